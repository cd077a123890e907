"""Runs one library for id_table.py, in its own process: maps ids to rows of a full table.

    python id_table_side.py SIDE --ids 10000000 --batch 65536 --threads 1

SIDE is "xsoftmax"; "torchrec", its MCHManagedCollisionModule with the LFU policy; "searchsorted", a
sorted tensor of ids with torch.searchsorted; or "dict", a Python dictionary with lists of ids.
Prints a line of JSON: nanoseconds per id.
"""

import argparse
import json
import time
from typing import Callable

import torch

LOOKED_UP = 2**21  # number of ids to look up


class XSoftmax:
    def __init__(self, args: argparse.Namespace):
        import xsoftmax as xs

        self.table = xs.IdTable(args.ids + 1)

    def insert(self, ids: torch.Tensor) -> None:
        self.table.train()(ids)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.eval()(ids)


class TorchRec:
    """torchrec assigns rows, and evicts others, once every `interval` ids: the more ids at a time,
    the lower the cost per id."""
    def __init__(self, args: argparse.Namespace):
        from torchrec import JaggedTensor
        from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

        self.jagged = JaggedTensor
        self.table = MCHManagedCollisionModule(args.ids + 1, torch.device("cpu"),
                                               LFU_EvictionPolicy(),
                                               eviction_interval=args.interval // args.batch)

    def features(self, ids: torch.Tensor) -> dict:
        return {"id": self.jagged(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))}

    def insert(self, ids: torch.Tensor) -> None:
        self.table.train()(self.features(ids))

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.eval()(self.features(ids))["id"].values()


class SearchSorted:
    """A sorted tensor without insertion: it is built from all ids at once."""
    def __init__(self, args: argparse.Namespace):
        self.ids = None

    def fill(self, ids: torch.Tensor) -> None:
        self.ids, self.rows = ids.sort()

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[place] == ids, self.rows[place], -1)


class Dict:
    def __init__(self, args: argparse.Namespace):
        self.rows: dict = {}

    def insert(self, ids: torch.Tensor) -> None:
        rows = self.rows
        for id in ids.tolist():
            rows.setdefault(id, len(rows))

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows
        return torch.tensor([rows.get(id, -1) for id in ids.tolist()])


SIDES = {"xsoftmax": XSoftmax, "torchrec": TorchRec, "searchsorted": SearchSorted, "dict": Dict}


def nanoseconds(call: Callable[[torch.Tensor], object], ids: torch.Tensor, batch: int) -> float:
    """Returns the nanoseconds per id."""
    start = time.perf_counter()
    for part in ids.split(batch):
        call(part)
    return 1e9 * (time.perf_counter() - start) / len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=2**16)
    parser.add_argument("--interval", type=int, default=2**20, help="torchrec: number of ids "
                        "between evictions")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.interval = max(args.interval // args.batch, 1) * args.batch
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ids, more = (torch.randint(-2**63, 2**63 - 2, (count,)) for count in (args.ids, LOOKED_UP))
    # A whole number of intervals, because torchrec would not have inserted the last ids otherwise.
    ids = ids[:max(len(ids) // args.interval, 1) * args.interval]
    known = ids[torch.randint(len(ids), (LOOKED_UP,))]
    side, found = SIDES[args.side](args), {}
    if hasattr(side, "fill"):
        side.fill(ids)
    else:
        found["insert into an empty table"] = nanoseconds(side.insert, ids, args.batch)
    rows = side.find(known[:args.batch])
    assert len(torch.unique(rows)) == len(torch.unique(
        known[:args.batch])), "an id without a row of its own"
    found["look up"] = min(nanoseconds(side.find, known, args.batch) for _ in range(3))
    found["look up, 4,096 ids per call"] = min(
        nanoseconds(side.find, known, 4096) for _ in range(3))
    # with a longer interval torchrec would insert none of these
    if args.side == "xsoftmax" or (args.side == "torchrec" and args.interval <= LOOKED_UP // 2):
        found["count ids that have a row"] = nanoseconds(side.insert, known, args.batch)
        side.insert(more)  # fills the table
        found["insert into a full table"] = nanoseconds(side.insert, more.flip(0) + 1, args.batch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
