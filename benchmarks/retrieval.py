"""Searches the best ten of a million trained items: certified search compared with scoring all
items, and recall against time compared with faiss.

    python benchmarks/retrieval.py --out FOLDER [--items 1000000] [--steps 2000]
                                   [--gowalla train.txt | --random]
                                   [--threads 1] [--json [FILE]]

Requires faiss-cpu. --out keeps the trained vectors (retrieval_data.py) and the faiss indices.
--gowalla trains on recorded users instead: a file with one line per user, the user followed by its
items. --random uses rows and queries in random directions, the worst case for a certificate; the
only rival is then to score all items. recall_against_time.py plots a record.

"Scoring all" is the fastest of loss.topk, a matrix product with torch.topk, and faiss IndexFlatIP.
Figures are medians over --repeats of all settings in turn, for a batch of 256 queries and for
single queries (32 per turn). With one thread they are processor times, which do not depend on other
programs. Recall refers to the ten items with the largest scores.
"""

import argparse
import time
from pathlib import Path

import faiss
import torch

from common import retrieval_data
import xsoftmax as xs
from common.records import add_json, figures_table, report, table
from common.timing import interleave

K, BATCH, SINGLE = 10, 256, 32
CELLS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
PROBES = (1, 4, 8, 16, 32, 64, 128, 256)
BEAMS = (10, 16, 24, 32, 64, 128, 256)


def faiss_index(args, loss, kind):
    options = f"_{args.neighbors}_{args.ef_construction}" if kind == "hnsw" else ""
    path = args.out / f"{args.name}_{kind}{options}.faiss"
    start = time.perf_counter()
    if not path.exists():
        faiss.write_index(
            xs.to_faiss(loss, kind, neighbors=args.neighbors, ef_construction=args.ef_construction),
            str(path))
        print(f"{kind}: {time.perf_counter() - start:.0f} s", flush=True)
    return faiss.read_index(str(path))


def with_setting(index, name, value):
    """Returns a faiss search with one setting."""
    def run(queries):
        faiss.ParameterSpace().set_index_parameter(index, name, value)
        return torch.from_numpy(index.search(queries.numpy(), K)[1])

    return run


def methods(args, loss):
    """Returns name -> (family, setting, function from queries to ids)."""
    weight = loss.linear.weight.detach()
    flat = faiss_index(args, loss, "flat")
    found = {
        "xsoftmax, certified": ("certified", 0, lambda q: loss.search(q, K).ids),
        "loss.topk": ("all", 0, lambda q: loss.topk(q, K)[1]),
        "matmul + topk": ("all", 0, lambda q: (q @ weight.T).topk(K).indices),
        "faiss IndexFlatIP": ("all", 0, lambda q: torch.from_numpy(flat.search(q.numpy(), K)[1]))
    }
    if args.random:
        return found
    ivf, hnsw = (faiss_index(args, loss, kind) for kind in ("ivf", "hnsw"))
    for cells in CELLS:
        found[f"xsoftmax, {cells} cells"] = "xsoftmax", cells, lambda q, cells=cells: loss.search(
            q, K, max_cells=cells).ids
    for probes in PROBES:
        found[f"faiss IndexIVFFlat, {probes} lists"] = "faiss IndexIVFFlat", probes, with_setting(
            ivf, "nprobe", probes)
    for beam in BEAMS:
        found[f"faiss IndexHNSWFlat, beam of {beam}"] = "faiss IndexHNSWFlat", beam, with_setting(
            hnsw, "efSearch", beam)
    return found


def recall(ids, want):
    return (ids.unsqueeze(2) == want.unsqueeze(1)).any(2).double().mean().item()


def measure(args, loss, queries):
    runs = methods(args, loss)
    held_out = queries[BATCH:BATCH + 2048]
    want = runs["xsoftmax, certified"][2](held_out)
    batch_queries = queries[:BATCH]
    exact = (batch_queries.double() @ loss.linear.weight.detach().double().T).topk(K).indices
    assert torch.equal(
        exact, runs["xsoftmax, certified"][2](batch_queries)), "certified search is not exact"
    results = {
        name: {
            "family": family, "setting": setting,
            "recall": 1.0 if family == "all" else recall(run(held_out), want)
        }
        for name, (family, setting, run) in runs.items()
    }
    one = [queries[i:i + 1] for i in range(SINGLE)]

    def each(run):
        return lambda: [run(query) for query in one]

    clock = time.process_time if args.threads == 1 else time.perf_counter
    batch = interleave(
        {name: lambda run=run: run(batch_queries)
         for name, (_, _, run) in runs.items()}, args.repeats, 1, clock)
    single = interleave({name: each(run)
                         for name, (_, _, run) in runs.items()}, args.repeats, 1, clock)
    for name, found in results.items():
        found["batch"], found["single"] = batch[name] / BATCH, single[name] / SINGLE
    return results


