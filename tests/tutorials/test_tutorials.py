"""Tutorials run from top to bottom in less than three minutes each (`make tutorials`)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "shared"))

from documents import TUTORIALS, cells_of


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorial_runs(page, tmp_path):
    cells = cells_of(page)
    assert len(cells) == page.read_text().count("```{code-cell}") and len(cells) >= 3
    program = tmp_path / f"{page.stem}.py"
    program.write_text("\n\n".join(f"# cell {number}\n{cell}"
                                   for number, cell in enumerate(cells, 1)))
    start = time.perf_counter()
    done = subprocess.run([sys.executable, program], cwd=tmp_path,
                          env=dict(os.environ,
                                   MPLBACKEND="Agg"), capture_output=True, text=True, timeout=900)
    print(f"{time.perf_counter() - start:.0f} s\n{done.stdout}")  # shown by pytest -s
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert time.perf_counter() - start < 180
