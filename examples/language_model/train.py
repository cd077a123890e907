"""Trains a language model with sampled softmax, CANE, the exact loss, or each in turn, and compares
them by exact perplexity.

    python examples/language_model/train.py --loss sampled exact --max-minutes 1.5
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common import training
from examples.common.arguments import (add_cane_arguments, add_file_arguments, add_loss_arguments,
                                       add_training_arguments, complete, fraction, positive,
                                       report_errors)
from examples.common.losses import DTYPES, build_loss, codebook_loss
from examples.common.errors import UsageError
from examples.common.ranks import add_ranks_arguments
from examples.common.training import Interrupt
from examples.language_model import data, ngram, report
from examples.language_model.model import ENCODERS, Completer, EdgeEmbedding, script


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)

    text = parser.add_argument_group("text")
    text.add_argument(
        "--data", metavar="PATH", help="a text file, or a folder with *.train.txt, "
        "*.valid.txt and *.test.txt "
        "(default: the source of Python's standard library)")
    text.add_argument("--min-count", type=positive(int), default=2, help="rarer words become <unk> "
                      "(default: %(default)s)")
    text.add_argument(
        "--max-tokens", type=positive(int), help="largest number of training tokens; "
        "validation and test get at most a tenth")
    text.add_argument("--eval-tokens", type=positive(int), help="largest number of validation and "
                      "of test tokens")

    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=ENCODERS, default="lstm", help="default: %(default)s")
    model.add_argument("--width", type=positive(int), default=200, help="width of embedding and "
                       "hidden layers (default: "
                       "%(default)s)")
    model.add_argument("--layers", type=positive(int), default=2, help="default: %(default)s")
    model.add_argument("--dropout", type=fraction, default=0.5, help="default: %(default)s")
    model.add_argument("--untied", action="store_true", help="use separate weights for the output "
                       "layer and the embedding")
    model.add_argument(
        "--table-dtype", choices=DTYPES, default="float32",
        help="dtype of the output layer, and of an embedding tied to it "
        "(default: %(default)s)")
    model.add_argument(
        "--unigram-bias", action="store_true",
        help="initialise the output layer's bias with the log of the words' frequencies instead "
        "of 0, so that the model starts normalised")
    model.add_argument(
        "--stateless", action="store_true", help="start each batch from a zero "
        "state instead of the previous batch's state")

    add_loss_arguments(parser, classes="words", query="word", head=512,
                       losses=("sampled", "exact", "cane"))
    add_cane_arguments(parser, classes="words", query="word",
                       sources=("head", "bigram", "routed", "midx"), candidates=30, noises=30,
                       noise="unigram", noise_reduction="log_of_mean")
    options = add_training_arguments(parser, epochs=6, batch_size=20, optimizer="adagrad",
                                     note=", the fastest start")
    options.add_argument(
        "--bptt", type=positive(int), default=35,
        help="number of words per step and column of the batch (default: "
        "%(default)s)")
    add_ranks_arguments(parser, classes="words")
    add_file_arguments(parser, "out/language_model")

    args = parser.parse_args(argv)
    complete(parser, args)
    if args.model == "transformer" and args.width % 4 != 0:
        parser.error("--width: expected a multiple of 4, the heads of the transformer, got "
                     f"{args.width}")
    return args


def build_encoder(args: argparse.Namespace, num_words: int, sparse: bool) -> nn.Module:
    options = {
        "width": args.width, "layers": args.layers, "dropout": args.dropout, "sparse": sparse
    }
    if args.model == "transformer":
        options["context"] = args.bptt
    return ENCODERS[args.model](num_words, **options)


class Run(training.Run):
    """A training run with one loss on the corpus, evaluated by perplexity."""

    unit = "tokens"
    TEST = ("test_perplexity",)
    STATE = (*training.Run.STATE, "recurrent")
    OF_RANK = (*training.Run.OF_RANK, "recurrent")

    def __init__(self, name: str, corpus: data.Corpus, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        # With sampling, the gradients of embedding and output layer are row-sparse. With the exact
        # loss, every row has a gradient.
        encoder = build_encoder(args, len(corpus.words), sparse=name != "exact")
        loss = build_loss(args, name, corpus.counts, args.width, bias=True,
                          classes=f"words of {corpus.name}")
        if args.table_dtype != "float32":
            if not isinstance(loss, xs.LinearLoss):
                raise UsageError(f"--table-dtype {args.table_dtype}: expected a loss without a "
                                 "tree")
            loss.linear.to(DTYPES[args.table_dtype])
            if not args.untied:
                encoder.embedding.to(DTYPES[args.table_dtype])
        self.counts = corpus.counts
        super().__init__(name, args, encoder, loss)
        columns = self.ranks.rows(args.batch_size)
        self.parts = {
            split: data.Batches(getattr(corpus, split), args.batch_size, args.bptt, self.device,
                                columns)
            for split in ("train", "valid", "test")
        }
        self.epoch_steps = len(self.parts["train"])
        self.recurrent: list[Tensor] = []  # state that the encoder carries to the next batch
        # for each word, the candidates for the next word
        self.successors: Tensor | None = None
        if name == "cane" and args.candidates_from == "bigram":
            self.successors = ngram.successors(corpus.train, len(corpus.words),
                                               args.candidates).to(self.device)

    def init_bias(self):
        super().init_bias()
        if self.args.unigram_bias:
            words = slice(None) if isinstance(self.loss,
                                              xs.LinearLoss) else self.loss.tree.class_node - 1
            counts = self.counts.clamp(min=1).to(self.device)
            with torch.no_grad():
                self.table.bias[words] = (counts / counts.sum()).log()

    def tie(self):
        if isinstance(self.loss, xs.LinearLoss):
            super().tie()
            return
        words = self.loss.tree.class_node - 1
        with torch.no_grad():
            self.table.weight.zero_()
            self.table.weight[words] = self.encoder.embedding.weight
        self.encoder.embedding = EdgeEmbedding(self.table.weight, words,
                                               self.encoder.embedding.sparse)

    def load_state_dict(self, state: dict):
        super().load_state_dict(state)
        self.recurrent = [tensor.to(self.device) for tensor in self.recurrent]

    def train_loss(self) -> tuple[Tensor, int]:
        position = self.steps % self.epoch_steps
        inputs, targets, count = self.parts["train"][position]
        if position == 0 or self.args.stateless:
            self.recurrent = []
        hidden, state = self.encoder(inputs, self.recurrent)
        self.recurrent = [tensor.detach() for tensor in state]
        candidates = [] if self.successors is None else [self.successors[inputs]]
        loss = self.loss_of(hidden, targets, *candidates)
        return loss + self.ranks.per_batch(codebook_loss(self.loss, hidden), count), count

    def loss_of(self, hidden: Tensor, *args: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, self.table.weight.dtype,
                            enabled=self.table.weight.dtype != torch.float32):
            return self.loss(hidden, *args)

    def perplexity(self, split: str, interrupt: Interrupt) -> dict | None:
        """Returns the perplexity over all words of the split."""
        total, words, state = 0.0, 0, []
        batches = self.parts[split]
        for i in self.batches(len(batches), split, interrupt):
            inputs, targets, count = batches[i]
            hidden, state = self.encoder(inputs, [] if self.args.stateless else state)
            total += self.ranks.batch_mean(self.loss_of(hidden, targets), count).item() * count
            words += count
        if interrupt.stopped:
            return None
        total, = self.ranks.mean(total)
        # e^700 is close to the largest float64
        return {f"{split}_perplexity": math.exp(min(total / words, 700.0))}

    def measure(self, interrupt: Interrupt) -> dict | None:
        return self.perplexity("valid", interrupt)

    def measure_test(self, interrupt: Interrupt) -> dict | None:
        return self.perplexity("test", interrupt)

    def summary(self, point: dict) -> str:
        return f"valid perplexity {point['valid_perplexity']:.1f}"


def save_model(run: Run, corpus: data.Corpus, path: Path):
    """Saves the model from the first rank. All ranks call it."""
    encoder = run.encoder.cpu().float()  # also converts a 16-bit table
    linear = nn.Linear(run.args.width, len(corpus.words))
    if isinstance(run.loss, xs.LinearLoss):
        linear.weight, linear.bias = (nn.Parameter(part.float())
                                      for part in run.ranks.whole_table(run.loss))
        if isinstance(encoder.embedding, xs.distributed.TiedEmbedding):
            encoder.embedding = nn.Embedding.from_pretrained(linear.weight.detach())
    else:
        linear.weight, linear.bias = (nn.Parameter(part.detach())
                                      for part in run.loss.class_table())
    if not run.ranks.first:
        return
    special = (data.UNKNOWN, data.END_OF_LINE, data.NUMBER)
    script(Completer(encoder, linear.cpu(), corpus.words, corpus.pretokenised,
                     special)).save(str(path))


def load_data(args: argparse.Namespace) -> data.Corpus:
    return data.load_corpus(args.data, args.min_count, args.max_tokens, args.eval_tokens)


def train(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    corpus = load_data(args)
    print(f"{corpus.name}: {corpus.sizes}", flush=True)
    sizes = {split: len(getattr(corpus, split)) for split in ("train", "valid", "test")}
    about = {
        "name": corpus.name, "num_words": len(corpus.words), "tokens": sizes,
        "fingerprint": corpus.fingerprint
    }

    def write(runs: list[Run]):
        report.write(args.output, training.history(args, runs, corpus=about))

    runs, interrupted = training.train_each(args, lambda name: Run(name, corpus, args),
                                            corpus.fingerprint, "the text of "
                                            f"{corpus.name}", write)
    evaluated = [run for run in runs if run.points]
    if evaluated:
        best = min(evaluated, key=lambda run: run.points[-1]["valid_perplexity"])
        save_model(best, corpus, args.output / "model.pt")
        print(f"\n{report.table([run.figures() for run in runs])}\n{args.output}: history.json, "
              "table.md, perplexity.png, "
              f"model.pt (trained with the {best.name} loss)")
    return 130 if interrupted else 0  # 128 + SIGINT, the convention of shells


def main(argv: list[str] | None = None) -> int:
    return report_errors(train, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
