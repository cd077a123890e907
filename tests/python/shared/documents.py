"""The programs in pages and tutorials."""

import re
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).parents[3]
TUTORIALS = [
    path for path in sorted((ROOT / "docs/tutorials").glob("*.md")) if path.name != "index.md"
]


def programs_of(page: Path) -> List[str]:
    """Returns the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def cells_of(notebook: Path) -> List[str]:
    """Returns the code cells of a MyST notebook, which form one program."""
    return re.findall(r"^```\{code-cell\} ipython3\n(?::\w.*\n)*(.*?)^```$", notebook.read_text(),
                      re.DOTALL | re.MULTILINE)


def written_by(cell: str) -> Dict[str, str]:
    """Returns {name: program} of Python files that a cell writes."""
    return dict(re.findall(r'"(\w+)\.py"\)\.write_text\("""\n(.*?)"""\)', cell, re.DOTALL))
