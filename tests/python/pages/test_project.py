"""Licence, versions, citations and recipes of the repository are consistent, and CI works."""

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch
from documents import ROOT, programs_of

import xsoftmax


def read(name):
    return (ROOT / name).read_text()


def test_the_licence_is_in_the_package():
    """A wheel without the licence may not be redistributed."""
    installed = metadata.distribution("xsoftmax")
    assert installed.metadata["License-Expression"] == "BSD-3-Clause"
    texts = [
        file.read_text() for file in installed.files if file.match("*.dist-info/licenses/LICENSE")
    ]
    assert texts == [read("LICENSE")] and "The xsoftmax authors" in texts[0]


def test_pip_and_cmake_report_the_version_of_the_package():
    version = xsoftmax.__version__
    assert metadata.version("xsoftmax").partition("+")[0] == version
    assert f'PACKAGE_VERSION "{version}"' in read_cmake("xsoftmaxConfigVersion.cmake")


def read_cmake(name):
    return next(Path(xsoftmax.cmake_prefix_path).rglob(name)).read_text()


def test_citations_name_existing_classes_and_estimators():
    """Each cited paper names its implementation in the package."""
    notes = re.findall(r'^    notes: "(.*)"$', read("CITATION.cff"), re.M)
    assert len(notes) == len(re.findall(r"^  - type: ", read("CITATION.cff"), re.M)) > 15
    for name in {
            name
            for note in notes
            for name in re.findall(r"\b[A-Z]\w+(?:Loss|Sampler|Linear|Matcher|Counts)\b", note)
    }:
        assert hasattr(xsoftmax, name) or hasattr(xsoftmax.samplers, name), name
    known = estimators()
    for name in {name for note in notes for name in re.findall(r"[Ee]stimator (\w+)", note)}:
        assert name in known, name


def estimators():
    return {*torch.ops.xsoftmax.estimator_names(), "complementary_sum"}


RECIPES = ["csrc/proposal/README.md", "csrc/estimator/README.md"]


@pytest.mark.parametrize("page", RECIPES)
def test_programs_of_recipes_run(page):
    (program,) = programs_of(ROOT / page)
    names = {}
    exec(compile(program, page, "exec"), names)
    assert torch.isfinite(names["value"]), "the loss that the recipe builds"


def test_make_gpu_refuses_a_machine_without_one(tmp_path):
    """It exits with an error and changes nothing."""
    stamp = tmp_path / "installed"
    stamp.touch()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run([ROOT / ".ci/gpu", stamp], env=environment, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 1 and "expected an NVIDIA GPU" in done.stderr and stamp.exists()


def test_a_check_runs_again_if_one_of_its_inputs_has_changed(tmp_path):
    """CI would otherwise skip a check that no longer passes."""
    for name in (".ci", "csrc"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / ".ci/passed", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text("TORCH ?= torch==2.13.0\n")
    source, other = tmp_path / "csrc/one.cpp", tmp_path / "README.md"
    source.write_text("int one();\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def passed(command):
        return subprocess.run([".ci/passed", command, "sanitize"], cwd=tmp_path).returncode == 0

    assert not passed("has")
    assert passed("record") and passed("has")
    other.write_text("not an input")
    assert passed("has")
    source.write_text("int two();\n")
    assert not passed("has")
    source.write_text("int one();\n")
    assert passed("has")
    (tmp_path / "Makefile").write_text("TORCH ?= torch==2.14.0\n")
    assert not passed("has")


def test_a_pass_of_wheels_counts_for_the_same_releases_of_torch(tmp_path, monkeypatch):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/passed", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text("TORCH ?= torch==2.13.0\nTORCH_VERSIONS ?= 2.11 2.15\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def passed(command, ends):
        monkeypatch.setenv("TORCH_ENDS", ends)
        return subprocess.run([".ci/passed", command, "check-wheels"], cwd=tmp_path).returncode == 0

    assert passed("record", "2.11 2.14") and passed("has", "2.11 2.14")
    assert not passed("has", "2.11 2.15")
    (tmp_path / "Makefile").write_text("TORCH ?= torch==2.13.0\nTORCH_VERSIONS ?= 2.12 2.15\n")
    assert not passed("has", "2.11 2.14")
