"""Biases after a replaced head, operations on its logits, and the reduction of one call.

Otherwise a bias could silently stop training or become outdated.
"""

import copy
import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xsoftmax as xs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
glue = pytest.importorskip("xsoftmax.integrations.transformers",
                           reason="accelerate is not installed: pip install xsoftmax[integrations]")

from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

from xsoftmax.integrations.logits import Logits  # noqa: E402

N, D = 30, 16


class Extra(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias


class Model(transformers.LlamaForCausalLM):
    """Adds `bias_of(self)` to its head's outputs."""
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids)[0]) + self.bias_of(self)
        loss = None if labels is None else F.cross_entropy(input=logits.view(-1, N),
                                                           target=labels.view(-1))
        return CausalLMOutput(loss=loss, logits=logits)


def model_with(bias_of, **tensors):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=N, hidden_size=D, intermediate_size=D,
                                      num_hidden_layers=1, pad_token_id=0, num_attention_heads=1,
                                      num_key_value_heads=1)
    model = Model(config)
    model.bias_of = bias_of
    for name, tensor in tensors.items():
        if isinstance(tensor, (nn.Parameter, nn.Module)):
            setattr(model, name, tensor)
        else:
            model.register_buffer(name, tensor)
    return model


def batch():
    ids = torch.randint(N, (2, 6), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids)


def parameter(*shape, train=True):
    return nn.Parameter(torch.linspace(-2, 2, N).reshape(shape), train)


def assert_alike(model, loss):
    """Checks that the loss, called directly or with labels, agrees with the logits of the model."""
    ids = batch()["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
        if logits.dtype == loss.linear.weight.dtype:
            hidden = model.model(ids)[0]
            torch.testing.assert_close(loss.log_prob(hidden), logits.log_softmax(-1))
        want = F.cross_entropy(logits.view(-1, N), ids.view(-1))
        torch.testing.assert_close(model(**batch()).loss, want)
        torch.testing.assert_close(loss.log_prob(model.model(ids)[0]), logits.log_softmax(-1))


# ---- a bias that trains

TRAINING = {  # bias of the model, its tensors, when it is refused, the message
    "a row": (lambda model: model.extra, lambda: dict(extra=parameter(1, N)), "at once",
              rf"a parameter of shape \[1, {N}\]"),
    "a row of another module": (lambda model: model.part.bias,
                                lambda: dict(part=Extra(parameter(1, N))), "with labels",
                                rf"a parameter of shape \[1, {N}\]"),
    "computed": (lambda model: model.extra * 2, lambda: dict(extra=parameter(N)), "with labels",
                 rf"a computed tensor of shape \[{N}\]"),
    "a view": (lambda model: model.extra[None, None], lambda: dict(extra=parameter(N)),
               "with labels", rf"a computed tensor of shape \[1, 1, {N}\]"),
}


@pytest.mark.parametrize("loss", [xs.LinearCrossEntropyLoss, xs.SampledSoftmaxLoss])
@pytest.mark.parametrize("kind", TRAINING)
def test_a_bias_that_would_not_train_is_refused(kind, loss):
    bias_of, tensors, when, shape = TRAINING[kind]
    options = dict(sampler="uniform", num_samples=5) if loss is xs.SampledSoftmaxLoss else {}
    model = model_with(bias_of, **tensors())
    message = (f"^replace_head of Model: expected a bias after the head that is a parameter of "
               rf"shape \[{N}\] or does not train, got {shape} that requires a gradient")
    if when == "at once":
        with pytest.raises(glue.UnsupportedHeadError, match=message):
            glue.replace_head(model, loss, **options)
        assert type(model) is Model and type(model.lm_head) is nn.Linear
        return
    made = glue.replace_head(model, loss, **options)
    with pytest.raises(glue.UnsupportedHeadError, match=message):
        model(**batch())
    xs.restore_head(model, made)
    assert type(model.lm_head) is nn.Linear
    model(**batch()).loss.backward()
    assert next(p for name, p in model.named_parameters() if name.endswith(("extra", "bias")))\
        .grad.abs().sum() > 0


@pytest.mark.parametrize("shape", [(N,), (1, N)])
def test_a_bias_that_is_unfrozen_later_trains_or_is_refused(shape):
    model = model_with(lambda model: model.extra, extra=parameter(*shape, train=False))
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss)
    assert_alike(model, loss)
    model.extra.requires_grad_()
    if shape == (N,):
        model(**batch()).loss.backward()
        assert model.extra.grad.abs().sum() > 0
    else:
        with pytest.raises(glue.UnsupportedHeadError, match="that requires a gradient"):
            model(**batch())


