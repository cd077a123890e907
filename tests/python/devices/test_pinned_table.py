"""tables.pinned: a table in page-locked memory of the host that a GPU addresses.

XSOFTMAX_TEST_DEVICE: as in test_cuda_device.py.
"""

import copy
import os

import pytest
import torch

import xsoftmax as xs

DEVICE = torch.device(os.environ.get("XSOFTMAX_TEST_DEVICE", "cuda"))
CUDA = DEVICE.type == "cuda"
HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key("xsoftmax::pinned_table", "CUDA")
pytestmark = pytest.mark.skipif(CUDA and not (torch.cuda.is_available() and HAS_KERNEL),
                                reason="needs a GPU, and a CUDA build")
N, D = 500, 12


def pinned(dtype):
    like = torch.empty(0, dtype=dtype, device=DEVICE)
    return torch.nn.Parameter(torch.ops.xsoftmax.pinned_table(like, [N, D]))


def ordinary(dtype):
    return torch.nn.Parameter(torch.zeros(N, D, dtype=dtype, device=DEVICE))


def optimizers(weight):
    options = {"stochastic_rounding": True} if weight.dtype == torch.bfloat16 else {}
    return {
        "adagrad": lambda: xs.optim.RowAdagrad([weight], lr=0.1, row_wise=True, **options),
        "adam": lambda: xs.optim.RowAdam([weight], lr=0.1, weight_decay=0.1, **options)
    }


def trained(make, dtype, optimizer):
    torch.manual_seed(0)
    weight = make(dtype)
    with torch.no_grad():
        weight.copy_(torch.randn(N, D))
    embedding = torch.nn.Embedding(N, D, sparse=True, _weight=weight)
    step = optimizers(embedding.weight)[optimizer]()
    for _ in range(3):
        embedding(torch.randint(N, (40,)).to(DEVICE)).float().square().sum().backward()
        step.step()
        step.zero_grad()
    xs.optim.catch_up(embedding.weight)
    assert embedding.weight.data_ptr() == weight.data_ptr()
    return embedding.weight.detach()


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_trains_as_in_memory_of_the_device(dtype, optimizer):
    found, expected = (trained(make, dtype, optimizer) for make in (pinned, ordinary))
    assert found.device == expected.device and torch.equal(found, expected)


def test_losses_train_in_it():
    def trained(make):
        torch.manual_seed(0)
        weight = make(torch.float32)
        with torch.no_grad():
            weight.copy_(torch.randn(N, D))
        loss = xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler="uniform",
                                                 num_samples=20)
        optimizer = xs.optim.RowAdagrad(loss.parameters(), lr=0.1)
        hidden, target = torch.randn(30, D).to(DEVICE), torch.randint(N, (30,)).to(DEVICE)
        for _ in range(3):
            loss(hidden, target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(trained(pinned), trained(ordinary))


def test_it_begins_as_zeros_and_is_copied_like_any_tensor(tmp_path):
    weight = pinned(torch.float32)
    assert weight.shape == (N, D) and not weight.any()
    with torch.no_grad():
        weight.copy_(torch.randn(N, D))
    torch.save(weight, tmp_path / "table.pt")
    for other in (copy.deepcopy(weight), torch.load(tmp_path / "table.pt")):
        assert torch.equal(other, weight) and other.data_ptr() != weight.data_ptr()
    assert torch.equal(weight.cpu(), torch.load(tmp_path / "table.pt", map_location="cpu"))


def test_tables_of_no_rows():
    like = torch.empty(0, device=DEVICE)
    assert torch.ops.xsoftmax.pinned_table(like, [0, D]).shape == (0, D)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_parameter_of_python():
    weight = xs.tables.pinned(N, D, torch.bfloat16)
    assert weight.is_cuda and weight.abs().max() <= D**-0.5 and weight.std() > 0
    assert not xs.tables.pinned(N, D, init=None).any()
