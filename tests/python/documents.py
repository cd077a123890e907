"""The programs that documents show."""

import re
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).parents[2]
TUTORIALS = [path for path in sorted((ROOT / "docs/tutorials").glob("*.md")) if path.name != "index.md"]


def programs_of(page: Path) -> List[str]:
    """Blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def cells_of(notebook: Path) -> List[str]:
    """Cells of code of a notebook as text, which are one program."""
    return re.findall(r"^```\{code-cell\} ipython3\n(?::\w.*\n)*(.*?)^```$", notebook.read_text(), re.DOTALL | re.MULTILINE)


def written_by(cell: str) -> Dict[str, str]:
    """Programs in Python that a cell writes into files, by the name of the file."""
    return dict(re.findall(r'"(\w+)\.py"\)\.write_text\("""\n(.*?)"""\)', cell, re.DOTALL))
