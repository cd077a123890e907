import os

import pytest

# Test processes that run side by side have a thread each. Set before torch is loaded, and for the programs that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

import xsoftmax as xs
from xsoftmax.samplers import sampler

settings.register_profile("untimed", deadline=None)  # machines are slow at times; no test is about time
settings.load_profile("untimed")


@pytest.fixture(params=["kernel", "reference"])
def impl(request):
    with xs.use_impl(request.param):
        yield request.param


@pytest.fixture
def threads():
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def same_for_any_threads(threads):
    """Calls a function with 1, 2 and 4 threads: the tensors that it returns must have the same bits."""
    def check(compute):
        results = []
        for count in (1, 2, 4):
            threads(count)
            parts = [(tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,) for tensor in compute()]
            results.append([tensor for part in parts for tensor in part])
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return check


@pytest.fixture(autouse=True)
def process_as_it_was():
    """Takes back what a test leaves in the process: names of samplers, such as those that pages of the docs give; and
    anomaly detection, which the import of a model of RecBole (sine.py) turns on."""
    names = dict(sampler._REGISTRY)
    yield
    sampler._REGISTRY.clear()
    sampler._REGISTRY.update(names)
    torch.autograd.set_detect_anomaly(False)
