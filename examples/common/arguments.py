"""Command-line options shared by the examples, and their checks."""

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Callable

import torch

from .errors import DIVERGED, DataError, Diverged, UsageError
from .losses import DTYPES, LEARNING_RATES, NOISES, OPTIMIZERS, SAMPLERS
from .ranks import complete_ranks, process_group


def positive(kind: type, least: float = 0, or_zero: bool = False):
    """Returns an argparse type for finite positive numbers, or numbers of at least `least`."""
    def parse(text: str):
        value = kind(text)
        if not ((value > 0 or or_zero) and value >= least and math.isfinite(value)):
            raise argparse.ArgumentTypeError(
                "expected "
                f"{f'at least {least}' if least or or_zero else 'more than 0'}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse shows this name if the text is not a number
    return parse


def seed(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected an integer of 64 bits, got {text}")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected 0 or more and less than 1, got {text}")
    return value


def add_loss_arguments(parser: argparse.ArgumentParser, classes: str, query: str, head: int,
                       losses: tuple[str, ...] = ("sampled", "exact"), default: str = "sampled"):
    """Adds the options of losses. `classes` and `query` name those in help texts, `head` is the
    default of --head, `losses` are the choices of --loss and `default` is its default."""
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--loss", nargs="+", choices=losses, default=[default],
        help=f"several: each in turn, with the same seed and budget (default: "
        f"{default})")
    loss.add_argument(
        "--sampler", nargs="+", choices=SAMPLERS, default=["unigram"],
        help=f"default: unigram; midx and the names after it draw for each {query}, the others "
        "for the batch; several: the union of their "
        "samples")
    loss.add_argument(
        "--samples", nargs="+", type=positive(int), default=[512], metavar="M",
        help=f"classes sampled per step, or per {query}; one number per "
        "sampler (default: 512)")
    loss.add_argument("--private", action="store_true", help=f"draw separate samples for each "
                      f"{query} with every sampler")
    loss.add_argument("--codewords", type=positive(int), default=64, help="codewords of each midx "
                      "codebook (default: %(default)s)")
    loss.add_argument("--distinct", action="store_true", help="midx samples without replacement "
                      f"for each {query}")
    loss.add_argument(
        "--refresh-every", type=positive(int), default=500,
        help="number of steps after which a sampler reads the weights again (default: "
        "%(default)s)")
    loss.add_argument(
        "--head", type=int, default=head,
        help=f"number of most frequent {classes} that are always scored (default: %(default)s; "
        "none with in_batch)")
    loss.add_argument("--estimator",
                      choices=[*torch.ops.xsoftmax.estimator_names(), "complementary_sum"],
                      help="default: ranking with private samples, else sampled_softmax")


def add_cane_arguments(parser: argparse.ArgumentParser, classes: str, query: str,
                       sources: tuple[str, ...], candidates: int, noises: int = 1,
                       noise: str = "uniform", noise_reduction: str = "mean_of_logs"):
    """Adds the options of CANE. `sources` are the sources of candidates, the default first; the
    other arguments are defaults."""
    cane = parser.add_argument_group("--loss cane")
    cane.add_argument(
        "--candidates", type=positive(int), default=candidates,
        help=f"{classes} proposed for each {query} independently of its target (default: "
        "%(default)s)")
    meaning = {
        "beam": "by a beam search in a tree", "routed": "from the best of --subsets subsets of "
        "equal frequency", "head": f"the most frequent {classes}",
        "bigram": f"the {classes} that most often "
        "follow the last one", "midx": "samples of midx"
    }
    cane.add_argument(
        "--candidates-from", choices=sources, default=sources[0],
        help="; ".join(f"{source}: {meaning[source]}"
                       for source in sources) + " (default: %(default)s)")
    if "beam" in sources:
        cane.add_argument(
            "--beam", type=positive(int), help="width of the beam search, at least "
            "--candidates (default: --candidates)")
    if "routed" in sources:
        cane.add_argument("--subsets", type=positive(int), default=100, help="default: %(default)s")
    cane.add_argument(
        "--noises", type=positive(int), default=noises, help="number of noise "
        f"samples from the other {classes} (default: "
        "%(default)s)")
    cane.add_argument(
        "--noise", choices=NOISES, default=noise, help="default: %(default)s; midx "
        "is not available if the candidates are "
        "from a tree")
    cane.add_argument("--noise-reduction", choices=["mean_of_logs", "log_of_mean"],
                      default=noise_reduction, help="default: %(default)s")


