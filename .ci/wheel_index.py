"""Writes the index pages of a folder of wheels, with checksums and the Python that they require
(PEP 503), for --find-links and --extra-index-url of pip.

    python .ci/wheel_index.py FOLDER        # FOLDER/xsoftmax/*.whl
"""

import hashlib
import html
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from urllib.parse import quote

PAGE = """<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
</head>
<body>
{links}
</body>
</html>
"""


def page(title: str, links: list[str]) -> str:
    return PAGE.format(title=html.escape(title), links="\n".join(f"{link}<br>" for link in links))


def link(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        python = Parser().parsestr(archive.read(metadata).decode())["Requires-Python"]
    address = f"{quote(wheel.name)}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    return (f'<a href="{html.escape(address)}" data-requires-python="{html.escape(python)}">'
            f"{html.escape(wheel.name)}</a>")


def main(root: Path) -> None:
    folder = root / "xsoftmax"
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"expected wheels in {folder}, got none")
    (folder / "index.html").write_text(page("xsoftmax", [link(wheel) for wheel in wheels]))
    (root / "index.html").write_text(page("Packages", ['<a href="xsoftmax/">xsoftmax</a>']))
    print(f"{root}: {len(wheels)} wheels")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: .ci/wheel_index.py FOLDER")
    main(Path(sys.argv[1]))
