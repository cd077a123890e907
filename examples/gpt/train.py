"""Trains a GPT with the exact loss, with sampled ones, and with what they replace, each for the
same time, and compares them by the exact loss on validation text.

    python examples/gpt/train.py --loss plain sampled midx --max-minutes 5

The losses take turns, so that a machine that becomes slower slows all of them.
"""

import argparse
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common import training
from examples.common.arguments import (add_file_arguments, add_training_arguments, complete,
                                       fraction, positive, report_errors)
from examples.common.errors import UsageError
from examples.common.losses import DTYPES
from examples.common.ranks import Ranks, add_ranks_arguments
from examples.common.training import Interrupt
from examples.gpt import report
from examples.gpt.data import Text, Windows, load_byte_pairs, load_words
from examples.gpt.layers import ABOUT, EXACT, LAYERS, Rival, build_layer
from examples.gpt.model import GPT


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data", metavar="PATH", help="as in examples/language_model (default: the "
        "source of Python's standard library)")
    text.add_argument("--tokens", choices=("words", "byte_pairs"), default="words",
                      help="default: %(default)s")
    text.add_argument("--min-count", type=positive(int), default=2, help="words: rarer ones become "
                      "<unk> (default: %(default)s)")
    text.add_argument(
        "--vocabulary", type=positive(int, 256), default=32768, help="byte pairs: the largest "
        "size of a tokenizer that is trained (default: %(default)s)")
    text.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="byte pairs: a tokenizer.json; "
        "if it does not exist, one is trained and written there")
    text.add_argument(
        "--max-tokens", type=positive(int), help="largest number of training tokens; "
        "validation and test get at most a tenth")
    text.add_argument(
        "--eval-tokens", type=positive(int), default=100_000, help="largest number of "
        "validation and of test tokens (default: %(default)s)")

    model = parser.add_argument_group("model")
    model.add_argument("--width", type=positive(int), default=256, help="default: %(default)s")
    model.add_argument("--layers", type=positive(int), default=4, help="default: %(default)s")
    model.add_argument("--heads", type=positive(int), default=4, help="default: %(default)s")
    model.add_argument("--context", type=positive(int), default=128, help="default: %(default)s")
    model.add_argument("--untied", action="store_true", help="use separate weights for the output "
                       "layer and the embedding")
    model.add_argument(
        "--precision", choices=DTYPES, default="bfloat16", help="of products, by "
        "autocast; weights are float32 (default: %(default)s)")
    model.add_argument(
        "--table-dtype", choices=DTYPES, default="float32", help="dtype of embedding "
        "and output layer; bfloat16: with stochastic rounding, and one second moment "
        "per token (default: %(default)s)")
    model.add_argument("--no-compile", dest="compile", action="store_false", help="do without "
                       "torch.compile of the model and of the plain loss")

    loss = parser.add_argument_group("loss")
    loss.add_argument("--loss", nargs="+", choices=LAYERS, default=["sampled"],
                      help=f"{ABOUT} (default: sampled)")
    loss.add_argument("--softcap", type=positive(float), help="logits become softcap * "
                      "tanh(logits / softcap)")
    loss.add_argument(
        "--z-loss", type=positive(float, or_zero=True), default=0.0,
        help="weight of the squared log normaliser, in training and validation "
        "(default: %(default)s)")
    loss.add_argument(
        "--head", type=positive(int), default=2048, help="sampled: number of most "
        "frequent tokens that are always scored (default: %(default)s)")
    loss.add_argument("--samples", type=positive(int), default=2048, help="sampled: samples per "
                      "step (default: %(default)s)")
    loss.add_argument("--power", type=positive(float), default=0.75, help="sampled: of the counts "
                      "(default: %(default)s)")
    loss.add_argument("--midx-head", type=positive(int), default=1024, help="default: %(default)s")
    loss.add_argument("--midx-samples", type=positive(int), default=32, help="samples per position "
                      "(default: %(default)s)")
    loss.add_argument("--codewords", type=positive(int), default=64, help="of each MIDX codebook "
                      "(default: %(default)s)")
    loss.add_argument("--refresh-every", type=positive(int), default=500, help="steps between "
                      "updates of the MIDX index (default: %(default)s)")

    options = add_training_arguments(parser, epochs=1000, batch_size=16, optimizer=None,
                                     schedule="cosine", lr=2e-3)
    options.add_argument(
        "--warm-up", type=fraction, default=0.05, help="the fraction of the "
        "training in which the learning rate grows (default: %(default)s)")
    options.add_argument(
        "--weight-decay", type=positive(float, or_zero=True), default=0.1,
        help="of the matrices of the model, not of the table (default: "
        "%(default)s)")
    add_ranks_arguments(parser, classes="tokens")
    add_file_arguments(parser, "out/gpt")
    args = parser.parse_args(argv)
    if args.tokenizer is not None and args.tokens != "byte_pairs":
        parser.error(f"--tokenizer: expected --tokens byte_pairs, got {args.tokens}")
    if args.max_minutes is None and args.epochs == parser.get_default("epochs"):
        args.max_minutes = 5.0
    complete(parser, args)
    if args.width % (2 * args.heads) != 0:
        parser.error(f"--width: expected a multiple of 2 * --heads, {2 * args.heads}, got "
                     f"{args.width}")
    if args.table_dtype != "float32" and not EXACT.isdisjoint(args.loss):
        parser.error(f"--table-dtype {args.table_dtype}: expected --loss sampled or midx, whose "
                     f"optimizer rounds stochastically, got {', '.join(args.loss)}")
    return args


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(
        torch.device(args.device).type, DTYPES[args.precision], enabled=args.precision != "float32")


