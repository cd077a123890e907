"""Trains a VGG-16 on images of many classes with the exact loss, sampled softmax, a beam tree
(CANE), hierarchical softmax, or each in turn, and compares their accuracy.

    python examples/image_classes/train.py --loss exact cane
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
from examples.common.arguments import (add_cane_arguments, add_file_arguments, add_loss_arguments,
                                       add_training_arguments, complete, fraction, positive,
                                       report_errors)
from examples.common.losses import LEARNING_RATES, build_loss, codebook_loss
from examples.common.training import Interrupt
from examples.image_classes import data, report
from examples.image_classes.model import VGG16


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(untied=True)  # there is no embedding
    learning_rates = LEARNING_RATES | {"adam": 3e-4}

    images = parser.add_argument_group("images")
    images.add_argument(
        "--data", metavar="PATH", help="a folder in which each subfolder with "
        "images is a class (default: glyphs of the "
        "fonts included in matplotlib, randomly distorted)")
    images.add_argument("--size", type=positive(int), default=48, help="height and width in pixels "
                        "(default: %(default)s)")
    images.add_argument("--color", action="store_true", help="three channels instead of one")
    images.add_argument("--max-classes", type=positive(int), help="largest number of classes; the "
                        "first by name are used")
    images.add_argument("--no-distortion", action="store_true", help="train on undistorted images")

    model = parser.add_argument_group("model")
    model.add_argument(
        "--width", type=positive(int), default=16,
        help="channels of the first layers; 64 is VGG-16, which takes 16 times as long as "
        "16 (default: %(default)s)")
    model.add_argument("--no-batch-norm", action="store_true", help="plain VGG-16, which learns "
                       "more slowly")
    model.add_argument("--dropout", type=fraction, default=0.2, help="VGG-16 has 0.5 (default: "
                       "%(default)s)")

    add_loss_arguments(parser, classes="classes", query="image", head=0,
                       losses=("exact", "sampled", "cane", "hierarchical"), default="exact")
    add_cane_arguments(parser, classes="classes", query="image", sources=("beam", "head", "midx"),
                       candidates=9)
    parser.add_argument("--arity", type=positive(int, least=2), default=10,
                        help="arity of the tree of cane and hierarchical (default: %(default)s)")
    add_training_arguments(parser, epochs=20, batch_size=64, optimizer="adam",
                           learning_rates=learning_rates, schedule="cosine")
    add_file_arguments(parser, "out/image_classes")

    args = parser.parse_args(argv)
    complete(parser, args, learning_rates)
    return args


class Run(training.Run):
    """A training run with one loss on the images, evaluated by top-1 and top-5 accuracy."""

    unit = "images"
    TEST = ("test_accuracy", "test_top5", "test_coverage")

    def __init__(self, name: str, dataset: data.Dataset, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        encoder = VGG16(args.width, dataset.train.images.shape[1], args.size,
                        not args.no_batch_norm, args.dropout)
        tree = None
        if name == "hierarchical" or name == "cane" and args.candidates_from == "beam":
            tree = xs.LabelTree.from_vectors(dataset.means(), args.arity,
                                             generator=torch.Generator().manual_seed(args.seed))
        loss = build_loss(args, name, dataset.counts, encoder.num_features, bias=True,
                          classes=f"classes of {dataset.name}", tree=tree)
        super().__init__(name, args, encoder, loss)
        self.parts = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}
        self.epoch_steps = -(-len(dataset.train) // args.batch_size)
        self.order: Tensor | None = None

    def train_loss(self) -> tuple[Tensor, int]:
        position = self.steps % self.epoch_steps
        if position == 0 or self.order is None:
            generator = torch.Generator().manual_seed(self.args.seed +
                                                      self.steps // self.epoch_steps)
            self.order = torch.randperm(len(self.parts["train"]), generator=generator)
        rows = self.order[position * self.args.batch_size:][:self.args.batch_size]
        images, labels = self.parts["train"].images[rows].float(
        ) / 255, self.parts["train"].labels[rows]
        if not self.args.no_distortion:
            images = data.distort(images)
        features = self.encoder(images.to(self.device))
        loss = self.loss(features, labels.to(self.device))
        return loss + codebook_loss(self.loss, features), len(labels)

    def accuracy(self, split: str, interrupt: Interrupt) -> dict | None:
        part, k = self.parts[split], 5
        found, candidates = [], []
        images = part.images.split(256)
        for i in self.batches(len(images), split, interrupt):
            hidden = self.encoder(images[i].to(self.device).float() / 255)
            found.append(self.loss.topk(hidden, min(k, self.loss.num_classes))[1].cpu())
            if isinstance(self.loss, xs.BeamTreeLoss):
                candidates.append(self.loss.candidates(hidden).cpu())
        if interrupt.stopped:
            return None
        hits = torch.cat(found) == part.labels.unsqueeze(1)
        return {
            f"{split}_accuracy": hits[:, 0].double().mean().item(),
            f"{split}_top5": hits.any(1).double().mean().item(),
            f"{split}_coverage": xs.metrics.coverage(torch.cat(candidates), part.labels)
            if candidates else None
        }

    def measure(self, interrupt: Interrupt) -> dict | None:
        return self.accuracy("valid", interrupt)

    def measure_test(self, interrupt: Interrupt) -> dict | None:
        return self.accuracy("test", interrupt)

    def summary(self, point: dict) -> str:
        text = (f"valid top-1 {100 * point['valid_accuracy']:.2f} %, top-5 "
                f"{100 * point['valid_top5']:.2f} %")
        return text if point["valid_coverage"] is None else (
            text + f", coverage {100 * point['valid_coverage']:.2f} %")


def load_data(args: argparse.Namespace) -> data.Dataset:
    return data.load_dataset(args.data, args.size, args.max_classes, args.color)


def train(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    dataset = load_data(args)
    sizes = {split: len(getattr(dataset, split)) for split in ("train", "valid", "test")}
    print(
        f"{dataset.name}: {len(dataset.classes):,} classes, {sizes['train']:,} images to train, "
        f"{sizes['valid']:,} to validate, "
        f"{sizes['test']:,} to test", flush=True)
    about = {
        "name": dataset.name, "num_classes": len(dataset.classes), "images": sizes,
        "fingerprint": dataset.fingerprint
    }

    def write(runs: list[Run]):
        report.write(args.output, training.history(args, runs, dataset=about))

    runs, interrupted = training.train_each(args, lambda name: Run(name, dataset, args),
                                            dataset.fingerprint, dataset.name, write)
    print(f"\n{report.table([run.figures() for run in runs])}\n{args.output}: history.json, "
          "table.md, accuracy.png")
    return 130 if interrupted else 0  # 128 + SIGINT, the convention of shells


def main(argv: list[str] | None = None) -> int:
    return report_errors(train, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
