"""Repeats the experiments of the papers whose methods the library has.

    python benchmarks/experiments.py                             # lists the studies
    python benchmarks/experiments.py midx_words --data FOLDER    # runs one
    make experiments NAME=midx_words PARTS=ptb DATA=FOLDER BUDGET=60

A study makes records, docs/experiments/STUDY.PART.json, with their plots. The same command goes on
after an interruption. Studies of many trainings keep finished ones in
docs/experiments/runs/STUDY.PART.jsonl and repeat none of them, also on another machine, except for
Omniglot, whose features are trained first, and agree to the bit only on similar CPUs. With another
folder of --records a study begins from nothing, and leaves those of the repository as they are.
--budget scales the numbers of epochs, so that the study takes about so many minutes on one core;
the records then say so. Very small budgets are exceeded, because each training starts, takes at
least one step, or one epoch of classifiers, and is evaluated; and other libraries take all of their
epochs. Data sets are folders of --data (see docs/experiments/data.md); a part whose data is missing
is left out with a message.
"""

import argparse
import json
import math
import re
import shlex
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from common import ROOT
from common.files import checksum
from common.methods import PAPER_SAMPLERS
from common.processes import run_program

DATA = {
    "ptb": "ptb", "novels": "novels", "gowalla": "gowalla", "beauty": "amazon_beauty/Beauty.txt",
    "delicious": "delicious/delicious.arff", "omniglot": "omniglot"
}
# Files without which a data set is incomplete, below its folder.
FILES = {
    "ptb": ("*.train.txt", "*.valid.txt", "*.test.txt"), "novels": ("*.txt",),
    "gowalla": ("train.txt", "valid.txt", "test.txt"),
    "omniglot": ("images_background/*", "images_evaluation/*")
}

# The option that names the interpreter of a rival, FOLDER/NAME/bin/python of --rivals.
RIVALS = {"pecos": "--pecos-python", "omikuji": "--omikuji-python", "vw": "--vw-python"}


@dataclass(frozen=True)
class Part:
    """A record of a study.

    Args:
        name: the record is STUDY.name.json.
        minutes: the time that all commands take without --budget, on one core.
        commands: programs of the repository, the last of which writes the record with --json.
            {ptb} and the other names of DATA are paths, {out} is a folder for this part, {runs} the
            file of its finished runs. {e:20} is a number of epochs that --budget scales, {n:20}
            such a whole number, at least 1.
        rivals: other libraries that the last command measures if --rivals has their environment.
        needs: those without which there is no record.
    """

    name: str
    minutes: float
    commands: tuple[str, ...]
    rivals: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def data(self) -> list[str]:
        return [name for name in DATA if any(f"{{{name}}}" in one for one in self.commands)]


@dataclass(frozen=True)
class Study:
    source: str  # tables and figures of a paper
    question: str
    parts: tuple[Part, ...]

    @property
    def minutes(self) -> float:
        return sum(part.minutes for part in self.parts)


CANE, MIDX = "Han et al. (2018)", "Chen et al. (2025)"
PECOS, PARABEL = "Yu et al. (2022)", "Lu et al. (2019)"
CLASSES = "benchmarks/classifiers.py --runs {runs} --threads 1 --seeds 3 "
# Train most of the rates to the end, because short trainings favour high rates.
MANY_RATES = CLASSES + "--finalists 6 --epochs {n:30} "
CLASSIFIERS = MANY_RATES + "--search-epochs {n:3} "
GAUSSIANS = MANY_RATES + "--gaussians 10000 --search-epochs {n:9} "
NEVER_BALANCED = " ".join(f"'CANE {split}, edges as in the paper'"
                          for split in ("1v9", "5v5", "9v1"))
