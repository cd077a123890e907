"""Repeats the experiments of the papers whose methods the library has.

    python benchmarks/experiments.py                             # lists the studies
    python benchmarks/experiments.py midx_words --data FOLDER    # runs one
    make experiments NAME=midx_words PARTS=ptb DATA=FOLDER BUDGET=60

A study makes records, docs/experiments/STUDY.PART.json, with their plots. The same command goes on
after an interruption. Studies of many trainings keep finished ones in
docs/experiments/runs/STUDY.PART.jsonl and repeat none of them, also on another machine, except for
Omniglot, whose features are trained first. --budget scales the numbers of epochs, so that the study
takes about so many minutes on one core; the records then say so. Data sets are folders of --data
(see docs/experiments/data.md); a part whose data is missing is left out with a message.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = {
    "ptb": "ptb", "novels": "novels", "gowalla": "gowalla", "beauty": "amazon_beauty/Beauty.txt",
    "delicious": "delicious/delicious.arff", "omniglot": "omniglot"
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
# Train most of the rates to the end, because short trainings favour high rates.
CLASSES = ("benchmarks/classifiers.py --runs {runs} --threads 1 --seeds 3 --finalists 6 "
           "--epochs {n:30} ")
CLASSIFIERS = CLASSES + "--search-epochs {n:3} "
GAUSSIANS = CLASSES + "--gaussians 10000 --search-epochs {n:9} "
LANGUAGE = "benchmarks/perplexity.py "
SMALL = " -- --width 128 --layers 1 --dropout 0.2"
KEPT = "--out {out} --runs {runs} --jobs 1 "
TIMED = KEPT + "--time "
TUNED = " --data {ptb} " + TIMED + "--epochs {e:8} --search-epochs {e:1}" + SMALL
CURVES = " --eval-epochs {e:2}"
NOVELS = " --data {novels} " + TIMED + "--epochs {e:0.5} --rates .004 --only "
SHORT = SMALL + " --eval-epochs {e:0.05} --eval-tokens 100000 --min-count "
ITEMS = ("benchmarks/recommend.py " + KEPT + "--epochs {e:20} --search-epochs {e:5} "
         "--seeds 3 --data ")
LABELS = ("benchmarks/sampled_labels.py --runs {runs} --threads 1 --epochs {n:20} "
          "--search-epochs {n:5} ")

STUDIES = {
    "cane_classes": Study(
        f"{CANE}, Tables 1 to 3, Figure 2", "Is CANE as accurate as the softmax over all classes?",
        (Part("delicious", 90, (CLASSIFIERS + "--delicious {delicious}",), ("vw",)),
         Part("aloi_like", 60,
              ("benchmarks/classifiers.py --write-aloi-like {out}/aloi.txt",
               CLASSIFIERS + "--libsvm {out}/aloi.txt --lr 0.001 0.003 0.01 0.03 0.1 "
               "0.3 1"), ("vw",)),
         Part("gaussians", 300,
              (GAUSSIANS + "--lr 0.00003 0.0001 0.0003 0.001 0.003 0.01 0.03 0.1 0.3",), ("vw",)),
         Part("omniglot", 240,
              ("examples/image_classes/train.py --data {omniglot} --threads 1 --epochs {n:20} "
               "--checkpoint {out}/model.ckpt --output {out}/vgg",
               "examples/image_classes/features.py --checkpoint {out}/model.ckpt --output "
               "{out}/features.pt", CLASSIFIERS + "--features {out}/features.pt --lr "
               "0.0003 0.001 0.003 0.01 0.03 0.1 0.3")))),
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
         Part("novels", 300, (LANGUAGE + "table" + NOVELS + "'20 private midx, ranking' "
                              "'20 private unigram, ranking' '512 shared unigram, head 512' "
                              "'head 64 + 64 private midx, ranking'" + SHORT + "5",)))),
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
    "midx_items": Study(f"{MIDX}, Table 7",
                        "How close do recommenders trained with samples come to the softmax?",
                        (Part("beauty", 400, (ITEMS + "{beauty}",)),
                         Part("gowalla", 900,
                              (ITEMS + "{gowalla} -- --unordered --eval-epochs {e:2}",)),
                         Part("gru", 400, (ITEMS + "{beauty} -- --model gru4rec --layers 1",)))),
    "midx_labels": Study(f"{MIDX}, Table 9",
                         "How precise are models of many labels trained with samples?",
                         (Part("delicious", 60, (LABELS + "--delicious {delicious}",)),
                          Part("generated", 120, (LABELS + "--generated --samples 200",)))),
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


def words(command: str, scale: float, places: dict[str, str]) -> list[str]:
    """Returns the words of a command with its placeholders replaced."""
    given = shlex.split(scale_numbers(command, scale))
    for name, place in places.items():
        given = [word.replace(f"{{{name}}}", place) for word in given]
    return given


def interpreter(rival: str, args: argparse.Namespace) -> Path | None:
    """Returns the interpreter of a rival, if --rivals has it."""
    found = args.rivals / rival / "bin/python" if args.rivals else None
    return found if found and found.exists() else None


def missing(part: Part, args: argparse.Namespace) -> str:
    """Returns which data sets and environments are missing; an empty text if none."""
    data = [DATA[one] for one in part.data() if not (args.data / DATA[one]).exists()]
    rivals = [one for one in part.needs if interpreter(one, args) is None]
    return "; ".join([
        *([f"{args.data} has no {', '.join(data)}"] if data else []),
        *([f"--rivals has no environment {', '.join(rivals)}"] if rivals else [])
    ])


def call(given: list[str]) -> None:
    done = subprocess.run([sys.executable, *given], cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{shlex.join(given)}: exit {done.returncode}")


def run(name: str, part: Part, scale: float, args: argparse.Namespace) -> str:
    """Makes a record with a fraction of the epochs. Returns its path, or why it was left out."""
    if absent := missing(part, args):
        return f"left out, since {absent}"
    out = args.out / f"{name}.{part.name}" / f"{scale:.3g}"  # runs of another budget differ
    out.mkdir(parents=True, exist_ok=True)
    places = {one: str(args.data / path)
              for one, path in DATA.items()} | {
                  "out": str(out), "runs": str(args.records / "runs" / f"{name}.{part.name}.jsonl")
              }
    record = args.records / f"{name}.{part.name}.json"
    *before, last = (words(command, scale, places) for command in part.commands)
    for number, given in enumerate(before, 1):
        finished, checkpoint = out / f"finished.{number}", out / "model.ckpt"
        if not finished.is_file():
            resume = given[0].endswith("train.py") and checkpoint.is_file()
            call([*given, *(["--resume"] if resume else [])])
            finished.touch()
    at = last.index("--") if "--" in last else len(last)  # the options of the examples follow "--"
    rivals = [
        word for rival in part.rivals if (found := interpreter(rival, args))
        for word in (RIVALS[rival], str(found))
    ]
    call([*last[:at], *rivals, *shlex.split(args.more), "--json", str(record), *last[at:]])
    found = json.loads(record.read_text()) | {"question": STUDIES[name].question}
    if not args.more:
        found["study"] = " ".join([
            f"make experiments NAME={name}", *(["DATA=FOLDER"] if part.data() else []),
            *(["RIVALS=FOLDER"] if rivals else []),
            *([f"PARTS={shlex.quote(' '.join(args.parts))}"] if args.parts else []),
            *([f"BUDGET={args.budget:g}"] if args.budget else [])
        ])
    if scale < 1 and any("{e:" in one or "{n:" in one for one in part.commands):
        found["budget"] = f"{args.budget:g} minutes: {scale:.2g} of the study's epochs"
    record.write_text(json.dumps(found, indent=1) + "\n")
    return str(record)


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
    parser.add_argument("--out", type=Path, default=Path("out/experiments"), help="folder of the "
                        "runs (default: %(default)s)")
    parser.add_argument("--records", type=Path, default=ROOT / "docs/experiments",
                        help="folder of the records (default: docs/experiments)")
    parser.add_argument(
        "--more", default="", help="options for the program that writes the "
        "record, such as --more '--rates .004 --only exact'")
    args = parser.parse_args()
    args.data, args.out, args.records = (path.absolute()
                                         for path in (args.data, args.out, args.records))
    args.rivals = args.rivals and args.rivals.absolute()
    if args.budget is not None and args.budget <= 0:
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
    minutes = sum(part.minutes for part in parts if not missing(part, args))
    scale = min(1.0, args.budget / max(minutes, args.budget)) if args.budget else 1.0
    for part in parts:
        print(f"{args.name}.{part.name}: {run(args.name, part, scale, args)}", flush=True)


if __name__ == "__main__":
    main()
