"""The README's Python programs run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program, tmp_path):
    names = {}
    exec(compile(program.replace("/tmp/", f"{tmp_path}/"), str(README), "exec"), names)
    assert names["value"].isfinite()


def test_there_are_programs():
    assert len(PROGRAMS) == 3
