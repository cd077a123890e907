"""Compares two wheels byte by byte, and prints the first difference.

    python .ci/compare_wheels.py WHEEL WHEEL
"""

import sys
import zipfile
from pathlib import Path
from typing import Optional


def first_difference(one: Path, other: Path) -> Optional[str]:
    """Returns where two wheels differ: in a file, in the list of files or in the archive itself."""
    if one.name != other.name:
        return f"names: {one.name} and {other.name}"
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        for left, right in zip(first.infolist(), second.infolist()):
            if left.filename != right.filename:
                return f"list of files: {left.filename} and {right.filename}"
            a, b = first.read(left), second.read(right)
            if a != b:
                place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y),
                             min(len(a), len(b)))
                return (f"{left.filename}, byte {place} of {len(a)} and {len(b)}: "
                        f"{a[place:place + 40]!r} and {b[place:place + 40]!r}")
            for name in ("external_attr", "date_time", "compress_type", "compress_size"):
                if getattr(left, name) != getattr(right, name):
                    return (f"{left.filename}, {name}: {getattr(left, name)} and "
                            f"{getattr(right, name)}")
        if len(first.infolist()) != len(second.infolist()):
            return f"number of files: {len(first.infolist())} and {len(second.infolist())}"
    return None if one.read_bytes() == other.read_bytes() else "the archives, not their files"


def main(one: Path, other: Path) -> None:
    if found := first_difference(one, other):
        raise SystemExit(f"wheels differ: {found}\n  {one}\n  {other}")
    print(f"{one.name}: the same {one.stat().st_size} bytes in both folders")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: .ci/compare_wheels.py WHEEL WHEEL")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
