"""Lightning and Accelerate with row-sparse gradients.

The exact loss trains like the plain model; clipping and checkpoints work.
"""

import copy
import subprocess
import sys

import pytest
import torch

import xsoftmax as xs

N, D = 50, 8
ABSENT = "{} is not installed: pip install xsoftmax[integrations]"


class Model(torch.nn.Module):
    """Predicts the next word. `head`: "plain" (Linear and cross entropy), "exact" or "sampled"."""
    def __init__(self, head):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.decoder, self.head = torch.nn.Embedding(N, D), torch.nn.Linear(D,
                                                                                            N), head
        if head == "exact":
            self.decoder = xs.LinearCrossEntropyLoss.from_linear(self.decoder)
        elif head == "sampled":
            self.decoder = xs.SampledSoftmaxLoss.from_linear(self.decoder, sampler="uniform",
                                                             num_samples=8)

    def forward(self, ids, target):
        hidden = self.embedding(ids)
        return torch.nn.functional.cross_entropy(
            self.decoder(hidden), target) if self.head == "plain" else self.decoder(hidden, target)

    def optimizer(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05,
                                 weight_decay=0.1) if self.head == "plain" else xs.optim.RowAdam(
                                     self.parameters(), lr=0.05, weight_decay=0.1)


def batches():
    random = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(N, (2, 6), generator=random)) for _ in range(5)]


# ---- Accelerate


def accelerated(head):
    pytest.importorskip("accelerate", reason=ABSENT.format("accelerate"))
    accelerator = xs.integrations.accelerate.Accelerator(cpu=True)
    model = Model(head)
    optimizer = model.optimizer()
    model, optimizer = accelerator.prepare(model, optimizer)
    values, norms = [], []
    for ids, target in batches():
        optimizer.zero_grad()
        value = model(ids, target)
        accelerator.backward(value)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
        optimizer.step()
        values.append(value.detach())
    return torch.stack(values), torch.stack(norms), accelerator, model, optimizer


def test_accelerate_with_the_exact_loss_trains_like_the_plain_model():
    (plain, norms, *_), (exact, our_norms, *_) = accelerated("plain"), accelerated("exact")
    torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_norms, norms, rtol=1e-4, atol=1e-5)
    assert (norms > 0.3).all()  # every step was clipped


def test_accelerate_clips_and_restores_row_sparse_training(tmp_path):
    values, norms, accelerator, model, optimizer = accelerated("sampled")
    assert model.decoder.linear.weight.grad.is_sparse and values.isfinite().all() and (norms
                                                                                       > 0.3).all()
    dense = [parameter.grad.to_dense() for parameter in model.parameters()]
    torch.testing.assert_close(torch.nn.utils.get_total_norm(dense), torch.tensor(0.3), rtol=1e-4,
                               atol=1e-5)
    with pytest.raises(TypeError, match="clipping by value: expected dense gradients, got "
                       "row-sparse ones"):
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    accelerator.save_state(str(tmp_path))
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(
        optimizer.state_dict()["state"])
    ids, target = batches()[0]
    optimizer.zero_grad()
    accelerator.backward(model(ids, target))
    optimizer.step()
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for number, tensors in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(tensors, state[number], rtol=0, atol=0)


def test_accelerate_saves_the_index_of_a_sampler(tmp_path):
    """Accelerate saves tensors by their memory, so it leaves out empty tables."""
    pytest.importorskip("accelerate", reason=ABSENT.format("accelerate"))

    def prepared():
        loss = xs.SampledSoftmaxLoss(D, N, sampler="midx", num_samples=4)
        accelerator = xs.integrations.accelerate.Accelerator(cpu=True)
        return accelerator, accelerator.prepare(loss)

    (accelerator, loss), (other, loaded) = prepared(), prepared()
    for each in (loss, loaded):
        each(torch.randn(3, D), torch.randint(N, (3,)))
    assert not torch.equal(loss.sampler.codewords1, loaded.sampler.codewords1)
    accelerator.save_state(str(tmp_path))
    loaded.sampler.step.fill_(7)
    other.load_state(str(tmp_path))
    torch.testing.assert_close(loaded.state_dict(), loss.state_dict(), rtol=0, atol=0)


