"""`{comparison}` shows figures of a paper beside cells of our records, which are not typed by hand.

    ```{comparison}
    sampler
    LSTM, paper
    LSTM, here = midx_words.ptb.json: test / exact
    LSTM, "ranking" = midx_words.ptb.json: test / exact: {}, ranking

    MIDX-rq | 20 private midx | 1.08
    MIDX-pq | 20 private midx_pq | 1.11
    ```

First the columns, each on a line; `= RECORD: COLUMN` takes the cells of a record, `= RECORD:
COLUMN: {}, ranking` those of the rows whose name has such an end. Then the rows: a label, the row
of the records, and the cells of the other columns.
"""

from typing import Callable

import benchmark_pages


def split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator)]


def cells(row: str, sources: list[tuple[dict, str, str]]) -> list[str]:
    """Returns the cells of a row in these columns of records; empty ones where a record has no such
    row, which one of them must have."""
    found, errors = [], []
    for record, column, pattern in sources:
        try:
            found.append(benchmark_pages.cell_of(record, pattern.format(row), column))
        except ValueError as error:
            found.append("")
            errors.append(error)
    if len(errors) == len(sources):
        raise errors[0]
    return found


def comparison(text: str, read: Callable[[str], dict]) -> str:
    """
    Returns the table as Markdown.

    Args:
        text: the content of the directive.
        read: returns the record of a file name.
    """
    columns, rows = (block.splitlines() for block in text.strip().split("\n\n"))
    heads, sources = zip(*(split(f"{line}=", "=")[:2] for line in columns))
    ours = [(read(name), column, pattern)
            for name, column, pattern in (split(f"{source}:{{}}", ":")[:3]
                                          for source in sources if source)]
    table = []
    for line in rows:
        label, row, *typed = split(line, "|")
        if len(typed) != sources[1:].count(""):
            raise ValueError(f"expected a cell for each column without a record, got {line!r}")
        left, found = iter(typed), iter(cells(row, ours))
        table.append([label, *(next(found if source else left) for source in sources[1:])])
    return benchmark_pages.table({"title": "", "columns": heads, "rows": table})
