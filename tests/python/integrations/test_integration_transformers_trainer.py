"""The Trainer of Transformers, and PEFT, with a model whose head was replaced."""

import pytest
import torch

import xsoftmax as xs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
glue = pytest.importorskip("xsoftmax.integrations.transformers",
                           reason="accelerate is not installed: pip install xsoftmax[integrations]")

from transformers_checks import EXACT, SAMPLED, V, gpt2, llama, tokens  # noqa: E402

# ---- Trainer


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, at):
        return {key: value[0] for key, value in tokens(1, seed=at).items()}


def arguments(folder, **kwargs):
    defaults = dict(max_steps=4, per_device_train_batch_size=4, learning_rate=0.02, report_to=[],
                    use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3, logging_steps=1,
                    weight_decay=0.1)
    return transformers.TrainingArguments(str(folder), **(defaults | kwargs))


def losses_of(trainer):
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_with_the_exact_loss_trains_like_the_plain_trainer(accumulate, tmp_path):
    histories = []
    for ours in (False, True):
        model = gpt2()
        if ours:
            xs.integrations.transformers.replace_head(model, **EXACT)
        trainer = (xs.integrations.transformers.Trainer if ours else transformers.Trainer)(
            model, arguments(tmp_path, gradient_accumulation_steps=accumulate),
            train_dataset=Texts(), eval_dataset=Texts())
        trainer.train()
        histories.append(
            torch.cat([losses_of(trainer),
                       torch.tensor([trainer.evaluate()["eval_loss"]])]))
    assert len(histories[0]) == 5
    torch.testing.assert_close(histories[1], histories[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_the_trainer_uses_a_row_optimizer_for_row_sparse_gradients(max_grad_norm, tmp_path):
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    grads = []
    loss.linear.weight.register_post_accumulate_grad_hook(
        lambda weight: grads.append(weight.grad.layout))
    trainer = xs.integrations.transformers.Trainer(model,
                                                   arguments(tmp_path, max_grad_norm=max_grad_norm),
                                                   train_dataset=Texts())
    trainer.train()
    inner = trainer.optimizer.optimizer
    assert type(inner) is xs.optim.RowAdam and set(grads) == {torch.sparse_coo}
    assert {group["weight_decay"]
            for group in inner.param_groups
            } == {0.1, 0.0} and inner.param_groups[0]["betas"] == (0.9, 0.999)
    assert all(entry["grad_norm"] > 0
               for entry in trainer.state.log_history if "grad_norm" in entry)


def test_a_model_without_a_loss_keeps_the_default_optimizer(tmp_path):
    trainer = xs.integrations.transformers.Trainer(gpt2(), arguments(tmp_path),
                                                   train_dataset=Texts())
    assert type(trainer.create_optimizer()) is torch.optim.AdamW


@pytest.mark.parametrize(
    "asked, message",
    [(dict(args=dict(label_smoothing_factor=0.1)), "expected label_smoothing_factor of "
      "0.*label_smoothing=0.1"),
     (dict(trainer=dict(
         compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean())),
      "expected no compute_loss_func")])
def test_trainer_options_that_would_bypass_the_loss_are_refused(asked, message, tmp_path):
    model = gpt2()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)

    def trainer():
        return xs.integrations.transformers.Trainer(model,
                                                    arguments(tmp_path, **asked.get("args", {})),
                                                    train_dataset=Texts(),
                                                    **asked.get("trainer", {}))

    with pytest.raises(ValueError, match=message):
        trainer().train()
    xs.restore_head(model, loss)
    del loss
    trainer().train()


def test_an_optimizer_without_row_sparse_support_is_refused(tmp_path):
    def optimizer(**kwargs):
        model = gpt2()
        xs.integrations.transformers.replace_head(model, **SAMPLED, **kwargs)
        return xs.integrations.transformers.Trainer(model, arguments(tmp_path, optim="adafactor"),
                                                    train_dataset=Texts()).create_optimizer()

    with pytest.raises(
            ValueError, match="expected optim as an Adam, AdamW, SGD or Adagrad.*got "
            "'adafactor'.*sparse_grad=False"):
        optimizer()
    assert type(optimizer(sparse_grad=False)) is transformers.optimization.Adafactor


def test_compute_metrics_gets_logits(tmp_path):
    got = []

    def metrics(prediction):
        got.append((prediction.predictions, prediction.label_ids))
        return {}

    values = []
    for ours in (False, True):
        model = gpt2()
        if ours:
            xs.integrations.transformers.replace_head(model, **SAMPLED)
        trainer = xs.integrations.transformers.Trainer(model, arguments(tmp_path),
                                                       eval_dataset=Texts(),
                                                       compute_metrics=metrics)
        values.append(torch.tensor(trainer.evaluate()["eval_loss"]))
    torch.testing.assert_close(torch.tensor(got[1][0]), torch.tensor(got[0][0]))
    assert got[1][0].shape == (16, 9, V) and (got[1][1] == got[0][1]).all()
    torch.testing.assert_close(values[1], values[0])


@pytest.mark.parametrize("sampler", ["uniform", "midx"])
def test_training_resumes_from_a_checkpoint(sampler, tmp_path):
    def trainer(folder, steps):
        model = gpt2()
        xs.integrations.transformers.replace_head(model, xs.SampledSoftmaxLoss, sampler=sampler,
                                                  num_samples=8)
        return xs.integrations.transformers.Trainer(
            model,
            arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2,
                      lr_scheduler_type="constant"), train_dataset=Texts())

    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    trainer(tmp_path / "parts", 2).train()
    resumed = trainer(tmp_path / "parts", 4)
    resumed.train(resume_from_checkpoint=True)
    assert len(losses_of(whole)) == 4
    torch.testing.assert_close(losses_of(resumed), losses_of(whole), rtol=1e-5, atol=1e-5)


