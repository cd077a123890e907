"""Helpers of the page generators."""

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Writes a page if its text has changed, so that Sphinx does not read unchanged pages again."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def cell(text: str) -> str:
    """Escapes the text of a cell of a Markdown table."""
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")
