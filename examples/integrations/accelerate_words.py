"""Trains a sampled softmax with Accelerate and gradient clipping."""

import torch
import xsoftmax as xs

torch.manual_seed(0)
encoder = torch.nn.Embedding(5000, 64)
decoder = xs.SampledSoftmaxLoss(64, 5000, bias=True,
                                sampler="log_uniform",
                                num_samples=512)
model = torch.nn.ModuleList([encoder, decoder])
optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3,
                             weight_decay=0.01)
accelerator = xs.integrations.accelerate.Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)

losses = []
for step in range(5):
    ids, target = torch.randint(5000, (2, 64))
    optimizer.zero_grad()
    value = decoder(encoder(ids), target)
    accelerator.backward(value)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(value.item())