ALOI = "benchmarks/classifiers.py --write-aloi-like {out}/aloi.txt"
LANGUAGE = "benchmarks/perplexity.py "
SMALL = " -- --width 128 --layers 1 --dropout 0.2"
KEPT = "--out {out} --runs {runs} --jobs 1 "
TIMED = KEPT + "--time "
TUNED = " --data {ptb} " + TIMED + "--epochs {e:8} --search-epochs {e:1}" + SMALL
CURVES = " --eval-epochs {e:2}"
NOVELS = " --data {novels} " + TIMED + "--epochs {e:0.5} --rates .004 --only "
SHORT = SMALL + " --eval-epochs {e:0.05} --eval-tokens 100000 --min-count "
SAMPLERS = "".join(f"'20 private {name}, ranking' " for name in PAPER_SAMPLERS)
TABLE_OF_NOVELS = (LANGUAGE + "table" + NOVELS + SAMPLERS + "'512 shared unigram, head 512' "
                   "'head 64 + 64 private midx, ranking'" + SHORT + "5")
PRIVATE = " ".join(f"'64 private {name}'" for name in PAPER_SAMPLERS)
ITEMS = "benchmarks/recommend.py " + KEPT + "--epochs {e:20} --search-epochs {e:5} --seeds "
BEAUTY = (ITEMS + "3 --data {beauty} --only " + PRIVATE + " '64 private midx, ranking' "
          "'512 shared uniform' '512 shared unigram' -- ")
GOWALLA = ITEMS + "1 --data {gowalla} --only " + PRIVATE
UNORDERED = " -- --unordered --eval-epochs {e:2} "
GRU = "--model gru4rec --layers 1"
LABELS = "benchmarks/sampled_labels.py --runs {runs} --threads 1 "

