"""Compares decoding through xs.integrations.transformers.fast_head with the dense head, in a Llama
model that is trained first: greedy, and samples of the whole softmax.

    python benchmarks/decode.py [--data PATH] [--minutes 5] [--width 512] [--layers 2]
                                [--intermediate 2048] [--byte-pairs 131072] [--bfloat16]
                                [--tokens 2000] [--batches 1 8 64] [--threads 1] [--json [FILE]]

The model is trained on words, or on --byte-pairs of a tokenizer trained on the text, with a sampled
softmax for --minutes, with products in bfloat16 if --bfloat16 is given; 0: its weights are random.
It decodes in float32. The default text is the source of Python's standard library. Each batch
continues as many windows of the validation text by --tokens tokens in total. Decoding with each
head takes turns. The time of the head alone is that of all its calls in one decoding. Samples start
from the same random state. The draft head (xs.draft_head) finds 8 likely tokens of one hidden state
at a time; its recall is that of hidden states which it was not fitted to.
"""

import argparse
import copy
import time
from typing import Callable

import torch
import transformers

import xsoftmax as xs
from common.records import add_json, report, table
from common.timing import interleave

from examples.gpt.data import Text, load_byte_pairs, load_words
from xsoftmax.integrations.transformers import fast_head, replace_head, restore_head

CONTEXT, WINDOWS, PROMPT = 64, 32, 32


def make_model(args: argparse.Namespace, words: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=words, hidden_size=args.width,
                                 intermediate_size=args.intermediate or 4 * args.width,
                                 num_hidden_layers=args.layers, num_attention_heads=8,
                                 max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
                                 pad_token_id=0))


def train(model: transformers.LlamaForCausalLM, corpus: Text, seconds: float,
          bfloat16: bool) -> tuple[int, float]:
    """Returns the number of steps, and the exact loss per token on the validation text."""
    model.model.embed_tokens.sparse = True  # only the rows of a batch have a gradient
    loss = replace_head(model, xs.SampledSoftmaxLoss, sampler="log_uniform", num_samples=2048)
    optimizer = xs.optim.RowAdam(model.parameters(), lr=1e-3)
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        begin = torch.randint(len(corpus.train) - CONTEXT, (WINDOWS, 1))
        ids = corpus.train[begin + torch.arange(CONTEXT)]
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            value = model(ids, labels=ids).loss
        value.backward()
        xs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    optimizer.flush()
    model.eval()
    ids = corpus.valid[:len(corpus.valid) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:256]
    with torch.no_grad():
        value = float(
            sum(model(part, labels=part).loss * len(part) for part in ids.split(32)) / len(ids))
    restore_head(model, loss)
    return steps, value


def measure(model: transformers.LlamaForCausalLM, corpus: Text, batch: int, tokens: int,
            sample: bool) -> dict:
    begin = torch.arange(batch) * (len(corpus.valid) - PROMPT) // batch
    prompt = corpus.valid[begin[:, None] + torch.arange(PROMPT)]
    searching, hidden = copy.deepcopy(model), []
    head = fast_head(searching)
    start = time.perf_counter()
    head.index()
    seconds = time.perf_counter() - start

    def decode(model: transformers.LlamaForCausalLM) -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=sample,
                              top_k=0, max_new_tokens=max(1, tokens // batch))

    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    is_equal = torch.equal(decode(model), decode(searching))
    hook.remove()
    counts = head.fast_steps, head.dense_steps, head.cells_read
    whole = interleave({"dense": lambda: decode(model), "fast": lambda: decode(searching)}, 3, 0)
    config = copy.deepcopy(model.generation_config)
    config.do_sample = sample
    head.begin_call(config, [])  # as in a call of generate
    searching.lm_head(hidden[0])
    head.check(model.lm_head(hidden[0])[:, -1])

    def answer(head: Callable[[torch.Tensor], object]) -> None:
        for states in hidden:
            head(states)

    with torch.no_grad():
        alone = interleave(
            {"dense": lambda: answer(model.lm_head), "fast": lambda: answer(searching.lm_head)}, 3,
            1)
    return {
        "batch": batch, "mode": "sample" if sample else "greedy", "tokens equal": is_equal,
        "fast steps": counts[0], "dense steps": counts[1],
        "cells read": counts[2] / max(1, counts[0] * head.num_cells),
        "head": alone["fast"] / alone["dense"], "model": whole["fast"] / whole["dense"],
        "dense head": alone["dense"] / len(hidden), "fast head": alone["fast"] / len(hidden),
        "index": seconds
    }


@torch.no_grad()
def measure_draft(model: transformers.LlamaForCausalLM, corpus: Text) -> dict:
    ids = corpus.valid[:len(corpus.valid) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:64]
    hidden = model.model(ids)[0].flatten(0, 1)
    hidden = hidden[torch.randperm(len(hidden))]
    draft, states = xs.draft_head(model.lm_head, hidden[:1024], k=8), hidden[1024:1152].split(1)
    seconds = interleave(
        {
            "dense": lambda: [model.lm_head(state).topk(8) for state in states],
            "draft": lambda: [draft(state) for state in states]
        }, 5, 1)
    return {
        "recall": draft.recall, "best": draft.best_recall,
        "ratio": seconds["draft"] / seconds["dense"], "draft": seconds["draft"] / len(states)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="as in examples/language_model")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--intermediate", type=int, help="4 times the width, if not given")
    parser.add_argument("--byte-pairs", type=int, help="the size of the vocabulary")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=1)
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    corpus = (load_byte_pairs(args.data, args.byte_pairs, None, 5_000_000)
              if args.byte_pairs else load_words(args.data, 2, 5_000_000))
    model = make_model(args, corpus.num_tokens)
    steps, value = train(model, corpus, 60 *
                         args.minutes, args.bfloat16) if args.minutes > 0 else (0, None)
    model.eval()
    results = [
        measure(model, corpus, batch, args.tokens, sample) for sample in (False, True)
        for batch in args.batches
    ]
    draft = measure_draft(model, corpus)
    rows = [{
        "decoding": f"{one['mode']}, batch {one['batch']}",
        "head / dense head": f"{one['head']:.3f}",
        "all / with the dense head": f"{one['model']:.2f}",
        "cells read": f"{one['cells read']:.0%}", "dense head": f"{1e3 * one['dense head']:.2f} ms",
        "fast head": f"{1e3 * one['fast head']:.3f} ms", "tokens equal": str(one["tokens equal"]),
        "dense steps": one["dense steps"]
    } for one in results]
    figures = [{"figure": f"{one['mode']}, batch {one['batch']}: {name}", "value": one[key]}
               for one in results for name, key in (("head / dense head", "head"),
                                                    ("decoding / with the dense head", "model"))]
    report(
        args, __doc__, question="How much faster does a Transformers model decode by search?",
        against="the model's own head, nn.Linear", tables=[
            table(rows, columns=list(rows[0])),
            table([{
                corpus.unit: f"{corpus.num_tokens:,}", "width": args.width, "steps": steps,
                "validation loss": "untrained" if value is None else f"{value:.3f}",
                "index": f"{results[0]['index']:.1f} s"
            }], columns=[corpus.unit, "width", "steps", "validation loss", "index"]),
            table([{
                "draft head / lm_head(state).topk(8)": f"{draft['ratio']:.3f}",
                "time": f"{1e3 * draft['draft']:.3f} ms",
                "recall of the best 8": f"{draft['recall']:.3f}",
                "best token found": f"{draft['best']:.3f}"
            }])
        ], results=results, figures=figures)


if __name__ == "__main__":
    main()
