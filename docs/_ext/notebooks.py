"""Pages that are notebooks as text (MyST-NB) are offered as .ipynb: NAME.md also becomes NAME.ipynb beside its page, with a link under the title."""

import re
from pathlib import Path

import nbformat
from myst_nb.core.read import is_myst_markdown_notebook, read_myst_markdown_notebook


def offer(app, docname: str, source: list[str]) -> None:
    if not is_myst_markdown_notebook(source[0]):
        return
    target = Path(app.outdir) / f"{docname}.ipynb"
    if app.builder.format == "html":
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(read_myst_markdown_notebook(source[0], add_source_map=False), str(target))
    link = f'<p class="notebook"><a download href="{target.name}">Download this page as a notebook</a></p>'
    source[0] = re.sub(r"(?m)^(# .+)$", lambda title: f"{title[1]}\n\n{link}", source[0], count=1)


def setup(app) -> dict:
    app.connect("source-read", offer)
    return {"parallel_read_safe": True}
