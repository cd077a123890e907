"""A small GPT trained for equal time with each output layer: validation loss against time."""

import math
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xsoftmax as xs
from examples.common.attention import TransformerLayer
from examples.language_model.data import load_corpus

from .bench import Bench, reason

PLAIN = "F.linear + F.cross_entropy, torch.compile"
CUT = "Cut Cross-Entropy"
RATE, WARM_UP, MARKS = 1e-3, 100, 8
LAYER_SECONDS = 6  # time per output layer for warm-up and validation


@dataclass
class Text:
    words: int
    counts: Tensor
    train: Tensor
    valid: Tensor


class Encoder(nn.Module):
    """Maps embedded words [B, T, width] to hidden states [B, T, width]."""
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.layers = nn.ModuleList(
            TransformerLayer(width, heads, 0.0, 4 * width, nn.GELU) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, embedded: Tensor) -> Tensor:
        hidden = embedded + self.position[:embedded.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


def exact_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


class Plain(nn.Module):
    """An output layer that calls a function of hidden states and table in bfloat16, and targets."""
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], classes: int,
                 width: int) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(width, classes, bias=False)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.function(hidden.bfloat16(), self.linear.weight.bfloat16(), target)


def output_layers(bench: Bench, text: Text) -> Dict[str, Callable[[], nn.Module]]:
    """Returns a function per output layer that creates it."""
    width, words = bench.language[0], text.words
    few, many = min(1024, words // 8), min(4096, words // 4)

    def sampled() -> nn.Module:
        sampler = xs.samplers.UnigramSampler(text.counts, many)
        return xs.SampledSoftmaxLoss(width, words, sampler=sampler, head_classes=many)

    def midx() -> nn.Module:
        return xs.SampledSoftmaxLoss(width, words, sampler="midx", num_samples=32, head_classes=few)

    def cut() -> nn.Module:
        from cut_cross_entropy import linear_cross_entropy
        return Plain(linear_cross_entropy, words, width)

    return {
        PLAIN: lambda: Plain(bench.compiled(exact_cross_entropy), words, width),
        "xs.LinearCrossEntropyLoss": lambda: xs.LinearCrossEntropyLoss(width, words),
        f"xs.SampledSoftmaxLoss, head {many:,} + {many:,} unigram": sampled,
        f"xs.SampledSoftmaxLoss, head {few:,} + 32 private MIDX": midx, CUT: cut
    }


class Trainer:
    """The model, optimizers and batches for one output layer."""
    def __init__(self, bench: Bench, text: Text, loss: nn.Module) -> None:
        width, layers, heads, self.context, self.batch_size = bench.language
        torch.manual_seed(0)
        self.bench, self.text = bench, text
        sampled = isinstance(loss, xs.SampledSoftmaxLoss)
        self.embedding = nn.Embedding(text.words, width, sparse=sampled).to(bench.device)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.encoder = Encoder(width, layers, heads, self.context).to(bench.device)
        self.encode = bench.compiled(self.encoder)
        self.loss = loss.to(bench.device)
        self.loss.linear.weight = self.embedding.weight
        dense = torch.optim.AdamW(self.encoder.parameters(), lr=RATE, weight_decay=0.1, fused=True)
        table = [self.embedding.weight]
        self.optimizers = [
            dense,
            xs.optim.RowAdam(table, lr=RATE) if sampled else torch.optim.AdamW(
                table, lr=RATE, weight_decay=0.0, fused=True)
        ]

    def autocast(self) -> Any:
        return torch.autocast(self.bench.device.type, dtype=torch.bfloat16)

    def batch(self) -> Tuple[Tensor, Tensor]:
        train, device = self.text.train, self.bench.device
        first = torch.randint(len(train) - self.context - 1, (self.batch_size, 1), device=device)
        words = train[first + torch.arange(self.context + 1, device=device)]
        return words[:, :-1], words[:, 1:].flatten()

    def warm_up(self) -> None:
        """Compiles the model, and creates the optimizer state."""
        for _ in range(2 if self.bench.tiny else 6):
            self.step(0.0)
        self.bench.synchronize()

    def step(self, rate: float) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        words, target = self.batch()
        with self.autocast():
            value = self.loss(self.encode(self.embedding(words)).flatten(0, 1), target)
        value.backward()
        nn.utils.clip_grad_norm_(self.encoder.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def validate(self) -> float:
        """Returns the exact loss on the validation text, in nats per word."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, xs.optim.RowAdam):
                optimizer.flush()
        valid, rows = self.text.valid, 16
        weight = self.embedding.weight.bfloat16()
        total, count, block = 0.0, 0, rows * self.context
        for begin in range(0, min(len(valid), 120_000) - block, block):
            words = valid[begin:begin + block].view(rows, self.context)
            target = valid[begin + 1:begin + block + 1]
            with self.autocast():
                hidden = self.encoder(self.embedding(words)).flatten(0, 1)
            total += exact_cross_entropy(hidden.bfloat16(), weight, target).item() * len(target)
            count += len(target)
        return total / count


def learning_rate(steps: int, share: float) -> float:
    """Returns the learning rate: a warm-up over steps, and a cosine over the fraction of time."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return RATE * min(1.0, (steps + 1) / WARM_UP) * (0.1 + 0.9 * cosine)


def train(trainer: Trainer, seconds: float) -> List[dict]:
    """Returns the points of the curve: seconds of training, steps, validation loss. Validation does
    not count as training time."""
    check_every = 2 if trainer.bench.tiny else 20
    used, steps, points = 0.0, 0, []
    begin = time.perf_counter()
    while len(points) < MARKS:
        trainer.step(learning_rate(steps, used / seconds))
        steps += 1
        if steps % check_every == 0:
            trainer.bench.synchronize()
            used += time.perf_counter() - begin
            if used >= seconds * (len(points) + 1) / MARKS:
                points.append({"seconds": used, "steps": steps, "loss": trainer.validate()})
            begin = time.perf_counter()
    return points


def seconds_to_reach(points: List[dict], loss: float) -> Optional[float]:
    """Returns when the curve first reaches `loss`, with linear interpolation between points."""
    before = None
    for point in points:
        if point["loss"] <= loss:
            if before is None or point["loss"] == before["loss"]:
                return point["seconds"]
            share = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return before["seconds"] + share * (point["seconds"] - before["seconds"])
        before = point
    return None


def load_text(bench: Bench) -> Text:
    corpus = load_corpus(bench.text, max_tokens=20_000 if bench.tiny else None)
    device = bench.device
    return Text(len(corpus.words),
                corpus.counts.double().clamp(min=0.5), corpus.train.to(device),
                corpus.valid.to(device))


def part_language_model(bench: Bench) -> None:
    """Trains each output layer for the same time; the remaining time is divided among them."""
    text = load_text(bench)
    layers = {}
    for name, make in output_layers(bench, text).items():
        try:
            layers[name] = make()
        except Exception as error:
            bench.row(f"(GPT, {name})", detail=reason(error))
    count, seconds = len(layers), 0.05 if bench.tiny else None
    curves: Dict[str, List[dict]] = {}
    for name in list(layers):
        try:
            trainer = Trainer(bench, text, layers.pop(name))
            trainer.warm_up()
            if seconds is None:  # the first trainer has compiled the code shared by all
                left = (bench.end - time.monotonic()) / count - LAYER_SECONDS
                seconds = max(3.0, min(60.0, left))
            points = curves[name] = train(trainer, seconds)
        except Exception as error:
            bench.row(f"(GPT, {name})", detail=reason(error))
            continue
        last = points[-1]
        step = last["seconds"] / last["steps"]
        detail = f"{last['steps']} steps, {1e3 * step:.4g} ms per step, {text.words:,} words"
        bench.row(f"GPT, {name}: validation loss after {seconds:.0f} s", last["loss"], "nats", None,
                  detail, curve=points)
        del trainer
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
