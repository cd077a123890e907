"""The output of every benchmark: tables for people, or a JSON record of the run, from which the
pages under docs/benchmarks are generated.

A program calls `add_json(parser)` and ends with `report(args, __doc__, question=..., against=...,
tables=..., ...)`. A record contains the fields of FIELDS and any other results of the program.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Collection

import torch

from common.timing import figure_rows, machine, print_machine, print_table

FIELDS = ("question", "about", "against", "command", "date", "commit", "machine", "loaded",
          "tables")


def _cpu_seconds() -> tuple[float, float]:
    """Returns the CPU seconds of all processes, and of this one and its finished children."""
    here = os.times()
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(
            int,
            Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return 0.0, 0.0
    return (user + nice + system + irq + softirq) / os.sysconf(
        "SC_CLK_TCK"), here.user + here.system + here.children_user + here.children_system


BEGIN = datetime.now(timezone.utc), time.monotonic(), _cpu_seconds()


def others() -> float:
    """Returns the average number of cores that other programs used since this one started."""
    (_, begin, (all_then, own_then)), (all_now, own_now) = BEGIN, _cpu_seconds()
    return max(0.0,
               (all_now - all_then) - (own_now - own_then)) / max(time.monotonic() - begin, 1e-9)


def commit() -> str:
    """Returns the short hash of the commit, followed by + if tracked files other than records have
    changed; "" outside a repository."""
    def git(*arguments: str) -> str:
        found = subprocess.run(["git", "--no-optional-locks", *arguments],
                               cwd=Path(__file__).parent, capture_output=True, text=True,
                               start_new_session=True)  # Ctrl-C does not end it
        return found.stdout.strip() if found.returncode == 0 else ""

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/",
        ":(top,exclude)docs/experiments", ":(top,exclude)docs/benchmarks") else "")


COMMIT = commit()  # at the start, because the repository may change while the program runs


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write a record of the run "
        "as JSON, to FILE or to standard output, instead of tables")


def plain_numbers(text: str) -> str:
    """Writes numbers without an exponent: 2.05e+03 becomes 2,050."""
    return re.sub(r"\d(?:\.\d+)?e\+\d+", lambda found: f"{float(found[0]):,.0f}", text)


def table(rows: list[dict], title: str = "", columns: list[str] | None = None) -> dict:
    """Builds a table for `report` from rows of texts by column. None: all columns that occur."""
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    return {
        "title": title, "columns": columns,
        "rows": [[plain_numbers(str(row.get(column, ""))) for column in columns] for row in rows]
    }


def shown_rate(rate: float, tried: Collection[float]) -> str:
    """Formats the best of several learning rates. An end of the range is marked, because a rate
    beyond it may be better."""
    ends = {min(tried): " (lowest)", max(tried): " (highest)"} if len(tried) > 1 else {}
    return f"{rate:g}{ends.get(rate, '')}"


def plot(x: str, y: str, curves: dict[str, list[tuple[float, float]]], log: str = "",
         lines: bool = True) -> dict:
    """Returns a plot for `report`: curves of points (x, y) by name.

    Args:
        x, y: labels of the axes.
        log: which axes have a logarithmic scale: "", "x", "y" or "xy".
        lines: join the points of a curve.
    """
    return {"x": x, "y": y, "log": log, "curves": curves, "lines": lines}


def figures_table(figures: list[dict], title: str = "") -> dict:
    """Builds a table of `figure`, `value` and, if there are any, `medians`."""
    return table(figure_rows(figures), title)


def report(args: argparse.Namespace, doc: str, *, question: str, against: str, tables: list[dict],
           threads: int | None = None, **found) -> None:
    """Prints tables, or writes a record if --json is given.

    Args:
        doc: the docstring of the program, which says what is measured and how. Its indented usage
            paragraphs are not included in the record.
        question: the question that the tables answer.
        against: what xsoftmax is compared with, and its version.
        threads: the number of threads, if other processes made the runs. Default: that of this one.
        found: additional results for programs that read the record. `plot`, made by
            the function of that name, is also drawn, to NAME.svg beside a record NAME.json.
    """
    if args.json:
        busy = others()
        # one line per paragraph and per item of a list
        about = "\n\n".join(
            re.sub(r"\n(?!- ) *", " ", part)
            for part in doc.strip().split("\n\n") if not part.startswith("    "))
        about_machine = machine() | {"cores": os.cpu_count()
                                     } | ({"threads": threads} if threads else {})
        record = {
            "question": question, "about": about, "against": against, "command": command(),
            "date": f"{BEGIN[0]:%Y-%m-%d}", "commit": COMMIT, "machine": about_machine,
            "other_programs_cores": round(busy, 3), "loaded": busy > 0.1, "tables": tables
        } | found
        text = json.dumps(record, indent=1, default=str)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(text + "\n")
            if "plot" in record:
                from common.pictures import draw  # needs matplotlib

                draw(record["plot"], Path(args.json).with_suffix(".svg"))
        return
    print_machine()
    for number, one in enumerate(tables):
        if number:
            print()
        if one["title"]:
            print(one["title"] + "\n")
        print_table([dict(zip(one["columns"], row)) for row in one["rows"]], one["columns"])


def shown_words(arguments: list[str]) -> list[str]:
    """Returns a command as a user would type it: without --json, and with file names instead of
    absolute paths."""
    words, left = [], list(arguments)
    while left:
        word, *left = left
        if word == "--json":
            left = left[1:] if left and not left[0].startswith("--") else left
        elif not word.startswith("--json="):
            words.append(Path(word).name if word.startswith("/") else word)
    return words


def command() -> str:
    return shlex.join(
        ["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown_words(sys.argv[1:])])


def run_benches(doc: str, benches: dict[str, Callable[[argparse.Namespace],
                                                      list[dict]]], *, question: str, against: str,
                extra: Callable[[argparse.ArgumentParser],
                                None] = lambda parser: None, defaults: dict | None = None) -> None:
    """Runs the benchmarks that --only names one after another, and reports one table for each.

    Args:
        benches: functions by name. The first line of their docstring is the title of the table.
        extra: adds options to the parser.
    """
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
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
    titles = {
        name: " ".join((benches[name].__doc__ or name).split("\n\n")[0].split())
        for name in names
    }
    report(args, doc, question=question, against=against,
           tables=[figures_table(found, titles[name]) for name, found in figures.items()],
           figures=[figure for found in figures.values() for figure in found])
