"""What every benchmark reports: tables for people, or a record of the run as JSON, from which the pages under docs/benchmarks are made.

A program calls `add_json(parser)` and ends with `report(args, __doc__, question=..., against=..., tables=..., ...)`. A record holds the fields of FIELDS,
the tables, and whatever else the program found.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable

import torch

from timing import figure_rows, machine, print_machine, print_table

FIELDS = ("question", "about", "against", "command", "date", "commit", "machine", "loaded", "tables")


def _cpu_seconds() -> tuple[float, float]:
    """(of all processes, of this one and those that it started and that have ended)"""
    here = os.times()
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return 0.0, 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), here.user + here.system + here.children_user + here.children_system


BEGIN = datetime.now(timezone.utc), time.monotonic(), _cpu_seconds()


def others() -> float:
    """Cores that other programs kept busy since this one began, on average."""
    (_, begin, (all_then, own_then)), (all_now, own_now) = BEGIN, _cpu_seconds()
    return max(0.0, (all_now - all_then) - (own_now - own_then)) / max(time.monotonic() - begin, 1e-9)


def commit() -> str:
    """Of the repository, with + where files of it have changed since; empty outside of one."""
    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else ""

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="a record of the run as JSON, into FILE or on standard output, instead of tables")


def table(rows: list[dict], title: str = "", columns: list[str] | None = None) -> dict:
    """One for `report`: rows are texts by column; columns: all that a row has, if not given."""
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    return {"title": title, "columns": columns, "rows": [[str(row.get(column, "")) for column in columns] for row in rows]}


def figures_table(figures: list[dict], title: str = "") -> dict:
    """Of `figure`, `value` and, where there are any, `medians`."""
    return table(figure_rows(figures), title)


def report(args: argparse.Namespace, doc: str, *, question: str, against: str, tables: list[dict], threads: int | None = None, **found) -> None:
    """
    Args:
        threads: of runs that other processes made. Default: those of this one.
        doc: of the program: what was measured, and how. Its usage, indented lines, is left out of the record.
        question: that the tables answer, for a reader.
        against: what xsoftmax is compared with, and its version.
        found: what machines read beside the tables.
    """
    if args.json:
        busy = others()
        about = "\n\n".join(part.replace("\n", " ") for part in doc.strip().split("\n\n") if not part.startswith("    "))
        about_machine = machine() | {"cores": os.cpu_count()} | ({"threads": threads} if threads else {})
        record = {"question": question, "about": about, "against": against, "command": command(), "date": f"{BEGIN[0]:%Y-%m-%d}", "commit": commit(),
                  "machine": about_machine, "other_programs_cores": round(busy, 3), "loaded": busy > 0.1, "tables": tables} | found
        text = json.dumps(record, indent=1, default=str)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(text + "\n")
        return
    print_machine()
    for number, one in enumerate(tables):
        if number:
            print()
        if one["title"]:
            print(one["title"] + "\n")
        print_table([dict(zip(one["columns"], row)) for row in one["rows"]], one["columns"])


def shown_words(given: list[str]) -> list[str]:
    """Of a command, as one would type it: without where the record goes, and with the names of files in the place of their folders."""
    words, given = [], list(given)
    while given:
        word, *given = given
        if word == "--json":
            given = given[1:] if given and not given[0].startswith("--") else given
        elif not word.startswith("--json="):
            words.append(Path(word).name if word.startswith("/") else word)
    return words


def command() -> str:
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown_words(sys.argv[1:])])


def run_benches(doc: str, benches: dict[str, Callable[[argparse.Namespace], list[dict]]], *, question: str, against: str,
                extra: Callable[[argparse.ArgumentParser], None] = lambda parser: None, defaults: dict | None = None) -> None:
    """
    The program of a file of benchmarks: those that --only names, one after another, then all figures, a table for each.

    benches: by name; the first line of a docstring is the title of its table. extra: adds options of its own.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--only", default=",".join(benches), help="comma-separated: %(default)s")
    extra(parser)
    add_json(parser)
    parser.set_defaults(**(defaults or {}))
    args = parser.parse_args()
    names = args.only.split(",")
    for name in names:
        if name not in benches:
            parser.error(f"--only: expected names out of {', '.join(benches)}, got {name!r}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    figures = {name: benches[name](args) for name in names}
    titles = {name: (benches[name].__doc__ or name).strip().split("\n")[0] for name in names}
    report(args, doc, question=question, against=against, tables=[figures_table(found, titles[name]) for name, found in figures.items()],
           figures=[figure for found in figures.values() for figure in found])
