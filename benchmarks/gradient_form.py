"""Measures a training step with row-sparse and with dense gradients of a class table, and with
sparse_grad=None, which chooses.

    python benchmarks/gradient_form.py [--threads 2] [--repeats 21]
                                       [--only language_model,candidates] [--json [FILE]]

The language model is an LSTM with two layers of width 200, tied to its embedding, with 9,572 and
100,000 words and 20 x 35 tokens, whose frequencies decrease as 1 / rank. A step consists of the
forward and backward pass, gradient clipping and the optimizers, fused Adam for the LSTM and RowAdam
for the table. The sampled loss has a head of 64 and 64 private MIDX samples. The embedding is
nn.Embedding(sparse=True) unless the table's gradient is always dense.

"Candidates" varies the number of candidates of a step (targets and samples of 512 queries) per row
of the table, for an untied loss of width 200 without an encoder.
"""

from typing import Callable, Optional

import torch
from torch import Tensor, nn

import xsoftmax as xs
from common.records import run_benches
from common.timing import interleave

WIDTH, BATCH, STEPS = 200, 20, 35
FORMS = {"sparse_grad=None": None, "sparse_grad=True": True, "sparse_grad=False": False}
Step = Callable[[], object]


class LanguageModel(nn.Module):
    def __init__(self, words: int, make_loss: Callable[[], Optional[nn.Module]],
                 sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH, sparse=sparse)
        self.encoder = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)
        self.loss = make_loss()
        if self.loss is not None:
            self.loss.linear.weight = self.embedding.weight

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(words))[0].flatten(0, 1)
        if self.loss is None:
            return nn.functional.cross_entropy(hidden @ self.embedding.weight.t(), target.flatten())
        return self.loss(hidden, target.flatten())


def falling(classes: int, *shape: int) -> Tensor:
    """Draws classes with frequencies of 1 / rank."""
    return ((classes + 1.0)**torch.rand(shape)).long().clamp_(1, classes) - 1


def training_step(words: int, make_loss: Callable[[], Optional[nn.Module]], sparse: bool) -> Step:
    model = LanguageModel(words, make_loss, sparse)
    plain = model.loss is None
    optimizers = [
        torch.optim.Adam(model.encoder.parameters(), fused=True),
        torch.optim.Adam(model.embedding.parameters(), fused=True)
        if plain else xs.optim.RowAdam(model.embedding.parameters())
    ]
    clip = torch.nn.utils.clip_grad_norm_ if plain else xs.clip_grad_norm_

    def step() -> None:
        text = falling(words, BATCH, STEPS + 1)
        model(text[:, :-1], text[:, 1:]).backward()
        clip(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def sampled(words: int, form: Optional[bool]) -> nn.Module:
    return xs.SampledSoftmaxLoss(WIDTH, words,
                                 sampler=xs.samplers.MidxSampler(words, WIDTH, 64, shared=False),
                                 head_classes=64, sparse_grad=form)


def bench_language_model(args) -> list[dict]:
    """Step of the language model / nn.Linear + nn.CrossEntropyLoss"""
    figures = []
    for words in (9_572, 100_000):
        steps = {
            "nn.Linear + CrossEntropyLoss": training_step(words, lambda: None, False),
            "xs.LinearCrossEntropyLoss": training_step(
                words, lambda words=words: xs.LinearCrossEntropyLoss(WIDTH, words), False)
        }
        steps |= {
            name: training_step(words, lambda words=words, form=form: sampled(words, form), form
                                is not False)
            for name, form in FORMS.items()
        }
        medians = interleave(steps, args.repeats, warmup=5)
        rival = next(iter(medians.values()))
        figures += [{
            "figure": f"{words:,} words, {name}", "value": round(seconds / rival, 3),
            "medians": f"{1e3 * seconds:.1f} ms"
        } for name, seconds in medians.items()]
    return figures


def loss_step(classes: int, draws: int, form: Optional[bool]) -> Step:
    loss = xs.SampledSoftmaxLoss(
        WIDTH, classes, sampler=xs.samplers.LogUniformSampler(classes, draws, shared=False),
        sparse_grad=form)
    optimizer = xs.optim.RowAdam(loss.parameters())

    def step() -> None:
        loss(torch.randn(512, WIDTH, requires_grad=True), falling(classes, 512)).backward()
        xs.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_candidates(args) -> list[dict]:
    """Step of a loss, sparse_grad=True over sparse_grad=False, by candidates for each row of the
    table"""
    draws, figures = 40, []
    for ratio in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0):
        classes = int(512 * (draws + 1) / ratio)
        medians = interleave(
            {
                name: loss_step(classes, draws, form)
                for name, form in FORMS.items() if form is not None
            }, args.repeats, warmup=5)
        sparse, dense = medians.values()
        figures.append({
            "figure": f"{ratio:g}", "value": round(sparse / dense, 3),
            "medians": f"{1e3 * sparse:.1f} ms, {1e3 * dense:.1f} ms"
        })
    return figures


BENCHES = {"language_model": bench_language_model, "candidates": bench_candidates}

if __name__ == "__main__":
    run_benches(__doc__, BENCHES, question="Row-sparse or dense gradients?",
                against=f"nn.Linear + nn.CrossEntropyLoss, torch {torch.__version__}")
