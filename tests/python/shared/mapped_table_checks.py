"""Tables in files, and training over them."""

import json

import pytest
import torch
from torch import nn

import xsoftmax as xs

ops = torch.ops.xsoftmax
N, D, Q = 3000, 24, 32
OPTIMIZERS = {
    "RowSGD": lambda params: xs.optim.RowSGD(params, lr=0.1),
    "RowSGD, momentum": lambda params: xs.optim.RowSGD(params, lr=0.1, momentum=0.9),
    "RowAdagrad": lambda params: xs.optim.RowAdagrad(params, lr=0.1, initial_accumulator_value=0.25
                                                     ),
    "RowAdagrad, row_wise": lambda params: xs.optim.RowAdagrad(params, lr=0.1, row_wise=True),
    "RowAdam": lambda params: xs.optim.RowAdam(params, lr=0.1, weight_decay=0.01),
}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "classes.safetensors")


def state_of(path):
    """The mark in the header, read without the library."""
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8),
                                                   "little")))["__metadata__"]["state"]


def made(path, **options):
    torch.manual_seed(1)
    return xs.tables.mapped(path, N, D, progress=False, **options)


def in_memory(weight):
    return nn.Parameter(weight.detach().clone())


def loss_over(weight):
    return xs.SampledSoftmaxLoss.from_linear(xs.tables.linear(weight), sampler="log_uniform",
                                             num_samples=40)


def train(weight, optimizer, steps, seed=0):
    torch.manual_seed(seed)
    loss = loss_over(weight)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randn(Q, D), torch.randint(N, (Q,))).backward()
        optimizer.step()
