"""Builds the native library with CMake and installs it, its headers and its CMake package inside
the Python package."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).parent.resolve()
PACKAGE = ROOT / "python_bindings" / "xsoftmax"


@dataclass
class Torch:
    """The torch of this environment, read from its version file instead of imported: the import of
    a CUDA build needs NVIDIA's libraries."""

    folder: Path
    version: str
    cuda: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def find_torch() -> Optional[Torch]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    found = dict(
        re.findall(r"^(__version__|cuda)\b.*? = '(.*)'$", (folder / "version.py").read_text(),
                   re.M))
    return Torch(folder, found["__version__"], found.get("cuda", ""))


TORCH = find_torch()
CMAKE_ARGS = shlex.split(os.environ.get("CMAKE_ARGS", ""))
WITH_CUDA = any(
    re.fullmatch(r"(-D)?XSOFTMAX_CUDA(:\w+)?=(ON|1|YES|TRUE|Y)", argument, re.IGNORECASE)
    for argument in CMAKE_ARGS)


class BuildNative(build_py):
    """build_py, then CMake, which adds lib/libxsoftmax.so, include/ and share/cmake/xsoftmax/ to
    the package: in an editable install (pip install -e) beside the Python sources."""
    def run(self):
        if TORCH is None:
            raise SystemExit("xsoftmax builds against the torch of this environment, and none is "
                             "installed: pip install torch, then "
                             "pip install --no-build-isolation .")
        prefix, rpath = Path(self.build_lib).resolve() / "xsoftmax", "$ORIGIN/../../torch/lib"
        if self.editable_mode:
            prefix, rpath = PACKAGE, TORCH.folder / "lib"
        else:
            shutil.rmtree(prefix, ignore_errors=True)  # no wheel holds what an earlier build left
            super().run()
        # A build folder inside the checkout: a second build compiles only what changed.
        python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
        default = ROOT / "build" / f"{python}-torch-{TORCH.version}"
        build = Path(os.environ.get("XSOFTMAX_BUILD_DIR") or default)
        options = {
            "CMAKE_PREFIX_PATH": TORCH.folder / "share" / "cmake",
            "CMAKE_INSTALL_PREFIX": prefix,
            "XSOFTMAX_INSTALL_RPATH": rpath,
            "XSOFTMAX_CUDA": "ON" if WITH_CUDA else "OFF",
            # The linker writes the path that the wheel needs. If installation replaced torch's path
            # on this machine, the length of that path and a build-id of it would stay in the wheel.
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "OFF" if self.editable_mode else "ON"
        }
        # These options win: conda's compilers set CMAKE_ARGS with an install prefix of their own.
        self.cmake("-S", ROOT, "-B", build, "-G", "Ninja", *CMAKE_ARGS,
                   *(f"-D{name}={value}" for name, value in options.items()))
        self.cmake("--build", build)
        if self.editable_mode:
            # Remove the headers of the build before, which the sources may no longer have.
            for name in ("lib", "include", "share"):
                shutil.rmtree(PACKAGE / name, ignore_errors=True)
        # Stripped: the table of local symbols is a sixth of the library. The one in the build
        # folder keeps it, for profilers.
        self.cmake("--install", build, "--strip")

    @staticmethod
    def cmake(*arguments):
        # SystemExit, because setuptools ignores other exceptions in an editable install.
        try:
            subprocess.check_call(["cmake", *arguments])
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"xsoftmax: {error}") from error


class WheelForAllPythons(bdist_wheel):
    """The library calls no function of Python, so a wheel is of one platform and of any Python
    3."""
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def torch_requirement() -> str:
    """Returns the torch that pip must install: for a wheel the minor release that it was built
    against, for a source distribution any release that it supports."""
    is_built = TORCH is not None and "sdist" not in sys.argv
    return f"torch=={TORCH.minor}.*" if is_built else "torch>=2.11"


def local_version() -> str:
    """Returns the local version label, such as +torch2.13.cpu, if XSOFTMAX_LOCAL_VERSION=1, else
    "". Builds without it have none, because pip refuses a source distribution whose wheel has
    another version than its file name."""
    if TORCH is None or os.environ.get("XSOFTMAX_LOCAL_VERSION") != "1":
        return ""
    return f"+torch{TORCH.minor}." + (f"cu{TORCH.cuda.replace('.', '')}" if WITH_CUDA else "cpu")


class EggInfo(egg_info):
    """egg_info, which adds the local version. A source distribution holds a setup.cfg that would
    override an option of setup()."""
    def finalize_options(self):
        self.tag_build = local_version()
        super().finalize_options()


class NativeDistribution(Distribution):
    def has_ext_modules(self):
        return True  # a platform wheel, though no module is a CPython extension


setup(install_requires=[torch_requirement(), "numpy"],
      cmdclass={"bdist_wheel": WheelForAllPythons, "build_py": BuildNative,
                "egg_info": EggInfo}, distclass=NativeDistribution)
