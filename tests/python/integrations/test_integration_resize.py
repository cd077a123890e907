"""resize_token_embeddings of a model with a replaced head.

Every resized parameter stays the same object and keeps its optimizer state; otherwise the next step
would fail or start over.
"""

import pytest
import torch

import xsoftmax as xs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
pytest.importorskip("xsoftmax.integrations.transformers",
                    reason="accelerate is not installed: pip install xsoftmax[integrations]")

from transformers_classes import TOKENS, batch_of, tiny_model  # noqa: E402

CLASSES = {
    "untied": "LlamaForCausalLM", "tied": "GPT2LMHeadModel", "a tied bias too": "BertForMaskedLM",
    "a bias after the head": "EsmForMaskedLM",
    "a buffer after the head": "BartForConditionalGeneration",
    "a resize of its own": "MarianMTModel"
}
OPTIMIZERS = {
    "RowAdam": xs.optim.RowAdam,
    "RowSGD": lambda parameters, lr: xs.optim.RowSGD(parameters, lr=lr, momentum=0.9),
    "AdamW": torch.optim.AdamW, "Adagrad": torch.optim.Adagrad,
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)
}
EXACT = dict(loss_class=xs.LinearCrossEntropyLoss)
SAMPLED = dict(loss_class=xs.SampledSoftmaxLoss, sampler="uniform", num_samples=9)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model.train()(**batch).loss.backward()
    optimizer.step()


def state_of(optimizer, parameter):
    return {
        name: value.to_dense().clone()
        for name, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.dim() > 0 and name != "pending"
    }


@pytest.mark.parametrize("count", [TOKENS + 7, TOKENS - 9])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_and_optimizer_state_are_resized_in_place(kind, optimizer, count):
    name = CLASSES[kind]
    model = tiny_model(name)
    if kind == "untied":
        assert model.lm_head.weight is not model.model.embed_tokens.weight
    options = SAMPLED if optimizer.startswith("Row") else EXACT
    loss = xs.integrations.transformers.replace_head(model, **options)
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=0.01)
    batch = {key: value.clamp(max=TOKENS - 10) for key, value in batch_of(name, model).items()}
    for _ in range(2):
        step(model, optimizer, batch)
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    before = {
        key: (parameter, parameter.detach().clone(), state_of(optimizer, parameter))
        for key, parameter in model.named_parameters()
    }
    embedding = model.resize_token_embeddings(count)
    kept, changed = min(count, TOKENS), []
    assert len(embedding.weight) == loss.num_classes == count == model.config.vocab_size
    assert embedding is model.get_input_embeddings() and embedding.num_embeddings == count
    for key, parameter in model.named_parameters():
        was, value, state = before[key]
        assert parameter is was, key
        now = state_of(optimizer, parameter)
        assert now.keys() == state.keys()
        if len(parameter) == len(value):
            assert torch.equal(parameter, value)
            continue
        changed.append(key)
        assert len(parameter) == count and torch.equal(parameter[:kept], value[:kept])
        for entry, tensor in state.items():
            assert len(now[entry]) == count or now[entry].dim() != parameter.dim(), (key, entry)
            if len(now[entry]) == count:
                assert torch.equal(now[entry][:kept], tensor[:kept])
                assert not now[entry][kept:].any() or not tensor.is_floating_point()
    assert len(changed) == {"untied": 2, "a tied bias too": 2,
                            "a bias after the head": 2}.get(kind, 1)
    rest = {id(parameter): parameter.detach().clone() for parameter in model.parameters()}
    step(model, optimizer, batch)
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    for key in changed:  # still trained
        assert not torch.equal(before[key][0], rest[id(before[key][0])])
    with torch.no_grad():  # loss and logits agree
        want = model.eval()(**batch).loss
        own = xs.restore_head(model, loss)
        torch.testing.assert_close(model(**batch).loss, want)
    assert own.out_features == count


def test_a_refused_resize_changes_nothing():
    name = "BartForConditionalGeneration"
    model = tiny_model(name)
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED, head_classes=20)
    optimizer, batch = xs.optim.RowAdam(model.parameters(), lr=0.01), batch_of(name, model)
    step(model, optimizer, batch)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match="head_classes"):
        model.resize_token_embeddings(10)
    assert model.config.vocab_size == TOKENS == loss.num_classes
    assert model.get_input_embeddings().num_embeddings == TOKENS
    assert all(parameters[key] is value for key, value in model.named_parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    step(model, optimizer, batch)
