"""tables.in_memory: a parameter in huge pages, for embeddings of many rows."""

import re
from pathlib import Path

import pytest
import torch

import xsoftmax as xs


def flags_of(tensor):
    """Returns the flags of the memory mapping of a tensor's middle."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    flags, inside = None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    return flags


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
                    reason="this system has no transparent huge pages")
def test_a_large_table_is_in_huge_pages():
    table = xs.tables.in_memory(300_000, 64, init=None)
    assert table.nbytes > 2 * 2**25 and "hg" in flags_of(table)
    assert not table.any()


def test_rows_are_those_of_a_linear_layer_or_of_init():
    torch.manual_seed(0)
    table = xs.tables.in_memory(50, 8)
    torch.manual_seed(0)
    bound = 8**-0.5
    assert torch.equal(table, torch.empty(50, 8).uniform_(-bound, bound))
    assert type(table) is torch.nn.Parameter and table.requires_grad
    assert xs.tables.in_memory(5, dtype=torch.bfloat16,
                               init=torch.nn.init.ones_).tolist() == [1] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_trains_as_in_ordinary_memory(dtype):
    def trained(make):
        torch.manual_seed(0)
        weight = make()
        embedding = torch.nn.Embedding(*weight.shape, sparse=True, _weight=weight)
        begin = weight.detach().clone()
        optimizer = xs.optim.RowAdagrad([embedding.weight], lr=0.1, row_wise=True)
        for _ in range(3):
            embedding(torch.randint(500, (40,))).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert 80 < (weight != begin).any(1).sum() <= 120  # the parameter shares its memory
        return embedding.weight

    plain = trained(
        lambda: torch.nn.Parameter(torch.empty(500, 8, dtype=dtype).uniform_(-8**-0.5, 8**-0.5)))
    assert torch.equal(trained(lambda: xs.tables.in_memory(500, 8, dtype)), plain)


@pytest.mark.parametrize("arguments, options, error, message", [
    ((2.5, 3), {}, TypeError, "num_rows of type int, got float"),
    ((-1, 3), {}, ValueError, "num_rows of at least 0, got -1"),
    ((2, 3, torch.int64), {}, TypeError, "dtype as float32, .*, got torch.int64"),
    ((2, 3), dict(init=3), TypeError, "init as a function of rows, or None, got int"),
])
def test_wrong_arguments_are_refused(arguments, options, error, message):
    with pytest.raises(error, match="tables.in_memory: expected " + message):
        xs.tables.in_memory(*arguments, **options)


def test_pinned_refuses_other_devices_and_dtypes():
    with pytest.raises(ValueError,
                       match="tables.pinned: expected device as a CUDA device, got cpu"):
        xs.tables.pinned(3, 2, device="cpu")
    with pytest.raises(TypeError, match="tables.pinned: expected dtype as .*, got torch.int64"):
        xs.tables.pinned(3, 2, torch.int64)


@pytest.mark.parametrize("sizes, message", [([2, -1], "at least 0, got \\[2, -1\\]"),
                                            ([2**40, 2**40], "fewer than 2\\^63 bytes, got sizes"),
                                            ([2**62], "fewer than 2\\^63 bytes, got sizes")])
def test_impossible_pinned_tables_are_refused(sizes, message):
    with pytest.raises(ValueError, match="pinned_table: expected .*" + message):
        torch.ops.xsoftmax.pinned_table(torch.empty(0), sizes)
