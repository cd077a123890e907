"""The package loads its native library or explains why it cannot."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xsoftmax
from xsoftmax._core import library as core_library


def import_error(environment: dict[str, str]) -> str:
    """Returns the error of a new interpreter that imports the package of this test run."""
    package = Path(xsoftmax.__file__).parent.parent
    result = subprocess.run([
        sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package)!r}); import xsoftmax"
    ], env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode != 0, "the import succeeded"
    return result.stderr.strip()


def built_for(folder: Path, **note: str) -> Path:
    """Returns a copy of the library as in the package, with a note of what it was built for."""
    library = folder / "lib" / "libxsoftmax.so"
    path = folder / "share" / "cmake" / "xsoftmax" / "built_for.json"
    library.parent.mkdir()
    shutil.copy(core_library.path, library)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(note))
    return library


def test_missing_library_names_the_path_and_the_remedy(tmp_path):
    message = import_error({"XSOFTMAX_LIBRARY": str(tmp_path / "absent.so")})
    assert f"{tmp_path}/absent.so: no such file" in message
    assert "ImportError" in message and "pip install" in message


def test_library_of_another_torch_names_both_versions(tmp_path):
    library = built_for(tmp_path, torch="1.13", cuda="")
    message = import_error({"XSOFTMAX_LIBRARY": str(library)})
    last = message.splitlines()[-1]  # one line holds the cause and the remedy
    assert last.startswith("ImportError: ")
    assert (f"built for torch 1.13, but torch {torch.__version__} is running: "
            "pip install 'torch==1.13.*'") in last


def test_file_that_is_no_library_shows_the_error_of_the_loader(tmp_path):
    bad = tmp_path / "libxsoftmax.so"
    bad.write_text("not a library")
    message = import_error({"XSOFTMAX_LIBRARY": str(bad)})
    assert str(bad) in message and "ImportError" in message


def test_library_without_the_operators_is_named():
    other = Path(torch.__file__).parent / "lib/libc10.so"
    message = import_error({"XSOFTMAX_LIBRARY": str(other)})
    assert f"ImportError: xsoftmax: {other} has no operators of xsoftmax" in message
    assert "XSOFTMAX_LIBRARY" in message.splitlines()[-1] and "; it is set)" in message


def test_library_whose_dependency_is_absent_names_it(tmp_path):
    source, library = tmp_path / "empty.c", tmp_path / "libxsoftmax.so"
    source.write_text("")
    build = ["gcc", "-shared", "-Wl,--no-as-needed", f"-L{tmp_path}"]
    subprocess.run([*build, "-o", tmp_path / "libabsent.so", source], check=True)
    subprocess.run([*build, "-labsent", "-o", library, source], check=True)
    (tmp_path / "libabsent.so").unlink()
    message = import_error({"XSOFTMAX_LIBRARY": str(library)})
    assert "libabsent.so: cannot open" in message.splitlines()[-1]


@pytest.mark.parametrize("cuda, words", [(None, "the CPU"), ("12.6", "CUDA 12.6"), ("13.2", None)])
def test_library_with_kernels_is_refused_by_a_torch_without_its_cuda(tmp_path, monkeypatch, cuda,
                                                                     words):
    """Also where the loader would find a CUDA runtime for it, as it finds all that this library,
    which has no kernels, needs."""
    minor = ".".join(torch.__version__.split(".")[:2])
    library = built_for(tmp_path, torch=minor, cuda="13")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    message = core_library._other_torch(library)
    if words is None:
        assert message == ""
        return
    assert (f"needs a build of torch for CUDA 13, but torch {torch.__version__} is built for "
            f"{words}: take the wheel") in message
    assert f"+torch{minor}.cpu," in message
    monkeypatch.setenv("XSOFTMAX_LIBRARY", str(library))
    with pytest.raises(ImportError) as error:
        core_library._load()
    assert str(error.value) == message


def test_no_second_openmp_runtime():
    """A second OpenMP runtime next to that of torch would double the thread pool."""
    if not Path("/proc/self/maps").is_file():
        pytest.skip("needs /proc")
    # A separate process, since other tests import libraries with their own runtimes.
    program = ("import xsoftmax, torch; torch.ones(9) @ torch.ones(9); "
               "print(open('/proc/self/maps').read())")
    maps = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          check=True).stdout
    runtimes = {
        line.split()[-1]
        for line in maps.splitlines() if "libgomp" in line or "libiomp" in line
    }
    assert len(runtimes) <= 1, runtimes


def test_no_operator_has_more_than_twelve_arguments():
    schemas = [
        schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("xsoftmax::")
    ]
    assert len(schemas) > 100
    assert {schema.name: len(schema.arguments)
            for schema in schemas if len(schema.arguments) > 12} == {}


def test_errors_contain_no_absolute_path_of_the_build_machine():
    """With C++ stacks enabled, messages of torch begin with the source file."""
    library = next((Path(xsoftmax.__file__).parent / "lib").glob("libxsoftmax.*"))
    text = library.read_bytes()
    assert re.findall(rb'[\x00"]csrc/\w+/', text)  # relative paths are there
    assert not re.findall(rb'[\x00"]/[^\x00"]*csrc/\w+/', text)
