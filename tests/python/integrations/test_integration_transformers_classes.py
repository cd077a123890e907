"""replace_head keeps the loss of each class of Transformers, or refuses the class.

Otherwise a class that shifts labels differently or changes its logits would silently train another
objective. The last tests check a sample of the classes, and all of them under `pytest -m minutes`.
"""

import collections

import pytest
import torch

import xsoftmax as xs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
glue = pytest.importorskip("xsoftmax.integrations.transformers",
                           reason="accelerate is not installed: pip install xsoftmax[integrations]")

from transformers_classes import TOKENS, batch_of, classes, head_name, tiny_model  # noqa: E402

MECHANISMS = {
    "labels are shifted": "LlamaForCausalLM",
    "a causal model whose labels are not": "BartForCausalLM",
    "permuted labels": "XLNetLMHeadModel",
    "a bias that is a buffer": "BartForConditionalGeneration",
    "a bias that is a parameter": "EsmForMaskedLM",
    "a soft cap": "Gemma2ForCausalLM",
    "a soft cap in a function": "RecurrentGemmaForCausalLM",
    "a scale": "CohereForCausalLM",
    "a scale that divides": "GraniteForCausalLM",
    "a divisor by name that multiplies": "HyperCLOVAXForCausalLM",
    "decoder inputs made by the model": "M2M100ForConditionalGeneration",
    "the dtype of the head is read": "MambaForCausalLM",
    "no input embeddings": "CanineForTokenClassification",
    "logits of the last token": "GPT2ForSequenceClassification",
    "router losses": "SwitchTransformersForConditionalGeneration",
}
REFUSED = {
    "the head's weights without a call": "MobileBertForMaskedLM",
    "a head with its own forward pass": "DoryForCausalLM",
    "log-probabilities of n-grams": "ProphetNetForConditionalGeneration",
}

ALL_REFUSED = {
    *REFUSED.values(), "ProphetNetForCausalLM", "FSMTForConditionalGeneration",
    "EuroBertForSequenceClassification"
}


def make_larger(model):
    """Scales the head's table and fills its biases, so that soft caps and biases matter."""
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("final_logits_bias", "lm_head.bias")):
                value.normal_()
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if head is not None:
            head.weight.mul_(20)


def own_and_replaced(name, **options):
    """Returns (loss, gradients) of the plain model and of the model with the exact loss."""
    results = []
    for ours in (False, True):
        model = tiny_model(name).eval()
        batch = batch_of(name, model)
        make_larger(model)
        if ours:
            glue.replace_head(model, xs.LinearCrossEntropyLoss, name=head_name(name, model))
        value = model(**batch).loss
        value.backward()
        results.append((value.detach(), {
            key: parameter.grad
            for key, parameter in model.named_parameters() if parameter.grad is not None
        }))
    return results


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_loss_and_gradients_equal_those_of_the_plain_class(mechanism):
    (value, gradients), (got, found) = own_and_replaced(MECHANISMS[mechanism])
    torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == found.keys() and len(gradients) > 2
    torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mechanism", REFUSED)
def test_a_class_with_an_unsupported_objective_is_refused(mechanism):
    name = REFUSED[mechanism]
    model = tiny_model(name)
    batch, loss = batch_of(name, model), None
    with pytest.raises(glue.UnsupportedHeadError, match=f"^replace_head of {name}: expected"):
        loss = glue.replace_head(model, xs.LinearCrossEntropyLoss, name=head_name(name, model))
        model(**batch)
    if loss is not None:
        xs.restore_head(model, loss)
    assert model(**batch).loss.requires_grad and type(model).__name__ == name  # and restored


@pytest.mark.parametrize(
    "name",
    ["Gemma2ForCausalLM", "CohereForCausalLM", "BartForConditionalGeneration", "EsmForMaskedLM"])
def test_topk_includes_what_the_model_does_after_the_head(name):
    """Both before and after the first call with labels."""
    model = tiny_model(name).eval()
    make_larger(model)
    batch = batch_of(name, model)
    seen = []
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss, name=head_name(name, model))
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: seen.append(args[0]))
    without = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder:
        without["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        want = model(**without).logits.log_softmax(-1).topk(5)
        for _ in range(2):
            values, ids = loss.topk(seen[0], 5)
            torch.testing.assert_close(values, want.values, rtol=1e-4, atol=1e-4)
            assert torch.equal(ids, want.indices)
            model(**batch)
    handle.remove()
    assert len(seen) == 1, "the hook runs only in calls that return logits"


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_bias_after_the_head_trains_if_it_is_a_parameter(kind):
    name = dict(parameter="EsmForMaskedLM", buffer="BartForConditionalGeneration")[kind]
    model = tiny_model(name).train()
    loss = glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=9)
    bias = model.lm_head.bias if kind == "parameter" else model.final_logits_bias
    before = bias.detach().clone()
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch_of(name, model)).loss.backward()
        optimizer.step()
    optimizer.flush()
    assert torch.equal(bias.detach(), before) == (kind == "buffer")
    assert loss.linear.bias is bias or kind == "buffer" and not loss.linear.bias.requires_grad
    assert xs.restore_head(model, loss) is model.get_output_embeddings()
    assert sorted(model.state_dict()) == sorted(tiny_model(name).state_dict())


