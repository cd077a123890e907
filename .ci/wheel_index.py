"""Writes the index pages of a folder of wheels, with checksums (PEP 503), for --find-links and
--extra-index-url of pip.

    python .ci/wheel_index.py FOLDER        # FOLDER/xsoftmax/*.whl
"""

import hashlib
import html
import sys
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


def page(title: str, links: dict[str, str]) -> str:
    lines = (f'<a href="{html.escape(link)}">{html.escape(name)}</a><br>'
             for name, link in links.items())
    return PAGE.format(title=html.escape(title), links="\n".join(lines))


def main(root: Path) -> None:
    folder = root / "xsoftmax"
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"expected wheels in {folder}, got none")
    links = {
        wheel.name: f"{quote(wheel.name)}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        for wheel in wheels
    }
    (folder / "index.html").write_text(page("xsoftmax", links))
    (root / "index.html").write_text(page("Packages", {"xsoftmax": "xsoftmax/"}))
    print(f"{root}: {len(wheels)} wheels")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: .ci/wheel_index.py FOLDER")
    main(Path(sys.argv[1]))