STUDIES = {
    "cane_classes": Study(
        f"{CANE}, Tables 1 to 3, Figure 2", "Is CANE as accurate as the softmax over all classes?",
        (Part("delicious", 90, (CLASSIFIERS + "--delicious {delicious}",), ("vw",)),
         Part("aloi_like", 60,
              (ALOI, CLASSIFIERS + "--libsvm {out}/aloi.txt --lr 0.001 0.003 0.01 0.03 0.1 "
               "0.3 1"), ("vw",)),
         Part("sgd", 80,
              (ALOI, CLASSES + "--optimizer sgd --finalists 6 --epochs {n:50} --libsvm "
               "{out}/aloi.txt --lr 1 3 10 30 100 300 --only softmax NCE-10 BlackOut-10 " +
               NEVER_BALANCED)),
         Part("gaussians", 300,
              (GAUSSIANS + "--lr 0.00003 0.0001 0.0003 0.001 0.003 0.01 0.03 0.1 0.3",), ("vw",)),
         Part("omniglot", 240,
              ("examples/image_classes/train.py --data {omniglot} --threads 1 --epochs {n:20} "
               "--checkpoint {out}/model.ckpt --output {out}/vgg",
               "examples/image_classes/features.py --checkpoint {out}/model.ckpt --output "
               "{out}/features.pt", CLASSIFIERS + "--features {out}/features.pt --lr "
               "0.0003 0.001 0.003 0.01 0.03 0.1 0.3"), ("vw",)),
         Part("time", 5,
              (ALOI, "benchmarks/classifier_time.py --threads 1 --libsvm {out}/aloi.txt")))),
    "cane_words": Study(
        f"{CANE}, section 7.2, Figure 3",
        "Does CANE train a language model better than NCE and BlackOut with as many words?",
        (Part("ptb", 500, (LANGUAGE + "cane --seeds 3" + TUNED + CURVES + " --unigram-bias",)),
         Part("routed", 120,
              (LANGUAGE + "routed --data {ptb} " + KEPT + "--epochs {e:3} --rates .004" + SMALL,)),
         Part("novels", 600,
              (LANGUAGE + "cane" + NOVELS + "'CANE-60, routed' 'CANE-60, half of them noises' "
               "NCE-60 BlackOut-60" + SHORT + "1",)))),
    "midx_words": Study(
        f"{MIDX}, Table 4, Figure 2",
        "How close do language models trained with sampled losses come to the exact loss?",
        (Part("ptb", 600, (LANGUAGE + "table --seeds 3" + TUNED,)),
         Part("transformer", 600,
              (LANGUAGE + "table --seeds 2" + TUNED + CURVES + " --model transformer",)),
         Part("novels", 300, (TABLE_OF_NOVELS,)),
         Part("novels_transformer", 300, (TABLE_OF_NOVELS + " --model transformer",)))),
    "midx_distance": Study(
        f"{MIDX}, Tables 2 and 3, Figures 4 and 5",
        "How far is each sampler's proposal from the softmax?",
        (Part("untrained", 3,
              ("benchmarks/sampler_distance.py --data {ptb} --out {out} --untrained",)),
         Part("trained", 20,
              ("benchmarks/sampler_distance.py --data {ptb} --out {out} --epochs {e:4}",)))),
    "midx_learnable": Study(f"{MIDX}, Table 5, Figure 3", "Do learned codebooks help?",
                            (Part("ptb", 360, (LANGUAGE + "learnable --seeds 3" + TUNED,)),)),
    "midx_ablation": Study(
        f"{MIDX}, Table 1, Figures 3, 6 and 7",
        "How do codewords, samples and refreshes change quality, and what does a sample cost?",
        (Part(
            "ptb", 500,
            (LANGUAGE + "ablation --data {ptb} " + KEPT + "--epochs {e:4} --rates .004" + SMALL,)),
         Part("time", 10, ("benchmarks/sampling_time.py --threads 1",)))),
    "midx_items": Study(
        f"{MIDX}, Table 7", "How close do recommenders trained with samples come to the softmax?",
        (Part("beauty", 400,
              (BEAUTY,)), Part("gowalla", 900, (GOWALLA + " '512 shared unigram'" + UNORDERED,)),
         Part("gru", 400, (BEAUTY + GRU,)),
         Part("gru_gowalla", 800,
              (GOWALLA + " '64 private unigram, ranking'" + UNORDERED + GRU,)))),
    "midx_labels": Study(f"{MIDX}, Table 9",
                         "How precise are models of many labels trained with samples?",
                         (Part("delicious", 20,
                               (LABELS + "--delicious {delicious} --lr 0.001 0.003 0.01 0.03 0.1 "
                                "--epochs {n:5} {n:20} --finalists 5",)),
                          Part("generated", 120,
                               (LABELS + "--generated --samples 200 --epochs {n:5} {n:20} "
                                "--search-epochs {n:5}",)))),
    "pecos_linear": Study(f"{PECOS}, Tables 3 to 5",
                          "Is XR-Linear as precise as libpecos, and how fast?",
                          (Part("three_sets", 40,
                                ("benchmarks/extreme_labels.py --out {out} --delicious {delicious} "
                                 "--gowalla {gowalla} --novels {novels}",), ("pecos", "omikuji"),
                                ("pecos",)),)),
    "pecos_ablation": Study(f"{PECOS}, Table 6 and section 3",
                            "What do trees, children and settings by layer change?",
                            (Part("settings", 15,
                                  ("benchmarks/xr_linear_settings.py --delicious {delicious} "
                                   "--gowalla {gowalla}",)),)),
    "parallel_trees": Study(f"{PARABEL}, Table 2, Figures 2 and 3",
                            "How much faster do threads make the training?",
                            (Part("threads", 10,
                                  ("benchmarks/xr_linear_threads.py --gowalla {gowalla}",)),)),
}


def scale_numbers(command: str, scale: float) -> str:
    """Replaces {e:20} and {n:20} by numbers of epochs."""
    command = re.sub(r"\{e:([\d.]+)\}", lambda found: f"{scale * float(found[1]):.3g}", command)
    return re.sub(r"\{n:(\d+)\}", lambda found: str(max(1, round(scale * int(found[1])))), command)


def split_command(command: str, scale: float, places: dict[str, str]) -> list[str]:
    """Returns the words of a command with its placeholders replaced."""
    parts = shlex.split(scale_numbers(command, scale))
    for name, place in places.items():
        parts = [part.replace(f"{{{name}}}", place) for part in parts]
    return parts


