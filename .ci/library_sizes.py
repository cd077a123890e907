#!/usr/bin/env python3
"""Prints the size of each part of a library as a Markdown table: device code by folder of csrc,
host code and tables.

    .ci/library_sizes.py BUILD        # a build folder, such as build/cuda

Sizes are those of the stripped library. Reads sections with `size` of binutils; device code is
compressed, one copy for each architecture.
"""

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

from cuda_objects import cuda_objects


def sections(path: Path) -> Counter[str]:
    """Returns the bytes in the file of each section that is loaded."""
    lines = subprocess.run(["size", "-A", str(path)], check=True, capture_output=True,
                           text=True).stdout.splitlines()
    sizes: Counter[str] = Counter()
    for line in lines:
        name, *numbers = line.split() or [""]
        if name.startswith(".") and name not in (".bss", ".tbss", ".comment"):
            sizes[name] += int(numbers[0])
    return sizes


def device_code(build: Path) -> Counter[str]:
    """Returns the bytes of device code by folder of csrc."""
    sizes: Counter[str] = Counter()
    for path, folder in cuda_objects(build).items():
        sizes[folder.partition("/")[0]] += sections(path)[".nv_fatbin"]
    return sizes


def rows(build: Path) -> list[tuple[str, int]]:
    library = build / "libxsoftmax.so"
    if not library.is_file():
        raise SystemExit(f"library_sizes: there is no {library}")
    found, by_folder = sections(library), device_code(build)
    device = found.pop(".nv_fatbin", 0)
    if sum(by_folder.values()) != device:
        raise SystemExit(f"library_sizes: the objects in {build} have {sum(by_folder.values())} "
                         f"bytes of device code, the library has {device}: build it anew")
    host = sum(size for name, size in found.items() if name.startswith((".text", ".plt")))
    names = sum(found[name] for name in (".dynsym", ".dynstr", ".gnu.hash"))
    unwinding = sum(found[name] for name in (".eh_frame", ".eh_frame_hdr", ".gcc_except_table"))
    return [(f"device code, `csrc/{folder}`", size) for folder, size in by_folder.most_common()] + [
        ("host code", host), ("names of functions", names), ("tables of exceptions", unwinding),
        ("constants, relocations and other", sum(found.values()) - host - names - unwinding)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    table = rows(parser.parse_args().build)
    total = sum(size for _, size in table)
    print("| part | KB | share |\n|---|---:|---:|")
    for name, size in [*table, ("all", total)]:
        print(f"| {name} | {size / 1000:,.0f} | {size / total:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
