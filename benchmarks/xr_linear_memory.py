"""Trains XR-Linear on generated data of Amazon-670K's shape, and measures peak memory and time.

    python benchmarks/xr_linear_memory.py [--scale 1.0] [--threads 2] [--json [FILE]]

The set has 490,449 examples, 135,909 features and 670,091 labels, with 5.45 labels and 75 features
per example, times --scale. Training consists of label vectors (PIFA), tree and layers with the
default options. Peak memory is the increase over the start of each step. It excludes the examples,
whose size is listed separately. Prediction finds 10 labels for each of 153,025 test examples.
"""

import argparse
import time

import torch

import xsoftmax as xs
from common import extreme_data
from common.records import add_json, report, table
from common.timing import PeakMemory

EXAMPLES, TEST, FEATURES, LABELS = 490_449, 153_025, 135_909, 670_091


def size(matrix) -> int:
    return matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes


def measure(step: str, work) -> tuple[dict, object]:
    with PeakMemory() as peak:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
    return {"step": step, "seconds": seconds, "peak bytes": peak.bytes}, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numbers = [int(args.scale * number) for number in (EXAMPLES, TEST, FEATURES, LABELS)]
    parts = extreme_data.generated(*numbers, 5.45, 75, seed=0)
    (X, Y), queries, truth = map(extreme_data.float_rows, parts["train"]), extreme_data.float_rows(
        parts["test"][0]), extreme_data.float_rows(parts["test"][1])
    del parts
    generator = torch.Generator().manual_seed(0)
    steps = []
    for step, work in (
        ("label vectors", lambda: xs.label_vectors.pifa(X, Y)),
        ("tree",
         lambda: xs.LabelTree.from_vectors(vectors, 16, max_leaf_size=100, generator=generator)),
        ("layers", lambda: xs.XRLinear.train(X, Y, tree=tree, generator=generator)),
        ("prediction", lambda: model.predict(queries)),
    ):
        row, result = measure(step, work)
        steps.append(row)
        if step == "label vectors":
            vectors = result
            steps[-1]["result bytes"] = size(result)
        elif step == "tree":
            tree, vectors = result, None
        elif step == "layers":
            model = result
            steps[-1]["result bytes"] = sum(part.nbytes for depth in range(model.depth)
                                            for part in model.model.layer(depth))
        else:
            predictions = result
            steps[-1]["result bytes"] = size(result)
    precision = xs.metrics.precision_at_k(predictions, truth, 1)
    examples = size(X) + size(Y)
    peak = examples + max(row["peak bytes"] for row in steps[:3])
    labels = Y.shape[1]
    rows = [{
        "step": row["step"], "seconds": f"{row['seconds']:.1f}",
        "peak memory": f"{row['peak bytes'] / 1e9:.2f} GB",
        "result": f"{row['result bytes'] / 1e9:.2f} GB" if "result bytes" in row else ""
    } for row in steps]
    model_bytes = steps[2]["result bytes"]
    report(
        args, __doc__, question="How much memory does the training of very many labels take?",
        against="no baseline", tables=[
            table(rows, f"{X.shape[0]} examples of {examples / 1e9:.2f} GB, {labels} labels"),
            table([{"figure": "examples and peak of training", "value": f"{peak / 1e9:.2f} GB"},
                   {"figure": "model, bytes per label", "value": f"{model_bytes / labels:.0f}"},
                   {"figure": "P@1 on the test examples", "value": f"{precision:.3f}"}])
        ], steps=steps, peak_bytes=peak, bytes_per_label=model_bytes / labels, layers=model.stats,
        precision=precision)


if __name__ == "__main__":
    main()
