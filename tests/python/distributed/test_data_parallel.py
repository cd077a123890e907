"""Losses under DistributedDataParallel, which does not support row-sparse gradients."""

import pytest
import torch
from torch import nn

import xsoftmax as xs
from ranks import needs_gloo

pytestmark = needs_gloo


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0,
                                         world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.body, self.loss = nn.Linear(4, 4), loss

    def forward(self, input, target):
        return self.loss(self.body(input), target)


def losses(**kwargs):
    yield xs.SampledSoftmaxLoss(4, 9, sampler="uniform", num_samples=3, **kwargs)
    yield xs.CaneLoss(4, 9, candidates=2, **kwargs)
    yield xs.BeamTreeLoss(4, xs.LabelTree.balanced(9, 3), num_candidates=2, num_noises=1, **kwargs)
    yield xs.HierarchicalSoftmaxLoss(4, xs.LabelTree.balanced(9, 3), **kwargs)


def test_sparse_gradients_are_refused_and_dense_ones_reduced(one_process):
    input, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 8])
    for loss in losses():
        parallel = nn.parallel.DistributedDataParallel(Model(loss))
        with pytest.raises(
                RuntimeError, match=f"{type(loss).__name__}: expected a table with "
                "sparse_grad=False under DistributedDataParallel"):
            parallel(input, target)
        assert Model(loss)(input, target).isfinite()  # without DistributedDataParallel
    for loss in losses(sparse_grad=False):
        alone = Model(loss)
        grads = []
        for model in (alone, nn.parallel.DistributedDataParallel(alone)):
            alone.zero_grad()
            torch.manual_seed(1)
            model(input, target).backward()
            grads.append([parameter.grad.clone() for parameter in alone.parameters()])
        assert all(torch.equal(a, b) and a.ne(0).any() for a, b in zip(*grads))
