"""Labels texts with some of thousands of labels: a hierarchical linear model on tf-idf, a neural
hierarchical matcher, a linear model on both, and their ensemble. Reports their precision and the
time per query.

    python examples/extreme_labels/train.py
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Callable

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from tqdm import tqdm

import xsoftmax as xs

# the repository's root, so that this file can be started from anywhere
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common.arguments import fraction, plain, positive, report_errors
from examples.common.errors import UsageError
from examples.common.report import write_text
from examples.extreme_labels import data, report
from examples.extreme_labels.model import BagOfWords, HuggingFace, Transformer

TOPK, BEAM, SINGLES = 10, 10, 500


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", metavar="PATH", help="a folder with train.txt and test.txt, or "
        "the common prefix of four .npz files; see "
        "data.py "
        "(default: the functions of Python's standard library)")
    parser.add_argument("--max-examples", type=positive(int), help="largest number of training "
                        "examples")
    tree = parser.add_argument_group("tree and linear model")
    tree.add_argument("--arity", type=positive(int, least=2), default=16,
                      help="default: %(default)s")
    tree.add_argument("--max-leaf-size", type=positive(int), default=100,
                      help="largest number of labels in a cluster (default: %(default)s)")
    tree.add_argument("--negatives", default="tfn", choices=["tfn", "man", "tfn+man"],
                      help="default: %(default)s")
    neural = parser.add_argument_group("neural matcher")
    neural.add_argument("--encoder", choices=["bag", "transformer", "huggingface", "none"],
                        default="bag", help="none: only the linear model (default: %(default)s)")
    neural.add_argument(
        "--model", help="for huggingface: a pretrained encoder of the Hugging Face "
        "Hub, or a folder with one (default: a small BERT, trained from scratch)")
    neural.add_argument("--neural-negatives", default="tfn+man", choices=["tfn", "man", "tfn+man"],
                        help="default: %(default)s")
    neural.add_argument("--device", type=torch.device,
                        default="cuda" if torch.cuda.is_available() else "cpu",
                        help="of the encoder and the matcher (default: %(default)s)")
    neural.add_argument("--width", type=positive(int), default=128, help="default: %(default)s")
    neural.add_argument("--dropout", type=fraction, default=0.3, help="default: %(default)s")
    neural.add_argument("--loss", choices=["squared_hinge", "logistic"], default="squared_hinge",
                        help="default: %(default)s")
    neural.add_argument(
        "--init", choices=["parents", "prototypes"], default="parents",
        help="initial weights of a layer: those of the parents, or "
        "sums of its examples' embeddings; with prototypes, the encoder is trained only with the "
        "last layer; requires bag (default: %(default)s)")
    neural.add_argument("--epochs", type=positive(float, or_zero=True), default=4,
                        help="epochs per layer (default: %(default)s)")
    neural.add_argument("--last-epochs", type=positive(float, or_zero=True),
                        help="epochs of the last layer (default: twice --epochs)")
    neural.add_argument("--batch-size", type=positive(int), default=64, help="default: %(default)s")
    neural.add_argument(
        "--lr", type=positive(float), default=1e-3, help="initial learning rate of "
        "a cosine schedule per layer (default: "
        "%(default)s)")
    neural.add_argument(
        "--encoder-lr", type=positive(float), help="learning rate of the encoder, "
        "for example 5e-5 for a pretrained one (default: --lr)")
    neural.add_argument("--last-lr", type=positive(float), help="that of the last layer (default: "
                        "--lr)")
    neural.add_argument("--beam", type=positive(int, least=TOPK), default=BEAM,
                        help="beam width in prediction (default: %(default)s)")
    neural.add_argument("--no-both", action="store_true", help="skip the linear model on "
                        "[tf-idf, embedding]")
    neural.add_argument(
        "--weight", type=positive(float), default=1, help="weight of the neural "
        "matcher in the ensemble "
        "(default: %(default)s)")
    parser.add_argument("--seed", type=positive(int, or_zero=True), default=1,
                        help="default: %(default)s")
    parser.add_argument("--threads", type=positive(int), help="CPU threads (default: as torch "
                        "chooses)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("out/extreme_labels"),
                        help="default: %(default)s")
    return parser.parse_args(argv)


class Neural:
    """An encoder and a matcher, and the inputs that they read from the data."""
    def __init__(self, args: argparse.Namespace, dataset: data.Dataset, tree: xs.LabelTree):
        torch.manual_seed(args.seed)
        self.args, self.order = args, np.random.default_rng(args.seed)
        if args.encoder == "transformer":
            counts: dict[str, int] = {}
            for text in dataset.train.texts:
                for word in data.words(text):
                    counts[word] = counts.get(word, 0) + 1
            self.ids = {
                word: i
                for i, word in enumerate((w for w, count in counts.items() if count >= 2), 1)
            }
            self.encoder = Transformer(len(self.ids), args.width, args.dropout)
        elif args.encoder == "huggingface":
            try:
                self.encoder = HuggingFace(args.model, dataset.train.texts, args.width,
                                           args.dropout)
            except (OSError, ImportError) as error:  # no such model, or a library is missing
                raise UsageError(f"--encoder huggingface: {error}") from error
        else:
            self.encoder = BagOfWords(dataset.train.X.shape[1], args.width, args.dropout,
                                      begin_linear=args.init == "prototypes")
        width = self.encoder.width if args.encoder == "huggingface" else args.width
        self.encoder.to(args.device)
        self.matcher = xs.HierarchicalMatcher(width, tree, loss=args.loss, beam=BEAM,
                                              negatives=args.neural_negatives, device=args.device)

    def read(self, part: data.Part) -> Tensor | sp.csr_matrix:
        if isinstance(self.encoder, BagOfWords):
            return part.X
        if isinstance(self.encoder, HuggingFace):
            return self.encoder.tokenize(part.texts)
        found = torch.zeros(len(part.texts), self.encoder.length, dtype=torch.int64)
        for i, text in enumerate(part.texts):
            ids = [self.ids[word]
                   for word in data.words(text) if word in self.ids][:self.encoder.length]
            found[i, :len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return found

    def encode(self, rows: Tensor | sp.csr_matrix) -> Tensor:
        device = self.args.device
        if isinstance(rows, Tensor):
            padding = self.encoder.tokenizer.pad_token_id if isinstance(self.encoder,
                                                                        HuggingFace) else 0
            return self.encoder(rows[:, :max(int((rows != padding).sum(1).max()), 1)].to(device))
        return self.encoder(
            torch.from_numpy(rows.indices).long().to(device),
            torch.from_numpy(rows.indptr[:-1]).long().to(device),
            torch.from_numpy(rows.data).to(device))

    def on_device(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.args.device) for tensor in tensors]

    def train(self, part: data.Part) -> None:
        """Trains layer by layer.

        With --init prototypes, the encoder is trained only with the last layer, because upper
        layers have few nodes and would remove the differences between the labels below them. The
        upper layers are trained again afterwards, for the final encoder.
        """
        args, matcher, target = self.args, self.matcher, xs.HierarchicalMatcher.targets(part.Y)
        input = self.read(part)
        depth, prototypes = matcher.tree.depth, args.init == "prototypes"
        last_epochs = 2 * args.epochs if args.last_epochs is None else args.last_epochs
        for layer in range(1, depth + 1):
            last = layer == depth
            if prototypes:
                matcher.init_from_prototypes(*self.on_device(self.embed(part), target))
            self.train_layer(input, target, last_epochs if last else args.epochs,
                             args.last_lr or args.lr if last else args.lr, last or not prototypes)
            matcher.next_layer()
        if prototypes and last_epochs > 0:
            for layer in range(1, depth):
                matcher.layer.fill_(layer)
                matcher.init_from_prototypes(*self.on_device(self.embed(part), target))
                self.train_layer(input, target, args.epochs, args.lr, False)
            matcher.layer.fill_(depth)

    def train_layer(self, input: Tensor | sp.csr_matrix, target: Tensor, epochs: float, lr: float,
                    with_encoder: bool) -> None:
        args = self.args
        of_encoder = list(self.encoder.parameters()) if with_encoder else []
        parameters = [*of_encoder, *self.matcher.parameters()]
        groups = [{"params": self.matcher.parameters()}]
        if of_encoder:
            groups.append({"params": of_encoder, "lr": args.encoder_lr or lr})
        self.encoder.requires_grad_(with_encoder).train()
        epoch_steps = -(-len(target) // args.batch_size)
        steps = round(epoch_steps * epochs)
        if steps == 0:
            return
        optimizer = xs.optim.RowAdam(groups, lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        recent, layer = 0.0, f"layer {int(self.matcher.layer)} of {self.matcher.tree.depth}"
        bar = tqdm(range(steps), desc=layer, mininterval=1, disable=not sys.stderr.isatty())
        for step in bar:
            if step % epoch_steps == 0:
                rows = self.order.permutation(len(target))
            batch_rows = rows[step % epoch_steps * args.batch_size:][:args.batch_size]
            loss = self.matcher(self.encode(input[batch_rows]), target[batch_rows].to(args.device))
            optimizer.zero_grad()
            loss.backward()
            xs.clip_grad_norm_(parameters, 10.0)
            optimizer.step()
            schedule.step()
            recent += (loss.item() - recent) * max(0.01, 1 / (step + 1))
            bar.set_postfix(loss=f"{recent:.3f}", refresh=False)
        # apply pending updates of the encoder's embedding; the matcher flushes only its own table
        optimizer.flush()
        print(f"{layer}: {steps} steps, loss {recent:.3f}", flush=True)

    @torch.no_grad()
    def embed(self, part: data.Part) -> Tensor:
        self.encoder.eval()
        input = self.read(part)
        return torch.cat(
            [self.encode(input[i:i + 512]).cpu() for i in range(0, part.Y.shape[0], 512)])

    def unit_rows(self, part: data.Part) -> Tensor:
        return torch.nn.functional.normalize(self.embed(part))

    @torch.no_grad()
    def predict(self, part: data.Part) -> sp.csr_matrix:
        self.encoder.eval()
        input, found = self.read(part), []
        for i in range(0, part.Y.shape[0], 512):
            scores, labels = self.matcher.topk(self.encode(input[i:i + 512]),
                                               min(TOPK, part.Y.shape[1]), self.args.beam)
            found.append((scores.cpu(), labels.cpu()))
        scores, labels = (torch.cat(half) for half in zip(*found))
        there = labels >= 0
        ends = np.r_[0, there.sum(1).cumsum(0).numpy()]
        return sp.csr_matrix((scores[there].numpy(), labels[there].numpy(), ends),
                             shape=part.Y.shape)


def part_of(part: data.Part, i: int) -> data.Part:
    return data.Part(part.X[i], part.Y[i], None if part.texts is None else [part.texts[i]])


class Table:
    """Collects models and their metrics."""
    def __init__(self, dataset: data.Dataset):
        self.dataset, self.rows, self.predictions = dataset, [], {}
        self.propensity = xs.metrics.propensity(torch.from_numpy(dataset.train.Y.getnnz(0)),
                                                dataset.train.Y.shape[0])

    def add(self, model: str, seconds: float, predict: Callable[[data.Part], sp.csr_matrix],
            singles: bool = True) -> None:
        test = self.dataset.test
        started = time.perf_counter()
        found = predict(test)
        batch = (time.perf_counter() - started) / test.Y.shape[0]
        latencies = []
        for i in range(min(SINGLES, test.Y.shape[0]) if singles else 0):
            one = part_of(test, i)
            started = time.perf_counter()
            predict(one)
            latencies.append(time.perf_counter() - started)
        self.predictions[model] = found
        self.rows.append({
            "model": model, "seconds": seconds, "batch": batch, "latencies": latencies,
            "precision": {k: xs.metrics.precision_at_k(found, test.Y, k)
                          for k in (1, 3, 5)},
            "psp": xs.metrics.psp_at_k(found, test.Y, 5, self.propensity)
        })
        row = self.rows[-1]
        print(
            f"{model}: {seconds:.1f} s, P@1 {100 * row['precision'][1]:.2f} %" +
            (f", {1e6 * statistics.median(latencies):.0f} us a query" if latencies else ""),
            flush=True)


def timed(run: Callable):
    started = time.perf_counter()
    made = run()
    return made, time.perf_counter() - started


def train(args: argparse.Namespace) -> int:
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.encoder in ("transformer", "huggingface") and args.model is None and (args.init
                                                                                  == "prototypes"):
        raise UsageError(f"--encoder {args.encoder} --init prototypes: expected an encoder that "
                         "tells texts apart before it is trained; use --encoder bag, or --model")
    if args.model is not None and args.encoder != "huggingface":
        raise UsageError(f"--model: expected --encoder huggingface, got {args.encoder}")
    dataset = data.load_dataset(args.data, args.max_examples)
    if args.encoder in ("transformer", "huggingface") and dataset.train.texts is None:
        raise UsageError(f"--encoder {args.encoder}: expected texts, got data of features alone; "
                         "use --encoder bag")
    X, Y = dataset.train.X, dataset.train.Y
    print(
        f"{dataset.name}: {Y.shape[1]:,} labels, {X.shape[1]:,} features, {X.shape[0]:,} "
        f"examples to train, {dataset.test.Y.shape[0]:,} to test, "
        f"{Y.nnz / max(Y.shape[0], 1):.1f} labels each", flush=True)
    for name in ("linear", "linear_on_both"):  # check before the training, not after it
        try:
            torch.ops.xsoftmax.xr_linear_check_target(str(args.output / name))
        except ValueError as error:
            raise UsageError(f"--output: {error}") from None
    generator = torch.Generator().manual_seed(args.seed)
    tree = xs.LabelTree.from_vectors(xs.label_vectors.pifa(X, Y), args.arity, generator=generator,
                                     max_leaf_size=args.max_leaf_size)
    args.output.mkdir(parents=True, exist_ok=True)
    table = Table(dataset)
    # created first, since its encoder may be missing
    neural = None if args.encoder == "none" else Neural(args, dataset, tree)

    linear, seconds = timed(
        lambda: xs.XRLinear.train(X, Y, tree=tree, negatives=args.negatives, generator=generator))
    linear.save(args.output / "linear")
    table.add("linear", seconds, lambda part: linear.predict(part.X, TOPK, BEAM))
    if neural is not None:
        _, seconds = timed(lambda: neural.train(dataset.train))
        torch.save({"encoder": neural.encoder.state_dict(), "matcher": neural.matcher.state_dict()},
                   args.output / "neural.pt")
        if isinstance(neural.encoder, HuggingFace):
            neural.encoder.save(args.output / "encoder")
        table.add(f"neural, {args.encoder}", seconds, neural.predict)
        total = sum(row["seconds"] for row in table.rows)
        if not args.no_both:
            both = sp.hstack([X, sp.csr_matrix(neural.unit_rows(dataset.train).numpy())],
                             format="csr")
            wide, more = timed(lambda: xs.XRLinear.train(both, Y, tree=tree, negatives=args.
                                                         negatives, generator=generator))
            wide.save(args.output / "linear_on_both")
            table.add("linear on [tf-idf, embedding]", seconds + more,
                      lambda part: wide.predict(part.X, TOPK, BEAM, dense=neural.unit_rows(part)))
            total += more
        parts = list(table.predictions.values())
        weights = [
            args.weight if model.startswith("neural") else 1.0 for model in table.predictions
        ]
        table.add("ensemble of the " + {2: "two", 3: "three"}[len(parts)], total,
                  lambda part: xs.combine_predictions(parts, "average", TOPK, weights=weights),
                  singles=False)

    rows = table.rows
    write_text(
        args.output / "history.json",
        json.dumps({"arguments": plain(args), "dataset": dataset.name, "models": rows}, indent=1))
    rows = json.loads((args.output / "history.json").read_text())["models"]
    write_text(args.output / "table.md", report.table(rows))
    report.plot(rows, args.output / "latency.png")
    print(f"\n{report.table(rows)}\n{args.output}: table.md, latency.png, history.json, models")
    return 0


def main(argv: list[str] | None = None) -> int:
    return report_errors(train, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
