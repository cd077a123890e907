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

from dataclasses import dataclass
from typing import Callable

import benchmark_pages


@dataclass
class Column:
    """A column of the table: of a record, or else with typed cells."""

    head: str
    record: dict | None = None
    name: str = ""  # of the column in the record
    row: str = "{}"  # the name of a row in the record

    def cell(self, row: str) -> str | None:
        """Returns the cell of a row; None if the record has no such row."""
        if not any(self.name in one["columns"] for one in self.record["tables"]):
            raise ValueError(f"expected a column {self.name!r} in the record of "
                             f"{self.record['command']!r}")
        try:
            return benchmark_pages.cell_of(self.record, self.row.format(row), self.name)
        except ValueError:
            return None


def split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator)]


def read_column(line: str, read: Callable[[str], dict]) -> Column:
    head, is_of_record, source = (part.strip() for part in line.partition("="))
    if not is_of_record:
        return Column(head)
    file, name, *row = split(source, ":")
    return Column(head, read(file), name, *row)


def comparison(text: str, read: Callable[[str], dict]) -> str:
    """
    Returns the table as Markdown.

    Args:
        text: the content of the directive.
        read: returns the record of a file name.

    Raises:
        ValueError: a record lacks a column, all records lack a row, a record has none of the rows,
            or a row has too few or too many typed cells.
    """
    lines, rows = (block.splitlines() for block in text.strip().split("\n\n"))
    label_head, *columns = (read_column(line, read) for line in lines)
    ours = [column for column in columns if column.record]
    table = []
    for line in rows:
        label, row, *typed = split(line, "|")
        if len(typed) != len(columns) - len(ours):
            raise ValueError(f"expected a cell for each column without a record, got {line!r}")
        found = [column.cell(row) for column in ours]
        if found and set(found) == {None}:
            raise ValueError(f"expected a row {row!r} in one of the records, got none")
        left, of_records = iter(typed), iter(found)
        cells = (next(of_records if column.record else left) for column in columns)
        table.append([label, *cells])
    for column, cells in zip(columns, list(zip(*table))[1:]):
        if set(cells) == {None}:
            raise ValueError(f"expected some of the rows in column {column.head!r}, got none")
    table = [["" if cell is None else cell for cell in row] for row in table]
    heads = [label_head.head, *(column.head for column in columns)]
    return benchmark_pages.table({"title": "", "columns": heads, "rows": table})
