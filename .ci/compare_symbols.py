"""Checks that the CUDA build has all that the CPU build has, and its kernels.

    python .ci/compare_symbols.py CPU_LIBRARY CUDA_LIBRARY
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def symbols(library: str, *options: str) -> set[str]:
    """Demangled names of the symbols that the library defines."""
    output = subprocess.run(["nm", "--demangle", "--defined-only", *options, library], check=True,
                            capture_output=True, text=True).stdout
    return {line.split(maxsplit=2)[-1] for line in output.splitlines()}


def exported(library: str) -> set[str]:
    """Those of them that are exported and ours: other libraries' templates differ between two
    builds of torch."""
    return {
        name
        for name in symbols(library, "--dynamic")
        if re.match(r"((typeinfo|typeinfo "
                    r"name|vtable) for "
                    r")?xsoftmax::", name)
    }


def kernels_in_source() -> set[str]:
    """Names of the __global__ functions."""
    pattern = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")
    return {
        name
        for path in (ROOT / "csrc").rglob("*.cu*")
        for name in pattern.findall(path.read_text())
    }


def ops_in_source() -> set[str]:
    """Names of the ops that have a CUDA kernel."""
    block = re.compile(r"TORCH_LIBRARY_IMPL\(xsoftmax, CUDA, m\) \{(.*?)\}\n", re.DOTALL)
    ops = set()
    for path in (ROOT / "csrc").rglob("*.cu"):
        for body in block.findall(path.read_text()):
            ops.update(re.findall(r'm\.impl\("(\w+)"', body))
    return ops


def main(cpu_library: str, cuda_library: str) -> int:
    passed, failures = 0, []
    needed, there, everything = exported(cpu_library), exported(cuda_library), symbols(cuda_library)
    if not needed:
        failures.append(f"{cpu_library} exports no symbol of xsoftmax")
    for name in sorted(needed):
        if name in there:
            passed += 1
        else:
            failures.append(f"not in the CUDA build: {name}")
    kernels = kernels_in_source()
    for name in sorted(kernels):
        if any(re.search(rf"\b{name}\b", symbol) for symbol in everything):
            passed += 1
        else:
            failures.append(f"kernel not in the CUDA build: {name}")
    if not any("TORCH_LIBRARY_IMPL_static_init_xsoftmax_CUDA" in symbol for symbol in everything):
        failures.append("the CUDA build registers no CUDA kernel")
    for failure in failures:
        print(failure)
    print(f"CUDA build: {len(needed)} exported symbols, {len(kernels)} kernels, "
          f"{len(ops_in_source())} ops with a CUDA kernel")
    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
