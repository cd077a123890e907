"""`{comparison}` shows figures of a paper beside cells of our records, which are not typed by hand.

    ```{comparison}
    sampler
    LSTM, paper
    LSTM, here = midx_words.ptb.json: test / exact

    MIDX-rq | 20 private midx, ranking | 1.08
    MIDX-pq | 20 private midx_pq, ranking | 1.11
    ```

First the columns, each on a line; `= RECORD: COLUMN` takes the cells of a record. Then the rows: a
label, the row of the records, and the cells of the other columns.
"""

from pathlib import Path

from sphinx.util.docutils import SphinxDirective

import benchmark_pages


def split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator)]


def comparison(text: str, records: dict[str, dict]) -> str:
    """
    Returns the table as Markdown.

    Args:
        text: the content of the directive.
        records: by file name.
    """
    columns, rows = (block.splitlines() for block in text.strip().split("\n\n"))
    heads, *sources = zip(*(split(f"{line}=", "=")[:2] for line in columns))
    found = []
    for line in rows:
        label, row, *typed = split(line, "|")
        if len(typed) != sources[0][1:].count(""):
            raise ValueError(f"expected a cell for each column without a record, got {line!r}")
        cells = iter(typed)
        found.append([
            label,
            *(benchmark_pages.cell_of(records[name], row, column) if column else next(cells)
              for name, column in (split(f"{source}:", ":")[:2] for source in sources[0][1:]))
        ])
    return benchmark_pages.table({"title": "", "columns": heads, "rows": found})


class Comparison(SphinxDirective):
    has_content = True

    def run(self):
        folder = Path(self.env.doc2path(self.env.docname)).parent
        records = {path.name: benchmark_pages.read(path) for path in folder.glob("*.json")}
        for name in records:
            self.env.note_dependency(str(folder / name))
        try:
            text = comparison("\n".join(self.content), records)
        except (KeyError, ValueError) as error:
            raise self.error(str(error)) from None
        return self.parse_text_to_nodes(text)


def setup(app) -> dict:
    app.add_directive("comparison", Comparison)
    return {"parallel_read_safe": True}
