"""On tensors that are said to be on a GPU no operator mixes devices, and no step reads a value on the host between
operators: every loss x sampler x estimator, each of which meets every optimizer, and the matcher, eagerly; every sampler
and every loss under torch.compile, laid out as on the CPU, and torch.export; no CUDA graph that torch.compile makes of
them (mode="reduce-overhead") holds what the host keeps. Within operators only shapes are computed there. Composites give the
values of the CPU on tensors that are not there. test_cuda_device.py has the kernels, on the emulator.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xsoftmax  # noqa: F401

LIBRARY = Path(os.environ.get("XSOFTMAX_CUDA_STAND_IN", Path(__file__).parents[2] / "build" / "package" / "tests" / "cpp" / "libcuda_stand_in.so"))
SHARDS = {"eager": 8, "export": 4, "compile": 8, "graphs": 8, "values": 2}


@pytest.mark.skipif(not LIBRARY.exists(), reason="the library tests/cpp/cuda_stand_in is not built: `make test` builds it")
@pytest.mark.skipif(torch.cuda.is_available() or torch.version.cuda is not None, reason="the stand-in is for builds without CUDA")
@pytest.mark.parametrize("way, shard", [(way, shard) for way, shards in SHARDS.items() for shard in range(shards)])
def test_devices_are_not_mixed(way, shard):
    program = Path(__file__).with_name("device_consistency.py")
    process = subprocess.run([sys.executable, str(program), str(LIBRARY), way, str(shard), str(SHARDS[way])], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert results["jobs"] * SHARDS[way] > {"eager": 200, "values": 130}.get(way, 30)
    assert not results["found"]


def test_operators_that_look_at_pending_updates_stay_out_of_cuda_graphs():
    """Which rows have them is known to the host alone: a replay would not ask again."""
    kinds = itertools.product(("adam", "adagrad", "sgd"), ("step", "rows", "flush"))
    for name in ("settle_", "reset_rows_", *(f"row_{rule}_{kind}_" for rule, kind in kinds)):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.xsoftmax, name).default.tags
