"""The GPT of examples/gpt trained for equal time with each output layer: validation loss against
time."""

import time
from importlib.util import find_spec
from typing import Dict, List

from examples.common.training import Interrupt
from examples.gpt.data import Text, load_words
from examples.gpt.report import points_of, seconds_to_reach
from examples.gpt.train import Run, parse_arguments

from .bench import Bench, reason

PLAIN = "F.linear + F.cross_entropy, torch.compile"
MARKS = 8  # points of a curve
LAYER_SECONDS = 7  # time per output layer for validation and test
COMPILE_SECONDS = 60
PACKAGES = {"cce": "cut_cross_entropy", "liger": "liger_kernel"}  # by --loss of examples/gpt


def part_seconds(layer_seconds: float) -> float:
    """Returns the time limit of the part if each output layer is trained for `layer_seconds`."""
    return len(output_layers(8)) * (layer_seconds + 2 * LAYER_SECONDS) + COMPILE_SECONDS


def output_layers(num_words: int) -> Dict[str, List[str]]:
    """Returns the options of examples/gpt for each output layer, the name of its --loss first."""
    few, many = min(1024, num_words // 8), min(4096, num_words // 4)
    return {
        PLAIN: ["plain"], "xs.LinearCrossEntropyLoss": ["exact"],
        f"xs.SampledSoftmaxLoss, head {many:,} + {many:,} unigram": [
            "sampled", "--head",
            str(many), "--samples",
            str(many), "--power", "1"
        ], f"xs.SampledSoftmaxLoss, head {few:,} + 32 private MIDX": [
            "midx", "--midx-head", str(few), "--midx-samples", "32"
        ], "Cut Cross-Entropy": ["cce"], "Liger": ["liger"]
    }


def make_run(bench: Bench, text: Text, layer: List[str]) -> Run:
    """Creates a run, whose model and loss are then compiled. Its time is set later."""
    width, layers, heads, context, batch_size = bench.language
    sizes = {
        "width": width, "layers": layers, "heads": heads, "context": context,
        "batch-size": batch_size, "eval-tokens": 120_000, "eval-epochs": 10**9
    }
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    if not bench.cuda:
        options.append("--no-compile")
    args = parse_arguments(
        ["--device", str(bench.device), "--lr", "1e-3", *options, "--loss", *layer])
    return Run(layer[0], text, args)


def train(run: Run, seconds: float) -> List[dict]:
    """Returns the points of the curve: seconds of training, steps, validation loss. Validation does
    not count as training time."""
    run.args.max_minutes, run.args.eval_minutes = seconds / 60, seconds / 60 / MARKS
    run.train(Interrupt(), lambda: None)
    return points_of(run.figures())


def part_language_model(bench: Bench) -> None:
    """Trains each output layer for the same time: --layer-seconds, or an equal share of the
    remaining time."""
    text = load_words(bench.text, 2, 20_000 if bench.tiny else None)
    layers = output_layers(text.num_tokens)
    for name, layer in list(layers.items()):
        package = PACKAGES.get(layer[0])
        if package and find_spec(package) is None:
            bench.row(f"(GPT, {name})", detail=f"No module named '{package}'")
            del layers[name]
    seconds = 0.05 if bench.tiny else bench.layer_seconds
    curves: Dict[str, List[dict]] = {}
    for name, layer in layers.items():
        try:
            run = make_run(bench, text, layer)
            bench.synchronize()
            if seconds is None:  # the first run has compiled the code shared by all
                left = (bench.end - time.monotonic()) / len(layers) - LAYER_SECONDS
                seconds = max(3.0, min(60.0, left))
            points = curves[name] = train(run, seconds)
        except Exception as error:
            bench.row(f"(GPT, {name})", detail=reason(error))
            continue
        last = points[-1]
        step = last["seconds"] / last["steps"]
        detail = f"{last['steps']} steps, {1e3 * step:.4g} ms per step, {text.num_tokens:,} words"
        bench.row(f"GPT, {name}: validation loss after {seconds:.0f} s", last["loss"], "nats", None,
                  detail, curve=points)
        del run
        bench.release()
    report(bench, curves)


def report(bench: Bench, curves: Dict[str, List[dict]]) -> None:
    """Reports when each output layer reaches the final loss of plain PyTorch."""
    if PLAIN not in curves:
        return
    end = curves[PLAIN][-1]
    for name, points in curves.items():
        if name != PLAIN:
            reached = seconds_to_reach(points, end["loss"])
            aim = "0.5" if name.startswith("xs.Sampled") else None
            figure = f"GPT, {name}: time to the last loss of plain PyTorch / its time"
            if reached is None:
                bench.row(
                    figure, None, "", aim, f"not reached: {points[-1]['loss']:.4f} after "
                    f"{points[-1]['seconds']:.1f} s, wanted {end['loss']:.4f}")
            else:
                bench.row(figure, reached / end["seconds"], "", aim,
                          f"{reached:.1f} of {end['seconds']:.1f} s to {end['loss']:.4f}")
