"""Trains two towers, one for a user's items and one for an item with its features, and compares
approximations of the softmax over all items in their loss.

    python examples/recommend/two_tower.py --loss uncorrected logq refined mixed

With the items of the batch as candidates (xs.TwoTowerLoss):

    uncorrected  without correction
    logq         scores of candidates and positives lowered by the log of their frequency in
                 batches (Yi et al., 2019)
    refined      only scores of candidates lowered, because the positive is not sampled
                 (Khrylchenko et al., 2025)
    mixed        refined, with a second batch sampled uniformly from all items (Yang et al., 2020)

With items that a sampler draws for the batch (xs.functional.tower_loss):

    uniform      uniformly, without correction (CCE-, Zhelnin et al., 2025, which draws for each
                 target)
    popularity   by frequency, corrected
    midx         by the scores of the batch, corrected; MIDX follows the vectors of all items,
                 which are recomputed when it refreshes
    full         the softmax over all items, whose vectors are recomputed in each step

The features of an item are hashes of its number. They carry no information, and represent the
categories and words of a real catalog. A user is the mean of the vectors of the items seen before
the target; for unordered data (--unordered) of the user's other items.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.arguments import plain, positive, report_errors
from examples.common.report import markdown, mean_and_error, write_text
from examples.recommend import data
from examples.recommend.candidates import METHODS
from examples.recommend.towers import Pairs, Towers, rank

BEST = "valid NDCG@10"  # selects the best evaluation of a run, and the best learning rate


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="PATH", help="as in train.py (default: generated "
                        "sequences)")
    parser.add_argument("--unordered", action="store_true", help="the order of a user's items has "
                        "no meaning")
    parser.add_argument("--loss", nargs="+", choices=METHODS,
                        default=["uncorrected", "logq", "refined",
                                 "mixed"], help="default: %(default)s")
    parser.add_argument("--epochs", type=positive(float), help="default: 5, or unlimited with "
                        "--max-minutes")
    parser.add_argument(
        "--max-minutes", type=positive(float),
        help="training time of each loss and seed in minutes of processor time (of all threads "
        "together), which does not depend on other programs")
    parser.add_argument(
        "--evaluations", type=positive(int), default=5, metavar="N",
        help="evaluate N times during training; results are those of the best by validation "
        "(default: %(default)s)")
    parser.add_argument("--validate", type=positive(int), metavar="N", help="number of randomly "
                        "chosen users for validation "
                        "(default: all)")
    parser.add_argument("--batch-size", type=positive(int), default=1024,
                        help="default: %(default)s")
    parser.add_argument("--negatives", type=positive(int), default=1024, help="number of samples "
                        "per batch (default: "
                        "%(default)s)")
    parser.add_argument("--codewords", type=positive(int), default=64, help="codewords of each "
                        "midx codebook (default: "
                        "%(default)s)")
    parser.add_argument(
        "--refresh-every", type=positive(int), default=100, metavar="STEPS",
        help="number of steps after which midx reads the item vectors again, fewer at first "
        "(default: %(default)s)")
    parser.add_argument("--width", type=positive(int), default=64, help="default: %(default)s")
    parser.add_argument(
        "--history", type=positive(int), default=30, help="number of a user's "
        "items that the model reads "
        "(default: %(default)s)")
    parser.add_argument("--temperature", type=positive(float), default=0.1,
                        help="default: %(default)s")
    parser.add_argument(
        "--lr", type=positive(float), nargs="+", default=[1e-3],
        help="several: each loss uses its best one by validation, from separate runs with "
        "another seed (default: 0.001)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=positive(int))
    parser.add_argument("--output", type=Path, default=Path("out/two_tower"),
                        help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.epochs is None:
        args.epochs = 5.0 if args.max_minutes is None else math.inf
    return args


def train(name: str, dataset: data.Dataset, args: argparse.Namespace, lr: float, seed: int) -> dict:
    """Trains one run, and returns the metrics of its best evaluation."""
    torch.manual_seed(seed)
    towers, random = Towers(len(dataset.items), args.width), torch.Generator().manual_seed(seed)
    loss = METHODS[name](dataset, args)
    optimizer = xs.optim.RowAdam(towers.parameters(), lr=lr)
    pairs, seconds, steps = Pairs(dataset.train, args.unordered, args.history), 0.0, 0
    last = args.epochs * math.ceil(len(pairs.wanted) / args.batch_size)
    limit = math.inf if args.max_minutes is None else 60 * args.max_minutes
    best, state, evaluations = {}, {}, 0
    # the same users in all runs
    users = torch.randperm(len(dataset.valid.known),
                           generator=torch.Generator().manual_seed(0))[:args.validate]
    valid = data.Queries(dataset.valid.known.select(users), dataset.valid.truth.select(users))
    bar = tqdm(desc=f"{name}, {lr}", unit="step", disable=not sys.stderr.isatty(), leave=False)
    while evaluations < args.evaluations:
        for known, lengths, target in pairs.batches(args.batch_size, random):
            start = time.process_time()
            value = loss(towers, towers.users(known, lengths), target)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            seconds, steps = seconds + time.process_time() - start, steps + 1
            bar.update()
            due = min(args.evaluations, int(args.evaluations * max(steps / last, seconds / limit)))
            if due == evaluations:
                continue
            evaluations = due
            optimizer.flush()
            found = {
                f"valid {metric}": figure
                for metric, figure in rank(towers, valid, args.history).items()
            }
            if not best or found[BEST] > best[BEST]:
                best, state = {"best at minute": seconds / 60,
                               **found}, copy.deepcopy(towers.state_dict())
            if evaluations == args.evaluations:
                break
    bar.close()
    towers.load_state_dict(state)
    best |= {
        f"test {metric}": figure
        for metric, figure in rank(towers, dataset.test, args.history).items()
    }
    return {"loss": name, "lr": lr, "seed": seed, "steps": steps, "minutes": seconds / 60, **best}


def table(runs: list[dict]) -> str:
    """Formats one line per loss: means over seeds, with standard errors if there are several."""
    rows = []
    for name in dict.fromkeys(run["loss"] for run in runs):
        mine = [run for run in runs if run["loss"] == name]
        row = {
            "loss": name, "learning rate": f"{mine[0]['lr']:g}",
            "steps": f"{statistics.mean(run['steps'] for run in mine):,.0f}"
        }
        row |= {
            key: f"{statistics.mean(run[key] for run in mine):.2f}"
            for key in ("minutes", "best at minute")
        }
        rows.append(
            row | {
                figure: mean_and_error([run[figure] for run in mine])
                for figure in mine[0] if "@" in figure
            })
    return markdown(rows)


def compare(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)  # fails before the training instead of after it
    dataset = data.load_dataset(args.data)
    print(
        f"{dataset.name}: {len(dataset.train):,} users, {len(dataset.items):,} items, "
        f"{len(dataset.train.items):,} actions to train", flush=True)
    searched, runs = [], []

    def run(to: list[dict], name: str, lr: float, seed: int) -> dict:
        to.append(train(name, dataset, args, lr, seed))
        print(json.dumps(to[-1]), flush=True)
        write_text(
            args.output / "runs.json",
            json.dumps({"arguments": plain(args), "searched": searched, "runs": runs}, indent=2) +
            "\n")
        return to[-1]

    rates = dict.fromkeys(args.loss, args.lr[0])
    if len(args.lr) > 1:
        other = max(args.seeds) + 1
        rates = {
            name: max([run(searched, name, lr, other)
                       for lr in args.lr], key=lambda one: one[BEST])["lr"]
            for name in args.loss
        }
    for seed in args.seeds:
        for name in args.loss:
            run(runs, name, rates[name], seed)
            write_text(args.output / "table.md", table(runs))
    print(f"\n{table(runs)}{args.output}: runs.json, table.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    return report_errors(compare, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
