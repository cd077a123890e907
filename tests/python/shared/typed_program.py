"""A user program for mypy in strict mode (test_types.py) that checks types of public names."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Tuple

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import xsoftmax as xs

N, D, Q = 60, 8, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, D)
        self.decoder = nn.Linear(D, N)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.decoder(self.encoder(x))
        return hidden


class FirstClasses(xs.samplers.Sampler):
    """Draws the first classes."""
    def sample(self, queries: Tensor, target: Optional[Tensor] = None,
               generator: Optional[torch.Generator] = None) -> List[xs.samplers.CandidateSet]:
        ids = torch.arange(self.num_samples)
        return [
            xs.samplers.CandidateSet(ids, torch.zeros(len(ids)),
                                     None if target is None else torch.zeros(target.shape), True)
        ]

    def log_count(self, queries: Tensor, ids: Tensor) -> Tensor:
        return torch.zeros(ids.shape)


def one_positive(batch: xs.CandidateBatch) -> Tensor:
    every: Tensor = torch.cat([batch.target.unsqueeze(1), batch.adjusted], 1)
    return every.logsumexp(1) - batch.target


if TYPE_CHECKING:  # the integrated packages may not be installed

    class MyTrainer(xs.integrations.transformers.Trainer):
        pass

    class MyGradients(xs.integrations.lightning.RowGradients):
        pass

    xs.integrations.torchmetrics.RecallAtK(5)
    xs.integrations.accelerate.Accelerator(cpu=True)


def train(loss: xs.LinearLoss, optimizer: xs.optim.RowAdam, hidden: Tensor,
          target: Tensor) -> float:
    value = assert_type(loss(hidden, target), Tensor)
    value.backward()
    assert_type(xs.clip_grad_norm_(loss.parameters(), 1.0), Tensor)
    optimizer.step()
    optimizer.zero_grad()
    return value.item()


def losses(hidden: Tensor, target: Tensor) -> None:
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.UnigramSampler(torch.ones(N), 8),
                                 bias=True, head_classes=4, device="cpu", dtype=torch.float32)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=1e-2, betas=(0.9, 0.99), row_wise=True,
                                 state_dtype=torch.float32)
    assert train(loss, optimizer, hidden, target) > 0
    optimizer.flush()
    optimizer.load_state_dict(optimizer.state_dict())
    loss.eval()
    assert_type(loss.exact(hidden, target), Tensor)
    assert_type(loss.topk(hidden, 3), Tuple[Tensor, Tensor])
    assert_type(loss.predict(hidden), Tensor)
    assert_type(loss.search(hidden, 3), xs.SearchResult)
    assert_type(loss.search_index(), xs.SearchIndex)
    torch.export.export(loss, (hidden, target)).run_decompositions(xs.decompositions())
    loss.train()
    assert_type(xs.diagnose(loss, hidden, target), xs.Diagnosis)
    loss.resize_classes(N + 2, optimizers=[optimizer])

    exact = xs.LinearCrossEntropyLoss(D, N, label_smoothing=0.1)
    assert_type(exact.log_prob(hidden), Tensor)
    model = Model()
    head = xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, sampler="midx", num_samples=4)
    assert_type(head, xs.SampledSoftmaxLoss)
    assert_type(
        xs.SampledSoftmaxLoss.from_linear(nn.Linear(D, N), sampler=FirstClasses(N, 4, shared=True)),
        xs.SampledSoftmaxLoss)
    xs.register_estimator("of_a_typed_program", one_positive, weighs=True)
    xs.CaneLoss(D, N, candidates=6, num_noises=2)
    tree = xs.LabelTree.balanced(N, 4)
    xs.BeamTreeLoss(D, tree, num_candidates=4, num_noises=2)
    xs.HierarchicalSoftmaxLoss(D, tree)
    xs.HierarchicalMatcher(D, tree)
    towers = xs.TwoTowerLoss(N, temperature=0.1, similarity="cosine",
                             counts=xs.samplers.StreamingCounts(N, half_life=100))
    assert torch.isfinite(towers(hidden, torch.randn(Q, D), target))
    assert_type(towers.topk(hidden, torch.randn(N, D), 3), Tuple[Tensor, Tensor])
    towers.resize_classes(N + 2)
    with xs.use_impl("reference"):
        xs.functional.linear_cross_entropy(hidden, exact.linear.weight, target, bias=None)


def tables(target: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weight = xs.tables.mapped(Path(folder) / "classes.safetensors", N, D, progress=False)
        assert_type(weight, nn.Parameter)
        xs.tables.flush(weight)
        del weight
    rows = xs.IdTable(N)
    rows.attach(xs.optim.RowSGD([nn.Parameter(torch.zeros(N, D))], lr=0.1, momentum=0.9))
    assert assert_type(rows(target), Tensor).shape == target.shape
    xs.samplers.UnionSampler(xs.samplers.UniformSampler(N, 4),
                             xs.samplers.MidxSampler(N, D, 4, codewords=4))
    xs.optim.RowAdagrad([{"params": [nn.Parameter(torch.zeros(N, D))], "lr": 0.1}])
    print(
        xs.__version__, xs.cpu_capability(),
        xs.metrics.precision_at_k(torch.zeros(2, 1, dtype=torch.int64),
                                  torch.zeros(2, dtype=torch.int64), 1))


if __name__ == "__main__":
    torch.manual_seed(0)
    losses(torch.randn(Q, D), torch.randint(N, (Q,)))
    tables(torch.randint(N, (Q,)))
