"""Compares the ranking of xs.advise with the results of training: each of its rows is trained for
the same time, from the same state of a language model.

The data are the words of Python's standard library; the model predicts a word from the four words
before it. The benchmark trains for a while, calls xs.advise, then trains with the loss of each row
for --seconds, and reports the exact loss on validation text.
"""

import argparse
import copy
import json
import sys
import time

import scipy.stats
import torch
from common.timing import machine, print_machine, print_table
from torch import Tensor, nn

import xsoftmax as xs

from examples.language_model.data import load_corpus

CONTEXT, WIDTH, BATCH = 4, 64, 1024


class Encoder(nn.Module):
    def __init__(self, words: int):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH, sparse=True)
        self.hidden = nn.Sequential(nn.Linear(CONTEXT * WIDTH, 256), nn.ReLU(),
                                    nn.Linear(256, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        return self.hidden(self.embedding(words).flatten(1))


def batches(ids: Tensor, generator: torch.Generator):
    windows = ids.unfold(0, CONTEXT + 1, 1)
    while True:
        part = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        yield part[:, :CONTEXT], part[:, CONTEXT]


def train(encoder: nn.Module, loss: nn.Module, ids: Tensor, seed: int, steps: int | None = None,
          seconds: float | None = None) -> int:
    """Trains for a number of steps or for `seconds` of processor time; returns the number of
    steps."""
    optimizer = xs.optim.RowAdam([*encoder.parameters(), *loss.parameters()], lr=1e-3)
    loss.train()
    start, taken = time.process_time(), 0
    for words, target in batches(ids, torch.Generator().manual_seed(seed)):
        if taken == steps or seconds is not None and time.process_time() - start > seconds:
            optimizer.flush()
            return taken
        optimizer.zero_grad()
        loss(encoder(words), target).backward()
        optimizer.step()
        taken += 1


@torch.no_grad()
def exact_loss(encoder: nn.Module, loss: nn.Module, ids: Tensor) -> float:
    loss.eval()
    words, target = next(batches(ids,
                                 torch.Generator().manual_seed(7))) if len(ids) < 4 * BATCH else (
                                     ids.unfold(0, CONTEXT + 1, 1)[:4 * BATCH, :CONTEXT],
                                     ids.unfold(0, CONTEXT + 1, 1)[:4 * BATCH, CONTEXT])
    return loss(encoder(words), target).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="number of training tokens: "
                        "%(default)s")
    parser.add_argument("--start-steps", type=int, default=300, help="steps before xs.advise is "
                        "called: %(default)s")
    parser.add_argument("--seconds", type=float, default=8, help="training time of each row: "
                        "%(default)s")
    parser.add_argument("--advise-seconds", type=float, default=20, help="%(default)s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    corpus = load_corpus(None, max_tokens=args.tokens)
    words, counts = len(corpus.words), corpus.counts.clamp(min=1)
    encoder = Encoder(words)
    loss = xs.SampledSoftmaxLoss(WIDTH, words, bias=True,
                                 sampler=xs.samplers.UnigramSampler(counts, 512), head_classes=512)
    train(encoder, loss, corpus.train, 0, steps=args.start_steps)
    inputs, target = next(batches(corpus.train, torch.Generator().manual_seed(1)))
    # Measure the rest of a step, with a loss that costs almost nothing.
    small = xs.SampledSoftmaxLoss(WIDTH, words, bias=True, sampler="uniform", num_samples=1)
    train(copy.deepcopy(encoder), small, corpus.train, 1, steps=20)
    begin = time.perf_counter()
    train(copy.deepcopy(encoder), small, corpus.train, 1, steps=50)
    model_ms = (time.perf_counter() - begin) / 50 * 1e3
    advice = xs.advise(loss,
                       encoder(inputs).detach(), target, args.advise_seconds, counts=counts,
                       model_ms=model_ms)
    before = exact_loss(encoder, loss, corpus.valid)
    rows = []
    for row in advice.rows:
        if row.code.startswith("#"):
            continue
        names = {"xs": xs, "counts": counts}
        exec(row.code, names)
        trained, copied = names["loss"], copy.deepcopy(encoder)
        trained.load_state_dict(
            {
                key: value.clone()
                for key, value in loss.state_dict().items() if key.startswith("linear.")
            }, strict=False)
        steps = train(copied, trained, corpus.train, 2, seconds=args.seconds)
        rows.append({
            "loss": row.name, "ms": row.ms, "bias": row.bias, "noise": row.noise,
            "error": row.error, "steps": steps, "trained": exact_loss(copied, trained, corpus.valid)
        })
    agreement = scipy.stats.spearmanr([row["error"] for row in rows],
                                      [row["trained"] for row in rows]).statistic
    found = {
        "words": words, "queries": BATCH, "width": WIDTH, "model_ms": model_ms, "before": before,
        "budget_ms": advice.budget_ms, "seconds": args.seconds, "rank_correlation": agreement,
        "rows": rows
    }
    if args.json:
        print(
            json.dumps(
                {
                    "machine": machine(),
                    "command": "python benchmarks/advise.py " + " ".join(sys.argv[1:]), **found
                }, indent=2))
        return
    print_machine()
    print(f"{words} words, {model_ms:.1f} ms per step besides the loss; exact loss before "
          f"{before:.3f}; rank correlation {agreement:.2f}\n")
    print_table(
        [{key: f"{value:.3g}" if isinstance(value, float) else value
          for key, value in row.items()} for row in rows], list(rows[0]))


if __name__ == "__main__":
    main()
