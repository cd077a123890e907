"""Builds the native library with CMake and installs it, its headers and its CMake package inside
the Python package."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
PACKAGE = ROOT / "python_bindings" / "xsoftmax"


class BuildNative(build_py):
    """build_py, then CMake, which adds lib/libxsoftmax.so, include/ and share/cmake/xsoftmax/ to
    the package: in an editable install (pip install -e) beside the Python sources."""
    def run(self):
        try:
            import torch
        except ImportError as error:
            raise SystemExit("xsoftmax builds against the torch of this environment, and none is "
                             "installed: pip install torch, then "
                             "pip install --no-build-isolation .") from error
        prefix, rpath = Path(self.build_lib).resolve() / "xsoftmax", "$ORIGIN/../../torch/lib"
        if self.editable_mode:
            prefix, rpath = PACKAGE, Path(torch.__file__).parent / "lib"
        else:
            shutil.rmtree(prefix, ignore_errors=True)  # no wheel holds what an earlier build left
            super().run()
        # A build folder inside the checkout: a second build compiles only what changed.
        python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
        default = ROOT / "build" / f"{python}-torch-{torch.__version__}"
        build = Path(os.environ.get("XSOFTMAX_BUILD_DIR") or default)
        options = {
            "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path, "CMAKE_INSTALL_PREFIX": prefix,
            "XSOFTMAX_INSTALL_RPATH": rpath
        }
        self.cmake("-S", ROOT, "-B", build, "-G", "Ninja",
                   *(f"-D{name}={value}" for name, value in options.items()),
                   *shlex.split(os.environ.get("CMAKE_ARGS", "")))
        # Stripped: the table of local symbols is a sixth of the library. The one in the build
        # folder keeps it, for profilers.
        self.cmake("--build", build, "--target", "install/strip")

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


def torch_requirement():
    """A library goes with the minor release of torch that it was built against."""
    try:
        import torch
    except ImportError:
        return "torch>=2.11"
    major, minor = torch.__version__.split(".")[:2]
    return f"torch=={major}.{minor}.*"


class NativeDistribution(Distribution):
    def has_ext_modules(self):
        return True  # a platform wheel, though no module is a CPython extension


setup(install_requires=[torch_requirement(), "numpy"],
      cmdclass={"bdist_wheel": WheelForAllPythons,
                "build_py": BuildNative}, distclass=NativeDistribution)
