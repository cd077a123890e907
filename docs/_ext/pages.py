"""What the generators of pages share."""

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Leaves a page alone that is as it should be, so that Sphinx does not read it again."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def cell(text: str) -> str:
    """One of a Markdown table."""
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")
