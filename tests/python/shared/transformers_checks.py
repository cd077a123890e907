"""Small models of Transformers, and batches for them."""

import torch
import transformers

import xsoftmax as xs

V, D = 60, 16
EXACT = dict(loss_class=xs.LinearCrossEntropyLoss)
SAMPLED = dict(loss_class=xs.SampledSoftmaxLoss, sampler="uniform", num_samples=12)


def gpt2(tied=True):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=V, n_embd=D, n_layer=1, n_head=2, n_positions=32,
                                     tie_word_embeddings=tied, bos_token_id=0, eos_token_id=V - 1,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def llama(tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=D, intermediate_size=D,
                                      num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=2, tie_word_embeddings=tied,
                                      pad_token_id=0)
    return transformers.LlamaForCausalLM(config)


def bert(tied=True):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=V, hidden_size=D, intermediate_size=D,
                                     num_hidden_layers=1, num_attention_heads=2,
                                     tie_word_embeddings=tied, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def t5(tied=False):
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=V, d_model=D, d_kv=8, d_ff=D, num_layers=1,
                                   num_heads=2, tie_word_embeddings=tied, dropout_rate=0.0,
                                   decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


def tokens(count=3, length=9, seed=1):
    ids = torch.randint(1, V - 1, (count, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 2:4] = -100
    return dict(input_ids=ids, labels=labels)
