"""What the repository says of itself: licence, version, citation, how to contribute."""

import ast
import graphlib
import re
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


PACKAGE = ROOT / "python_bindings/xsoftmax"


def modules_of_the_package():
    """Names of modules below `xsoftmax`, by dots, and their files; "__init__" is its own."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name, path, modules):
    """The modules of the package that one imports, wherever the import stands.

    Who imports a module of another package runs the `__init__` of that package as well.
    """
    folder = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            wanted = [each.name.split(".") for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ["xsoftmax", *folder][:len(folder) + 2 - node.level] if node.level else []
            start += node.module.split(".") if node.module else []
            wanted = [[*start, each.name] for each in node.names]
        else:
            is_call = isinstance(node, ast.Call)
            called = ast.unparse(node.func).split(".")[-1] if is_call else ""
            by_text = called in ("import_module", "__import__")
            assert not by_text or path.name == "__init__.py", f"{name} imports by text"
            continue
        for parts in wanted:
            if parts[0] != "xsoftmax":
                continue
            whole = ".".join(parts[1:])
            target = whole if whole in modules else ".".join(parts[1:-1]) or "__init__"
            yield target
            if "." in target and target.split(".")[0] not in folder:
                yield target.split(".")[0]


def imports_of_the_package():
    modules = modules_of_the_package()
    return {name: set(imports_of(name, path, modules)) for name, path in modules.items()}


def test_modules_of_the_package_import_those_below():
    """The layers that CONTRIBUTING.md names; a circle would make the order of imports matter."""
    rows = re.search(r"^\| layer .*?\n\|-.*?\n(.*?)\n\n", read("CONTRIBUTING.md"), re.M | re.S)[1]
    layers = [re.findall(r"`(\w+)`", row) for row in rows.splitlines()]
    named = [name for layer in layers for name in layer]
    imports = imports_of_the_package()
    assert sorted(named) == sorted({name.split(".")[0] for name in imports})
    height = {name: number for number, layer in enumerate(layers) for name in layer}
    for name, targets in imports.items():
        for target in targets:
            assert height[target.split(".")[0]] <= height[name.split(".")[0]], \
                f"{name} imports {target}, which is above it"
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names a circle


def test_tables_over_ranks_are_known_above_alone():
    """A program on one process never loads them, and a build of torch may lack what they need."""
    knows = {name for name, targets in imports_of_the_package().items()
             if any(target.split(".")[0] == "distributed" for target in targets)}
    assert {name for name in knows if name.split(".")[0] != "distributed"} == {"__init__"}


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


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_are_there(path):
    targets = set(re.findall(r"^([\w-]+):(?!=)", read("Makefile"), re.M))
    (matrix,) = re.findall(r"target: \[(.*)\]", path.read_text()) or [""]
    called = {*re.findall(r"\bmake ([\w-]+)$", path.read_text(), re.M),
              *filter(None, matrix.split(", "))}  # fmt: skip
    assert called and called <= targets


def test_the_gpu_workflow_waits_for_a_machine_with_a_gpu():
    """Without a configured runner no machine takes it, and no push starts it."""
    text = read(".github/workflows/gpu.yml")
    (triggers,) = re.findall(r"^on:\n((?:  .*\n)+)", text, re.M)
    assert triggers.split() == ["workflow_dispatch:"]
    jobs = text.partition("jobs:\n")[2]
    assert re.findall(r"^  \w+:\n    (.*)\n    (.*)\n", jobs, re.M) == [
        ("if: vars.GPU_RUNNER != ''", "runs-on: ${{ vars.GPU_RUNNER }}")]  # fmt: skip
    assert "- run: make gpu\n" in jobs


def test_make_gpu_refuses_a_machine_without_one(tmp_path):
    """And changes nothing there."""
    stamp = tmp_path / "installed"
    stamp.touch()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run([ROOT / ".ci/gpu", stamp], env=environment, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 1 and "expected an NVIDIA GPU" in done.stderr and stamp.exists()
