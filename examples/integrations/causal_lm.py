"""Trains a Transformers GPT-2 with a sampled softmax and Trainer,
and saves it as a plain model."""

import torch
import transformers
import xsoftmax as xs

torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=5000, n_embd=64,
                                 n_layer=2, n_head=2, n_positions=32,
                                 bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config)
loss = xs.replace_head(model, "lm_head", xs.SampledSoftmaxLoss,
                       sampler="log_uniform", num_samples=512)

texts = [{"input_ids": ids, "labels": ids}
         for ids in torch.randint(5000, (40, 16))]
arguments = transformers.TrainingArguments("out", max_steps=5,
                                           learning_rate=1e-3,
                                           logging_steps=1,
                                           report_to="none")
trainer = xs.integrations.transformers.Trainer(model, arguments,
                                               train_dataset=texts,
                                               eval_dataset=texts)
trainer.train()
trainer.evaluate()
losses = [
    entry.get("loss", entry.get("eval_loss"))
    for entry in trainer.state.log_history
    if "loss" in entry or "eval_loss" in entry
]

model.save_pretrained("out/model")
again = transformers.AutoModelForCausalLM.from_pretrained("out/model")
text = again.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5,
                      do_sample=False)
