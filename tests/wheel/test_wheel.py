"""A wheel and the package that it installs; tests/wheel/run creates the environment."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
import torch

import xsoftmax

ROOT = Path(__file__).parents[2]
WHEEL = Path(os.environ["XSOFTMAX_WHEEL"])
PACKAGE = Path(xsoftmax.__file__).parent
LIBRARY = PACKAGE / "lib" / "libxsoftmax.so"
MINOR = ".".join(torch.__version__.split(".")[:2])
HAS_KERNELS = b"libcudart" in LIBRARY.read_bytes()
VERSION = f"{xsoftmax.__version__}+torch{MINOR}." + (f"cu{torch.version.cuda.replace('.', '')}"
                                                     if HAS_KERNELS else "cpu")


def output(*command, **environment) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                            env={**os.environ, **environment}, cwd=ROOT / "build")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_imported_package_comes_from_the_wheel():
    assert Path(sys.prefix) in PACKAGE.parents
    with zipfile.ZipFile(WHEEL) as wheel:
        assert LIBRARY.read_bytes() == wheel.read("xsoftmax/lib/libxsoftmax.so")


def test_the_tag_supports_any_python_and_the_linux_of_torch():
    """Wheels of torch need manylinux_2_28; a newer tag would exclude machines.

    auditwheel has checked that the library fits the tag.
    """
    name, version, python, abi, platform = WHEEL.stem.split("-")
    assert (name, version, python, abi) == ("xsoftmax", VERSION, "py3", "none")
    assert platform == f"manylinux_2_28_{os.uname().machine}"
    assert " Py" not in output("nm", "--dynamic", "--undefined-only", LIBRARY)


def test_the_library_is_stripped_and_finds_torch_by_a_relative_path():
    sections = output("readelf", "--wide", "--section-headers", "--dynamic", LIBRARY)
    assert ".symtab" not in sections and ".debug" not in sections
    assert "[$ORIGIN/../../torch/lib]" in sections


def test_a_library_without_kernels_needs_no_part_of_torch_that_a_cpu_build_lacks():
    """The torch that it was built against may have been a CUDA build."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "--dynamic", LIBRARY)))
    of_torch = {name for name in needed if re.match("lib(torch|c10)", name)}
    assert {"libtorch_cpu.so", "libc10.so"} <= of_torch
    assert HAS_KERNELS or of_torch == {"libtorch_cpu.so", "libc10.so"}


def test_kernels_are_those_of_every_device_unless_others_were_asked_for():
    note = json.loads((PACKAGE / "share/cmake/xsoftmax/built_for.json").read_text())
    (every,) = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES (.*)\)",
                          (ROOT / "cmake/cuda.cmake").read_text())
    expected = os.environ.get("CUDA_ARCHITECTURES") or every.replace(" ", ";")
    assert note["architectures"] == (expected if HAS_KERNELS else "")
    assert note["cuda"] == (torch.version.cuda.split(".")[0] if HAS_KERNELS else "")


def test_metadata_requires_the_version_of_torch():
    with zipfile.ZipFile(WHEEL) as wheel:
        fields = Parser().parsestr(wheel.read(f"xsoftmax-{VERSION}.dist-info/METADATA").decode())
    assert f"torch=={MINOR}.*" in fields.get_all("Requires-Dist")
    assert metadata.version("xsoftmax") == VERSION


def test_the_wheel_has_all_sources_and_headers_and_nothing_else():
    with zipfile.ZipFile(WHEEL) as wheel:
        names = set(wheel.namelist())
    sources = {
        f"xsoftmax/{path.relative_to(ROOT / 'python_bindings/xsoftmax')}"
        for path in (ROOT / "python_bindings/xsoftmax").rglob("*.py")
    }
    headers = {
        str(Path("xsoftmax/include") / path.relative_to(ROOT / "include"))
        for path in (ROOT / "include").rglob("*.h")
    }
    found = {name for name in names if not name.endswith("/") and ".dist-info/" not in name}
    cmake = {
        f"xsoftmax/share/cmake/xsoftmax/{name}"
        for name in ("built_for.json", "cudart.cmake", "xsoftmaxConfig.cmake",
                     "xsoftmaxConfigVersion.cmake", "xsoftmaxTargets.cmake",
                     "xsoftmaxTargets-release.cmake")
    }
    assert found == sources | headers | cmake | {"xsoftmax/py.typed", "xsoftmax/lib/libxsoftmax.so"}
    if (ROOT / "LICENSE").is_file():
        assert f"xsoftmax-{VERSION}.dist-info/licenses/LICENSE" in names


