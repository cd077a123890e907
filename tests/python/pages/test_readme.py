"""The Python programs of the README run (those of other pages: test_docs.py)."""

import pytest
import torch
from documents import ROOT, programs_of

PROGRAMS = programs_of(ROOT / "README.md")


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_readme_runs(program, tmp_path):
    names = {}
    exec(compile(program.replace("/tmp/", f"{tmp_path}/"), "<documentation>", "exec"), names)
    assert torch.as_tensor(names["value"]).isfinite()


def test_the_readme_has_programs():
    assert PROGRAMS
