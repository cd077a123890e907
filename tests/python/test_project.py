"""What the repository says of itself: licence, version, citation, how to contribute."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from documents import ROOT, programs_of

import xsoftmax


def read(name):
    return (ROOT / name).read_text()


def test_the_licence_is_in_the_package():
    """A wheel without it may not be passed on."""
    installed = metadata.distribution("xsoftmax")
    assert installed.metadata["License-Expression"] == "BSD-3-Clause"
    texts = [file.read_text() for file in installed.files if file.match("*.dist-info/licenses/LICENSE")]
    assert texts == [read("LICENSE")] and "The xsoftmax authors" in texts[0]


def test_one_version():
    """A program that asks Python, pip, CMake, the citation or the changelog gets the same answer."""
    version = xsoftmax.__version__
    assert metadata.version("xsoftmax") == version
    assert f'PACKAGE_VERSION "{version}"' in read_cmake("xsoftmaxConfigVersion.cmake")
    assert re.search(r'^version: "(.*)"$', read("CITATION.cff"), re.M).group(1) == version
    of_changelog = re.search(r"^## \[Unreleased\]\n\n.*?\b(\d+\.\d+\.\d+)\b|^## \[(\d+\.\d+\.\d+)\]", read("CHANGELOG.md"), re.M | re.S)
    assert version in of_changelog.groups()


def read_cmake(name):
    return next(Path(xsoftmax.cmake_prefix_path).rglob(name)).read_text()


def test_methods_are_cited():
    """Each paper names what implements it; names of the package are there."""
    notes = re.findall(r'^    notes: "(.*)"$', read("CITATION.cff"), re.M)
    assert len(notes) == len(re.findall(r"^  - type: ", read("CITATION.cff"), re.M)) > 15
    for name in {name for note in notes for name in re.findall(r"\b[A-Z]\w+(?:Loss|Sampler|Linear|Matcher|Counts)\b", note)}:
        assert hasattr(xsoftmax, name) or hasattr(xsoftmax.samplers, name), name
    known = estimators()
    for name in {name for note in notes for name in re.findall(r"[Ee]stimator (\w+)", note)}:
        assert name in known, name


def test_papers_that_docstrings_name_are_cited():
    """By the first author and the year: a nickname, such as "the CANE paper", would lead nobody to it."""
    cited = set()
    for entry in read("CITATION.cff").split("  - type: ")[1:]:
        cited.add((re.search(r'family-names: "(.*)"', entry)[1].split("-")[0], re.search(r"year: (\d+)", entry)[1]))
    public = [*(ROOT / "python_bindings").rglob("*.py"), *(ROOT / "include").rglob("*.h"), *(ROOT / "docs").glob("[chst]*/*.md")]
    year = r"(?:,? (?:[A-Z]\w+ )?(?:et al\.|and [A-Z]\w+))?,? ?\(?(?:\"[^\"]*\", (?:\w+ )?|[A-Z]\w+ )?((?:19|20)\d\d)\b"
    found = 0
    for path in public:
        text = re.sub(r"\s*\n\s*(///|//|#)?\s*", " ", path.read_text())
        assert not re.search(r"\b(CANE|MIDX|PECOS) paper", text), path
        for name, when in re.findall(rf"\b([A-Z]\w+){year}", text):
            assert (name, when) in cited, f"{path.relative_to(ROOT)}: {name} {when}"
            found += 1
    assert found > 30


def test_folders_of_csrc_include_those_below():
    """The floors that CONTRIBUTING.md names."""
    sentence = re.search(r"includes headers of those below it alone: (.*?)\. A test", read("CONTRIBUTING.md"), re.S)[1]
    floors = [re.findall(r"`(\w+)`", floor) for floor in sentence.split("<")]
    height = {folder: number for number, floor in enumerate(floors) for folder in floor}
    assert set(height) == {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    for path in (ROOT / "csrc").rglob("*.*"):
        for folder in set(re.findall(r'#include "(\w+)/', path.read_text())) & set(height):
            here = path.parent.name
            assert folder == here or height[folder] < height[here], f"{path.relative_to(ROOT)} includes a header of {folder}"


def estimators():
    return {*torch.ops.xsoftmax.estimator_names(), "complementary_sum"}


@pytest.mark.parametrize("program", programs_of(ROOT / "CONTRIBUTING.md"), ids=["sampler", "estimator"])
def test_programs_of_contributing(program):
    names = {}
    exec(compile(program, "CONTRIBUTING.md", "exec"), names)
    assert torch.isfinite(names["value"]), "the loss that the walk builds"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_files_that_pages_name_are_there(page):
    """A reader who follows a name finds a file."""
    text = read(page)
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")}
    named = set(re.findall(r"`((?:csrc|include|tests|docs|examples|benchmarks|cmake|python_bindings|\.ci)/[\w./-]+\.\w+)`", text))
    missing = [name for name in links | named if name and not (ROOT / name).exists()]
    assert missing == []