TABLE_SAMPLERS = ["midx", "lsh", "rff", "sphere"]


@pytest.mark.parametrize("sampler", TABLE_SAMPLERS)
@pytest.mark.parametrize(
    "name", ["BartForConditionalGeneration", "MarianMTModel", "EsmForMaskedLM", "LlamaForCausalLM"])
def test_samplers_that_follow_the_table_work_with_and_without_a_bias(name, sampler):
    """Their index is built for rows with a bias or without, and does not fit the other kind."""
    model = tiny_model(name).train()
    make_larger(model)
    batch = batch_of(name, model)
    own = tiny_model(name).eval()
    own.load_state_dict(model.state_dict())
    loss = glue.replace_head(model, xs.SampledSoftmaxLoss, sampler=sampler, num_samples=9)
    torch.testing.assert_close(model.eval()(**batch).loss, own(**batch).loss, rtol=1e-5, atol=1e-5)
    optimizer, before = xs.optim.RowAdam(model.parameters(), lr=0.1), loss.linear.weight.clone()
    for _ in range(2):
        optimizer.zero_grad()
        value = model.train()(**batch).loss
        value.backward()
        optimizer.step()
    assert value.isfinite() and not torch.equal(loss.linear.weight, before)


@pytest.mark.parametrize("count", [TOKENS + 6, TOKENS - 6])
def test_a_buffer_that_the_model_does_not_add_is_a_zero_bias_for_such_a_sampler(count):
    model = tiny_model("LlamaForCausalLM").train()
    model.register_buffer("unused", torch.randn(TOKENS))
    batch = batch_of("LlamaForCausalLM", model)
    batch = {key: value.clamp(max=TOKENS - 10) for key, value in batch.items()}
    own = model(**batch).loss
    loss = glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="midx", num_samples=9)
    model(**batch).loss.backward()
    assert not loss.linear.bias.any() and not loss.linear.bias.requires_grad
    torch.testing.assert_close(model.eval()(**batch).loss, own)
    model.resize_token_embeddings(count)
    assert len(loss.linear.bias) == count and not loss.linear.bias.any()
    model.train()(**batch).loss.backward()
    want = model.eval()(**batch).loss
    xs.restore_head(model, loss)
    torch.testing.assert_close(model(**batch).loss, want)


def test_a_bias_found_after_the_index_was_built_is_refused():
    name = "BartForConditionalGeneration"
    model = tiny_model(name).train()
    vars(model)["final_logits_bias"] = model._buffers.pop("final_logits_bias")
    loss = glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="midx", num_samples=9)
    with pytest.raises(glue.UnsupportedHeadError, match=f"^replace_head of {name}: .* no bias"):
        model(**batch_of(name, model))
    xs.restore_head(model, loss)
    glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=9)
    assert model(**batch_of(name, model)).loss.isfinite()


def test_a_failing_resize_of_the_embedding_leaves_the_head_unchanged():
    name = "LlamaForCausalLM"
    model = tiny_model(name)
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(**batch_of(name, model)).loss.backward()
    optimizer.step()
    embedding, head = model.get_input_embeddings().weight, loss.linear.weight
    optimizer.state[embedding]["exp_avg"] = torch.zeros(TOKENS, 1)
    with pytest.raises(TypeError, match="exp_avg of shape"):
        model.resize_token_embeddings(TOKENS + 5)
    assert loss.num_classes == len(head) == len(embedding) == TOKENS == model.config.vocab_size
    assert len(optimizer.state[head]["exp_avg"]) == TOKENS


def test_the_loss_follows_train_and_eval_of_the_model():
    """It may be called directly, and is exact in eval()."""
    model = tiny_model("LlamaForCausalLM").eval()
    loss = glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=9)
    assert not loss.training
    for mode in (True, False):
        torch.nn.Sequential(model).train(mode)
        assert loss.training == mode


