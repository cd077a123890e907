import os

import pytest

# Parallel test processes have one thread each. Set before torch is loaded, and inherited by the
# programs that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

import xsoftmax as xs
from xsoftmax.samplers import sampler

# no deadline: a busy machine is slow
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(params=["kernel", "reference"])
def impl(request):
    with xs.use_impl(request.param):
        yield request.param


@pytest.fixture
def threads():
    """`torch.set_num_threads`; the number is restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def same_for_any_threads(threads):
    """A check that a function returns tensors with the same bits for 1, 2 and 4 threads."""
    def check(compute):
        results = []
        for count in (1, 2, 4):
            threads(count)
            parts = [(tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
                     for tensor in compute()]
            results.append([tensor for part in parts for tensor in part])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

    return check


@pytest.fixture(autouse=True)
def restore_process_state():
    """Restores the registry of samplers, and turns off anomaly detection after each test.

    Programs of the documentation register samplers; importing RecBole turns on anomaly detection.
    """
    names = dict(sampler._REGISTRY)
    yield
    sampler._REGISTRY.clear()
    sampler._REGISTRY.update(names)
    torch.autograd.set_detect_anomaly(False)
