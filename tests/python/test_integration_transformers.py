"""A sampled head in models of Hugging Face Transformers: what they do with it, against the models as they were."""

import copy

import pytest
import torch

import xsoftmax as xs

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
glue = pytest.importorskip("xsoftmax.integrations.transformers", reason="accelerate is not installed: pip install xsoftmax[integrations]")

V, D = 60, 16
EXACT = dict(loss_class=xs.LinearCrossEntropyLoss)
SAMPLED = dict(loss_class=xs.SampledSoftmaxLoss, sampler="uniform", num_samples=12)


def gpt2(tied=True):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=V - 1,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def llama(tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=D, intermediate_size=D, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                                      tie_word_embeddings=tied, pad_token_id=0)
    return transformers.LlamaForCausalLM(config)


def bert(tied=True):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=V, hidden_size=D, intermediate_size=D, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=tied,
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def t5(tied=False):
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=V, d_model=D, d_kv=8, d_ff=D, num_layers=1, num_heads=2, tie_word_embeddings=tied, dropout_rate=0.0,
                                   decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


def tokens(count=3, length=9, seed=1):
    ids = torch.randint(1, V - 1, (count, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 2:4] = -100
    return dict(input_ids=ids, labels=labels)


@pytest.mark.parametrize("name, tied", [("gpt2", True), ("gpt2", False), ("llama", False), ("llama", True), ("bert", True), ("bert", False), ("t5", False)])
def test_exact_loss_trains_as_the_plain_model(name, tied):
    """Several steps, each with the loss of the model as it was: shift, -100, ties, gradients and their steps."""
    plain, model = MODELS[name](tied), MODELS[name](tied)
    xs.integrations.transformers.replace_head(model, **EXACT)
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=0.02), xs.optim.RowAdam(model.parameters(), lr=0.02, weight_decay=0.01)]
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
    assert value < first - 0.1  # something was learnt, or steps would be compared that change nothing
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_without_labels_it_is_the_model_as_it_was(name):
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
        torch.testing.assert_close(model(**batch, labels=labels).loss, plain(**batch, labels=labels).loss)  # in eval() exact
        assert torch.equal(model(**batch, labels=labels, return_dict=False)[0], model(**batch, labels=labels).loss)
        count = torch.tensor(11)
        if name in ("gpt2", "llama"):
            value = plain(**batch, labels=labels, num_items_in_batch=count).loss
            torch.testing.assert_close(model(**batch, labels=labels, num_items_in_batch=count).loss, value)
    assert list(model.state_dict()) == before and type(model).__name__ == type(plain).__name__ and isinstance(model, type(plain))
    assert model.get_output_embeddings() is loss.linear


def test_labels_may_be_positional():
    model, plain = bert().eval(), bert().eval()
    xs.integrations.transformers.replace_head(model, **EXACT)
    batch = tokens()
    args = (batch["input_ids"], None, None, None, None, None, None, batch["labels"])
    torch.testing.assert_close(model(*args).loss, plain(*args).loss)


def test_logits_of_a_call_with_labels_raise_where_they_are_used():
    model = gpt2()
    xs.integrations.transformers.replace_head(model, **SAMPLED)
    outputs = model(**tokens())
    for use in (lambda: outputs.logits.argmax(-1), lambda: outputs.logits[..., :-1, :], lambda: torch.softmax(outputs.logits, -1), lambda: outputs.logits + 1,
                lambda: len(outputs.logits), lambda: outputs["logits"].shape):
        with pytest.raises(AttributeError, match="call it without labels for logits"):
            use()


