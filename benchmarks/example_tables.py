"""Makes a record from the tables of examples: runs each command and keeps its table.md.

    python benchmarks/example_tables.py --question "What do row-wise states cost?" \\
        --against "Adagrad" --out out/rowwise --json FILE -- \\
        examples/language_model/train.py --data ptb --lr 0.1 -- \\
        examples/language_model/train.py --data ptb --lr 0.1 --row-wise

A command is what follows `python`, or a torchrun command, without --output. With several commands,
the first column shows the options in which they differ, or --names. With --mean, commands that
differ only in --seed are combined: means over the seeds, with standard errors. --out keeps finished
runs, which are not repeated. Runs share the machine (--jobs), so their times are not meaningful:
select the other columns with --columns.
"""

import argparse
import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT
from common.records import BEGIN, COMMIT, add_json, others, report, shown_words, table

from examples.common.report import mean_and_error


def split(words: list[str]) -> list[list[str]]:
    """Splits words at each `--`."""
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def program(command: list[str]) -> Path:
    """Returns the file of the example that a command runs as a path or as a module."""
    named = next(
        (Path(*word.split(".")).with_suffix(".py") if word.startswith("examples.") else Path(word)
         for word in command if word.startswith(("examples.", "examples/"))), None)
    if named is None or not (ROOT / named).is_file():
        raise SystemExit(f"expected a program of examples/ in {shlex.join(command)!r}")
    return ROOT / named


def run(command: list[str], out: Path) -> tuple[list[str], list[list[str]], Path]:
    """Returns columns and rows of the command's table, and the file of facts about the run."""
    folder = out / hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]
    finished = folder / "finished"
    if not finished.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        python = [
            sys.executable, *(["-m", "torch.distributed.run", *command[1:]]
                              if command[0] == "torchrun" else command)
        ]
        with open(folder / "log.txt", "w") as log:
            log.write(shlex.join(command) + "\n")
            log.flush()
            code = subprocess.run([*python, "--output", str(folder)], cwd=ROOT, stdout=log,
                                  stderr=log).returncode
        if code:
            raise SystemExit(f"{shlex.join(command)}: exit {code}, see {folder / 'log.txt'}")
        finished.write_text(json.dumps({"date": f"{BEGIN[0]:%Y-%m-%d}", "commit": COMMIT}))
    columns, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")]
                         for line in (folder / "table.md").read_text().splitlines())
    return columns, rows, finished


def facts(finished: Path, busy: float) -> dict:
    """Returns the record's facts about a run. Those of a run of this call get the load `busy`,
    which is measured after all runs, because an unfinished one would count as another program."""
    about = json.loads(finished.read_text())
    if "other_programs_cores" not in about:
        about["other_programs_cores"] = busy
        finished.write_text(json.dumps(about))
    return about


def differences(commands: list[list[str]]) -> list[str]:
    """Returns for each command the options, with their values, that not all commands have."""
    options = []
    for command in commands:
        groups: list[list[str]] = []
        for word in command:
            if not groups or word.startswith("-") or not groups[-1][0].startswith("-"):
                groups.append([])
            groups[-1].append(word)
        options.append([" ".join(group) for group in groups])
    return [
        " ".join(option for option in one if any(option not in other for other in options))
        for one in options
    ]


def without_seed(command: list[str]) -> list[str]:
    at = command.index("--seed") if "--seed" in command else len(command)
    return command[:at] + command[at + 2:]


def mean(cells: tuple[str, ...]) -> str:
    """Combines one cell of several tables: the mean of numbers, also with a unit, a text if all are
    equal, or ""."""
    numbers, _, units = zip(*(cell.partition(" ") for cell in cells))
    try:
        values = [float(number.replace(",", "")) for number in numbers]
    except ValueError:
        return cells[0] if len(set(cells)) == 1 else ""
    if len(set(units)) > 1:
        return ""
    found = mean_and_error(values, decimals=len(numbers[0].partition(".")[2]))
    return f"{found} {units[0]}".strip()


def over_seeds(commands: list[list[str]],
               found: list[tuple]) -> tuple[list[list[str]], list[tuple]]:
    """Combines commands that differ only in --seed, with the means of their tables."""
    groups: dict[str, list[int]] = {}
    for number, command in enumerate(commands):
        groups.setdefault(shlex.join(without_seed(command)), []).append(number)
    first = [numbers[0] for numbers in groups.values()]
    means = [[[mean(cells) for cells in zip(*rows)] for rows in zip(*(found[number][1]
                                                                      for number in numbers))]
             for numbers in groups.values()]
    return [without_seed(commands[number]) for number in first
            ], [(found[number][0], rows, found[number][2]) for number, rows in zip(first, means)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", required=True, help="the question that the tables answer")
    parser.add_argument("--against", required=True, help="what xsoftmax is compared with")
    parser.add_argument("--columns", nargs="+", help="columns of the table to keep")
    parser.add_argument("--names", nargs="+", help="names of the commands for the first column")
    parser.add_argument("--mean", action="store_true", help="average over commands that differ "
                        "only in --seed")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs; kept "
                        "between calls")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time "
                        "(default: %(default)s)")
    add_json(parser)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, commands = parser.parse_args(sys.argv[1:end]), split(sys.argv[end:])
    if not commands:
        parser.error("expected a command after --")
    programs = [program(command) for command in commands]
    with ThreadPoolExecutor(args.jobs) as pool:
        made = list(pool.map(lambda command: run(command, args.out), commands))
    busy = round(others(), 3)
    found = [(columns, rows, facts(finished, busy)) for columns, rows, finished in made]
    threads = {
        command[command.index("--threads") + 1]
        for command in commands if "--threads" in command
    }
    labelled, tables = over_seeds(commands, found) if args.mean else (commands, found)
    if args.names and len(args.names) != len(labelled):
        parser.error(f"--names: expected one for each of {len(labelled)} commands, got "
                     f"{len(args.names)}")
    first_column = "run" if args.names else "options"
    names = args.names or (differences(labelled) if len(labelled) > 1 else [])
    rows = [({first_column: names[number]} if names else {}) | dict(zip(columns, row))
            for number, (columns, several, _) in enumerate(tables) for row in several]
    known = list(dict.fromkeys(column for row in rows for column in row))
    if unknown := set(args.columns or []) - set(known):
        parser.error(f"--columns: expected some of {', '.join(known)}, got "
                     f"{', '.join(sorted(unknown))}")
    wanted = [
        column for column in known if not args.columns or column in (first_column, *args.columns)
    ]
    lines = [
        shlex.join([*([] if command[0] == "torchrun" else ["python"]), *shown_words(command)])
        for command in commands
    ]
    first, busy = min((about for _, _, about in found),
                      key=lambda about: about["date"]), max(about["other_programs_cores"]
                                                            for _, _, about in found)
    about = ast.get_docstring(ast.parse(programs[0].read_text()))
    report(args, about, question=args.question, against=args.against,
           tables=[table(rows, columns=wanted)], command="\n".join(lines),
           threads=int(threads.pop()) if len(threads) == 1 else os.cpu_count(),
           **first | {"other_programs_cores": busy, "loaded": busy > 0.1})


if __name__ == "__main__":
    main()