# ---- Lightning


def lightning_module(head):
    lightning = pytest.importorskip("lightning.pytorch", reason=ABSENT.format("lightning"))

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.values, self.clipped = Model(head), [], []

        def training_step(self, batch, index):
            torch.manual_seed(self.global_step)
            value = self.model(batch[0][0], batch[1][0])
            self.values.append(value.detach())
            return value

        def on_train_epoch_end(self):
            if head == "sampled":
                # a checkpoint flushes too; without this, runs would read different values
                self.optimizers(use_pl_optimizer=False).flush()

        def on_before_zero_grad(self, optimizer):
            grads = [
                parameter.grad.to_dense()
                for parameter in self.parameters() if parameter.grad is not None
            ]
            if grads:
                self.clipped.append(torch.nn.utils.get_total_norm(grads))

        def configure_optimizers(self):
            return self.model.optimizer()

    return Module()


def fit(module, folder, path=None, **kwargs):
    import lightning.pytorch as lightning
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*(torch.stack(part) for part in zip(*batches()))),
        batch_size=1)
    options = dict(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                   enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.3,
                   default_root_dir=folder, callbacks=[xs.integrations.lightning.RowGradients()])
    trainer = lightning.Trainer(**(options | kwargs))
    trainer.fit(module, data, ckpt_path=path)
    return trainer


def test_lightning_with_the_exact_loss_trains_like_the_plain_model(tmp_path):
    plain, exact = lightning_module("plain"), lightning_module("exact")
    fit(plain, tmp_path, callbacks=[])
    fit(exact, tmp_path)
    assert len(plain.values) == 5
    torch.testing.assert_close(torch.stack(exact.values), torch.stack(plain.values), rtol=1e-5,
                               atol=1e-5)


def test_lightning_clips_and_saves_row_sparse_training(tmp_path):
    module = lightning_module("sampled")
    trainer = fit(module, tmp_path)
    weight = module.model.decoder.linear.weight
    assert weight.grad.is_sparse and (torch.stack(module.clipped)
                                      <= 0.3 + 1e-4).all() and module.clipped
    flushed = weight.detach().clone()
    module.eval()  # catches up
    assert torch.equal(weight, flushed)  # nothing was pending: the epoch ended with a flush
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert torch.equal(saved["state_dict"]["model.decoder.linear.weight"], weight)
    with pytest.raises(TypeError, match="clipping by value: expected dense gradients"):
        fit(lightning_module("sampled"), tmp_path, gradient_clip_algorithm="value")


def test_lightning_resumes(tmp_path):
    """A resumed run has the losses of an uninterrupted one. The step number is the seed."""
    whole, first, second = (lightning_module("sampled") for _ in range(3))
    fit(whole, tmp_path, max_epochs=2)
    fit(first, tmp_path).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, tmp_path, max_epochs=2, path=tmp_path / "half.ckpt")
    torch.testing.assert_close(torch.stack(first.values + second.values), torch.stack(whole.values))


def test_the_package_imports_without_the_integrated_libraries():
    blocked = """import sys
for name in ("transformers", "lightning", "pytorch_lightning", "accelerate", "torchmetrics"):
    sys.modules[name] = None
"""
    subprocess.run([
        sys.executable, "-c", blocked + "import xsoftmax as xs, torch\n"
        "model = torch.nn.ModuleDict({'decoder': torch.nn.Linear(3, 9)})\n"
        "xs.restore_head(model, xs.replace_head(model, 'decoder', "
        "xs.LinearCrossEntropyLoss))\nxs.integrations\n"
        "try: xs.integrations.lightning\nexcept ImportError: pass\nelse: raise "
        "SystemExit('imported')"
    ], check=True)