# ---- PEFT


def peft_model(**kwargs):
    peft = pytest.importorskip(
        "peft", reason="peft is not installed: pip install "
        "xsoftmax[integrations]")
    torch.manual_seed(2)
    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, **kwargs))


def test_peft_trains_a_head_in_modules_to_save(tmp_path):
    peft = pytest.importorskip(
        "peft", reason="peft is not installed: pip install "
        "xsoftmax[integrations]")
    values = []
    for ours in (False, True):
        model = peft_model(modules_to_save=["lm_head"])
        if ours:
            loss = xs.integrations.transformers.replace_head(model, **EXACT)
            assert loss.linear.weight.requires_grad
        optimizer = xs.optim.RowAdam(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.05)
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
    torch.testing.assert_close(read.eval()(input_ids=ids).logits,
                               model.eval()(input_ids=ids).logits)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False),
                       read.generate(input_ids=ids, max_new_tokens=4, do_sample=False))


def test_peft_works_with_a_frozen_head():
    model = peft_model()
    loss = xs.integrations.transformers.replace_head(model, **SAMPLED)
    assert not loss.linear.weight.requires_grad
    model(**tokens()).loss.backward()
    assert loss.linear.weight.grad is None
    assert all(parameter.grad is not None
               for parameter in model.parameters() if parameter.requires_grad)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad])
    optimizer.step()  # a frozen head has no row-sparse gradient


def test_peft_adapters_on_the_head_are_refused():
    peft = pytest.importorskip(
        "peft", reason="peft is not installed: pip install "
        "xsoftmax[integrations]")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(glue.UnsupportedHeadError, match="put the head among modules_to_save, not "
                       "among target_modules"):
        xs.integrations.transformers.replace_head(model, **SAMPLED)
    model = llama()
    xs.integrations.transformers.replace_head(model, **SAMPLED)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(
            RuntimeError, match="what changes a head .PEFT, set_output_embeddings. "
            "comes before xs.replace_head"):
        model(**tokens())
