"""Extreme multi-label classification of data files: `xsoftmax train`, `xsoftmax predict` and
`xsoftmax evaluate`."""

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch

from .. import __version__ as version
from .. import metrics
from .._core.files import replace_file
from ..datasets import read_examples, read_matrix, read_sparse
from ..matcher.ensemble import METHODS, combine_predictions
from ..trees.label_tree import LabelTree
from ..label_vectors import pifa, pifa_lf, unit_rows
from ..matcher.xr_linear import XRLinear


def main(arguments: Optional[List[str]] = None) -> int:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads: expected at least 1, got {args.threads}")
    if not 0 <= getattr(args, "seed", 0) < 2**63:
        parser.error(f"--seed: expected a number in [0, 2^63), got {args.seed}")
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        args.run(args)
    except (OSError, ValueError, TypeError, IndexError, RuntimeError) as error:
        print(f"xsoftmax {args.command}: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("scipy", "tqdm"):
            raise
        print(
            f"xsoftmax {args.command}: expected {package}, which is not installed: pip install "
            "xsoftmax[matcher]", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"xsoftmax {args.command}: not enough memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"xsoftmax {args.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xsoftmax", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"xsoftmax {version}")
    commands = parser.add_subparsers(dest="command", required=True)

    class Formatter(argparse.HelpFormatter):
        """Appends the default value to the help of options that have one."""
        def _get_help_string(self, action: argparse.Action) -> Optional[str]:
            shows_default = action.option_strings and action.default not in (
                None, False, argparse.SUPPRESS) and "(default:" not in (action.help or "")
            return f"{action.help} (default: %(default)s)" if shows_default else action.help

    def command(name: str, run: Callable[[argparse.Namespace], Any],
                about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about, formatter_class=Formatter)
        sub.set_defaults(run=run)
        return sub

    def data(sub: argparse.ArgumentParser, about: str) -> None:
        sub.add_argument(
            "data", help=f"{about}: text with a header \"examples features labels\", "
            "plain or .gz (-: standard input), "
            "or .npz of scipy.sparse with --labels")
        sub.add_argument(
            "--labels", help="the labels of examples in a .npz: another .npz, of "
            "shape [examples, labels]")

    train = command(
        "train", run_train, "Trains a hierarchical linear model. Under torchrun, all processes "
        "train one model together.")
    data(train, "training examples")
    train.add_argument("model", help="the folder to write")
    train.add_argument(
        "--resume", help="checkpoint file: stores finished layers, from which the command "
        "continues after an interruption, and is deleted once the model is written")
    train.add_argument("--force", action="store_true", help="replace an existing model")
    train.add_argument(
        "--normalize", action="store_true", help="scale rows to length 1, in training and in "
        "predictions of the model")
    train.add_argument("--arity", type=int, default=16, help="largest number of children of a node "
                       "of the label tree")
    train.add_argument("--max-leaf-size", type=int, default=100, help="largest number of labels "
                       "in a cluster of the label tree")
    train.add_argument(
        "--label-features", help=".npz [labels, F]: features of the labels, used "
        "in addition to their examples to build the tree")
    train.add_argument(
        "--negatives", default="tfn", help="the training examples of a node. tfn: "
        "those with a label below its parent. man: "
        "those whose beam search reaches its parent. tfn+man: "
        "both")
    train.add_argument("--beam", type=int, default=10, help="beam width of the search for man")
    train.add_argument("--loss", default="squared_hinge",
                       choices=["squared_hinge", "hinge",
                                "logistic"], help="loss of each node's classifier")
    train.add_argument("--positive-cost", type=float, default=1.0, help="weight of the positive "
                       "examples of a node")
    train.add_argument("--negative-cost", type=float, default=1.0, help="weight of the negative "
                       "examples of a node")
    train.add_argument(
        "--tolerance", type=float, default=0.1, help="the solver stops when its "
        "projected gradients differ by less than this")
    train.add_argument("--sweeps", type=int, default=100, help="largest number of passes of the "
                       "solver over the examples of a node")
    train.add_argument("--bias", type=float, default=1.0, help="value of a constant feature added "
                       "to every example; 0: none")
    train.add_argument("--threshold", type=float, default=0.1, help="drop weights with a smaller "
                       "absolute value")
    train.add_argument("--max-weights", type=int, help="largest number of weights of a node "
                       "(default: no limit)")
    train.add_argument("--seed", type=int, default=0, help="random seed for the tree and the order "
                       "of examples")
    train.add_argument("--quiet", action="store_true", help="show no progress bar")

    predict = command("predict", run_predict, "Finds the best labels of each example.")
    data(predict, "examples, whose labels are ignored")
    predict.add_argument("predictions", help=".npz file to write or replace: the scores as "
                         "scipy.sparse CSR")
    predict.add_argument(
        "models", nargs="+", help="folders of models; the predictions of several "
        "models are combined")
    predict.add_argument("--topk", type=int, default=10, help="labels per example")
    predict.add_argument(
        "--beam", type=int, default=10, help="beam width of the search; a wider beam "
        "finds better labels and takes longer")
    predict.add_argument(
        "--transform", help="the function applied to a node's score: identity, sigmoid, "
        "l1-hinge to l6-hinge, or log- followed by one of the last "
        "two "
        "(default: that of the model)")
    predict.add_argument(
        "--combiner", choices=["multiply", "add", "last"],
        help="combines a node's score with its parent's: product, sum, or the node's score only "
        "(default: add for logarithms and identity, else multiply)")
    predict.add_argument("--ensemble", default="average", choices=METHODS,
                         help="how the predictions of several models are combined")

    evaluate = command(
        "evaluate", run_evaluate, "Computes precision, recall, nDCG and propensity-scored "
        "precision (PSP) of predictions, as fractions.")
    data(evaluate, "examples with their true labels")
    evaluate.add_argument("predictions", help=".npz file written by predict")
    evaluate.add_argument("-k", type=int, nargs="+", default=[1, 3, 5], help="numbers of best "
                          "labels to evaluate")
    evaluate.add_argument(
        "--train", help="the training examples as text, or their labels as "
        ".npz: adds PSP, in which rare labels count more")
    evaluate.add_argument("-a", type=float, default=0.55, help="parameter a of the propensities "
                          "(xsoftmax.metrics.propensity)")
    evaluate.add_argument("-b", type=float, default=1.5, help="parameter b of the propensities")

    for sub in (train, predict, evaluate):
        sub.add_argument("--threads", type=int, help="largest number of threads (default: all "
                         "cores)")
        sub.add_argument("--json", action="store_true", help="print one line of JSON instead of "
                         "text")
    return parser


@contextmanager
def ranks_of_torchrun() -> Iterator[Optional["torch.distributed.ProcessGroup"]]:
    """Yields the process group of all processes started by torchrun, or None without torchrun."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        yield None
        return
    distributed.init_process_group("gloo")
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def run_train(args: argparse.Namespace) -> None:
    with ranks_of_torchrun() as group:
        train_together(args, group, group is None or group.rank() == 0)


def train_together(args: argparse.Namespace, group: Optional["torch.distributed.ProcessGroup"],
                   first: bool) -> None:
    if not set(args.negatives.split("+")) <= {"tfn", "man"}:
        raise ValueError(f"--negatives: expected tfn, man, or tfn+man, got {args.negatives}")
    if first:  # the rank that writes the model
        check_parent(Path(args.model))
        torch.ops.xsoftmax.xr_linear_check_target(args.model)
        if Path(args.model).exists() and not args.force:
            raise FileExistsError(f"there is a model in {args.model} already: --force replaces it")
    if args.resume is not None:
        if group is not None:
            raise ValueError("--resume: expected a single process, got several of torchrun")
        check_parent(Path(args.resume))
    X, Y = read_arguments(args)
    if X.shape[0] == 0:
        raise ValueError(f"expected at least one example in {args.data}, got none")
    X = unit_rows(X) if args.normalize else X
    generator = torch.Generator().manual_seed(args.seed)
    vectors = pifa(X, Y) if args.label_features is None else pifa_lf(
        X, Y, read_sparse(args.label_features))
    tree = LabelTree.from_vectors(vectors, args.arity, generator=generator,
                                  max_leaf_size=args.max_leaf_size, group=group)
    model = XRLinear.train(X, Y, tree=tree, negatives=args.negatives, beam=args.beam,
                           loss=args.loss, positive_cost=args.positive_cost,
                           negative_cost=args.negative_cost, tolerance=args.tolerance,
                           sweeps=args.sweeps, bias=args.bias, threshold=args.threshold,
                           max_weights=args.max_weights, generator=generator,
                           progress=not (args.quiet or args.json), group=group, resume=args.resume)
    if not first:
        return
    model.notes["normalize"] = args.normalize
    model.save(args.model)
    if args.resume is not None:
        Path(args.resume).unlink(missing_ok=True)
    if args.json:
        print(
            json.dumps({
                "model": args.model, "features": model.num_features, "labels": model.num_labels,
                "depth": model.depth, "weights": model.model.num_weights(), "layers": model.stats
            }))
    else:
        print(model)
    lengths = np.sqrt(np.asarray(X.power(2, dtype=np.float64).sum(1)).ravel())
    if len(lengths) and not 0.9 < np.median(lengths) < 1.1:
        print(
            f"the rows of {args.data} are of length {np.median(lengths):.3g} (median): the "
            "defaults suit rows of length 1, see --normalize", file=sys.stderr)


def read_arguments(args: argparse.Namespace) -> Tuple[Any, Any]:
    if args.data.endswith(".npz") and args.labels is None:
        raise ValueError(f"--labels: expected the .npz with the labels of {args.data}, got none")
    return read_examples(args.data, args.labels)


def check_parent(path: Path) -> None:
    """Checks that the output folder exists, before hours of work."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.absolute().parent} for {path.name}")


def run_predict(args: argparse.Namespace) -> None:
    import scipy.sparse as sp

    if not args.predictions.endswith(".npz"):
        raise ValueError(f"expected the name of a .npz for the predictions, got {args.predictions}")
    if args.topk < 1:
        raise ValueError(f"--topk: expected at least 1, got {args.topk}")
    check_parent(Path(args.predictions))
    X = read_sparse(args.data) if args.data.endswith(".npz") else read_examples(args.data)[0]
    predictions = []
    for path in args.models:
        model = XRLinear.load(path)
        predictions.append(
            model.predict(
                unit_rows(X) if model.notes.get("normalize") else X, args.topk, args.beam,
                transform=args.transform, combiner=args.combiner))
    scores = predictions[0] if len(predictions) == 1 else combine_predictions(
        predictions, args.ensemble, args.topk)
    with replace_file("predict", args.predictions) as draft, open(draft, "wb") as file:
        sp.save_npz(file, scores)
    if args.json:
        print(
            json.dumps({
                "predictions": args.predictions, "examples": X.shape[0], "topk": args.topk,
                "scores": scores.nnz
            }))
    else:
        print(f"{args.predictions}: {X.shape[0]} examples, up to {args.topk} labels each")


def run_evaluate(args: argparse.Namespace) -> None:
    if args.data != "-" and not Path(args.data).is_file():
        raise FileNotFoundError(f"there is no file {args.data}")
    truth = read_matrix("read_sparse", args.labels,
                        "labels") if args.labels else read_arguments(args)[1]
    predictions = read_sparse(args.predictions, scores=True)
    if predictions.shape != truth.shape:
        raise ValueError(f"expected predictions of shape {list(truth.shape)}, as the examples "
                         f"have, got {list(predictions.shape)}")
    columns: Dict[str, Callable[..., float]] = {
        "precision": metrics.precision_at_k, "recall": metrics.recall_at_k,
        "nDCG": metrics.ndcg_at_k
    }
    if args.train:
        train_labels = read_matrix("read_sparse", args.train,
                                   "labels") if args.train.endswith(".npz") else read_examples(
                                       args.train)[1]
        if train_labels.shape[1] != truth.shape[1]:
            raise ValueError(f"expected --train with {truth.shape[1]} labels, as the examples "
                             f"have, got {train_labels.shape[1]}")
        propensity = metrics.propensity(torch.from_numpy(train_labels.getnnz(0)),
                                        train_labels.shape[0], args.a, args.b)
        columns["PSP"] = lambda *which: metrics.psp_at_k(*which, propensity
                                                         )  # type: ignore[call-arg]
    figures = {
        k: {name: figure(predictions, truth, k)
            for name, figure in columns.items()}
        for k in args.k
    }
    if args.json:
        print(
            json.dumps(
                {name: {str(k): values[name]
                        for k, values in figures.items()}
                 for name in columns}))
        return
    print("   k" + "".join(f"{name:>11}" for name in columns))
    for k, values in figures.items():
        print(f"{k:4}" + "".join(f"{value:11.4f}" for value in values.values()))


if __name__ == "__main__":
    sys.exit(main())
