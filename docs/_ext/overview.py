"""The overviews of docs/benchmarks and docs/experiments: `{overview}` shows headline figures of the
records as a table and a bar chart.

A headline names cells of a record. A record that no longer has them is an error, so no figure on
these pages is typed by hand.
"""

import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import benchmark_pages
import pages

DOCS = Path(__file__).parent.parent


@dataclass
class Headline:
    """
    A figure of a record.

    Args:
        record: name of the record without .json, in docs/benchmarks or docs/experiments.
        label: what is measured, in a few words.
        row, column: the cell. The row is named by its first cell.
        over: the row of the rival. The factor is then the rival's number over that of `row`.
        factor: "inverse" if the cell is a ratio xsoftmax / rival, "as is" if it is a factor,
            otherwise the unit of the cell; not used for experiments.
        against: the rival, for the table.
        table: number of the table in the record, from 1. Default: the first that has the cell.
    """

    record: str
    label: str
    row: str
    column: str = "value"
    over: str | None = None
    factor: str = "inverse"
    against: str = ""
    table: int | None = None


BENCHMARKS = [
    Headline("training_step", "Training step, 1,000,000 classes", "xs.SampledSoftmaxLoss",
             "1,000,000 classes", "nn.Linear + CrossEntropyLoss", against="`nn.Linear` + "
             "`nn.CrossEntropyLoss`, Adam"),
    Headline("training_step", "Exact loss, 1,000,000 classes", "xs.LinearCrossEntropyLoss",
             "1,000,000 classes", "nn.Linear + CrossEntropyLoss", against="`nn.Linear` + "
             "`nn.CrossEntropyLoss`, Adam"),
    Headline("output_layer", "512 shared samples, 1,000,000 classes",
             "512 shared, N 1M, D 256, highest: whole step, RowAdam / naive with SparseAdam",
             against="sampled softmax in plain PyTorch, SparseAdam"),
    Headline("output_layer", "20 private samples, 1,000,000 classes",
             "20 private, N 1M, D 256: forward + backward / naive",
             against="sampled softmax in plain PyTorch"),
    Headline("cuda", "512 shared samples on an H100, CUDA graph",
             "the same step, xsoftmax, as a CUDA graph / naive with SparseAdam",
             against="plain PyTorch with SparseAdam, eager"),
    Headline("cuda", "512 shared samples on an H100, eager",
             "512 shared, N 1M, D 256, Q 8,192: step / naive with SparseAdam",
             against="plain PyTorch with SparseAdam, eager"),
    Headline(
        "cuda", "Exact loss on an H100, bfloat16",
        "exact loss, N 131k, D 256, Q 8,192, forward + backward / F.linear + F.cross_entropy, "
        "bfloat16", against="`F.linear` + `F.cross_entropy`, eager"),
    Headline("midx", "20 private MIDX samples, 1,000,000 classes",
             "20 private MIDX-rq / naive uniform private 20",
             against="uniform samples in plain PyTorch"),
    Headline("gradient_form", "LSTM step, 100,000 words", "100,000 words, sparse_grad=None",
             against="`nn.Linear` + `nn.CrossEntropyLoss`"),
    Headline("topk", "Best 100 of 100,000 classes, 256 queries", "k = 100 / compiled",
             against="`F.linear`, `log_softmax` and `torch.topk`, compiled"),
    Headline("retrieval", "Certified search, one query, 1,000,000 items",
             "certified top-10 / scoring all, single", against="scoring all classes"),
    Headline("trees", "Top 5 by beam search, 1,000,000 classes",
             "top-5 prediction by beam search, N 1M, D 256 / matmul + topk",
             against="matrix product and `torch.topk`"),
    Headline("two_tower", "Two towers, batch of 4,096",
             "4,096 x 4,096 x 64, a step / by hand: time", against="the same in plain PyTorch"),
    Headline("extreme_labels", "Extreme multi-label training, Gowalla",
             "gowalla: training / libpecos", against="libpecos"),
    Headline("data_parallel", "Two ranks, 1,000,000 classes, split table",
             "split / dense, N 1,000,000", against="DistributedDataParallel, dense gradient"),
    Headline("xr_linear_ranks", "Extreme multi-label training on two ranks", "tfn",
             "together / alone", against="one process"),
    Headline("serving", "Top 10 of 100,000 classes, 64 queries", "topk, AOTInductor", "64 queries",
             "nn.Linear, AOTInductor", against="`nn.Linear` + `torch.topk`, AOTInductor"),
    Headline("decode", "Head of a trained language model, greedy decoding", "greedy, batch 1",
             "head / dense head", against="`nn.Linear`"),
    Headline("id_table", "Raw ids: look up an id", "look up, time per id: torchrec / xsoftmax",
             factor="as is", against="torchrec"),
    Headline("resize_classes", "Add new classes, 1,000 at a time",
             "uniform, 1,000 at a time: us per row", factor="us per class"),
    Headline("streaming_counts", "Count 4,096 raw ids of a stream",
             "open ids, hashes=2, update, ms", factor="ms"),
    Headline("mapped_table", "Table of 30.7 GB in a file, 25 GB of memory",
             "by falling frequency, after 10,000 steps: mapped / memory",
             against="a tenth of the classes in memory"),
    Headline("host_cost", "Host time of a tiny step", "16 uniform, shared",
             against="`nn.Linear` + `nn.CrossEntropyLoss` + SGD", table=2),
]