def test_another_scale_or_soft_cap_than_the_models_is_refused():
    """`shift` overrides the model; another scale or soft cap than the model's is refused."""
    name = "BartForCausalLM"
    model = tiny_model(name).eval()
    batch = batch_of(name, model)
    own = model(**batch).loss
    for shift, is_own in ((False, True), (True, False)):
        loss = glue.replace_head(model, xs.LinearCrossEntropyLoss, shift=shift)
        assert torch.allclose(model(**batch).loss, own) == is_own
        xs.restore_head(model, loss)
    for given in (dict(softcap=1.0), dict(logit_scale=2.0)):
        loss = glue.replace_head(model, xs.LinearCrossEntropyLoss, **given)
        with pytest.raises(
                glue.UnsupportedHeadError, match=
            (f"^replace_head of {name}: expected {next(iter(given))} as the model has it, .*, "
             f"got {next(iter(given.values()))}: leave the argument out")):
            model(**batch)
        xs.restore_head(model, loss)
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss, softcap=None, logit_scale=1.0)
    torch.testing.assert_close(model(**batch).loss, own)
    assert loss.softcap is None and loss.logit_scale == 1.0


# ---- all classes

SAMPLE = """
    ArceeForCausalLM BigBirdPegasusForConditionalGeneration BlenderbotSmallForCausalLM
    BlenderbotSmallForConditionalGeneration CTRLLMHeadModel CamembertForMaskedLM
    DebertaForTokenClassification DebertaV2ForSequenceClassification DeepseekV3ForCausalLM
    ErnieForCausalLM ErnieForMaskedLM GPT2LMHeadModel GPTJForCausalLM Glm4MoeLiteForCausalLM
    GlmForTokenClassification GraniteSpeechForConditionalGeneration HYV3ForCausalLM
    JetMoeForCausalLM JetMoeForSequenceClassification JinaEmbeddingsV3ForMaskedLM
    MegatronBertForCausalLM MistralForCausalLM ModernVBertForMaskedLM MptForTokenClassification
    MusicFlamingoForConditionalGeneration NllbMoeForConditionalGeneration
    NomicBertForSequenceClassification OPTForCausalLM PegasusForConditionalGeneration
    Phi4MultimodalForCausalLM RoCBertForCausalLM RoFormerForMaskedLM Starcoder2ForCausalLM
    Starcoder2ForTokenClassification T5ForConditionalGeneration T5ForSequenceClassification
    UMT5ForConditionalGeneration XLMRobertaForMaskedLM XLMWithLMHeadModel YoutuForCausalLM
""".split()


def loss_and_gradients(model, batch):
    """Returns the loss and its gradients by parameter, or None if the backward pass fails."""
    model.zero_grad()
    loss = model(**batch).loss
    try:
        loss.backward()
    except RuntimeError:  # a kernel that does not support such small sizes
        return loss.item(), None
    return loss.item(), {
        name: parameter.grad
        for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def difference(own, got):
    """Returns how two losses and their gradients differ, or "" if they agree."""
    (value, gradients), (found_value, found) = own, got
    if not abs(found_value - value) <= 2e-5 * (1 + abs(value)):
        return f"loss {found_value} instead of {value}"
    if gradients is None or found is None:
        return "" if gradients is found else "only one of the two has a backward pass"
    if gradients.keys() != found.keys():
        return f"only one trains {sorted(gradients.keys() ^ found.keys())}"
    for name, gradient in gradients.items():
        gap, scale = (found[name] - gradient).abs().max(), gradient.abs().max()
        if not gap <= 1e-4 * scale + 1e-6:
            return f"gradient of {name} off by {gap} of {scale}"
    return ""


def outcome_of(name):
    """Returns the outcome of replace_head for a class, and details."""
    try:
        model = tiny_model(name).eval()
        batch = batch_of(name, model)
        own = loss_and_gradients(model, batch)
        assert own[0] == own[0]
    except Exception as error:  # of Transformers, or caused by the tiny config
        return "not built", f"{type(error).__name__}: {error}"
    try:
        glue.replace_head(model, xs.LinearCrossEntropyLoss, name=head_name(name, model))
        details = difference(own, loss_and_gradients(model, batch))
    except glue.UnsupportedHeadError as error:
        return "refused", str(error)
    except Exception as error:
        return "raw error", f"{type(error).__name__}: {error}"
    return "another objective" if details else "same", details


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_keeps_its_objective(name):
    assert outcome_of(name) == ("same", "")


@pytest.mark.minutes
def test_every_class_keeps_its_objective_or_is_refused():
    found = collections.defaultdict(dict)
    for name in classes():
        outcome, details = outcome_of(name)
        found[outcome][name] = details
    for outcome in ("refused", "not built", "raw error", "another objective"):
        print(f"\n{outcome}: {len(found[outcome])}")
        for name, details in found[outcome].items():
            print(f"  {name}: {details[:200]}")
    print(f"\nthe same: {len(found['same'])}")
    assert not found["raw error"] and not found["another objective"]
    assert set(found["refused"]) == ALL_REFUSED and len(found["not built"]) <= 30
    assert len(found["same"]) > 450
