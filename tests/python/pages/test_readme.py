"""The Python programs of the README run (those of other pages: test_docs.py)."""

import re

import pytest
import torch
from documents import ROOT, programs_of

PROGRAMS = programs_of(ROOT / "README.md")


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_readme_runs(program, tmp_path):
    names = {}
    exec(compile(program.replace("/tmp/", f"{tmp_path}/"), "<documentation>", "exec"), names)
    assert torch.as_tensor(names["value"]).isfinite()


def test_the_readme_has_five_programs():
    assert len(PROGRAMS) == 5


def test_the_cuda_page_lists_all_kernels():
    kernels = {
        name
        for path in (ROOT / "csrc").rglob("*.cu*")
        for name in re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(",
                               path.read_text())
    }
    assert set(re.findall(r"\w+_kernel\b", (ROOT / "docs/howto/cuda.md").read_text())) == kernels
