"""FSDP2 and DistributedDataParallel on two ranks, with row optimizers and replaced heads."""

import pytest
import torch

import xsoftmax as xs
from ranks import needs_gloo, ranks

pytestmark = needs_gloo
N, D = 50, 6
RULES = {
    "RowAdam": (torch.optim.AdamW, dict(lr=0.1, weight_decay=0.01)),
    "RowSGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "RowAdagrad": (torch.optim.Adagrad, dict(lr=0.1))
}


def mesh():
    return torch.distributed.init_device_mesh("cpu", (2,))


def batch(seed, *shape):
    return torch.randint(N, shape, generator=torch.Generator().manual_seed(seed))


def sharded(rank, rule):
    """Trains uneven shards, one of them empty, and reloads the optimizer state in both ways."""
    from torch.distributed.checkpoint.state_dict import (get_optimizer_state_dict,
                                                         set_optimizer_state_dict)
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    fully_shard(model, mesh=mesh())

    def make():
        return getattr(xs.optim, rule)(model.parameters(), **RULES[rule][1])

    optimizer = make()
    for step in range(4):
        train(model, optimizer, step)
        if step == 1:
            state = get_optimizer_state_dict(model, optimizer)
            optimizer = make()
            set_optimizer_state_dict(model, optimizer, state)
        if step == 2:
            state = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(state)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def train(model, optimizer, step):
    optimizer.zero_grad()
    model(torch.randn(4, 5,
                      generator=torch.Generator().manual_seed(step))).square().sum().backward()
    xs.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_row_optimizers_step_sharded_parameters(rule):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    optimizer = RULES[rule][0](model.parameters(), **RULES[rule][1])
    for step in range(4):
        train(model, optimizer, step)
    for got in ranks(2).run(sharded, rule):
        torch.testing.assert_close(got, [parameter.detach() for parameter in model.parameters()],
                                   rtol=1e-4, atol=1e-5)


class Words(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = torch.nn.Sequential(torch.nn.Embedding(N, D),
                                                      torch.nn.Linear(D, D)), torch.nn.Linear(D, N)
        if head == "exact":
            self.head = xs.LinearCrossEntropyLoss.from_linear(self.head)
        elif head == "sampled":
            self.head = xs.SampledSoftmaxLoss.from_linear(self.head, sampler="uniform",
                                                          num_samples=8)

    def forward(self, ids, target):
        hidden = self.encoder(ids)
        return torch.nn.functional.cross_entropy(self.head(hidden), target) if type(
            self.head) is torch.nn.Linear else self.head(hidden, target)


def fsdp(rank, head):
    from torch.distributed.fsdp import fully_shard
    model = Words(head)
    if head == "plain":
        fully_shard(model, mesh=mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    else:
        fully_shard(xs.distributed.replicate(model, mesh()), mesh=mesh(),
                    ignored_params=set(model.head.parameters()))
        optimizer = xs.optim.RowAdam(model.parameters(), lr=0.05, weight_decay=0.01)
    torch.manual_seed(rank)
    values = []
    for step in range(4):
        ids, target = batch(step + 10 * rank, 2, 16)
        optimizer.zero_grad()
        value = model(ids, target)
        value.backward()
        if head == "sampled":
            assert model.head.linear.weight.grad.is_sparse
        xs.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        values.append(value.item())
    weight = model.eval().head.linear.weight.detach() if head != "plain" else None
    return torch.tensor(values), weight


def test_fsdp2_with_the_exact_loss_trains_like_the_plain_model():
    plain, exact = ranks(2).run(fsdp, "plain"), ranks(2).run(fsdp, "exact")
    for (want, _), (got, _) in zip(plain, exact):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_fsdp2_with_row_sparse_gradients_keeps_ranks_equal():
    (_, first), (_, second) = ranks(2).run(fsdp, "sampled")
    assert torch.equal(first, second)


def data_parallel(rank, kind):
    from transformers_checks import EXACT, SAMPLED, gpt2
    model = gpt2(tied=True)
    if kind != "plain":
        xs.integrations.transformers.replace_head(model, **(EXACT if kind == "exact" else SAMPLED))
        xs.distributed.replicate(model)
        optimizer = xs.optim.RowAdam(model.parameters(), lr=0.05, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    called = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    values = []
    for step in range(3):
        ids = batch(step + 10 * rank, 2, 9)
        optimizer.zero_grad()
        value = called(input_ids=ids, labels=ids).loss
        value.backward()
        optimizer.step()
        values.append(value.item())
    return torch.tensor(values), model.state_dict()["lm_head.weight"].clone()


@pytest.mark.slow
def test_data_parallel_transformers_train_like_the_plain_model():
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install "
        "xsoftmax[integrations]")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install "
                        "xsoftmax[integrations]")
    plain, exact = ranks(2).run(data_parallel, "plain"), ranks(2).run(data_parallel, "exact")
    for (want, _), (got, table) in zip(plain, exact):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (_, first), (_, second) = ranks(2).run(data_parallel, "sampled")
    assert torch.equal(first, second)
