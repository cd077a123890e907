"""Computes checksums of data files."""

import zlib
from pathlib import Path


def checksum(path: str | Path) -> str:
    """Returns a checksum of a file, or of the names and contents of all files in a folder."""
    path, value = Path(path), 0
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            name = str(file.relative_to(path)) if file != path else ""
            value = zlib.crc32(file.read_bytes(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