class Optimizers:
    """Optimizers of different parameters as one."""
    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self):
        for part in self.parts:
            part.step()

    def flush(self):
        for part in self.parts:
            if isinstance(part, xs.optim.RowAdam):
                part.flush()

    def state_dict(self) -> dict:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict):
        for i, part in enumerate(self.parts):
            part.load_state_dict(state[str(i)])
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class Run(training.Run):
    """A training run with one output layer, evaluated by the exact loss per token."""

    unit = "tokens"
    TEST = ("test_loss",)

    def __init__(self, name: str, text: Text, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        # Only the rows of sampled tokens have a gradient, unless every row has one.
        self.is_sparse = name not in EXACT
        model = GPT(text.num_tokens, args.width, args.layers, args.heads, args.context,
                    self.is_sparse)
        loss = build_layer(args, name, text.counts, args.width)
        for table in (model.embedding, loss.linear):
            table.to(DTYPES[args.table_dtype])
        if args.compile:
            model.body.compile()
        self.warm_up(args, model.to(args.device), loss.to(args.device))
        super().__init__(name, args, model, loss)
        self.windows = {
            split: Windows(ids.to(self.device), args.context, args.seed)
            for split, ids in (("train", text.train), ("valid", text.valid[:args.eval_tokens]),
                               ("test", text.test[:args.eval_tokens]))
        }
        self.rows = self.ranks.rows(args.batch_size)
        self.epoch_steps = max(1, self.windows["train"].count // args.batch_size)

    @staticmethod
    def warm_up(args: argparse.Namespace, model: GPT, loss: nn.Module):
        """Compiles the model and the loss, which is no training time."""
        state = torch.get_rng_state()
        rows = Ranks(args.table).rows(args.batch_size)
        shape = rows.stop - rows.start, args.context
        embedded = torch.randn(*shape, args.width, device=args.device, requires_grad=True)
        with autocast(args):
            hidden = model.body(embedded)
            value = loss(hidden, torch.zeros(shape, dtype=torch.long, device=args.device)) if (
                isinstance(loss, Rival)) else hidden.sum()
        value.backward()
        for module in (model, loss):
            module.zero_grad()
        torch.set_rng_state(state)

    @property
    def table(self) -> nn.Linear:
        return self.loss.linear

    def build_optimizer(self) -> Optimizers:
        tables = [self.table.weight]
        if self.args.untied:
            tables.append(self.encoder.embedding.weight)
        matrices = [part for part in self.encoder.body.parameters() if part.dim() == 2]
        norms = [part for part in self.encoder.body.parameters() if part.dim() < 2]
        groups: list[dict[str,
                          Any]] = [{"params": matrices, "weight_decay": self.args.weight_decay},
                                   {"params": norms, "weight_decay": 0.0}]
        if not self.is_sparse:
            groups.append({"params": tables, "weight_decay": 0.0})
        options: dict[str, Any] = {"lr": self.args.lr, "betas": (0.9, 0.95)}
        dense = torch.optim.AdamW(groups, fused=True, **options)
        if not self.is_sparse:
            return Optimizers(dense)
        if self.args.table_dtype != "float32":
            options |= {
                "row_wise": True, "stochastic_rounding": True,
                "state_dtype": DTYPES[self.args.table_dtype]
            }
        return Optimizers(dense, xs.optim.RowAdam(tables, **options))

    @property
    def learning_rate(self) -> float:
        """Grows during --warm-up; a cosine schedule ends at a tenth of the rate."""
        warm_up = min(1.0, 0.01 + self.progress / max(self.args.warm_up, 1e-9))
        if self.args.schedule == "constant":
            return self.args.lr * warm_up
        return warm_up * (0.1 * self.args.lr + 0.9 * super().learning_rate)

    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.args):
            return self.loss(self.encoder(inputs), targets)

    def train_loss(self) -> tuple[Tensor, int]:
        size, windows = self.args.batch_size, self.windows["train"]
        return self.compute(*windows.batch(self.steps, size, self.rows)), size * windows.context

    def mean_loss(self, split: str, interrupt: Interrupt) -> dict | None:
        """Returns the exact loss per token of the split."""
        windows, size = self.windows[split], self.args.batch_size
        steps = windows.count // size
        total = 0.0
        for i in self.batches(steps, split, interrupt):
            batch = windows.at(torch.arange(i * size, (i + 1) * size)[self.rows])
            loss = self.ranks.batch_mean(self.compute(*batch), size * windows.context)
            total += loss.item()
        if interrupt.stopped:
            return None
        total, = self.ranks.mean(total)
        return {f"{split}_loss": total / steps}

    def measure(self, interrupt: Interrupt) -> dict | None:
        return self.mean_loss("valid", interrupt)

    def measure_test(self, interrupt: Interrupt) -> dict | None:
        return self.mean_loss("test", interrupt)

    def summary(self, point: dict) -> str:
        return f"valid loss {point['valid_loss']:.4f}"


def load_text(args: argparse.Namespace) -> Text:
    if args.tokens == "words":
        return load_words(args.data, args.min_count, args.max_tokens)
    return load_byte_pairs(args.data, args.vocabulary, args.tokenizer, args.max_tokens)


def train(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    text = load_text(args)
    sizes = {split: len(getattr(text, split)) for split in ("train", "valid", "test")}
    for split, size in sizes.items():
        if split != "train":
            size = min(size, args.eval_tokens)
        if size <= args.batch_size * args.context:
            raise UsageError(f"--data: expected more than one batch of {args.batch_size} x "
                             f"{args.context} tokens in the {split} text, got {size} tokens")
    print(f"{text.name}: {text.num_tokens:,} {text.unit}, {sizes['train']:,} tokens to train",
          flush=True)
    about = {"name": text.name, "num_tokens": text.num_tokens, "unit": text.unit, "sizes": sizes}
    fingerprint = zlib.crc32(text.valid.numpy().tobytes(), text.num_tokens)

    def write(runs: list[Run]):
        report.write(args.output, training.history(args, runs, text=about))

    runs, interrupted = training.train_each(args, lambda name: Run(name, text, args), fingerprint,
                                            f"the text of {text.name}", write, takes_turns=True)
    if all(run.points for run in runs):
        print(f"\n{report.table([run.figures() for run in runs])}\n{args.output}: history.json, "
              "table.md, loss.png")
    return 130 if interrupted else 0  # 128 + SIGINT, the convention of shells


def main(argv: list[str] | None = None) -> int:
    return report_errors(train, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