@pytest.mark.parametrize("minor", range(10, 1 + sys.version_info.minor))
def test_modules_parse_in_every_supported_python(minor):
    for path in PACKAGE.rglob("*.py"):
        ast.parse(path.read_text(), str(path), feature_version=(3, minor))


def test_the_command_line_runs():
    assert "train" in output(Path(sys.prefix) / "bin" / "xsoftmax", "--help")
    assert "train" in output(sys.executable, "-m", "xsoftmax", "--help")


@pytest.mark.parametrize("isa", ["default", "avx2", "avx512"])
def test_each_instruction_set_can_be_selected(isa):
    """One wheel serves all CPUs of an architecture."""
    order, widest = ["default", "avx2", "avx512"], xsoftmax.cpu_capability()
    if order.index(isa) > order.index(widest):
        pytest.skip(f"this CPU has no more than {widest}")
    program = ("import torch, xsoftmax as xs; torch.manual_seed(0); loss = "
               "xs.LinearCrossEntropyLoss(64, 1000); "
               "value = loss(torch.randn(8, 64), torch.arange(8)); value.backward(); "
               "print(xs.cpu_capability(), value.item())")
    name, value = output(sys.executable, "-c", program, XSOFTMAX_CPU=isa).split()
    assert name == isa and 6 < float(value) < 8


# torch 2.12 may abort when a program that trained in threads ends, also without xsoftmax. So this
# one ends without the destructors of torch.
THREADS = """
import os
import threading
import torch
import xsoftmax as xs

def train(seed):
    generator = torch.Generator().manual_seed(seed)
    loss = xs.SampledSoftmaxLoss(16, 1000, sampler="midx", num_samples=10)
    with torch.no_grad():
        loss.linear.weight.copy_(torch.randn(1000, 16, generator=generator))
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        x = torch.randn(32, 16, generator=generator)
        target = torch.randint(1000, (32,), generator=generator)
        loss(x, target, generator=generator).backward()
        optimizer.step()
    found[seed] = loss.linear.weight.detach()

torch.set_num_threads(1)
found = {}
for seed in range(4):
    train(seed)
alone, found = found, {}
threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(all(torch.equal(alone[seed], found[seed]) for seed in alone), flush=True)
os._exit(0)
"""


def test_threads_train_as_each_would_alone():
    # In a program of its own: modules that other tests load switch the lock of a free-threaded
    # Python on.
    assert output(sys.executable, "-c", THREADS) == "True\n"


@pytest.mark.parametrize("version, advice", [
    ("2.10.1", f"'torch=={MINOR}.*'. xsoftmax needs torch 2.11 or later"),
    ("2.16.0+cpu", f"'torch=={MINOR}.*', or a wheel of xsoftmax whose version has +torch2.16,"),
])
def test_another_torch_is_refused_in_one_line(version, advice):
    program = f"import torch; torch.__version__ = {version!r}; import xsoftmax"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert (f"was built for torch {MINOR}, but torch {version} is running: "
            f"pip install {advice}") in last


def test_a_cmake_project_builds_on_the_installed_package(tmp_path):
    """tests/consumer finds the package by its `cmake_prefix_path`."""
    prefix = output(
        sys.executable, "-c", "import torch, xsoftmax as xs; "
        "print(torch.utils.cmake_prefix_path, "
        "xs.cmake_prefix_path, sep=';')").strip()
    assert str(PACKAGE) in prefix
    output("cmake", "-G", "Ninja", "-S", ROOT / "tests/consumer", "-B", tmp_path,
           f"-DCMAKE_PREFIX_PATH={prefix}")
    output("cmake", "--build", tmp_path)
    for program in ("consumer", "consumer_by_name", "consumer_readme"):
        output(tmp_path / program)


def test_cmake_refuses_a_package_built_for_another_torch(tmp_path):
    copy = tmp_path / "copy" / "share" / "cmake" / "xsoftmax"
    shutil.copytree(PACKAGE / "share" / "cmake" / "xsoftmax", copy)
    config = copy / "xsoftmaxConfig.cmake"
    assert config.read_text().count(f"built for torch {MINOR}") == 1
    config.write_text(config.read_text().replace(f"^{MINOR}(",
                                                 "^1.13(").replace(f"torch {MINOR}", "torch 1.13"))
    prefix = f"{torch.utils.cmake_prefix_path};{tmp_path / 'copy'}"
    result = subprocess.run([
        "cmake", "-G", "Ninja", "-S", ROOT / "tests/consumer", "-B", tmp_path / "build",
        f"-DCMAKE_PREFIX_PATH={prefix}"
    ], capture_output=True, text=True)
    assert result.returncode != 0
    assert f"xsoftmax was built for torch 1.13, found torch {MINOR}" in " ".join(
        result.stderr.split())
