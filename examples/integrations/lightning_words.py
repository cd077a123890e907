"""Trains a sampled softmax with Lightning, with gradient clipping."""

import lightning.pytorch as lightning
import torch
import xsoftmax as xs


class Words(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.encoder = torch.nn.Embedding(5000, 64)
        self.loss = xs.SampledSoftmaxLoss(64, 5000, bias=True,
                                          sampler="log_uniform",
                                          num_samples=512)

    def training_step(self, batch, index):
        ids, target = batch
        value = self.loss(self.encoder(ids), target)
        self.losses.append(value.item())
        return value

    def configure_optimizers(self):
        return xs.optim.RowAdam(self.parameters(), lr=1e-3,
                                weight_decay=0.01)


torch.manual_seed(0)
model = Words()
data = torch.utils.data.TensorDataset(torch.randint(5000, (160,)),
                                      torch.randint(5000, (160,)))
options = dict(max_epochs=1, accelerator="cpu", logger=False,
               enable_checkpointing=False)
trainer = lightning.Trainer(
    **options, gradient_clip_val=1.0,
    callbacks=[xs.integrations.lightning.RowGradients()])
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=32))
losses = model.losses