def least(results, family, share, mode):
    """Returns the fastest setting of a family that reaches a recall; None if there is none."""
    reached = [(one[mode], name) for name, one in results.items()
               if one["family"] == family and one["recall"] >= share]
    return min(reached) if reached else None


def figures(args, loss, results, queries):
    found = []
    for mode in ("batch", "single"):
        certified, (brute,
                    name) = results["xsoftmax, certified"][mode], least(results, "all", 1.0, mode)
        found.append({
            "figure": f"certified top-10 / scoring all, {mode}", "value": certified / brute,
            "medians": f"xsoftmax {1e6 * certified:.0f} us, {name} {1e6 * brute:.0f} us "
            "per query"
        })
        for share in (0.9, 0.95, 0.99):
            ours = min(
                filter(None, (least(results, family, share, mode)
                              for family in ("xsoftmax", "certified"))))
            for rival in ("faiss IndexIVFFlat", "faiss IndexHNSWFlat"):
                theirs = least(results, rival, share, mode)
                if theirs:
                    found.append({
                        "figure": f"recall {share}, {mode}: xsoftmax / {rival}",
                        "value": ours[0] / theirs[0],
                        "medians": f"{ours[1]} {1e6 * ours[0]:.0f} us, {theirs[1]} "
                        f"{1e6 * theirs[0]:.0f} us per query"
                    })
    held_out = queries[BATCH:BATCH + 2048]
    want = loss.search(held_out, K).ids
    index = loss.search_index(queries[-1024:])
    for share in (0.9, 0.95, 0.99):
        search = loss.search(held_out, K, recall=share)
        found.append({
            "figure": f"recall of other queries with recall={share}",
            "value": recall(search.ids, want),
            "medians": f"{search.cells_read.double().mean():.1f} of {index.num_cells} "
            "cells"
        })
    exact = loss.search(held_out, K)
    found.append({
        "figure": "mean number of cells read by a certified search",
        "value": exact.cells_read.double().mean().item()
    })
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for vectors and indices")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=2000, help="number of training steps")
    parser.add_argument("--gowalla", type=Path, help="train.txt of the Gowalla set")
    parser.add_argument("--random", action="store_true", help="normally distributed rows and "
                        "queries")
    parser.add_argument("--neighbors", type=int, default=32, help="option of IndexHNSWFlat")
    parser.add_argument("--ef-construction", type=int, default=200, help="option of IndexHNSWFlat")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.random:
        args.name = f"random_{args.items}_64"
        weight, queries = torch.randn(args.items, 64), torch.randn(4096, 64)
        args.out.mkdir(parents=True, exist_ok=True)
    else:
        args.name = (f"gowalla_64_{args.steps}"
                     if args.gowalla else f"vectors_{args.items}_64_{args.steps}")
        vectors = retrieval_data.trained(args.out, args.name, args.gowalla or args.items,
                                         steps=args.steps)
        weight, queries = vectors["weight"].float(), vectors["queries"].float()
    loss = xs.LinearCrossEntropyLoss(weight.shape[1], weight.shape[0], device="meta").eval()
    loss.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    start = time.perf_counter()
    index = loss.search_index()
    built = time.perf_counter() - start
    results = measure(args, loss, queries)
    size = sum(part.numel() * part.element_size() for part in index.tensors)
    found = figures(args, loss, results, queries)
    found += [{"figure": "index: memory / that of the table", "value": size / (4 * weight.numel())},
              {"figure": "index: seconds to build", "value": built}]
    rows = [{
        "search": name, "recall@10": f"{one['recall']:.4f}",
        "single": f"{1e6 * one['single']:.0f} us", "batch": f"{1e6 * one['batch']:.1f} us"
    } for name, one in results.items()]
    report(args, __doc__, question="How fast is a search for the best classes?",
           against=f"faiss-cpu {faiss.__version__}; scoring all classes",
           tables=[table(rows), figures_table(found)], results=results, figures=found)


if __name__ == "__main__":
    main()
