"""Models of Transformers with a replaced head keep their losses, logits, files and methods."""

import copy

import pytest
import torch

import xsoftmax as xs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
glue = pytest.importorskip("xsoftmax.integrations.transformers",
                           reason="accelerate is not installed: pip install xsoftmax[integrations]")

from transformers_checks import EXACT, MODELS, SAMPLED, D, V  # noqa: E402
from transformers_checks import bert, gpt2, llama, tokens  # noqa: E402


@pytest.mark.parametrize("name, tied", [("gpt2", True), ("gpt2", False), ("llama", False),
                                        ("llama", True), ("bert", True), ("bert", False),
                                        ("t5", False)])
def test_the_exact_loss_trains_like_the_plain_model(name, tied):
    """Every step has the loss of the plain model, with shifted labels, -100 and tied tables."""
    plain, model = MODELS[name](tied), MODELS[name](tied)
    xs.integrations.transformers.replace_head(model, **EXACT)
    optimizers = [
        torch.optim.AdamW(plain.parameters(), lr=0.02),
        xs.optim.RowAdam(model.parameters(), lr=0.02, weight_decay=0.01)
    ]
    batch, first = tokens(), plain(**tokens()).loss
    for step in range(4):
        values = []
        for each, optimizer in zip((plain, model), optimizers):
            optimizer.zero_grad()
            value = each(**batch).loss
            value.backward()
            xs.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            values.append(value)
        torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)
    # the steps changed the loss, so the comparison is not empty
    assert value < first - 0.1
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_calls_without_labels_and_in_eval_equal_the_plain_model(name):
    plain, model = MODELS[name]().eval(), MODELS[name]()
    before = list(model.state_dict())
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    model.eval()
    batch = tokens()
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    labels = batch.pop("labels")
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    with torch.no_grad():
        # the loss is exact in eval()
        torch.testing.assert_close(
            model(**batch, labels=labels).loss,
            plain(**batch, labels=labels).loss)
        assert torch.equal(
            model(**batch, labels=labels, return_dict=False)[0],
            model(**batch, labels=labels).loss)
        count = torch.tensor(11)
        if name in ("gpt2", "llama"):
            value = plain(**batch, labels=labels, num_items_in_batch=count).loss
            torch.testing.assert_close(
                model(**batch, labels=labels, num_items_in_batch=count).loss, value)
    assert list(model.state_dict()) == before and type(model).__name__ == type(
        plain).__name__ and isinstance(model, type(plain))
    assert model.get_output_embeddings() is loss.linear


def test_labels_may_be_positional():
    model, plain = bert().eval(), bert().eval()
    xs.integrations.transformers.replace_head(model, **EXACT)
    batch = tokens()
    args = (batch["input_ids"], None, None, None, None, None, None, batch["labels"])
    torch.testing.assert_close(model(*args).loss, plain(*args).loss)


def test_using_the_logits_of_a_call_with_labels_raises_an_error():
    model = gpt2()
    xs.integrations.transformers.replace_head(model, **SAMPLED)
    outputs = model(**tokens())
    for use in (lambda: outputs.logits.argmax(-1), lambda: outputs.logits[..., :-1, :],
                lambda: torch.softmax(outputs.logits, -1), lambda: outputs.logits + 1,
                lambda: len(outputs.logits), lambda: outputs["logits"].shape):
        with pytest.raises(AttributeError, match="call it without labels for logits"):
            use()


@pytest.mark.parametrize("tied", [True, False])
def test_training_generating_saving_and_restoring(tied, tmp_path):
    """A model trained with samples is saved and loaded as a plain model, which generates the same
    texts."""
    model = gpt2(tied)
    loss = xs.replace_head(model, "lm_head", xs.SampledSoftmaxLoss, sampler="uniform",
                           num_samples=12, shared=False, sparse_grad=True)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.02)
    for step in range(8):
        optimizer.zero_grad()
        model.train()(**tokens(seed=step)).loss.backward()
        assert loss.linear.weight.grad.is_sparse  # also for a tied table
        optimizer.step()
    prompt = tokens()["input_ids"]
    generated = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
    beams = model.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=3)
    assert generated[:, 9:].max() >= D  # ids are not indices of the hidden state
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is transformers.GPT2LMHeadModel and not hasattr(read, "_xsoftmax_head")
    assert torch.equal(read.generate(prompt, max_new_tokens=8, do_sample=False), generated)
    assert torch.equal(read.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=3), beams)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert xs.restore_head(model,
                           loss) is model.lm_head and type(model) is transformers.GPT2LMHeadModel
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(model(**tokens()).loss, read(**tokens()).loss)
    assert not model.transformer.wte.sparse
    with pytest.raises(ValueError, match="expected one place where replace_head took a head out"):
        xs.restore_head(model, loss)


def test_logits_state_dicts_and_copies_include_pending_updates():
    model = llama()
    xs.integrations.transformers.replace_head(model, **SAMPLED)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(**tokens(seed=step)).loss.backward()
        optimizer.step()
    twin = copy.deepcopy(model.lm_head.weight.detach())  # without pending updates
    state = model.state_dict()["lm_head.weight"].clone()
    assert not torch.equal(state, twin)
    for step in range(2):
        optimizer.zero_grad()
        model(**tokens(seed=step)).loss.backward()
        optimizer.step()
    copied = copy.deepcopy(model)._modules["lm_head"].weight.detach().clone()
    logits = model(tokens()["input_ids"]).logits.detach()
    optimizer.flush()
    assert torch.equal(copied, model.lm_head.weight)
    assert torch.equal(model(tokens()["input_ids"]).logits, logits)