def find_interpreter(rival: str, args: argparse.Namespace) -> Path | None:
    """Returns the interpreter of a rival, if --rivals has it."""
    found = args.rivals / rival / "bin/python" if args.rivals else None
    return found if found and found.exists() else None


def name_missing(part: Part, args: argparse.Namespace) -> str:
    """Returns which data sets and environments are missing; an empty text if none."""
    data = [
        pattern for one in part.data()
        for pattern in ([f"{DATA[one]}/{name}" for name in FILES.get(one, ())] or [DATA[one]])
        if not any(args.data.glob(pattern))
    ]
    rivals = [one for one in part.needs if find_interpreter(one, args) is None]
    return "; ".join([
        *([f"{args.data} has no {', '.join(data)}"] if data else []),
        *([f"--rivals has no environment {', '.join(rivals)}"] if rivals else [])
    ])


class Failed(Exception):
    """A program of a study ended with an error."""


def call(command: list[str]) -> None:
    code = run_program([sys.executable, *command], cwd=ROOT)
    if code:
        raise Failed(f"{shlex.join(command)}: exit {code}")


def command_of(name: str, parts: list[Part], args: argparse.Namespace) -> str:
    """Returns the command that repeats the records of these parts of a study."""
    names = " ".join(part.name for part in parts)
    rivals = [one for part in parts for one in part.rivals if find_interpreter(one, args)]
    return " ".join([
        f"make experiments NAME={name}",
        *([f"PARTS={shlex.quote(names)}"] if len(parts) < len(STUDIES[name].parts) else []),
        *(["DATA=FOLDER"] if any(part.data() for part in parts) else []),
        *(["RIVALS=FOLDER"] if rivals else []),
        *([f"BUDGET={args.budget:g}"] if args.budget else [])
    ])


def describe_budget(part: Part, scale: float, budget: float, rivals: bool) -> str:
    """Says by how much a budget shortens a part; an empty text if it does not.

    Args:
        rivals: whether the part also measures other libraries, whose epochs are not scaled.
    """
    text = " ".join(part.commands)
    if scale == 1 or not re.search(r"\{[en]:", text):
        return ""
    least = any(float(count) * scale < 0.5 for count in re.findall(r"\{n:(\d+)\}", text))
    return (f"{budget:g} minutes: {scale:.2g} of the study's epochs" +
            (", but at least one" if least else "") +
            ("; other libraries with all of theirs" if rivals else ""))


def folder_of(part: Part, scale: float, args: argparse.Namespace) -> str:
    """Returns the name of a folder for files that the commands make from the data: another one for
    other data, budgets or preparing commands. The last command only reads what is in it, or names
    its files by its options."""
    depends = [scale_numbers(command, scale) for command in part.commands[:-1]
               ] + [checksum(args.data / DATA[name]) for name in part.data()]
    return f"{scale:.3g}-{zlib.crc32(' '.join(depends).encode()):08x}"


def run(name: str, part: Part, scale: float, args: argparse.Namespace) -> dict:
    """Makes a record with a fraction of the epochs, and returns it."""
    out = args.out / f"{name}.{part.name}" / folder_of(part, scale, args)
    out.mkdir(parents=True, exist_ok=True)
    places = {one: str(args.data / path)
              for one, path in DATA.items()} | {
                  "out": str(out), "runs": str(args.records / "runs" / f"{name}.{part.name}.jsonl")
              }
    record = args.records / f"{name}.{part.name}.json"
    *before, last = (split_command(command, scale, places) for command in part.commands)
    for number, command in enumerate(before, 1):
        finished, checkpoint = out / f"finished.{number}", out / "model.ckpt"
        if not finished.is_file():
            resume = command[0].endswith("train.py") and checkpoint.is_file()
            call([*command, *(["--resume"] if resume else [])])
            finished.touch()
    at = last.index("--") if "--" in last else len(last)  # the options of the examples follow "--"
    rivals = [
        word for rival in part.rivals if (found := find_interpreter(rival, args))
        for word in (RIVALS[rival], str(found))
    ]
    call([*last[:at], *rivals, *shlex.split(args.more), "--json", str(record), *last[at:]])
    return json.loads(record.read_text())


