"""`{record} NAME.json` shows the command, machine and tables of a record written by a script in
benchmarks/.

    ```{record} stream.json
    :columns: rows of, Recall@10
    ```
"""

from pathlib import Path

from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

import benchmark_pages


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
        return self.parse_text_to_nodes(benchmark_pages.shown(record, **options))


def setup(app) -> dict:
    app.add_directive("record", Record)
    return {"parallel_read_safe": True}