@pytest.mark.parametrize("count", [V + 7, V - 9])
@pytest.mark.parametrize("name, tied", [("gpt2", True), ("llama", False), ("bert", True)])
def test_resize_token_embeddings_resizes_loss_and_optimizer_state(name, tied, count, tmp_path):
    model = MODELS[name](tied)
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.02)
    weight = loss.linear.weight

    def step(seed):
        optimizer.zero_grad()
        batch = {key: value.clamp(max=V - 10) for key, value in tokens(seed=seed).items()}
        model.train()(**batch).loss.backward()
        optimizer.step()

    step(0)
    optimizer.flush()
    before = weight.detach().clone()
    embedding = model.resize_token_embeddings(count)
    kept = min(count, V)
    assert loss.num_classes == count == len(
        loss.linear.weight) == embedding.num_embeddings == model.config.vocab_size
    assert loss.linear.weight is weight and model.get_output_embeddings(
    ) is loss.linear and loss.sampler.num_classes == count
    assert (embedding.weight is weight) == tied and torch.equal(weight[:kept], before[:kept])
    step(1)  # optimizer state was resized, also for an untied embedding
    model.save_pretrained(tmp_path)
    read = type(model)._base_class.from_pretrained(tmp_path)
    torch.testing.assert_close(
        read(tokens()["input_ids"].clamp(max=V - 10)).logits,
        model.eval()(tokens()["input_ids"].clamp(max=V - 10)).logits)


def test_a_refused_resize_changes_nothing():
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, xs.SampledSoftmaxLoss,
                                                     sampler="uniform", num_samples=4,
                                                     head_classes=20)
    before = model.state_dict()["lm_head.weight"].clone()
    with pytest.raises(ValueError, match="head_classes"):
        model.resize_token_embeddings(10)
    assert model.config.vocab_size == V == loss.num_classes and torch.equal(
        model.lm_head.weight, before)
    assert model.transformer.wte.weight is model.lm_head.weight is loss.linear.weight
    model(**tokens()).loss.backward()


def test_a_copied_model_has_a_loss_of_its_own(tmp_path):
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        other = twin._xsoftmax_head.loss
        assert other is not loss and other.linear is twin.lm_head
        assert twin.lm_head is not model.lm_head
        twin(**tokens()).loss.backward()
        assert model.lm_head.weight.grad is None and twin.lm_head.weight.grad.is_sparse
        torch.testing.assert_close(twin.eval()(**tokens()).loss, model.eval()(**tokens()).loss)
        model.train()


def test_samplers_move_with_the_model():
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED, head_classes=3)
    moved = {
        name: buffer.device.type
        for name, buffer in copy.deepcopy(loss).to("meta").named_buffers()
    }
    assert {buffer.device.type for buffer in loss.buffers()} == {"cpu"} and "meta" in moved.values()
    model.to("meta")
    value = model(**{key: tensor.to("meta") for key, tensor in tokens().items()}).loss
    assert value.device.type == "meta" and {
        name: buffer.device.type
        for name, buffer in loss.named_buffers()
    } == moved
    assert loss.linear is model.lm_head


def test_the_head_of_a_nested_model_is_replaced_and_restored():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = gpt2()

    wrapper = Wrapper()
    loss = xs.replace_head(wrapper, "model.lm_head", **SAMPLED)
    assert wrapper.model(**tokens()).loss.requires_grad and wrapper.model.lm_head is loss.linear
    assert xs.restore_head(wrapper, loss) is wrapper.model.lm_head


def test_the_head_of_a_text_classifier_is_replaced():
    """Its head is not the output embedding, and its labels are not shifted."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=V, hidden_size=D, intermediate_size=D,
                                     num_hidden_layers=1, num_attention_heads=2, num_labels=500)
    model = transformers.BertForSequenceClassification(config).eval()
    batch = dict(input_ids=tokens()["input_ids"], labels=torch.tensor([3, 499, 7]))
    want = model(**batch).loss
    xs.replace_head(model, "classifier", **SAMPLED)
    torch.testing.assert_close(model(**batch).loss, want)
    assert model(batch["input_ids"]).logits.shape == (3, 500)
    with pytest.raises(ValueError, match="expected the name of its head.*'classifier'"):
        xs.integrations.transformers.replace_head(
            transformers.BertForSequenceClassification(config), **SAMPLED)


def test_wrong_calls_are_refused():
    model = gpt2()
    with pytest.raises(TypeError, match="parameters are those of the Linear, got others, log_z"):
        glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=4,
                          estimator="nce", log_z="learned")
    assert type(model) is transformers.GPT2LMHeadModel
    loss = glue.replace_head(model, **EXACT)
    with pytest.raises(ValueError, match="whose head is a LinearCrossEntropyLoss already"):
        glue.replace_head(model, **EXACT)
    with pytest.raises(ValueError, match="expected the loss that replace_head gave for this "
                       "GPT2LMHeadModel"):
        xs.restore_head(model, xs.LinearCrossEntropyLoss(D, V))
    model.set_output_embeddings(torch.nn.Linear(D, V, bias=False))
    with pytest.raises(RuntimeError, match="expected lm_head to be the Linear of its "
                       "LinearCrossEntropyLoss"):
        model(**tokens())
    assert loss.linear is not model.lm_head
    with pytest.raises(TypeError, match="expected a model of Transformers, got Linear"):
        glue.replace_head(torch.nn.Linear(2, 2), **EXACT)
