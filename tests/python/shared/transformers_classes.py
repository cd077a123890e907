"""Tiny models of every class in five auto mappings of Transformers, made by one rule that shrinks
config defaults."""

import dataclasses
import functools

import torch
import transformers
from transformers.models.auto import modeling_auto

MAPPINGS = dict(causal="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
                masked="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
                seq2seq="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
                token="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
                sequence="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES")
TOKENS, LABELS, LENGTH = 100, 7, 8
NO_DEFAULT = dict(vocab_size=TOKENS, num_experts_per_tok=2, num_key_value_heads=2)
# Options that need other values than the rule gives.
SPECIAL = dict(BltConfig=dict(encoder_hash_byte_group_vocab=100),
               DbrxAttentionConfig=dict(rope_theta=1e4, clip_qkv=8.0),
               GPTNeoConfig=dict(attention_types=[[["global", "local"], 1]]),
               GPTNeoXJapaneseConfig=dict(num_attention_heads=4),
               ReformerConfig=dict(axial_pos_embds=False,
                                   attn_layers=["local",
                                                "lsh"]), XmodConfig=dict(default_language="en_XX"))


@functools.cache
def tasks():
    """Returns {name of a class: its task} for all mappings, without importing the classes."""
    found = {}
    for task, mapping in MAPPINGS.items():
        for names in getattr(modeling_auto, mapping).values():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                found.setdefault(name, task)
    return found


def classes():
    """Returns the names of all classes that Transformers has, each once."""
    return [name for name in tasks() if getattr(transformers, name, None) is not None]


def _size(name, value, factor):
    """Returns a small value for a config option: fewer layers and experts, narrower tables."""
    words = set(name.split("_"))
    if name.endswith("vocab_size") or name == "n_words":
        return TOKENS
    if name.endswith(("token_id", "_index")):
        return value if value < 3 else 3 + sum(map(ord, name)) % 90
    if name in ("n_group", "topk_group"):
        return 1
    if "layers" in words or name in ("n_layer", "depth", "num_blocks"):
        return min(value, 2)
    if words & {"topk", "k"} or words & {"expert", "experts"} and "per" in words:
        return min(value, 2)
    if words & {"experts"} or name in ("num_expert", "zero_expert_num"):
        return min(value, 4)
    if words & {"size", "dim", "rank", "d", "embd", "inner", "ffn", "channels", "dims"}:
        return value // factor if value >= 64 and value % factor == 0 else value
    return value


def tiny_config(kind, factor):
    """Returns a config of this class with small sizes."""
    options, default = {}, kind()
    for field in dataclasses.fields(kind):
        if type(field.default) is int:
            options[field.name] = _size(field.name, field.default, factor)
        elif field.name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            kinds = list(dict.fromkeys(getattr(default, field.name) or ()))
            options[field.name] = (kinds * 2)[:2] or None
    for name in getattr(kind, "sub_configs", {}):
        sub = type(getattr(default, name, None))
        if dataclasses.is_dataclass(sub):
            options[name] = tiny_config(sub, factor)
    for name, value in NO_DEFAULT.items():
        if vars(default).get(name, 0) is None:
            options[name] = value
    if vars(default).get("head_dim", 0) is None:
        options["head_dim"] = options["hidden_size"] // options["num_attention_heads"]
    return kind(**{"use_cache": False, **options, **SPECIAL.get(kind.__name__, {})})


def tiny_model(name):
    task, kind = tasks()[name], getattr(transformers, name)
    torch.manual_seed(0)
    for factor in (16, 8, 4):
        try:
            config = tiny_config(kind.config_class, factor)
            config.num_labels = LABELS
            for option, value in dict(decoder_start_token_id=0, pad_token_id=0).items():
                if getattr(config, option, None) is None:
                    setattr(config, option, value)
            if name.startswith("Reformer"):
                config.is_decoder = task == "causal"
            return kind(config)
        except Exception as caught:
            error = caught
    raise error


def batch_of(name, model):
    task = tasks()[name]
    ids = torch.randint(4, TOKENS - 1, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = dict(input_ids=ids)
    if task == "sequence":  # models like Bart pool at the only end-of-text token
        end = getattr(model.config, "eos_token_id", None)
        end = end if type(end) is int else 3
        ids[ids == end], ids[:, -1] = (5 if end == 4 else 4), end
        return dict(batch, labels=torch.tensor([3, 5]))
    labels = ids % LABELS if task == "token" else ids.clone()
    labels[:, 2] = -100
    return dict(batch, labels=labels)


def head_name(name, model):
    """Returns the name of the last Linear with an output per label; None: output embeddings."""
    size = TOKENS if tasks()[name] in ("causal", "masked", "seq2seq") else LABELS
    try:
        if size == TOKENS and model.get_output_embeddings() is not None:
            return None
    except (AttributeError, NotImplementedError):
        pass
    found = [
        key for key, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == size
    ]
    return found[-1]