def add_training_arguments(parser: argparse.ArgumentParser, *, epochs: int, batch_size: int,
                           optimizer: str | None, note: str = "",
                           learning_rates: dict[str, float] = LEARNING_RATES,
                           schedule: str = "constant", lr: float | None = None):
    """Adds the options of training and returns their group, for an example to add more. `note` is
    appended to the help of --optimizer. With None, the example has its own optimizer, and `lr` is
    its learning rate."""
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=positive(float), default=epochs,
                          help="default: %(default)s")
    training.add_argument("--eval-epochs", type=positive(float), default=1,
                          help="between evaluations (default: %(default)s)")
    training.add_argument("--max-minutes", type=positive(float), help="training time of each loss, "
                          "without evaluation")
    training.add_argument(
        "--eval-minutes", type=positive(float),
        help="training time between evaluations, in addition to those of --eval-epochs "
        "(default: a sixth of --max-minutes)")
    training.add_argument("--batch-size", type=positive(int), default=batch_size,
                          help="default: %(default)s")
    if optimizer is not None:
        training.add_argument("--optimizer", choices=OPTIMIZERS, default=optimizer,
                              help=f"default: %(default)s{note}")
        training.add_argument(
            "--row-wise", action="store_true", help="keep one accumulator or second "
            "moment per class, with "
            "adagrad and adam")
        training.add_argument(
            "--state-dtype", choices=DTYPES, default="float32",
            help="dtype of the other optimizer state of classes (default: "
            "%(default)s)")
        training.add_argument("--stochastic-rounding", action="store_true",
                              help="update 16-bit rows with "
                              "stochastic rounding")
    training.add_argument(
        "--lr", type=positive(float), default=lr, help="default: " +
        (", ".join(f"{k} {v}" for k, v in learning_rates.items()) if lr is None else f"{lr}"))
    training.add_argument(
        "--schedule", choices=["constant", "cosine"], default=schedule,
        help="cosine: the learning rate decays to 0 over --epochs or "
        "--max-minutes (default: %(default)s)")
    training.add_argument("--clip", type=positive(float), default=1.0, help="gradient norm to clip "
                          "to (default: "
                          "%(default)s)")
    training.add_argument("--seed", type=seed, default=1, help="default: %(default)s")
    training.add_argument("--threads", type=positive(int), help="CPU threads (default: as torch "
                          "chooses)")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                          help="default: %(default)s")
    return training


def add_file_arguments(parser: argparse.ArgumentParser, output: str):
    files = parser.add_argument_group("files")
    files.add_argument("--output", metavar="DIR", type=Path, default=Path(output),
                       help="default: %(default)s")
    files.add_argument("--checkpoint", metavar="PATH", type=Path, help="written after each "
                       "evaluation and when "
                       "interrupted")
    files.add_argument(
        "--resume", action="store_true", help="resume from --checkpoint; the result is "
        "bit-identical to that of an uninterrupted "
        "run")


def complete(parser: argparse.ArgumentParser, args: argparse.Namespace,
             learning_rates: dict[str, float] = LEARNING_RATES):
    """Sets defaults that depend on other options, and ends the program if options contradict each
    other."""
    args.loss = list(dict.fromkeys(args.loss))
    if "optimizer" in args:
        args.lr = args.lr or learning_rates[args.optimizer]
        if args.row_wise and args.optimizer == "sgd":
            parser.error(
                "--row-wise: expected --optimizer adagrad or adam, got sgd, which has no state")
    complete_ranks(parser, args)
    if args.eval_minutes is None and args.max_minutes is not None:
        args.eval_minutes = args.max_minutes / 6
    if args.resume and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if args.resume and not args.checkpoint.is_file():
        parser.error(f"--resume: there is no checkpoint at {args.checkpoint}")
    if args.checkpoint is not None:
        folder = args.checkpoint.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            parser.error(f"--checkpoint: nothing can be written to {folder}: {error.strerror}")
    try:
        torch.empty(0, device=args.device).to("cpu")
    # no such device, or the meta device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        parser.error(f"--device: {args.device} is not available ({str(error).splitlines()[0]})")
    if "sampler" in args:
        check_losses(parser, args)


def check_losses(parser: argparse.ArgumentParser, args: argparse.Namespace):
    """Ends the program if options of add_loss_arguments and add_cane_arguments contradict each
    other."""
    if len(args.samples) != len(args.sampler):
        parser.error(f"--samples: expected a number for each of the {len(args.sampler)} samplers, "
                     f"got {len(args.samples)}")
    if len(args.sampler) > 1 and "in_batch" in args.sampler:
        parser.error("--sampler: expected in_batch alone, because its candidates are the targets")
    if args.distinct and not any(sampler.startswith("midx") for sampler in args.sampler):
        parser.error(f"--distinct: expected a midx sampler, got {' '.join(args.sampler)}")
    if args.private and "in_batch" in args.sampler:
        parser.error("--private: expected a sampler that draws, got in_batch")
    if "noise" in args and args.noise == "midx" and args.candidates_from in ("beam", "routed"):
        parser.error(f"--noise midx: expected no --candidates-from {args.candidates_from}: in a "
                     "tree classes have no rows of their own")
    if getattr(args, "beam", None) is not None and args.candidates_from != "beam":
        parser.error(f"--beam: expected --candidates-from beam, got {args.candidates_from}")
    if args.head < 0:
        parser.error(f"--head: expected 0 or more, got {args.head}")


def plain(args: argparse.Namespace) -> dict:
    """Returns the options as values that JSON has."""
    return {
        key: str(value) if isinstance(value, (Path, torch.device)) else value
        for key, value in vars(args).items()
    }


def report_errors(program: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs the program and returns its exit code: 2 on an error, DIVERGED if the loss diverged.
    Prints the reason in one line."""
    name = Path(sys.argv[0]).name
    try:
        with process_group(args):
            return program(args)
    except (UsageError, DataError) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except Diverged as error:
        print(f"{name}: {error}", file=sys.stderr)
        return DIVERGED
    except OSError as error:
        reasons = filter(None, (error.filename, error.strerror or str(error)))
        print(f"{name}: {': '.join(map(str, reasons))}", file=sys.stderr)
    return 2
