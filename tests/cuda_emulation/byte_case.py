"""The bytes that a kernel must read and write, for test_bytes.py."""

import dataclasses
from typing import Callable, Dict, Optional

import torch

LIMIT = 1.15
SECTOR = 32
ops = torch.ops.xsoftmax


@dataclasses.dataclass
class Case:
    call: Callable[[], object]  # launches the kernel
    kernel: str  # without template arguments; several names, separated by commas, count together
    memory: float  # the minimum
    blocks: Optional[float] = None  # None: the same as memory
    shape: str = ""
    limit: float = LIMIT
    why: str = ""  # the reason for a limit above 1.15


CASES: Dict[str, Callable[[], Case]] = {}


def case(make):
    CASES[make.__name__] = make
    return make