def run_all(name: str, parts: list[Part], args: argparse.Namespace) -> bool:
    """Makes the records of the parts whose data is there. Returns whether it made any, and none
    failed."""
    ready = [part for part in parts if not name_missing(part, args)]
    minutes = sum(part.minutes for part in ready)
    scale = min(1.0, args.budget / minutes) if args.budget and ready else 1.0
    well = bool(ready)
    for part in parts:
        label, path = f"{name}.{part.name}", args.records / f"{name}.{part.name}.json"
        if part not in ready:
            print(f"{label}: left out, since {name_missing(part, args)}", flush=True)
            continue
        rivals = {one: find_interpreter(one, args) for one in part.rivals}
        if args.rivals and (absent := [one for one, python in rivals.items() if not python]):
            print(
                f"{label}: without {', '.join(absent)}, since {args.rivals} has no such "
                "environment", flush=True)
        budget = describe_budget(part, scale, args.budget, any(rivals.values()))
        if scale < 1 and not budget:
            print(f"{label}: about {part.minutes:g} minutes, whatever the budget", flush=True)
        try:
            found = run(name, part, scale, args) | {"question": STUDIES[name].question}
        except Failed as error:
            print(f"{label}: {error}", flush=True)
            well = False
            continue
        if not args.more:
            found["study"] = command_of(name, ready, args)
        path.write_text(json.dumps(found | ({"budget": budget} if budget else {}), indent=1) + "\n")
        print_record(found)
        print(f"{label}: {path}", flush=True)
    return well


def print_record(found: dict) -> None:
    from common.timing import print_table  # imports torch, without which studies are listed faster

    for one in found["tables"]:
        print("\n" + one["title"])
        print_table([dict(zip(one["columns"], row)) for row in one["rows"]], one["columns"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=STUDIES, metavar="STUDY")
    parser.add_argument("--parts", nargs="+", help="some of the study's records; default: all")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets "
                        "(default: %(default)s)")
    parser.add_argument(
        "--rivals", type=Path, help="folder with the virtual environments of other libraries: "
        f"{', '.join(RIVALS)}")
    parser.add_argument("--budget", type=float, help="minutes for the study, on one core")
    parser.add_argument(
        "--out", type=Path, help="folder of unfinished runs and trained features "
        "(default: out/experiments, or out in that of --records)")
    parser.add_argument("--records", type=Path, default=ROOT / "docs/experiments",
                        help="folder of the records (default: docs/experiments)")
    parser.add_argument(
        "--more", default="", help="options for the program that writes the "
        "record, such as --more='--rates .004 --only exact'")
    args = parser.parse_args()
    if args.out is None:
        ours = args.records.resolve() == parser.get_default("records").resolve()
        args.out = Path("out/experiments") if ours else args.records / "out"
    args.data, args.out, args.records = (path.absolute()
                                         for path in (args.data, args.out, args.records))
    args.rivals = args.rivals and args.rivals.absolute()
    if args.budget is not None and not 0 < args.budget < math.inf:
        parser.error(f"--budget: expected minutes above 0, got {args.budget:g}")
    if args.name is None:
        for name, study in STUDIES.items():
            parts = ", ".join(part.name for part in study.parts)
            print(f"{name:<15} {study.minutes / 60:5.1f} hours  {parts}\n"
                  f"{'':<15} {study.question}\n{'':<15} {study.source}")
        return
    study = STUDIES[args.name]
    known = [part.name for part in study.parts]
    if unknown := set(args.parts or []) - set(known):
        parser.error(f"--parts: expected some of {', '.join(known)}, got "
                     f"{', '.join(sorted(unknown))}")
    parts = [part for part in study.parts if not args.parts or part.name in args.parts]
    for name in ("records", "out"):
        try:
            getattr(args, name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{name}: expected a folder ({error})")
    try:
        well = run_all(args.name, parts, args)
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on from here") from None
    if not well:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
