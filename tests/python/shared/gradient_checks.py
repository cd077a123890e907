"""Row-sparse gradients for the tests of optimizers and gradient clipping."""

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# A 16-bit parameter may be rounded the other way once; float sums differ by their order.
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-6), torch.float64: dict(rtol=1e-12, atol=1e-13),
    torch.bfloat16: dict(rtol=1.6e-2, atol=1e-3), torch.float16: dict(rtol=2e-3, atol=1e-4)
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    torch.ops.xsoftmax.set_impl("kernel")


def opmath(dtype):
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def sparse(rows, values, num_rows):
    return torch.sparse_coo_tensor(rows[None], values, (num_rows, *values.shape[1:]),
                                   check_invariants=False)


def random_grad(num_rows, width, count=23, dtype=torch.float32, kind="duplicates"):
    """Returns (rows, values) as three sources make them.

    "duplicates": repeated rows in any order; "padded": sorted rows, zero values after the first of
    each; "unique": each row once.
    """
    values = torch.randn(count, *([width] if width else [])).to(dtype)
    if kind == "unique":
        return torch.randperm(num_rows)[:count], values[:num_rows]
    rows = torch.randint(num_rows, (count,))
    if kind == "padded":
        rows = rows.sort()[0]
        values[1:][rows[1:] == rows[:-1]] = 0
    return rows, values


def pair(num_rows=12, width=5, dtype=torch.float32):
    """Returns two equal parameters."""
    table = torch.randn(num_rows, *([width] if width else [])).to(dtype)
    return torch.nn.Parameter(table.clone()), torch.nn.Parameter(table.clone())
