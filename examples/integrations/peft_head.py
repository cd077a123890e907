"""Trains LoRA adapters in the body of a model, and its head with a
sampled softmax."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
import xsoftmax as xs

torch.manual_seed(0)
config = LlamaConfig(vocab_size=5000, hidden_size=64,
                     intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=2, num_key_value_heads=2)
model = get_peft_model(
    LlamaForCausalLM(config),
    LoraConfig(target_modules=["q_proj", "v_proj"],
               modules_to_save=["lm_head"]))
loss = xs.integrations.transformers.replace_head(
    model, xs.SampledSoftmaxLoss, sampler="log_uniform",
    num_samples=512)
trained = [
    parameter
    for parameter in model.parameters() if parameter.requires_grad
]
optimizer = xs.optim.RowAdam(trained, lr=1e-3, weight_decay=0.01)

losses = []
for step in range(5):
    ids = torch.randint(5000, (8, 16))
    optimizer.zero_grad()
    value = model(input_ids=ids, labels=ids).loss
    value.backward()
    optimizer.step()
    losses.append(value.item())
model.save_pretrained("out/adapters")