EXPERIMENTS = [
    Headline("midx_words.ptb", "Perplexity, Penn Treebank: head 64 + 64 MIDX samples",
             "head 64 + 64 private midx, ranking", "test / exact"),
    Headline("midx_words.ptb", "Perplexity, Penn Treebank: head 512 + 512 shared samples",
             "512 shared unigram, head 512", "test / exact"),
    Headline("midx_words.novels", "Perplexity, novels, one seed: head 64 + 64 MIDX samples",
             "head 64 + 64 private midx, ranking", "test / exact"),
    Headline("midx_words.novels", "Perplexity, novels, one seed: head 512 + 512 shared samples",
             "512 shared unigram, head 512", "test / exact"),
    Headline("midx_items.beauty", "NDCG@10, Amazon Beauty: 64 MIDX samples", "64 private midx",
             "NDCG@10 / full"),
    Headline("midx_items.beauty", "NDCG@10, Amazon Beauty: 64 uniform samples",
             "64 private uniform", "NDCG@10 / full"),
    Headline("midx_items.beauty", "NDCG@10, Amazon Beauty: 512 shared samples by frequency",
             "512 shared unigram", "NDCG@10 / full"),
    Headline("midx_items.gowalla", "NDCG@10, Gowalla, one seed: 64 MIDX samples", "64 private midx",
             "NDCG@10 / full"),
    Headline("midx_items.gowalla", "NDCG@10, Gowalla, one seed: 64 uniform samples",
             "64 private uniform", "NDCG@10 / full"),
    Headline("midx_items.gowalla", "NDCG@10, Gowalla, one seed: 512 shared samples by frequency",
             "512 shared unigram", "NDCG@10 / full"),
    Headline("cane_words.ptb", "Perplexity, Penn Treebank: CANE, 60 words, half of them noise",
             "CANE-60, half of them noises", "test / exact"),
    Headline("cane_words.ptb", "Perplexity, Penn Treebank: BlackOut, 60 words", "BlackOut-60",
             "test / exact"),
    Headline("cane_words.ptb", "Perplexity, Penn Treebank: NCE, 60 words", "NCE-60",
             "test / exact"),
]


def number(cell: str) -> float:
    """Returns the first number of a cell: "12,858.2 ms, 8,011 MB" is 12858.2."""
    return float(re.search(r"[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?", cell)[0].replace(",", ""))


def cell_of(headline: Headline, record: dict, row: str) -> str:
    return benchmark_pages.cell_of(record, row, headline.column, headline.table)


def factor_of(headline: Headline, record: dict) -> float | None:
    """Returns the rival's number over xsoftmax's; None for a figure with a unit."""
    if headline.factor not in ("inverse", "as is"):
        return None
    value = number(cell_of(headline, record, headline.row))
    if headline.over is not None:
        return number(cell_of(headline, record, headline.over)) / value
    return value if headline.factor == "as is" else 1 / value


