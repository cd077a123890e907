"""cached_step: chunks give the gradients of one step over the whole batch."""

import pytest
import torch
from torch import nn

import xsoftmax as xs

Q, D, N = 23, 8, 40


class Towers(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(dropout),
                                   nn.Linear(16, D))
        self.item = nn.EmbeddingBag(N, D, mode="sum")
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.double()

    def item_vectors(self, ids, times=1):
        return self.item(ids) * times


def batch():
    made = torch.Generator().manual_seed(3)
    return torch.randn(Q, 5, generator=made,
                       dtype=torch.float64), torch.randint(N, (Q, 2), generator=made)


@pytest.mark.parametrize("chunk", [1, 4, 8, 23, 100])
@pytest.mark.parametrize("inputs", ["tensor", "tuple", "dict"])
def test_gradients_are_those_of_one_step(chunk, inputs):
    torch.manual_seed(0)
    model, (features, ids) = Towers(0.0), batch()
    losses = [xs.TwoTowerLoss(N, temperature=model.scale) for _ in range(2)]
    item_id = ids[:, 0]
    value = losses[0](model.query(features), model.item_vectors(ids, 2), item_id)
    value.backward()
    want = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    of_items = {
        "tensor": (lambda i: model.item_vectors(i, 2), ids),
        "tuple": (model.item_vectors, (ids, 2)),
        "dict": (model.item_vectors, dict(ids=ids, times=2))
    }
    got = xs.cached_step(losses[1], [(model.query, features), of_items[inputs]], item_id,
                         chunk_size=chunk)
    torch.testing.assert_close(got, value.detach(), rtol=1e-12, atol=0)
    assert not got.requires_grad
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], rtol=1e-6, atol=1e-12)
    # gradients accumulate
    xs.cached_step(losses[1], [(model.query, features), of_items[inputs]], item_id,
                   chunk_size=chunk)
    assert (model.query[0].weight.grad -
            want["query.0.weight"]).abs().max() > 0.5 * want["query.0.weight"].abs().max()


def test_both_passes_use_the_same_dropout_masks():
    """The result is a step of the network with these masks written out."""
    torch.manual_seed(0)
    model, (features, ids) = Towers(0.5), batch()
    masks = []
    hook = model.query[2].register_forward_hook(lambda module, inputs, output: masks.append(
        (output != 0) | (inputs[0] == 0)))
    state = torch.get_rng_state()
    xs.cached_step(xs.TwoTowerLoss(N), [(model.query, features), (model.item_vectors, ids)],
                   ids[:, 0], chunk_size=6)
    hook.remove()
    first, second = masks[:4], masks[4:]
    assert all(torch.equal(one, other) for one, other in zip(first, second)) and len(second) == 4
    assert not torch.cat(first).all()
    got = model.query[0].weight.grad.clone()
    model.zero_grad()
    torch.set_rng_state(state)
    whole = torch.cat([model.query(part) for part in features.split(6)])
    xs.TwoTowerLoss(N)(whole, model.item_vectors(ids), ids[:, 0]).backward()
    torch.testing.assert_close(got, model.query[0].weight.grad, rtol=1e-6, atol=1e-12)


def test_the_random_state_advances():
    model, (features, ids) = Towers(0.5), batch()
    after = []
    for _ in range(2):
        torch.manual_seed(0)
        xs.cached_step(xs.TwoTowerLoss(N), [(model.query, features), (model.item_vectors, ids)],
                       ids[:, 0], chunk_size=6)
        after.append(torch.rand(1))
    torch.manual_seed(0)
    for part in features.split(6):
        model.query(part)
    assert after[0] == after[1] == torch.rand(1)


def test_the_random_state_advances_after_an_error():
    """A program that skips a batch after an error, such as out of memory, must not repeat its draws
    in the next one."""
    model, (features, ids) = Towers(0.5), batch()
    calls = []

    def fails_in_the_second_pass(part):
        calls.append(len(part))
        if len(calls) == 6:  # the second of four chunks
            raise MemoryError("no memory")
        return model.query(part)

    states = []
    for tower in (model.query, fails_in_the_second_pass):
        torch.manual_seed(0)
        try:
            xs.cached_step(xs.TwoTowerLoss(N), [(tower, features), (model.item_vectors, ids)],
                           ids[:, 0], chunk_size=6)
        except MemoryError:
            assert len(calls) == 6
        states.append(torch.get_rng_state())
    assert len(calls) == 6 and torch.equal(states[0], states[1])


def test_memory_of_activations():
    """At most a chunk's rows go through a tower at a time."""
    model, (features, ids) = Towers(0.0), batch()
    rows = []
    model.query.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    xs.cached_step(xs.TwoTowerLoss(N), [(model.query, features), (model.item_vectors, ids)],
                   ids[:, 0], chunk_size=10)
    assert rows == [10, 10, 3] * 2


def test_a_gradient_scaler_is_used():
    model, (features, ids) = Towers(0.0), batch()
    grads = []
    for factor in (1.0, 8.0):
        model.zero_grad()
        xs.cached_step(xs.TwoTowerLoss(N), [(model.query, features),
                                            (model.item_vectors, ids)], ids[:, 0], chunk_size=10,
                       backward=lambda value, factor=factor: (value * factor).backward())
        grads.append(model.query[0].weight.grad.clone())
    torch.testing.assert_close(grads[1], 8 * grads[0])


def test_a_frozen_tower():
    model, (features, ids) = Towers(0.0), batch()
    model.item.requires_grad_(False)
    xs.cached_step(xs.TwoTowerLoss(N), [(model.query, features), (model.item_vectors, ids)],
                   ids[:, 0], chunk_size=10)
    assert model.item.weight.grad is None and model.query[0].weight.grad is not None


@pytest.mark.parametrize("chunk, inputs, message",
                         [(0, torch.zeros(3, 5), "expected chunk_size of "
                           "at least 1, got 0"), (2.0, torch.zeros(3, 5), "chunk_size"),
                          (2, (torch.zeros(3, 5), torch.zeros(4)),
                           "expected inputs of tower 0 to hold tensors of one batch size"),
                          (2, 7, "got no tensor")])
def test_bad_input(chunk, inputs, message):
    with pytest.raises(ValueError, match=message):
        xs.cached_step(xs.TwoTowerLoss(N), [(nn.Linear(5, D), inputs)], chunk_size=chunk)


def test_a_tower_that_drops_rows_is_refused():
    with pytest.raises(
            ValueError, match=r"expected tower 0 to give 2 rows for as many inputs, got "
            r"shape \[1, 5\]"):
        xs.cached_step(xs.TwoTowerLoss(N), [(lambda x: x[:1], torch.zeros(3, 5))], chunk_size=2)
