"""Tests the checks and the files of `make release`: .ci/release.py, .ci/wheel_index.py,
.ci/compare_wheels.py."""

import importlib.util
import json
import re
import subprocess
import tarfile
import zipfile

import pytest
from documents import ROOT

LINT_PYTHON = ROOT / "build/lint-venv/bin/python"
METADATA = """Name: xsoftmax
Version: 1.2.3+torch2.13.cpu
License-Expression: BSD-3-Clause
Requires-Python: >=3.10
Requires-Dist: torch==2.13.*
Requires-Dist: numpy
Requires-Dist: scipy; extra == "matcher"
"""


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(folder):
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "xsoftmax-1.2.3+torch2.13.cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("xsoftmax/lib/libxsoftmax.so", "library")
        archive.writestr("xsoftmax-1.2.3+torch2.13.cpu.dist-info/METADATA", METADATA)
    return wheel


def write_sources(folder, *names):
    """Writes a source distribution with files of a folder, or empty ones."""
    (folder / "dist").mkdir(exist_ok=True)
    with tarfile.open(folder / "dist/xsoftmax-1.2.3.tar.gz", "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"xsoftmax-1.2.3/{name}"))


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The module, in a repository that is ready for a release of 1.2.3."""
    module, files = load("release"), {
        "python_bindings/xsoftmax/__init__.py": '__version__ = "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2027-01-31\n\n- A change\n",
        ".gitignore": "dist/\n"
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
    module.git("config", "user.name", "Someone")
    module.git("config", "user.email", "someone@example.org")
    module.git("add", ".")
    module.git("commit", "-q", "-m", "All")
    return module


def test_a_release_that_is_ready(release):
    assert list(release.problems("1.2.3")) == []


@pytest.mark.parametrize("version, found", [
    ("1.2", ["VERSION: expected a version such as 1.2.3, got '1.2'"]),
    ("1.3.0", [
        "python_bindings/xsoftmax/__init__.py: expected version 1.3.0, got 1.2.3",
        "CHANGELOG.md: expected a section ## [1.3.0] - DATE"
    ]),
])
def test_a_version_that_is_not_ready(release, version, found):
    assert list(release.problems(version)) == found


def test_a_tree_that_is_not_ready(release, tmp_path):
    release.git("tag", "v1.2.3")
    release.git("checkout", "-q", "-b", "other")
    (tmp_path / "new").write_text("")
    assert list(release.problems("1.2.3")) == [
        "files that are not committed:\n?? new", "expected the branch main, got other",
        "the tag v1.2.3 exists"
    ]


@pytest.mark.parametrize("text, found", [
    ("## [1.0.0]\n\n- A\n", ["CHANGELOG.md: expected ## [1.0.0] - DATE, got ## [1.0.0]"]),
    ("## [1.0.0] - 2027-01-31\n\n## [0.9.0] - 2026-01-31\n\n- A\n",
     ["CHANGELOG.md: the section of 1.0.0 is empty"]),
    ("## [Unreleased]\n\n- B\n\n## [1.0.0] - 2027-01-31\n\n- A\n",
     ["CHANGELOG.md: changes under [Unreleased] are not those of 1.0.0"]),
])
def test_changelogs_that_are_not_ready(text, found):
    assert list(load("release").changelog_problems(text, "1.0.0")) == found


@pytest.mark.skipif(not LINT_PYTHON.is_file(), reason="needs build/lint-venv: make lint")
def test_the_components_of_a_wheel(tmp_path):
    wheel = write_wheel(tmp_path)
    program = ("import pathlib, sys; sys.path.insert(0, '.ci'); import release; "
               f"print(release.components(pathlib.Path({str(wheel)!r})))")
    texts = [
        subprocess.run([LINT_PYTHON, "-c", program], cwd=ROOT, check=True, capture_output=True,
                       text=True).stdout for _ in range(2)
    ]
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    package, parts = found["metadata"]["component"], found["components"]
    assert package["purl"] == "pkg:pypi/xsoftmax@1.2.3%2Btorch2.13.cpu"
    assert package["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert package["hashes"][0]["content"] == load("release").sha256(wheel)
    assert [part["name"] for part in parts] == ["xsoftmax/lib/libxsoftmax.so", "numpy", "torch"]
    assert parts[2]["properties"] == [{"name": "required", "value": "==2.13.*"}]


def test_finishing_writes_checksums_and_the_tag(release, tmp_path, monkeypatch):
    wheel = write_wheel(tmp_path / "dist/wheels/xsoftmax")
    write_sources(tmp_path, "CHANGELOG.md", "PKG-INFO")
    monkeypatch.setattr(release, "components", lambda wheel: "{}")
    with pytest.raises(SystemExit, match=r"expected xsoftmax-\S+\+torch2.12.cpu-\*.whl, got none"):
        release.finish("1.2.3", ["2.12", "2.13"])
    assert not release.git("tag", "--list")
    release.finish("1.2.3", ["2.13"])
    checked = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "dist",
                             check=True, capture_output=True, text=True).stdout
    assert checked.count(": OK") == 3 and f"{wheel.name}: OK" in checked
    assert release.git("cat-file", "-t", "v1.2.3") == "tag"


def test_a_source_distribution_holds_files_of_git_alone(release, tmp_path):
    """The site's pages, say, which git ignores, would differ from one checkout to the next."""
    write_wheel(tmp_path / "dist/wheels/xsoftmax")
    (tmp_path / "page.md").write_text("")
    write_sources(tmp_path, "CHANGELOG.md", "page.md", "PKG-INFO", "xsoftmax.egg-info/PKG-INFO")
    with pytest.raises(SystemExit, match=r"expected files of the commit, got page\.md$"):
        release.finish("1.2.3", ["2.13"])


def test_only_the_commit_that_was_checked_is_finished(release, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "CHECKED", tmp_path / "dist/checked.txt")
    monkeypatch.setattr(release, "finish", lambda *arguments: finished.append(arguments))
    finished = []

    def run(step):
        monkeypatch.setattr("sys.argv", ["release.py", "1.2.3", step, "2.13"])
        release.main()

    with pytest.raises(SystemExit, match="expected the commit that was checked, none, got"):
        run("finish")
    run("check")
    run("finish")
    assert finished == [("1.2.3", ["2.13"])]
    release.git("commit", "-q", "--allow-empty", "-m", "Another")
    with pytest.raises(SystemExit, match="expected the commit that was checked, [0-9a-f]+, got"):
        run("finish")


def test_the_index_page_links_wheels_with_their_checksums(tmp_path):
    wheel = write_wheel(tmp_path / "xsoftmax")
    index = load("wheel_index")
    index.main(tmp_path)
    page = (tmp_path / "xsoftmax/index.html").read_text()
    ((link, python),) = re.findall(r'href="(.*?)" data-requires-python="(.*?)"', page)
    assert python == "&gt;=3.10"
    assert link == ("xsoftmax-1.2.3%2Btorch2.13.cpu-py3-none-any.whl#sha256=" +
                    load("release").sha256(wheel))
    assert 'href="xsoftmax/"' in (tmp_path / "index.html").read_text()
    with pytest.raises(SystemExit, match="expected wheels in .*, got none"):
        index.main(tmp_path / "xsoftmax")


def test_comparing_wheels_prints_the_first_difference(tmp_path, capsys):
    compare, one = load("compare_wheels"), write_wheel(tmp_path / "one")
    other = tmp_path / "other" / one.name
    other.parent.mkdir()
    other.write_bytes(one.read_bytes())
    compare.main(one, other)
    assert f"{one.name}: the same {one.stat().st_size} bytes" in capsys.readouterr().out
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("xsoftmax/lib/libxsoftmax.so", "librarY")
    with pytest.raises(SystemExit, match="libxsoftmax.so, byte 6 of 7 and 7: b'y' and b'Y'"):
        compare.main(one, other)
    with zipfile.ZipFile(one) as archive:
        infos = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(other, "w") as archive:
        for info, data in infos.items():
            info.external_attr ^= 0o040 << 16
            archive.writestr(info, data)
    with pytest.raises(SystemExit, match="libxsoftmax.so, external_attr"):
        compare.main(one, other)