# ---- a bias that is frozen

FROZEN = {
    "buffer": (lambda model: model.extra, lambda: dict(extra=parameter(1, N).detach())),
    "row": (lambda model: model.extra, lambda: dict(extra=parameter(1, N, train=False))),
    "vector": (lambda model: model.extra, lambda: dict(extra=parameter(N, train=False))),
    "computed": (lambda model: model.extra * 1, lambda: dict(extra=parameter(N).detach())),
}


def set_data(model):
    model.extra.data = model.extra.data.flip(-1).clone()


def assign_state(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    state["extra"] = state["extra"] * 2
    model.load_state_dict(state, assign=True)


def set_weight(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 3)


CHANGES = {
    "double": lambda model: model.double(),
    "double, inside a module": lambda model: nn.Sequential(model).double(),
    "half and back": lambda model: model.half().float(),
    "in place": lambda model: model.extra.data.mul_(2),
    "data": set_data,
    "assigned state": assign_state,
    "another weight": set_weight,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", FROZEN)
def test_changes_of_a_frozen_bias_reach_the_loss(kind, change):
    """Casts and moves do so at once, other changes in the next call with labels."""
    bias_of, tensors = FROZEN[kind]
    model = model_with(bias_of, **tensors())
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss)
    model(**batch())
    shared = loss.linear
    CHANGES[change](model)
    if "double" in change:
        assert {value.dtype for value in loss.linear.parameters()} == {torch.float64}
        if kind != "computed":
            hidden = torch.randn(3, D, dtype=torch.float64)
            want = (model.lm_head(hidden) + model.extra).log_softmax(-1)
            torch.testing.assert_close(loss.log_prob(hidden), want)
    model(**batch())
    assert_alike(model, loss)
    assert loss.linear is shared, "no step creates a Linear"


@pytest.mark.parametrize("kind", FROZEN)
def test_a_copied_model_has_a_bias_of_its_own(kind):
    bias_of, tensors = FROZEN[kind]
    model = model_with(bias_of, **tensors())
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss)
    model(**batch())
    twin = copy.deepcopy(model)
    other = twin._xsoftmax_head.loss
    assert other is not loss and other.linear.weight is twin.lm_head.weight
    twin.extra.data.neg_()
    if kind == "computed":
        twin(**batch())  # a computed bias is known only from calls
    hidden = torch.randn(3, D)
    for each, its_loss in ((model, loss), (twin, other)):
        torch.testing.assert_close(its_loss.log_prob(hidden),
                                   (each.lm_head(hidden) + each.extra).log_softmax(-1))
        assert_alike(each, its_loss)


def test_two_calls_before_one_backward_pass():
    """Copying a computed bias in place would invalidate the graph of the first call."""
    model = model_with(lambda model: model.extra * 1, extra=parameter(N).detach())
    want = 2 * model(**batch()).loss
    want.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    glue.replace_head(model, xs.LinearCrossEntropyLoss)
    (model(**batch()).loss + model(**batch()).loss).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, gradient)


def test_the_zero_bias_of_a_sampler_is_cast_with_the_model():
    """A bias that was found but is not added stays as zeros for the sampler."""
    model = model_with(lambda model: model.extra, extra=torch.ones(N))
    model.__class__ = transformers.LlamaForCausalLM
    loss = glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="midx", num_samples=5)
    model(**batch())
    model.double()
    assert loss.linear.bias.dtype == torch.float64 and not loss.linear.bias.any()
    assert model(**batch()).loss.dtype == torch.float64


# ---- one Linear of two models


@pytest.mark.parametrize("calls", [True, False])
def test_models_that_share_a_linear_are_restored_separately(calls):
    models = [model_with(lambda model: model.extra, extra=torch.ones(N)) for _ in range(2)]
    models[1].lm_head = models[0].lm_head
    losses = [glue.replace_head(each, xs.LinearCrossEntropyLoss) for each in models]
    xs.restore_head(models[0], losses[0])
    if calls:
        assert_alike(models[1], losses[1])
    assert models[0](**batch()).logits.shape == (2, 6, N)
    xs.restore_head(models[1], losses[1])
    assert type(models[1].lm_head) is nn.Linear


