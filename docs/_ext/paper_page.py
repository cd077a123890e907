"""docs/reference/papers.md: the papers that docstrings cite by author and year, from
CITATION.cff."""

from pathlib import Path

import pages
import yaml

DOCS = Path(__file__).parent.parent


def short_name(paper: dict) -> str:
    """Returns the name used in docstrings: one or two family names, or the first of more."""
    names = [author["family-names"] for author in paper["authors"]]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} et al."


def entry(paper: dict) -> str:
    where = paper.get("collection-title") or paper.get("journal", "")
    title = f"*{paper['title']}*{'. ' + where if where else ''}"
    return f"{short_name(paper)} ({paper['year']})\n: {title}. {pages.cell(paper['notes'])}.\n"


def generate(app=None) -> None:
    papers = sorted(
        yaml.safe_load((DOCS.parent / "CITATION.cff").read_text())["references"], key=lambda paper:
        (short_name(paper), paper["year"]))
    pages.write(
        DOCS / "reference/papers.md", "# Papers\n\nThe papers whose methods the library "
        "implements, and the names in the library that implement "
        "each.\n\n" + "\n".join(map(entry, papers)))


def setup(app) -> dict:
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
