"""Operators and steps on fake CUDA tensors mix no devices and read no values on the host.

Every loss, sampler, estimator and optimizer runs eagerly; every sampler and loss also under
torch.compile (with the layout of the CPU), torch.export, and mode="reduce-overhead", whose CUDA
graphs must not capture values of the host. Composites must give the values of the CPU.
test_cuda_device.py tests kernels on the emulator.
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

LIBRARY = Path(
    os.environ.get(
        "XSOFTMAX_CUDA_STAND_IN",
        Path(__file__).parents[3] / "build" / "package" / "tests" / "cpp" / "libcuda_stand_in.so"))
SHARDS = {"eager": 8, "export": 4, "compile": 8, "graphs": 8, "values": 2}


@pytest.mark.slow
@pytest.mark.skipif(not LIBRARY.exists(), reason="cuda_stand_in is not built: make test")
@pytest.mark.skipif(torch.cuda.is_available() or torch.version.cuda is not None,
                    reason="the stand-in is for builds without CUDA")
@pytest.mark.parametrize("way, shard", [(way, shard) for way, shards in SHARDS.items()
                                        for shard in range(shards)])
def test_no_operator_mixes_devices_or_reads_values_on_the_host(way, shard):
    program = (Path(__file__).parents[1] / "shared/device_consistency.py")
    process = subprocess.run(
        [sys.executable,
         str(program),
         str(LIBRARY), way,
         str(shard), str(SHARDS[way])], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert results["jobs"] * SHARDS[way] > {"eager": 200, "values": 130}.get(way, 30)
    assert not results["found"]


def test_operators_that_check_pending_updates_are_not_captured():
    """Only the host knows which tables have them, and a replay would not check."""
    kinds = itertools.product(("adam", "adagrad", "sgd"), ("step", "rows", "flush"))
    for name in ("catch_up_", "reset_rows_", *(f"row_{rule}_{kind}_" for rule, kind in kinds)):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.xsoftmax, name).default.tags