def shown(factor: float) -> str:
    """Formats a factor: 5,591x, 43x, 2.2x, 0.93x."""
    digits = 0 if factor >= 10 else 1 if factor >= 1.95 else 2
    return f"{factor:,.{digits}f}x"


def benchmark_rows(folder: Path = DOCS / "benchmarks") -> list[tuple[Headline, float | None, str]]:
    found = []
    for headline in BENCHMARKS:
        record = benchmark_pages.read(folder / f"{headline.record}.json")
        factor = factor_of(headline, record)
        if factor is None:
            text = f"{cell_of(headline, record, headline.row)} {headline.factor}"
        else:
            text = shown(factor)
        found.append((headline, factor, text))
    return found


def benchmark_table(rows: list[tuple[Headline, float | None, str]]) -> str:
    lines = ["| measurement | speed | compared with |", "|---|---:|---|"]
    lines += [
        f"| [{pages.cell(headline.label)}]({headline.record}.md) | {text} | {headline.against} |"
        for headline, _, text in rows
    ]
    return "\n".join(lines) + "\n"


def experiment_table(folder: Path = DOCS / "experiments") -> str:
    lines = ["| measurement | relative to the exact loss |", "|---|---:|"]
    for headline in EXPERIMENTS:
        record = benchmark_pages.read(folder / f"{headline.record}.json")
        value = cell_of(headline, record, headline.row)
        page = headline.record.partition(".")[0]
        lines.append(f"| [{pages.cell(headline.label)}]({page}.md) | {value} |")
    return "\n".join(lines) + "\n"


def chart(rows: list[tuple[Headline, float | None, str]]) -> str:
    """Returns an SVG of bars that start at 1x, on a logarithmic axis."""
    bars = [(headline.label, factor, text) for headline, factor, text in rows if factor is not None]
    left, width, height = 310, 640, 22
    low, high = (math.log10(pick(factor for _, factor, _ in bars)) for pick in (min, max))
    low, high = min(low, 0.0), max(high, 0.1)
    per_decade = (width - left - 110) / (high - low)
    one = left + 50 - low * per_decade
    parts = []
    for place, (label, factor, text) in enumerate(bars):
        y, end = height * place + 4, one + math.log10(factor) * per_decade
        begin, length = min(one, end), max(abs(end - one), 1)
        colour = "#2a7f62" if factor >= 1 else "#b4552d"
        parts.append(
            f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{begin:.1f}" y="{y}" width="{length:.1f}" height="16" fill="{colour}"/>' +
            (f'<text x="{end + 5:.1f}" y="{y + 12}">{text}</text>' if factor >=
             1 else f'<text x="{end - 5:.1f}" y="{y + 12}" text-anchor="end">{text}</text>'))
    bottom = height * len(bars) + 4
    return (f'<div style="overflow-x: auto"><svg viewBox="0 0 {width} {bottom}" role="img" '
            f'style="min-width: 38rem; width: 100%" font-size="12" fill="currentColor" '
            f'aria-label="Speed relative to the rival of each measurement, on a logarithmic axis">'
            f'{"".join(parts)}<line x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="{bottom}" '
            f'stroke="currentColor"/></svg></div>')


class Overview(SphinxDirective):
    required_arguments = 1

    def run(self):
        folder = self.arguments[0]
        if folder not in ("benchmarks", "experiments"):
            raise self.error(f"expected benchmarks or experiments, got {folder!r}")
        for path in (DOCS / folder).glob("*.json"):
            self.env.note_dependency(str(path))
        if folder == "experiments":
            return self.parse_text_to_nodes(experiment_table())
        rows = benchmark_rows()
        return [
            nodes.raw("", chart(rows), format="html"),
            *self.parse_text_to_nodes(benchmark_table(rows))
        ]


def setup(app) -> dict:
    app.add_directive("overview", Overview)
    return {"parallel_read_safe": True}