@pytest.mark.parametrize("tied", [True, False])
def test_train_save_generate_restore(tied, tmp_path):
    """The way of a user: train sampled, generate, save, read as a plain model, which generates the same."""
    model = gpt2(tied)
    loss = xs.replace_head(model, "lm_head", xs.SampledSoftmaxLoss, sampler="uniform", num_samples=12, shared=False, sparse_grad=True)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.02)
    for step in range(8):
        optimizer.zero_grad()
        model.train()(**tokens(seed=step)).loss.backward()
        assert loss.linear.weight.grad.is_sparse  # of a tied table too
        optimizer.step()
    prompt = tokens()["input_ids"]
    generated = model.eval().generate(prompt, max_new_tokens=8, do_sample=False)
    beams = model.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=3)
    assert generated[:, 9:].max() >= D  # ids are not those of the hidden state
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(read) is transformers.GPT2LMHeadModel and not hasattr(read, "_xsoftmax_head")
    assert torch.equal(read.generate(prompt, max_new_tokens=8, do_sample=False), generated)
    assert torch.equal(read.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=3), beams)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert xs.restore_head(model, loss) is model.lm_head and type(model) is transformers.GPT2LMHeadModel
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(model(**tokens()).loss, read(**tokens()).loss)
    assert not model.transformer.wte.sparse
    with pytest.raises(ValueError, match="expected one place where replace_head took a head out"):
        xs.restore_head(model, loss)


def test_what_rows_owe_is_made_up_before_logits_saves_and_copies():
    """Rows of a table owe steps after each step of RowAdam. Tied or not, logits and state dicts must be those of a flushed table."""
    model = llama()
    xs.integrations.transformers.replace_head(model, **SAMPLED)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(**tokens(seed=step)).loss.backward()
        optimizer.step()
    twin = copy.deepcopy(model.lm_head.weight.detach())  # as it lies in memory
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
def test_resize_token_embeddings(name, tied, count, tmp_path):
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
    assert loss.num_classes == count == len(loss.linear.weight) == embedding.num_embeddings == model.config.vocab_size
    assert loss.linear.weight is weight and model.get_output_embeddings() is loss.linear and loss.sampler.num_classes == count
    assert (embedding.weight is weight) == tied and torch.equal(weight[:kept], before[:kept])
    step(1)  # the optimizer followed, and with it the state of an untied embedding
    model.save_pretrained(tmp_path)
    read = type(model)._base_class.from_pretrained(tmp_path)
    torch.testing.assert_close(read(tokens()["input_ids"].clamp(max=V - 10)).logits, model.eval()(tokens()["input_ids"].clamp(max=V - 10)).logits)


def test_resize_that_is_refused_changes_nothing():
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=4, head_classes=20)
    before = model.state_dict()["lm_head.weight"].clone()
    with pytest.raises(ValueError, match="head_classes"):
        model.resize_token_embeddings(10)
    assert model.config.vocab_size == V == loss.num_classes and torch.equal(model.lm_head.weight, before)
    assert model.transformer.wte.weight is model.lm_head.weight is loss.linear.weight
    model(**tokens()).loss.backward()


def test_copies_have_losses_of_their_own(tmp_path):
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        other = twin._xsoftmax_head.loss
        assert other is not loss and other.linear is twin.lm_head and twin.lm_head is not model.lm_head
        twin(**tokens()).loss.backward()
        assert model.lm_head.weight.grad is None and twin.lm_head.weight.grad.is_sparse
        torch.testing.assert_close(twin.eval()(**tokens()).loss, model.eval()(**tokens()).loss)
        model.train()


def test_samplers_move_with_the_model():
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED, head_classes=3)
    moved = {name: buffer.device.type for name, buffer in copy.deepcopy(loss).to("meta").named_buffers()}
    assert {buffer.device.type for buffer in loss.buffers()} == {"cpu"} and "meta" in moved.values()
    model.to("meta")
    value = model(**{key: tensor.to("meta") for key, tensor in tokens().items()}).loss
    assert value.device.type == "meta" and {name: buffer.device.type for name, buffer in loss.named_buffers()} == moved
    assert loss.linear is model.lm_head


def test_a_head_inside_of_a_module_of_ones_own():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = gpt2()
    wrapper = Wrapper()
    loss = xs.replace_head(wrapper, "model.lm_head", **SAMPLED)
    assert wrapper.model(**tokens()).loss.requires_grad and wrapper.model.lm_head is loss.linear
    assert xs.restore_head(wrapper, loss) is wrapper.model.lm_head


