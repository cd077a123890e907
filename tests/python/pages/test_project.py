"""Licence, versions, citations, recipes and workflows of the repository are consistent."""

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


def test_all_files_name_the_same_version():
    """Python, pip, CMake, the citation and the changelog."""
    version = xsoftmax.__version__
    assert metadata.version("xsoftmax") == version
    assert f'PACKAGE_VERSION "{version}"' in read_cmake("xsoftmaxConfigVersion.cmake")
    assert re.search(r'^version: "(.*)"$', read("CITATION.cff"), re.M).group(1) == version
    of_changelog = re.search(
        r"^## \[Unreleased\]\n\n.*?\b(\d+\.\d+\.\d+)\b|^## "
        r"\[(\d+\.\d+\.\d+)\]", read("CHANGELOG.md"), re.M | re.S)
    assert version in of_changelog.groups()


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


def test_papers_that_docstrings_name_are_cited():
    """Papers are named by first author and year; nobody would find "the CANE paper"."""
    cited = set()
    for entry in read("CITATION.cff").split("  - type: ")[1:]:
        cited.add((re.search(r'family-names: "(.*)"',
                             entry)[1].split("-")[0], re.search(r"year: (\d+)", entry)[1]))
    public = [
        *(ROOT / "python_bindings").rglob("*.py"), *(ROOT / "include").rglob("*.h"),
        *(ROOT / "docs").glob("[chst]*/*.md")
    ]
    year = (r"(?:,? (?:[A-Z]\w+ )?(?:et al\.|and [A-Z]\w+))?,? ?\(?"
            r"(?:\"[^\"]*\", (?:\w+ )?|[A-Z]\w+ )?((?:19|20)\d\d)\b")
    found = 0
    for path in public:
        text = re.sub(r"\s*\n\s*(///|//|#)?\s*", " ", path.read_text())
        assert not re.search(r"\b(CANE|MIDX|PECOS) paper", text), path
        for name, when in re.findall(rf"\b([A-Z]\w+){year}", text):
            assert (name, when) in cited, f"{path.relative_to(ROOT)}: {name} {when}"
            found += 1
    assert found > 30


def estimators():
    return {*torch.ops.xsoftmax.estimator_names(), "complementary_sum"}


RECIPES = ["csrc/proposal/README.md", "csrc/estimator/README.md"]
PAGES = [
    "CONTRIBUTING.md", "HACKING.md", "SECURITY.md", "CHANGELOG.md",
    *(str(path.relative_to(ROOT)) for folder in ("csrc", "tests", "benchmarks")
      for path in (ROOT / folder).rglob("README.md"))
]


@pytest.mark.parametrize("page", RECIPES)
def test_programs_of_recipes_run(page):
    (program,) = programs_of(ROOT / page)
    names = {}
    exec(compile(program, page, "exec"), names)
    assert torch.isfinite(names["value"]), "the loss that the recipe builds"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_exist(page):
    """Links and names of files in pages lead to existing files."""
    text, folder = read(page), (ROOT / page).parent
    links = {
        link.split("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")
    }
    folders = "csrc|include|tests|docs|examples|benchmarks|cmake|python_bindings|\\.ci"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", text))
    missing = [name for name in links if name and not (folder / name).exists()]
    assert missing + [name for name in named if not (ROOT / name).exists()] == []


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_existing_targets(path):
    targets = set(re.findall(r"^([\w-]+):(?!=)", read("Makefile"), re.M))
    (matrix,) = re.findall(r"target: \[(.*)\]", path.read_text()) or [""]
    called = {
        *re.findall(r"\bmake ([\w-]+)$", path.read_text(), re.M), *filter(None, matrix.split(", "))
    }  # fmt: skip
    assert called and called <= targets


def test_the_gpu_workflow_waits_for_a_machine_with_a_gpu():
    """It runs only on a configured runner, and only when started by hand."""
    text = read(".github/workflows/gpu.yml")
    (triggers,) = re.findall(r"^on:\n((?:  .*\n)+)", text, re.M)
    assert triggers.split() == ["workflow_dispatch:"]
    jobs = text.partition("jobs:\n")[2]
    assert re.findall(r"^  \w+:\n    (.*)\n    (.*)\n", jobs, re.M) == [
        ("if: vars.GPU_RUNNER != ''", "runs-on: ${{ vars.GPU_RUNNER }}")
    ]  # fmt: skip
    assert "- run: make gpu\n" in jobs


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