# ---- operations on logits


def logits_of(*batch_shape, classes=5):
    """Returns a Logits object, the logits it stands for, and their head."""
    torch.manual_seed(0)
    head = nn.Linear(3, classes, bias=False)
    hidden = torch.randn(*batch_shape, 3)
    tap = types.SimpleNamespace(num_classes=classes, owner="Model")
    return Logits(tap, hidden), head(hidden).detach(), head


PLACES = [
    slice(None),
    slice(0, 1), 0, None, Ellipsis,
    torch.tensor([1, 0]),
    torch.tensor([True, False]),
    torch.tensor([[True, False, True], [False, True, True]])
]


@pytest.mark.parametrize("batch_shape", [(2,), (2, 3)])
def test_an_index_that_selects_classes_is_refused(batch_shape):
    stand_in, logits, head = logits_of(*batch_shape)
    ids = torch.arange(5).expand(logits.shape)
    kept = 0
    for count in range(5):
        for index in itertools.product(PLACES, repeat=count):
            if sum(place is Ellipsis for place in index) > 1:
                continue
            try:
                found = ids[index]
            except IndexError:
                continue
            is_whole = found.shape[-1:] == (5,) and bool((found == torch.arange(5)).all())
            if is_whole:
                kept += 1
                got = stand_in[index]
                assert got.shape == found.shape, index
                torch.testing.assert_close(head(got.hidden), logits[index])
            else:
                with pytest.raises(glue.UnsupportedHeadError, match="^replace_head of Model: exp"):
                    stand_in[index]
    assert kept > 50


@pytest.mark.parametrize("operation", [
    lambda logits, bias: torch.add(logits, bias, alpha=2),
    lambda logits, bias: logits.add(bias, alpha=2),
    lambda logits, bias: torch.div(logits, 2, rounding_mode="floor"),
    lambda logits, bias: logits.div(2, rounding_mode="floor"), lambda logits, bias: logits * -1,
    lambda logits, bias: logits / -2.0, lambda logits, bias: logits * float("inf"),
    lambda logits, bias: logits[..., None]
])
def test_an_unsupported_operation_on_logits_is_refused(operation):
    stand_in, _, _ = logits_of(2)
    with pytest.raises(glue.UnsupportedHeadError, match="^replace_head of Model: expected"):
        operation(stand_in, torch.ones(5))


# ---- the reduction of one call

LOSSES = {
    "exact": lambda **options: xs.LinearCrossEntropyLoss(D, N, **options), "sampled": lambda **
    options: xs.SampledSoftmaxLoss(D, N, sampler="uniform", num_samples=5, z_loss=0.1, **options),
    "cane": lambda **options: xs.CaneLoss(D, N, candidates=4, num_noises=2, **options)
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("kind", LOSSES)
def test_with_reduction_equals_a_loss_with_that_reduction(kind, reduction, training):
    loss, other = LOSSES[kind](), LOSSES[kind](reduction=reduction)
    other.load_state_dict(loss.state_dict())
    loss.train(training)
    other.train(training)
    input, target = torch.randn(7, D), torch.randint(N, (7,))
    values = []
    for each in (loss._copy_with_reduction(reduction), other, loss):
        torch.manual_seed(3)
        values.append(each(input, target))
    torch.testing.assert_close(values[0], values[1])
    whole = values[0].mean() if reduction == "none" else values[0] / 7
    torch.testing.assert_close(values[2], whole)


@pytest.mark.parametrize("options", [{}, dict(num_items_in_batch=7)])
def test_a_model_with_a_replaced_head_compiles_to_one_graph(options):
    """With labels, in both reductions, and without, like the plain model."""
    model = model_with(None)
    model.__class__ = transformers.LlamaForCausalLM
    model.eval()
    # without it Transformers warns about the name of the class, which breaks the graph
    model.loss_type = "ForCausalLM"
    want = model(**batch(), **options)
    glue.replace_head(model, xs.LinearCrossEntropyLoss)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch(), **options).loss, want.loss)
    torch.testing.assert_close(compiled(batch()["input_ids"]).logits, want.logits)
