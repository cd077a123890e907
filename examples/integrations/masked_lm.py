"""Trains a Transformers BERT with a sampled softmax in a custom
training loop."""

import torch
from transformers import BertConfig, BertForMaskedLM
import xsoftmax as xs

torch.manual_seed(0)
config = BertConfig(vocab_size=5000, hidden_size=64,
                    intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=2)
model = BertForMaskedLM(config)
loss = xs.replace_head(model, "cls.predictions.decoder",
                       xs.SampledSoftmaxLoss, sampler="uniform",
                       num_samples=512)
optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3,
                             weight_decay=0.01)

losses = []
for step in range(5):
    ids = torch.randint(5000, (8, 16))
    labels = torch.where(torch.rand(8, 16) < 0.15, ids, -100)
    optimizer.zero_grad()
    value = model(input_ids=ids.masked_fill(labels >= 0, 4),
                  labels=labels).loss
    value.backward()
    xs.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(value.item())
