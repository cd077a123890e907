"""Every loss x sampler x estimator, each of which meets every optimizer, and the matcher, on tensors that are said to be on a GPU: no device is mixed with
another, and no step reads a value on the host between operators. Within them only shapes are computed here; test_cuda_device.py looks there, on the
emulator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIBRARY = Path(os.environ.get("XSOFTMAX_CUDA_STAND_IN", Path(__file__).parents[2] / "build" / "package" / "tests" / "cpp" / "libcuda_stand_in.so"))


@pytest.mark.skipif(not LIBRARY.exists(), reason="the library tests/cpp/cuda_stand_in is not built: `make test` builds it")
@pytest.mark.skipif(torch.cuda.is_available() or torch.version.cuda is not None, reason="the stand-in is for builds without CUDA")
def test_devices_are_not_mixed():
    program = Path(__file__).with_name("device_consistency.py")
    process = subprocess.run([sys.executable, str(program), str(LIBRARY)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert results["combinations"] > 200
    assert not results["found"]
