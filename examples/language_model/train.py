"""
Trains a language model with sampled softmax, with the exact loss, or with each in turn, and compares them by exact perplexity.

    python examples/language_model/train.py --loss sampled exact --max-minutes 1.5
"""

import argparse
import math
import os
import platform
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import xsoftmax as xs

import data
import report
from model import ENCODERS, Completer, script

OPTIMIZERS = {"adam": xs.optim.RowAdam, "sgd": xs.optim.RowSGD, "adagrad": xs.optim.RowAdagrad}
LEARNING_RATES = {"adam": 2e-3, "sgd": 5.0, "adagrad": 0.02}

SAMPLERS = ["unigram", "uniform", "log_uniform", "in_batch", "midx", "midx_pq"]

# What may differ between the run that wrote a checkpoint and the run that resumes it: the rest decides the weights.
FREE_ARGUMENTS = {"eval_minutes", "threads", "checkpoint", "resume", "output", "loss"}
BUDGET_ARGUMENTS = {"epochs", "max_minutes"}  # free, too, where the learning rate does not follow them


class UsageError(ValueError):
    """Arguments that do not fit together, or not the data; the message says which."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    text = parser.add_argument_group("text")
    text.add_argument("--data", metavar="PATH", help="a text file, or a folder with *.train.txt, *.valid.txt and *.test.txt "
                      "(default: the source of Python's standard library)")
    text.add_argument("--min-count", type=positive(int), default=2, help="rarer words become <unk> (default: %(default)s)")
    text.add_argument("--max-tokens", type=positive(int), help="of the training text; validation and test get a tenth at most")

    model = parser.add_argument_group("model")
    model.add_argument("--model", choices=ENCODERS, default="lstm", help="default: %(default)s")
    model.add_argument("--width", type=positive(int), default=200, help="of embedding and hidden layers (default: %(default)s)")
    model.add_argument("--layers", type=positive(int), default=2, help="default: %(default)s")
    model.add_argument("--dropout", type=fraction, default=0.5, help="default: %(default)s")
    model.add_argument("--untied", action="store_true", help="an output layer with rows of its own, not those of the embedding")
    model.add_argument("--stateless", action="store_true", help="start each batch from a zero state instead of the last batch's")

    loss = parser.add_argument_group("loss")
    loss.add_argument("--loss", nargs="+", choices=["sampled", "exact"], default=["sampled"],
                      help="several: each in turn, same seed and budget (default: sampled)")
    loss.add_argument("--sampler", nargs="+", choices=SAMPLERS, default=["unigram"],
                      help="default: unigram; the midx draw for each word, the others for the batch; several: the union of their draws")
    loss.add_argument("--samples", nargs="+", type=positive(int), default=[512], metavar="M",
                      help="classes drawn a step, or a word; a number for each sampler (default: 512)")
    loss.add_argument("--private", action="store_true", help="draw for each word, whichever the sampler")
    loss.add_argument("--codewords", type=positive(int), default=64, help="of each midx codebook (default: %(default)s)")
    loss.add_argument("--refresh-every", type=positive(int), default=500, help="steps between midx codebooks (default: %(default)s)")
    loss.add_argument("--head", type=int, default=512,
                      help="most frequent words, always scored (default: %(default)s; in_batch has none)")
    loss.add_argument("--estimator", choices=["sampled_softmax", "ranking"], default="sampled_softmax", help="default: %(default)s")

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive(int), default=6, help="default: %(default)s")
    training.add_argument("--max-minutes", type=positive(float), help="training time of each loss, evaluation left out")
    training.add_argument("--eval-minutes", type=positive(float),
                          help="training time between evaluations, beside the one after each epoch (default: a sixth of --max-minutes)")
    training.add_argument("--batch-size", type=positive(int), default=20, help="default: %(default)s")
    training.add_argument("--bptt", type=positive(int), default=35,
                          help="words a step reads of each of the batch's columns (default: %(default)s)")
    training.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad", help="default: %(default)s, the fastest start")
    training.add_argument("--lr", type=positive(float), help="default: " + ", ".join(f"{k} {v}" for k, v in LEARNING_RATES.items()))
    training.add_argument("--schedule", choices=["constant", "cosine"], default="constant",
                          help="cosine: the learning rate falls to 0 over --epochs or --max-minutes (default: %(default)s)")
    training.add_argument("--clip", type=positive(float), default=1.0, help="largest norm of the gradient (default: %(default)s)")
    training.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    training.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")

    files = parser.add_argument_group("files")
    files.add_argument("--output", metavar="DIR", type=Path, default=Path("out/language_model"), help="default: %(default)s")
    files.add_argument("--checkpoint", metavar="PATH", type=Path, help="written after each evaluation and when interrupted")
    files.add_argument("--resume", action="store_true", help="go on from --checkpoint, bit for bit as if never stopped")

    args = parser.parse_args(argv)
    args.loss = list(dict.fromkeys(args.loss))
    args.lr = args.lr or LEARNING_RATES[args.optimizer]
    if args.eval_minutes is None and args.max_minutes is not None:
        args.eval_minutes = args.max_minutes / 6
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if args.resume and not args.checkpoint.is_file():
        parser.error(f"--resume: there is no checkpoint at {args.checkpoint}")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device: {args.device} is not there")
    if args.model == "transformer" and args.width % 4 != 0:
        parser.error(f"--width: expected a multiple of 4, the heads of the transformer, got {args.width}")
    if len(args.samples) != len(args.sampler):
        parser.error(f"--samples: expected a number for each of the {len(args.sampler)} samplers, got {len(args.samples)}")
    if len(args.sampler) > 1 and "in_batch" in args.sampler:
        parser.error("--sampler: in_batch, whose candidates are the targets, stands alone")
    if args.private and len(args.sampler) > 1:
        parser.error("--private: expected one sampler, got a union, in which each draws as suits it")
    if args.head < 0:
        parser.error(f"--head: expected 0 or more, got {args.head}")
    return args


def positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it when the text is no number
    return parse


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected 0 or more and less than 1, got {text}")
    return value


def build_encoder(args: argparse.Namespace, num_words: int, sparse: bool) -> nn.Module:
    options = {"width": args.width, "layers": args.layers, "dropout": args.dropout, "sparse": sparse}
    if args.model == "transformer":
        options["context"] = args.bptt
    return ENCODERS[args.model](num_words, **options)


def build_loss(args: argparse.Namespace, name: str, corpus: data.Corpus) -> nn.Module:
    num_words = len(corpus.words)
    if name == "exact":
        return xs.LinearCrossEntropyLoss(args.width, num_words, bias=True)
    options = {"estimator": args.estimator, "bias": True}
    if args.sampler == ["in_batch"]:
        # The candidates are the targets of the step, frequent words among them: no number to choose, and no head beside them.
        return xs.SampledSoftmaxLoss(args.width, num_words, sampler="in_batch", num_samples=0, **options)
    if args.head + max(args.samples) > num_words:
        raise UsageError(
            f"--head {args.head} and --samples {max(args.samples)} together exceed the {num_words} words of {corpus.name}: "
            "take fewer, or --loss exact"
        )
    samplers = [build_sampler(args, kind, corpus) for kind in args.sampler]
    sampler = samplers[0] if len(samplers) == 1 else xs.samplers.UnionSampler(*zip(samplers, args.samples))
    shared = False if args.private else None  # None: as suits the sampler
    return xs.SampledSoftmaxLoss(args.width, num_words, sampler=sampler, num_samples=args.samples[0], shared=shared,
                                 head_classes=args.head, **options)


def build_sampler(args: argparse.Namespace, kind: str, corpus: data.Corpus) -> xs.samplers.Sampler:
    num_words = len(corpus.words)
    if kind == "unigram":
        # At least 1: a word that training never shows, and validation may, is one to be drawn too.
        return xs.samplers.UnigramSampler(corpus.counts.clamp(min=1), power=0.75)
    if kind in ("midx", "midx_pq"):
        return xs.samplers.MidxSampler(num_words, args.width, kind="pq" if kind == "midx_pq" else "rq", codewords=args.codewords,
                                       refresh_every=args.refresh_every)
    return xs.samplers.make_sampler(kind, num_words)


class Run:
    """One loss trained on the corpus: weights, optimizer, position and figures, all of which a checkpoint holds."""

    def __init__(self, name: str, corpus: data.Corpus, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        self.name = name
        self.args = args
        self.device = torch.device(args.device)
        self.parts = {
            split: data.Batches(getattr(corpus, split), args.batch_size, args.bptt, self.device)
            for split in ("train", "valid", "test")
        }
        # Sampled: the gradients of embedding and output layer have rows for the words of a step only. Exact: every row has one.
        sparse = name == "sampled"
        self.encoder = build_encoder(args, len(corpus.words), sparse).to(self.device)
        self.loss = build_loss(args, name, corpus).to(self.device)
        if not args.untied:
            self.loss.linear.weight = self.encoder.embedding.weight
        with torch.no_grad():
            self.loss.linear.bias.zero_()
        modules = nn.ModuleList([self.encoder, self.loss])
        self.parameters = list(modules.parameters())  # the tied weight once
        self.optimizer = OPTIMIZERS[args.optimizer](self.parameters, lr=args.lr)

        self.steps = 0
        self.tokens = 0
        self.train_seconds = 0.0
        self.points: list[dict] = []  # one an evaluation
        self.test_perplexity: float | None = None
        self.recurrent: list[Tensor] = []  # what the encoder carries to the next batch
        self.recent = [0.0, 0]  # summed loss and number of tokens since the last evaluation
        self.rng = self.rng_state()

    def rng_state(self) -> dict:
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None}

    def set_rng_state(self, state: dict):
        torch.set_rng_state(state["cpu"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    STATE = ("steps", "tokens", "train_seconds", "points", "test_perplexity", "recurrent", "recent", "rng")
    MODULES = ("encoder", "loss", "optimizer")

    def state_dict(self) -> dict:
        return {key: getattr(self, key) for key in self.STATE} | {key: getattr(self, key).state_dict() for key in self.MODULES}

    def load_state_dict(self, state: dict):
        for key in self.STATE:
            setattr(self, key, state[key])
        for key in self.MODULES:
            getattr(self, key).load_state_dict(state[key])
        self.recurrent = [tensor.to(self.device) for tensor in self.recurrent]

    @property
    def progress(self) -> float:
        """The share of the budget that is spent: of steps, or of minutes."""
        spent = self.steps / (self.args.epochs * len(self.parts["train"]))
        return spent if self.args.max_minutes is None else max(spent, self.train_seconds / (60 * self.args.max_minutes))

    @property
    def finished(self) -> bool:
        return self.progress >= 1

    def step(self):
        position = self.steps % len(self.parts["train"])
        inputs, targets, count = self.parts["train"][position]
        if position == 0 or self.args.stateless:
            self.recurrent = []
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * (0.5 + 0.5 * math.cos(math.pi * self.progress) if self.args.schedule == "cosine" else 1.0)
        self.encoder.train()
        self.loss.train()
        hidden, state = self.encoder(inputs, self.recurrent)
        loss = self.loss(hidden, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        xs.clip_grad_norm_(self.parameters, self.args.clip)
        self.optimizer.step()
        self.recurrent = [tensor.detach() for tensor in state]
        value = loss.item()
        if not math.isfinite(value):
            raise UsageError(f"the {self.name} loss is {value} after {self.steps} steps: try a smaller --lr than {self.args.lr}")
        self.recent = [self.recent[0] + value * count, self.recent[1] + count]
        self.steps += 1
        self.tokens += count

    @torch.no_grad()
    def perplexity(self, split: str, interrupt: "Interrupt") -> float | None:
        """Of every word of the split, by the full softmax; None when interrupted."""
        self.encoder.eval()
        self.loss.eval()  # the exact loss, whichever trains
        self.optimizer.flush()  # what rows without a gradient still owe
        total, words, state = 0.0, 0, []
        batches = self.parts[split]
        for i in tqdm(range(len(batches)), desc=f"{self.name}: {split}", disable=not sys.stderr.isatty(), leave=False):
            if interrupt.seen:
                return None
            inputs, targets, count = batches[i]
            hidden, state = self.encoder(inputs, [] if self.args.stateless else state)
            total += self.loss(hidden, targets).item() * count
            words += count
        return math.exp(min(total / words, 700.0))  # e^700: what a float64 can still hold

    def evaluate(self, interrupt: "Interrupt"):
        valid = self.perplexity("valid", interrupt)
        if valid is None:
            return
        point = {
            "step": self.steps,
            "epoch": self.steps / len(self.parts["train"]),
            "tokens": self.tokens,
            "train_seconds": self.train_seconds,
            "train_loss": self.recent[0] / max(self.recent[1], 1),
            "valid_perplexity": valid,
        }
        self.points.append(point)
        self.recent = [0.0, 0]
        tqdm.write(
            f"{self.name}: step {self.steps:,}, epoch {point['epoch']:.3g}, {self.train_seconds / 60:.2f} min, "
            f"train loss {point['train_loss']:.3f}, valid perplexity {valid:.1f}"
        )
        sys.stdout.flush()

    def train(self, interrupt: "Interrupt", save):
        """Trains until the budget is spent or a key is pressed, and calls save() wherever a later run may go on."""
        self.set_rng_state(self.rng)
        if not self.finished:
            self.test_perplexity = None  # resumed with a larger budget: the figure of its last weights is still to come
        epoch_steps = len(self.parts["train"])
        eval_seconds = 60 * self.args.eval_minutes if self.args.eval_minutes else math.inf
        evaluated = self.points[-1]["train_seconds"] if self.points else 0.0
        steps, quiet = self.args.epochs * epoch_steps, not sys.stderr.isatty()
        bar = tqdm(total=steps, initial=self.steps, desc=self.name, unit="step", disable=quiet)
        while not self.finished and not interrupt.seen:
            start = time.perf_counter()
            self.step()
            self.train_seconds += time.perf_counter() - start
            bar.update()
            if self.finished or self.steps % epoch_steps == 0 or self.train_seconds - evaluated >= eval_seconds:
                evaluated = self.train_seconds
                self.rng = self.rng_state()
                self.evaluate(interrupt)
                save()
        bar.close()
        self.rng = self.rng_state()
        if self.finished and self.test_perplexity is None and not interrupt.seen:
            self.test_perplexity = self.perplexity("test", interrupt)
        save()

    def figures(self) -> dict:
        return {
            "loss": self.name,
            "steps": self.steps,
            "epochs": self.steps / len(self.parts["train"]),
            "tokens": self.tokens,
            "train_seconds": self.train_seconds,
            "points": self.points,
            "test_perplexity": self.test_perplexity,
        }


class Interrupt:
    """Turns the first Ctrl-C into a flag, read between steps, where everything can be saved; the second ends the program."""

    def __init__(self):
        self.seen = False

    def __enter__(self):
        self.previous = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGINT, self.previous)

    def handle(self, number, frame):
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def save_checkpoint(path: Path, corpus: data.Corpus, args: argparse.Namespace, states: dict[str, dict]):
    """Writes beside the old checkpoint and then takes its place: whenever the program ends, one of the two is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save({"arguments": plain(args), "fingerprint": corpus.fingerprint, "runs": states}, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, corpus: data.Corpus, args: argparse.Namespace) -> dict[str, dict]:
    """The states of the runs so far, by the name of the loss."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        saved, fingerprint, runs = checkpoint["arguments"], checkpoint["fingerprint"], checkpoint["runs"]
    except Exception as error:  # whatever torch.load meets in a file that is no checkpoint
        raise UsageError(f"--resume: {path} is not a checkpoint of this program ({error})") from error
    free = FREE_ARGUMENTS | (BUDGET_ARGUMENTS if args.schedule == "constant" else set())
    for key, value in plain(args).items():
        if key not in free and saved.get(key) != value:
            option = key.replace("_", "-")
            raise UsageError(f"--resume: the checkpoint was written with --{option} {saved.get(key)}, and this run has {value}")
    if fingerprint != corpus.fingerprint:
        raise UsageError(f"--resume: the text of {corpus.name} is not the one that the checkpoint was trained on")
    return runs


def plain(args: argparse.Namespace) -> dict:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def history(corpus: data.Corpus, args: argparse.Namespace, runs: list[Run]) -> dict:
    """Every figure, with all that it takes to get it again."""
    sizes = {split: len(getattr(corpus, split)) for split in ("train", "valid", "test")}
    processor = platform.processor() or platform.machine()
    return {
        "arguments": plain(args),
        "corpus": {"name": corpus.name, "num_words": len(corpus.words), "tokens": sizes, "fingerprint": corpus.fingerprint},
        "machine": {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": processor},
        "runs": [run.figures() for run in runs],
    }


def save_model(run: Run, corpus: data.Corpus, path: Path):
    encoder = run.encoder.cpu()
    linear = nn.Linear(run.args.width, len(corpus.words))
    linear.weight, linear.bias = run.loss.linear.weight, run.loss.linear.bias
    special = (data.UNKNOWN, data.END_OF_LINE, data.NUMBER)
    script(Completer(encoder, linear.cpu(), corpus.words, corpus.pretokenised, special)).save(str(path))


def train(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    corpus = data.load_corpus(args.data, args.min_count, args.max_tokens)
    print(
        f"{corpus.name}: {len(corpus.words):,} words, {len(corpus.train):,} tokens to train, "
        f"{len(corpus.valid):,} to validate, {len(corpus.test):,} to test",
        flush=True,
    )
    args.output.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    states = load_checkpoint(args.checkpoint, corpus, args) if args.resume else {}

    runs: list[Run] = []
    with Interrupt() as interrupt:
        for name in args.loss:
            run = Run(name, corpus, args)
            if name in states:
                run.load_state_dict(states[name])
            runs.append(run)

            def save():
                states[name] = run.state_dict()
                if args.checkpoint:
                    save_checkpoint(args.checkpoint, corpus, args, states)
                report.write(args.output, history(corpus, args, runs))

            run.train(interrupt, save)
            if interrupt.seen:
                saved = f", --checkpoint {args.checkpoint} --resume goes on from here" if args.checkpoint else ""
                print(f"interrupted after {run.steps} steps of the {name} loss{saved}", flush=True)
                break

    evaluated = [run for run in runs if run.points]
    if evaluated:
        best = min(evaluated, key=lambda run: run.points[-1]["valid_perplexity"])
        save_model(best, corpus, args.output / "model.pt")
        print(f"\n{report.table([run.figures() for run in runs])}\n{args.output}: history.json, table.md, perplexity.png, "
              f"model.pt (trained with the {best.name} loss)")
    return 130 if interrupt.seen else 0  # 128 + SIGINT, as shells have it


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return train(args)
    except (UsageError, data.DataError) as error:
        print(f"train.py: {error}", file=sys.stderr)
    except OSError as error:
        print(f"train.py: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
