"""docs/reference/command_line.md: the output of `xsoftmax --help` and of its commands' --help."""

import argparse
import os
from pathlib import Path

import pages
from xsoftmax.tools.cli import make_parser

DOCS = Path(__file__).parent.parent


def generate(app=None) -> None:
    os.environ["COLUMNS"] = "70"  # read by argparse
    parser = make_parser()
    commands = next(action for action in parser._actions
                    if isinstance(action, argparse._SubParsersAction)).choices
    parts = [
        "# Command line\n\nGenerated from `xsoftmax --help`.\n",
        f"```text\n{parser.format_help()}```\n"
    ]
    for name, command in commands.items():
        parts += [f"## xsoftmax {name}\n", f"```text\n{command.format_help()}```\n"]
    pages.write(DOCS / "reference/command_line.md", "\n".join(parts))


def setup(app) -> dict:
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
