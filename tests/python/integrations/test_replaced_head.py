"""A loss that xs.replace_head put into a model is a part of it.

It shares the parameters, modes, devices and checkpoints of the model.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import xsoftmax as xs

D, N = 6, 40
SAMPLERS = {
    "uniform": dict(sampler="uniform"), "midx": dict(sampler="midx"),
    "log_z": dict(sampler="uniform", estimator="nce", log_z="learned"),
    "weighted": dict(sampler="uniform", weight=torch.linspace(0.5, 1.5, N))
}


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.decoder = nn.Linear(D, N, bias=bias)

    def forward(self, input):
        return self.decoder(self.body(input))


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, D, generator=generator), torch.randint(N, (8,), generator=generator)


def replaced(bias=True, **options):
    model = Model(bias)
    kwargs = dict(num_samples=6, **(options or SAMPLERS["uniform"]))
    return model, xs.replace_head(model, "decoder", xs.SampledSoftmaxLoss, **kwargs)


@pytest.mark.parametrize("bias", [True, False])
def test_an_optimizer_over_the_model_trains_the_table(bias):
    """If the model lacked the loss, its table would not be trained and its gradient would grow."""
    model, loss = replaced(bias)
    assert len(list(model.parameters())) == len(set(model.parameters())) == 3 + bias
    assert set(loss.parameters()) <= set(model.parameters())
    optimizer, before = xs.optim.RowAdam(model.parameters(), lr=0.1), loss.linear.weight.clone()
    for seed in range(3):
        optimizer.zero_grad()
        input, target = batch(seed)
        loss(model(input), target).backward()
        assert loss.linear.weight.grad._nnz() < N
        optimizer.step()
    optimizer.flush()
    assert not torch.equal(loss.linear.weight, before)


class ScaledLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(N))

    def forward(self, input):
        return super().forward(input) * self.scale


@pytest.mark.parametrize("kind", [xs.LinearCrossEntropyLoss, xs.SampledSoftmaxLoss, xs.CaneLoss])
def test_a_linear_with_another_forward_pass_is_refused(kind):
    """The loss would ignore the scale, which then would never train."""
    model = Model()
    model.decoder = layer = ScaledLinear(D, N)
    for make in (lambda: xs.replace_head(model, "decoder", kind), lambda: kind.from_linear(layer)):
        with pytest.raises(TypeError, match="forward pass of nn.Linear, got ScaledLinear"):
            make()
    assert model.decoder is layer


def test_the_loss_follows_train_eval_and_dtype_of_the_model():
    model, loss = replaced()
    input, target = batch()
    model.eval()
    assert not loss.training
    logits = F.linear(model(input), loss.linear.weight, loss.linear.bias)
    torch.testing.assert_close(loss(model(input), target), F.cross_entropy(logits, target))
    assert model.train() is model and loss.training
    model.double()
    assert {value.dtype for value in loss.parameters()} == {torch.float64}
    model.zero_grad()
    assert any(module is loss for module in model.modules())
    frozen = Model().eval()
    assert not xs.replace_head(frozen, "decoder", xs.LinearCrossEntropyLoss).training


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", SAMPLERS)
def test_checkpoints_load_with_and_without_a_replaced_head(options, bias, nested):
    """Checkpoints of the plain model load into one with a loss, and the reverse."""
    def wrapped(model):
        return nn.Sequential(model) if nested else model

    old, (model, loss) = wrapped(Model(bias)), replaced(bias, **SAMPLERS[options])
    model = wrapped(model)
    with torch.no_grad():
        for value in old.parameters():
            value.add_(1)
    prefix = "0.decoder." if nested else "decoder."
    extra = [prefix + "loss." + key for key in loss.state_dict() if "linear." not in key]
    assert sorted(model.state_dict()) == sorted([*old.state_dict(), *extra])
    places = [value.data_ptr() for value in model.state_dict().values() if value.numel() > 0]
    assert len(set(places)) == len(places)  # each tensor once
    assert model.load_state_dict(old.state_dict()) == ([], [])
    torch.testing.assert_close(loss.linear.weight, old.get_parameter(prefix + "weight"))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(2)
    keys = old.load_state_dict(model.state_dict(), strict=not extra)
    assert sorted(keys.unexpected_keys) == sorted(extra) and not keys.missing_keys
    torch.testing.assert_close(loss.linear.weight, old.get_parameter(prefix + "weight"))
    twin = wrapped(replaced(bias, **SAMPLERS[options])[0])
    assert twin.load_state_dict(model.state_dict()) == ([], [])
    for key, value in twin.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_state_dicts_of_a_parametrized_head_load_both_ways():
    def parametrized():
        model = Model()
        nn.utils.parametrizations.weight_norm(model.decoder)
        return model

    old, model = parametrized(), parametrized()
    loss = xs.replace_head(model, "decoder", xs.LinearCrossEntropyLoss)
    with torch.no_grad():
        for value in old.parameters():
            value.add_(1)
    assert "decoder.parametrizations.weight.original0" in model.state_dict()
    assert model.load_state_dict(old.state_dict()) == ([], [])
    torch.testing.assert_close(loss.linear.weight, old.decoder.weight)
    assert parametrized().load_state_dict(model.state_dict()) == ([], [])
    state = old.state_dict()
    del state["decoder.parametrizations.weight.original0"]
    with pytest.raises(RuntimeError, match='"decoder.parametrizations.weight.original0"'):
        model.load_state_dict(state)


def test_errors_name_missing_and_unexpected_keys_of_the_state_dict():
    model, _ = replaced(**SAMPLERS["log_z"])
    state = model.state_dict()
    del state["decoder.weight"], state["decoder.loss.log_z"]
    with pytest.raises(RuntimeError, match='Missing key.*: "decoder.weight"'):
        model.load_state_dict(state)
    state = {**model.state_dict(), "decoder.scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match='Unexpected key.*: "decoder.scale"'):
        model.load_state_dict(state)


def test_state_dict_applies_pending_updates():
    model, loss = replaced()
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.1, weight_decay=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        input, target = batch(seed)
        loss(model(input), target).backward()
        optimizer.step()
    saved = model.state_dict()["decoder.weight"].clone()
    optimizer.flush()
    assert torch.equal(saved, loss.linear.weight)


def test_a_copied_model_has_a_loss_of_its_own():
    model, loss = replaced()
    twin = copy.deepcopy(model)
    assert twin.decoder.loss is not loss
    with torch.no_grad():
        twin.decoder.loss.linear.weight.zero_()
    assert loss.linear.weight.abs().sum() > 0
    restored = xs.restore_head(model, loss)
    assert restored is model.decoder and list(model.state_dict()) == list(Model().state_dict())


def test_torch_distributed_state_dict_helpers_restore_the_table():
    model, loss = replaced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    input, target = batch()
    loss(model(input), target).backward()
    optimizer.step()
    state, of_optimizer = dcp.get_state_dict(model, optimizer)
    assert "decoder.weight" in state
    want = loss.linear.weight.detach().clone()
    with torch.no_grad():
        loss.linear.weight.zero_()
    dcp.set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    assert torch.equal(loss.linear.weight, want) or torch.equal(loss.linear.weight,
                                                                state["decoder.weight"])


def test_a_model_with_a_replaced_head_can_be_scripted():
    model, _ = replaced()
    input, _ = batch()
    assert torch.equal(torch.jit.script(model)(input), model(input))


# ---- a table that no optimizer has


def encoder_and_loss():
    """Returns an encoder and a loss whose parameters a program forgets to give to the optimizer."""
    torch.manual_seed(0)
    encoder = nn.Linear(D, D)
    loss = xs.SampledSoftmaxLoss(D, 100 * N, sampler="uniform", num_samples=6)
    return encoder, loss


@pytest.mark.parametrize("clears", ["encoder", "model", "nothing"])
@pytest.mark.parametrize(
    "kinds", [[torch.optim.AdamW], [xs.optim.RowAdam], [torch.optim.AdamW, torch.optim.SGD]],
    ids=lambda kinds: "+".join(kind.__name__ for kind in kinds))
def test_a_table_without_an_optimizer_gives_one_warning(kinds, clears):
    """Whether its gradient accumulates or is cleared in each step."""
    encoder, loss = encoder_and_loss()
    optimizers = [kind([parameter], lr=0.1) for kind, parameter in zip(kinds, encoder.parameters())]
    model, seen = nn.ModuleList([encoder, loss]), []
    for seed in range(30):
        {"encoder": encoder, "model": model, "nothing": nn.Identity()}[clears].zero_grad()
        input, target = batch(seed)
        loss(encoder(input), target).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for optimizer in optimizers:
                optimizer.step()
        seen += [(seed, warning) for warning in caught]
    (seed, warning), = seen
    assert seed == 15 and warning.filename == __file__
    assert (f"its table of shape [{100 * N}, {D}] has had a gradient over 16 steps of "
            f"{kinds[0].__name__}, and no optimizer has the table" in str(warning.message))


@pytest.mark.parametrize("clears", [False, True])
def test_the_check_for_untrained_tables_does_not_iterate_over_parameters(clears):
    """Neither before nor after the warning, since a model may have thousands of parameters."""
    class Parameters(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    encoder, loss = encoder_and_loss()
    optimizer = torch.optim.AdamW(encoder.parameters())
    passes = []
    for seed in range(20):
        input, target = batch(seed)
        loss(encoder(input), target).backward()
        params = optimizer.param_groups[0]["params"] = Parameters(
            optimizer.param_groups[0]["params"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            xs.optim.first_step._before_step(optimizer, (optimizer,), {})
        passes.append(params.passes)
        if clears:
            loss.zero_grad()
    assert passes[0] > 0 and sum(passes[1:]) <= 1, "only the search before the warning"


@pytest.mark.parametrize(
    "kind, every",
    [  # optimizers of torch are unknown before their first step
        (torch.optim.SparseAdam, 5), (torch.optim.SparseAdam, 12), (torch.optim.SparseAdam, 20),
        (torch.optim.SGD, 20), (xs.optim.RowAdam, 5), (xs.optim.RowAdam, 20)
    ])
def test_a_table_that_is_stepped_rarely_gives_no_warning(kind, every):
    encoder, loss = encoder_and_loss()
    optimizer, rare = torch.optim.AdamW(encoder.parameters()), kind(list(loss.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(24):
            input, target = batch(seed)
            loss(encoder(input), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if seed % every == every - 1:
                rare.step()
                rare.zero_grad()
    assert not [str(each.message) for each in caught if "is not trained" in str(each.message)]


@pytest.mark.parametrize("program", ["two optimizers", "accumulation", "by hand", "left over"])
def test_tables_that_are_trained_give_no_warning(program):
    """Also with several optimizers, accumulation, updates by hand or an old gradient."""
    encoder, loss = encoder_and_loss()
    optimizers = [torch.optim.AdamW(encoder.parameters()), xs.optim.RowAdam(loss.parameters())]
    if program in ("by hand", "left over"):
        optimizers.pop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(60 if program == "accumulation" else 24):
            input, target = batch(seed)
            loss(encoder(input), target).backward()
            if seed % 3 < 2 and program == "accumulation":
                continue
            for optimizer in optimizers:
                optimizer.step()
            if program == "by hand":
                with torch.no_grad():
                    loss.linear.weight.add_(loss.linear.weight.grad, alpha=-0.1)
            encoder.zero_grad()
            if program == "left over":
                loss.linear.weight.requires_grad_(False)
            else:
                loss.zero_grad()
