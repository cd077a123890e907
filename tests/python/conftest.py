import pytest
import torch
from hypothesis import settings

import xsoftmax as xs

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
