"""Trains a next-item recommender with sampled softmax, with the exact loss, or with each in turn,
and compares their rankings.

    python examples/recommend/train.py --loss sampled exact
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common import training
from examples.common.arguments import (add_file_arguments, add_loss_arguments,
                                       add_training_arguments, complete, fraction, positive,
                                       report_errors)
from examples.common.losses import LEARNING_RATES, build_loss, codebook_loss
from examples.common.ranks import add_ranks_arguments
from examples.common.training import Interrupt
from examples.recommend import data, report
from examples.recommend.model import ENCODERS

METRICS = {"NDCG": xs.metrics.ndcg_at_k, "Recall": xs.metrics.recall_at_k}
PLACES = (10, 50)
FIGURES = [f"{metric}@{k}" for metric in METRICS for k in PLACES]
BEST = "valid_NDCG@10"  # results are taken from the point of the curve with the highest value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    learning_rates = LEARNING_RATES | {"adam": 4e-3}

    sequences = parser.add_argument_group("sequences")
    sequences.add_argument(
        "--data", metavar="PATH", help="a file of lines `user item item ...` in "
        "time order, or a folder with such "
        "train.txt, valid.txt and test.txt (default: generated sequences)")
    sequences.add_argument(
        "--max-length", type=positive(int), default=50,
        help="number of items that the model reads; longer sequences are split (default: "
        "%(default)s)")
    sequences.add_argument(
        "--unordered", action="store_true",
        help="the order of a user's items has no meaning: shuffle them in each "
        "epoch")
    sequences.add_argument("--rank-seen", action="store_true", help="also rank items that the user "
                           "already has")

    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=ENCODERS, default="sasrec", help="default: %(default)s")
    model.add_argument("--width", type=positive(int), default=64, help="width of embedding and "
                       "hidden layers (default: "
                       "%(default)s)")
    model.add_argument("--layers", type=positive(int), default=2, help="default: %(default)s")
    model.add_argument("--heads", type=positive(int), default=1, help="attention heads of sasrec "
                       "(default: %(default)s)")
    model.add_argument("--dropout", type=fraction, default=0.5, help="default: %(default)s")
    model.add_argument("--untied", action="store_true", help="use separate weights for the output "
                       "layer and the embedding")
    model.add_argument(
        "--bias", action="store_true", help="add a bias to the output layer, which "
        "can represent the items' popularity")

    add_loss_arguments(parser, classes="items", query="position", head=0)
    options = add_training_arguments(parser, epochs=20, batch_size=128, optimizer="adam",
                                     learning_rates=learning_rates, schedule="cosine")
    options.add_argument(
        "--patience", type=positive(int), metavar="N",
        help="stop after N evaluations without a better validation NDCG@10 "
        "(default: never)")
    add_ranks_arguments(parser, classes="items")
    add_file_arguments(parser, "out/recommend")

    args = parser.parse_args(argv)
    complete(parser, args, learning_rates)
    if args.model == "sasrec" and args.width % args.heads != 0:
        parser.error(f"--width: expected a multiple of --heads {args.heads}, got {args.width}")
    return args


def build_encoder(args: argparse.Namespace, num_items: int, sparse: bool) -> torch.nn.Module:
    options = {
        "width": args.width, "layers": args.layers, "dropout": args.dropout, "sparse": sparse
    }
    if args.model == "sasrec":
        options |= {"heads": args.heads, "max_length": args.max_length}
    return ENCODERS[args.model](num_items, **options)


class Run(training.Run):
    """A training run with one loss on the sequences, evaluated by its ranking of all items."""

    unit = "targets"
    TEST = (*(f"{split}_{figure}" for split in ("valid", "test")
              for figure in FIGURES), "best_epoch")

    def __init__(self, name: str, dataset: data.Dataset, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        # With sampling, the gradients of embedding and output layer are row-sparse. With the exact
        # loss, every row has a gradient.
        encoder = build_encoder(args, len(dataset.items), sparse=name == "sampled")
        loss = build_loss(args, name, dataset.counts, args.width, bias=args.bias,
                          classes=f"items of {dataset.name}")
        super().__init__(name, args, encoder, loss)
        self.train_part = data.Batches(dataset.train, args.batch_size, args.max_length,
                                       args.unordered, args.seed, self.device)
        self.epoch_steps = len(self.train_part)
        self.num_items = len(dataset.items)
        self.queries = {"valid": dataset.valid, "test": dataset.test}
        if args.unordered:  # so that --max-length does not depend on the order in the file
            random = torch.Generator().manual_seed(args.seed)
            self.queries = {
                split: data.Queries(part.known.shuffled(random), part.truth)
                for split, part in self.queries.items()
            }

    @property
    def best(self) -> int | None:
        """The index of the point with the best validation result; the first one of ties."""
        return max(range(len(self.points)), key=lambda i: (self.points[i][BEST], -i), default=None)

    @property
    def finished(self) -> bool:
        patience = self.args.patience
        return super().finished or (patience is not None and bool(self.points)
                                    and len(self.points) - 1 - self.best >= patience)

    def train_loss(self) -> tuple[Tensor, int]:
        batch = self.train_part.get(self.steps)
        items, lengths, targets = data.part_of_batch(*batch, self.ranks.rank, self.ranks.size)
        hidden = self.encoder(items, lengths)
        count = len(batch[-1])
        return self.loss(hidden, targets) + self.ranks.per_batch(codebook_loss(self.loss, hidden),
                                                                 count), count

    def measure(self, interrupt: Interrupt) -> dict | None:
        """Evaluates on the validation data. If the result is the best so far, also evaluates on the
        test data, so that no weights need to be stored."""
        figures = self.ranking("valid", interrupt)
        if figures is not None and (not self.points
                                    or figures[BEST] > self.points[self.best][BEST]):
            tested = self.ranking("test", interrupt)
            return None if tested is None else figures | tested
        return figures

    def measure_test(self, interrupt: Interrupt) -> dict | None:
        point = self.points[self.best]
        return {key: point[key]
                for key in self.TEST if key in point} | {"best_epoch": point["epoch"]}

    def ranking(self, split: str, interrupt: Interrupt) -> dict | None:
        queries = self.queries[split]
        chosen = (queries.truth.lengths > 0).nonzero().squeeze(1)
        # Group users with about the same number of items: the more items a user has, the more must
        # be ranked so that k new ones remain.
        chosen = chosen[queries.known.lengths[chosen].argsort(stable=True)]
        parts = chosen.split(256)
        found = torch.zeros(len(chosen), max(PLACES), dtype=torch.int64)
        for i in self.batches(len(parts), split, interrupt):
            known, mine = queries.known.select(parts[i]), self.ranks.rows(len(parts[i]))
            seen = 0 if self.args.rank_seen else int(known.lengths.max())  # the same on all ranks
            # a rank without users ranks for the first one, because all ranks must take part
            users = torch.arange(len(known))[mine] if mine.start < mine.stop else torch.zeros(
                1, dtype=torch.int64)
            found.split(256)[i][mine] = self.recommend(known.select(users), max(PLACES),
                                                       seen)[:mine.stop - mine.start]
        if interrupt.stopped:
            return None
        predictions, truth = self.ranks.sum(found), queries.truth.select(chosen).split()
        return {
            f"{split}_{name}@{k}": metric(predictions, truth, k)
            for name, metric in METRICS.items()
            for k in PLACES
        }

    def recommend(self, known: data.Sequences, k: int, seen: int) -> Tensor:
        """Returns the k best items of each row, int64 [rows, k], padded with -1.

        Args:
            known: the known items of each row.
            k: the number of items.
            seen: 0: rank all items; else the largest number of items in a row, and the items of the
                row are excluded.
        """
        recent = known.select(torch.arange(len(known)), self.args.max_length)
        hidden = self.encoder(recent.items.to(self.device),
                              recent.lengths.to(self.device))[(recent.ends - 1).to(self.device)]
        ranked = self.loss.topk(hidden, min(k + seen, self.num_items))[1].cpu()
        if seen:
            key = torch.arange(len(known)).unsqueeze(1) * self.num_items
            out = torch.isin(ranked + key, known.items + key.squeeze(1)[known.rows()])
            # new items first, in their order
            ranked = ranked.masked_fill(out, -1).gather(1, out.long().argsort(dim=1, stable=True))
        return torch.nn.functional.pad(ranked[:, :k], (0, max(k - ranked.shape[1], 0)), value=-1)

    def summary(self, point: dict) -> str:
        return "valid " + ", ".join(f"{figure} {point[f'valid_{figure}']:.4f}"
                                    for figure in FIGURES)


def load_data(args: argparse.Namespace) -> data.Dataset:
    return data.load_dataset(args.data)


def train(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    dataset = load_data(args)
    print(f"{dataset.name}: {dataset.sizes}", flush=True)
    about = {
        "name": dataset.name, "num_users": len(dataset.train), "num_items": len(dataset.items),
        "actions": dataset.actions, "fingerprint": dataset.fingerprint
    }

    def write(runs: list[Run]):
        report.write(args.output, training.history(args, runs, dataset=about), FIGURES)

    runs, interrupted = training.train_each(args, lambda name: Run(name, dataset, args),
                                            dataset.fingerprint, dataset.name, write)
    print(f"\n{report.table([run.figures() for run in runs], FIGURES)}\n{args.output}: "
          "history.json, table.md, ndcg.png")
    return 130 if interrupted else 0  # 128 + SIGINT, the convention of shells


def main(argv: list[str] | None = None) -> int:
    return report_errors(train, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
