"""`{record} NAME.json` shows the command, machine, tables and plot of a record written by a script
in benchmarks/.

    ```{record} stream.json
    :columns: rows of, Recall@10
    ```

`{comparison}` shows cells of records beside figures of a paper, see comparison.py.
"""

from pathlib import Path

from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

import benchmark_pages
import comparison


def in_words(plot: dict) -> str:
    """Returns what a plot shows, for those who cannot see it."""
    return f"{plot['y']} against {plot['x']}, for each of: {', '.join(plot['curves'])}."


class Record(SphinxDirective):
    required_arguments = 1
    option_spec = {
        "columns": lambda given: [name.strip() for name in given.split(",")],
        "tables": lambda given: [int(number) for number in given.split()], "bare": directives.flag
    }

    def run(self):
        path = (Path(self.env.doc2path(self.env.docname)).parent / self.arguments[0]).resolve()
        self.env.note_dependency(str(path))
        options = self.options | {"bare": "bare" in self.options}
        record = benchmark_pages.read(path)
        known = {name for one in record["tables"] for name in one["columns"]}
        if unknown := [name for name in options.get("columns", []) if name not in known]:
            raise self.error(f"expected columns of {sorted(known)}, got {unknown}")
        text = benchmark_pages.shown(record, **options)
        if "plot" in record and not options["bare"] and "tables" not in options:
            picture = Path(self.arguments[0]).with_suffix(".svg")
            text += f"\n\n```{{image}} {picture}\n:alt: {in_words(record['plot'])}\n```\n"
        return self.parse_text_to_nodes(text)


class Comparison(SphinxDirective):
    has_content = True

    def run(self):
        folder = Path(self.env.doc2path(self.env.docname)).parent

        def read(name: str) -> dict:
            self.env.note_dependency(str(folder / name))
            return benchmark_pages.read(folder / name)

        try:
            text = comparison.comparison("\n".join(self.content), read)
        except (OSError, ValueError) as error:
            raise self.error(str(error)) from None
        return self.parse_text_to_nodes(text)


def setup(app) -> dict:
    app.add_directive("record", Record)
    app.add_directive("comparison", Comparison)
    return {"parallel_read_safe": True}
