"""Offers pages that are text notebooks (MyST-NB) as downloads: NAME.md also becomes NAME.ipynb,
with a link below the title of its page."""

import re
from pathlib import Path

import nbformat
from myst_nb.core.read import is_myst_markdown_notebook, read_myst_markdown_notebook


def offer(app, docname: str, source: list[str]) -> None:
    if is_myst_markdown_notebook(source[0]):
        name = Path(docname).name
        link = (f'<p class="notebook"><a download href="{name}.ipynb">Download this page as a '
                'notebook</a></p>')
        # the language for syntax highlighting of cells that were not run
        if not re.search(r"(?m)^  language: ", source[0]):
            source[0] = re.sub(r"(?m)^kernelspec:$", "kernelspec:\n  language: python", source[0],
                               count=1)
        source[0] = re.sub(r"(?m)^(# .+)$", lambda title: f"{title[1]}\n\n{link}", source[0],
                           count=1)


def write(app, exception) -> None:
    if exception or app.builder.format != "html":
        return
    for docname in app.env.found_docs:
        page = Path(app.env.doc2path(docname))
        if page.suffix == ".md" and is_myst_markdown_notebook(page.read_text()):
            target = Path(app.outdir) / f"{docname}.ipynb"
            target.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(read_myst_markdown_notebook(page.read_text(), add_source_map=False),
                           str(target))


def setup(app) -> dict:
    app.connect("source-read", offer)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
