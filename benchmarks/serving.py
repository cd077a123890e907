"""Measures the latency of a served model, an encoder with the ten best of many classes, for each
way to deploy it.

    python benchmarks/serving.py [--classes 100000] [--width 64] [--batch 64] [--threads 1]
                                 [--repeats 101] [--serve PROGRAM] [--json [FILE]]

The encoder is an MLP (width -> 4 width -> width, with a layer norm). Its head is `loss.topk(hidden,
10)`, or, in the plain model, the log-softmax of an nn.Linear and torch's topk. Each way answers one
query, and a batch. Calls are interleaved in one process; times are medians, ratios are medians of
the ratios of turns. AOTInductor packages are run by Python's loader, which wraps the C++ one.
`--serve build/cpp_app/serve` adds a row for the C++ program of examples/cpp_app, in its own process
after the turns. onnxruntime runs `topk` with xs.decompositions(). It requires the extra
`deployment`.
"""

import argparse
import re
import statistics
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Callable

import torch

import xsoftmax as xs
from common.records import add_json, report, table
from common.timing import turns


class Model(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module, loss: xs.LinearLoss):
        super().__init__()
        self.encoder, self.loss, self.k = encoder, loss, 10

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.loss.topk(self.encoder(input), self.k)


class Plain(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module, linear: torch.nn.Linear):
        super().__init__()
        self.encoder, self.linear, self.k = encoder, linear, 10

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.log_softmax(self.linear(self.encoder(input)), 1).topk(self.k)
        return values, ids


def compiled(model: torch.nn.Module, queries: torch.Tensor, path: Path) -> Callable:
    program = torch.export.export(model, (queries,), dynamic_shapes=({0: torch.export.Dim("Q")},))
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path),
        inductor_configs={"aot_inductor.metadata": {"width": str(queries.shape[1])}})
    return torch._inductor.aoti_load_package(str(path))


def in_onnx(model: torch.nn.Module, queries: torch.Tensor, path: Path, threads: int) -> Callable:
    import onnxruntime

    program = torch.export.export(model, (queries,),
                                  dynamic_shapes=({0: torch.export.Dim("Q")
                                                   },)).run_decompositions(xs.decompositions())
    torch.onnx.export(program, f=str(path), verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda queries: session.run(None, {name: queries.numpy()})


def in_cpp(args: argparse.Namespace, package: Path, queries: torch.Tensor, batch: int) -> float:
    """Returns the median in seconds that examples/cpp_app/serve reports."""
    text = "".join(" ".join(map(str, query)) + "\n" for query in queries.tolist()) * 10
    done = subprocess.run(
        [args.serve, package, "--batch",
         str(batch), "--threads",
         str(args.threads)], input=text, capture_output=True, text=True, check=True)
    return 1e-6 * float(re.search(r"median ([\d.]+) us", done.stderr).group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--serve", help="the program of examples/cpp_app")
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")  # torch's exporters warn about themselves
    wide = 4 * args.width
    encoder = torch.nn.Sequential(torch.nn.Linear(args.width, wide), torch.nn.GELU(),
                                  torch.nn.Linear(wide, args.width), torch.nn.LayerNorm(args.width))
    loss = xs.SampledSoftmaxLoss(args.width, args.classes, sampler="uniform", num_samples=512,
                                 bias=True)
    model, plain, queries = Model(encoder, loss).eval(), Plain(encoder,
                                                               loss.linear).eval(), torch.randn(
                                                                   args.batch, args.width)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder)
        ways = {
            "topk, eager": model,
            "topk, TorchScript": torch.jit.script(model),
            "topk, AOTInductor": compiled(model, queries, path / "model.pt2"),
            "topk, onnxruntime": in_onnx(model, queries, path / "model.onnx", args.threads),
            "nn.Linear, eager": plain,
            "nn.Linear, AOTInductor": compiled(plain, queries, path / "plain.pt2"),
        }
        right = model(queries)[1]
        for name, way in ways.items():
            wrong = (torch.as_tensor(way(queries)[1]) != right).double().mean()
            # two scores may differ by less than a rounding error
            assert wrong < 0.01, f"{name} has other ids: {wrong:.1%}"
        rows = [{"way": name} for name in ways]
        found = []
        for title, count in (("one query", 1), (f"{args.batch} queries", args.batch)):
            seconds = turns(
                {name: (lambda way=way: way(queries[:count]))
                 for name, way in ways.items()}, args.repeats, warmup=10)
            for row, (name, times) in zip(rows, seconds.items()):
                ratio = statistics.median(a / b
                                          for a, b in zip(times, seconds["topk, AOTInductor"]))
                row |= {
                    title: f"{1e3 * statistics.median(times):.3g} ms", f"{title}, / "
                    "AOTInductor": f"{ratio:.2f}"
                }
                found.append({
                    "way": name, "queries": count, "seconds": statistics.median(times),
                    "ratio": ratio
                })
        if args.serve:
            rows.append({"way": "topk, AOTInductor, C++"})
            for title, count in (("one query", 1), (f"{args.batch} queries", args.batch)):
                taken = in_cpp(args, path / "model.pt2", queries, count)
                rows[-1] |= {title: f"{1e3 * taken:.3g} ms", f"{title}, / AOTInductor": ""}
                found.append({"way": "topk, AOTInductor, C++", "queries": count, "seconds": taken})
    import onnxruntime

    report(
        args, __doc__, question="What does a query cost, by each way of serving a model?",
        against=f"nn.Linear and torch.topk of torch {torch.__version__}; onnxruntime "
        f"{onnxruntime.__version__}", tables=[
            table(rows, f"{args.classes:,} classes, width {args.width}, threads: "
                  f"{args.threads}")
        ], figures=found)


if __name__ == "__main__":
    main()
