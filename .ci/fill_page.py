#!/usr/bin/env python3
"""Puts what is on standard input into a page, between <!-- NAME --> and <!-- end of NAME -->.

    COMMAND | .ci/fill_page.py PAGE NAME
"""

import sys
from pathlib import Path

page, name = Path(sys.argv[1]), sys.argv[2]
begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
found = sys.stdin.read()
before, _, rest = page.read_text().partition(begin)
_, middle, after = rest.partition(end)
if not middle or not found.strip():
    sys.exit(f"fill_page: {page} has no place for {name}, or there is nothing to put there")
page.write_text(before + begin + "\n" + found.strip() + "\n\n" + end + after)