def test_classifier_of_texts():
    """A head that is no output embedding: labels are classes, unshifted."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=V, hidden_size=D, intermediate_size=D, num_hidden_layers=1, num_attention_heads=2, num_labels=500)
    model = transformers.BertForSequenceClassification(config).eval()
    batch = dict(input_ids=tokens()["input_ids"], labels=torch.tensor([3, 499, 7]))
    want = model(**batch).loss
    xs.replace_head(model, "classifier", **SAMPLED)
    torch.testing.assert_close(model(**batch).loss, want)
    assert model(batch["input_ids"]).logits.shape == (3, 500)
    with pytest.raises(ValueError, match="expected the name of its head.*'classifier'"):
        xs.integrations.transformers.replace_head(transformers.BertForSequenceClassification(config), **SAMPLED)


def test_bad_calls():
    model = gpt2()
    with pytest.raises(TypeError, match="parameters are those of the Linear, got log_z"):
        glue.replace_head(model, xs.SampledSoftmaxLoss, sampler="uniform", num_samples=4, estimator="nce", log_z="learned")
    assert type(model) is transformers.GPT2LMHeadModel
    loss = glue.replace_head(model, **EXACT)
    with pytest.raises(ValueError, match="whose head is a LinearCrossEntropyLoss already"):
        glue.replace_head(model, **EXACT)
    with pytest.raises(ValueError, match="expected the loss that replace_head gave for this GPT2LMHeadModel"):
        xs.restore_head(model, xs.LinearCrossEntropyLoss(D, V))
    model.set_output_embeddings(torch.nn.Linear(D, V, bias=False))
    with pytest.raises(RuntimeError, match="expected lm_head to be the Linear of its LinearCrossEntropyLoss"):
        model(**tokens())
    assert loss.linear is not model.lm_head
    with pytest.raises(TypeError, match="expected a model of Transformers, got Linear"):
        glue.replace_head(torch.nn.Linear(2, 2), **EXACT)


# -------------------------------------------------------------------------------------------------------------------------------- Trainer

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, at):
        return {key: value[0] for key, value in tokens(1, seed=at).items()}


def arguments(folder, **kwargs):
    defaults = dict(max_steps=4, per_device_train_batch_size=4, learning_rate=0.02, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3,
                    logging_steps=1, weight_decay=0.1)
    return transformers.TrainingArguments(str(folder), **(defaults | kwargs))


def losses_of(trainer):
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer_with_the_exact_loss_is_the_plain_trainer(accumulate, tmp_path):
    histories = []
    for ours in (False, True):
        model = gpt2()
        if ours:
            xs.integrations.transformers.replace_head(model, **EXACT)
        trainer = (xs.integrations.transformers.Trainer if ours else transformers.Trainer)(
            model, arguments(tmp_path, gradient_accumulation_steps=accumulate), train_dataset=Texts(), eval_dataset=Texts())
        trainer.train()
        histories.append(torch.cat([losses_of(trainer), torch.tensor([trainer.evaluate()["eval_loss"]])]))
    assert len(histories[0]) == 5
    torch.testing.assert_close(histories[1], histories[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_trainer_with_row_sparse_gradients(max_grad_norm, tmp_path):
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    grads = []
    loss.linear.weight.register_post_accumulate_grad_hook(lambda weight: grads.append(weight.grad.layout))
    trainer = xs.integrations.transformers.Trainer(model, arguments(tmp_path, max_grad_norm=max_grad_norm), train_dataset=Texts())
    trainer.train()
    inner = trainer.optimizer.optimizer
    assert type(inner) is xs.optim.RowAdam and set(grads) == {torch.sparse_coo}
    assert {group["weight_decay"] for group in inner.param_groups} == {0.1, 0.0} and inner.param_groups[0]["betas"] == (0.9, 0.999)
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)


def test_a_plain_trainer_keeps_its_optimizer(tmp_path):
    trainer = xs.integrations.transformers.Trainer(gpt2(), arguments(tmp_path), train_dataset=Texts())
    assert type(trainer.create_optimizer()) is torch.optim.AdamW


@pytest.mark.parametrize("asked, message", [
    (dict(args=dict(label_smoothing_factor=0.1)), "expected label_smoothing_factor of 0.*label_smoothing=0.1"),
    (dict(trainer=dict(compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean())), "expected no compute_loss_func")])
def test_what_would_go_past_the_loss_is_refused(asked, message, tmp_path):
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)

    def trainer():
        return xs.integrations.transformers.Trainer(model, arguments(tmp_path, **asked.get("args", {})), train_dataset=Texts(), **asked.get("trainer", {}))
    with pytest.raises(ValueError, match=message):
        trainer().train()
    xs.restore_head(model, loss)
    del loss
    trainer().train()


def test_an_optimizer_that_may_take_no_row_sparse_gradients_is_refused(tmp_path):
    def optimizer(**kwargs):
        model = gpt2()
        xs.integrations.transformers.replace_head(model, **SAMPLED, **kwargs)
        return xs.integrations.transformers.Trainer(model, arguments(tmp_path, optim="adafactor"), train_dataset=Texts()).create_optimizer()
    with pytest.raises(ValueError, match="expected optim as an Adam, AdamW, SGD or Adagrad.*got 'adafactor'.*sparse_grad=False"):
        optimizer()
    assert type(optimizer(sparse_grad=False)) is transformers.optimization.Adafactor


def test_compute_metrics_sees_logits(tmp_path):
    got = []
    def metrics(prediction):
        got.append((prediction.predictions, prediction.label_ids))
        return {}
    values = []
    for ours in (False, True):
        model = gpt2()
        if ours:
            xs.integrations.transformers.replace_head(model, **SAMPLED)
        trainer = xs.integrations.transformers.Trainer(model, arguments(tmp_path), eval_dataset=Texts(), compute_metrics=metrics)
        values.append(torch.tensor(trainer.evaluate()["eval_loss"]))
    torch.testing.assert_close(torch.tensor(got[1][0]), torch.tensor(got[0][0]))
    assert got[1][0].shape == (16, 9, V) and (got[1][1] == got[0][1]).all()
    torch.testing.assert_close(values[1], values[0])


@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_training_resumes(sampler, tmp_path):
    def trainer(folder, steps):
        model = gpt2()
        xs.integrations.transformers.replace_head(model, xs.SampledSoftmaxLoss, sampler=sampler, num_samples=8)
        return xs.integrations.transformers.Trainer(model, arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2,
                                                                     lr_scheduler_type="constant"), train_dataset=Texts())
    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    trainer(tmp_path / "parts", 2).train()
    resumed = trainer(tmp_path / "parts", 4)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses_of(whole)) == 4
    torch.testing.assert_close(losses_of(resumed), losses_of(whole), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------------------- PEFT

def peft_model(**kwargs):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install xsoftmax[integrations]")
    torch.manual_seed(2)
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, **kwargs))


def test_peft_with_a_trained_head(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install xsoftmax[integrations]")
    values = []
    for ours in (False, True):
        model = peft_model(modules_to_save=["lm_head"])
        if ours:
            loss = xs.integrations.transformers.replace_head(model, **EXACT)
            assert loss.linear.weight.requires_grad
        optimizer = xs.optim.RowAdam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            value = model(**tokens(seed=step)).loss
            value.backward()
            optimizer.step()
            values.append(value.detach())
    torch.testing.assert_close(values[4:], values[:4], rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(llama(), tmp_path)
    ids = tokens()["input_ids"]
    torch.testing.assert_close(read.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), read.generate(input_ids=ids, max_new_tokens=4, do_sample=False))


def test_peft_with_a_frozen_head():
    model = peft_model()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    assert not loss.linear.weight.requires_grad
    model(**tokens()).loss.backward()
    assert loss.linear.weight.grad is None
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    optimizer.step()  # no row-sparse gradient here


def test_peft_that_changes_the_head_is_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install xsoftmax[integrations]")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(glue.UnsupportedHeadError, match="put the head among modules_to_save, not among target_modules"):
        xs.integrations.transformers.replace_head(model, **SAMPLED)
    model = llama()
    xs.integrations.transformers.replace_head(model, **SAMPLED)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(RuntimeError, match="what changes a head .PEFT, set_output_embeddings. comes before xs.replace_head"):
        model(**tokens())
