"""fast_head: generation through an index gives the tokens of the dense head."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import xsoftmax as xs

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install xsoftmax[integrations]")
glue = pytest.importorskip("xsoftmax.integrations.transformers",
                           reason="accelerate is not installed: pip install xsoftmax[integrations]")
from xsoftmax.integrations.fast_head import _sums_of  # noqa: E402

fast_head, slow_head = glue.fast_head, glue.slow_head

V, D = 500, 128
PROMPT = torch.tensor([[3, 17, 9, 250], [8, 8, 41, 5]])


def gpt2(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=D, n_layer=1, n_head=2,
                                bos_token_id=1, eos_token_id=2, pad_token_id=0, **options))
    with torch.no_grad():  # distinct logits; a tied head would repeat the last token
        model.lm_head.weight = torch.nn.Parameter(torch.randn(V, D))
    return model.to(dtype).eval()


def made(model, **options):
    torch.manual_seed(5)
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12,
                          **options)


FAST = [
    dict(do_sample=False),
    dict(do_sample=False, min_new_tokens=10),
    dict(do_sample=True, top_k=20),
    dict(do_sample=True, top_k=50, top_p=0.8, temperature=0.7),
    dict(do_sample=True, top_k=5, min_p=0.1, min_length=9),
    dict(do_sample=True, top_k=0),
    dict(do_sample=True, top_k=0, temperature=2.5),
]
DENSE = [
    dict(num_beams=3, do_sample=False),
    dict(do_sample=True, top_k=0, min_new_tokens=9),
    dict(do_sample=True, top_k=0, min_p=0.1),
    dict(do_sample=True, top_k=51),
    dict(do_sample=False, repetition_penalty=1.3),
    dict(do_sample=False, no_repeat_ngram_size=2),
    dict(do_sample=True, top_k=5, bad_words_ids=[[7]]),
    dict(do_sample=False, return_dict_in_generate=True, output_logits=True),
    dict(do_sample=False,
         custom_generate=lambda model, input_ids, **options: model(input_ids[:, -1:]).logits),
    dict(do_sample=False, logits_processor=[lambda ids, scores: scores.roll(1, 1)]),
    dict(do_sample=True, top_k=0,
         logits_processor=[transformers.TopPLogitsWarper(0.5, filter_value=5.0)]),
]


@pytest.mark.parametrize("options", FAST)
def test_the_tokens_are_those_of_the_dense_head(options):
    model = gpt2()
    want = made(model, **options)
    head = fast_head(model)
    assert torch.equal(made(model, **options), want)
    assert head.fast_steps > 0 and head.dense_steps == 2
    assert 0 < head.cells_read <= head.fast_steps * head.num_cells


@pytest.mark.parametrize("top_p, temperature, is_fast, is_dense", [(0.95, 1.0, True, False),
                                                                   (0.7, 2.0, True, True),
                                                                   (0.2, 1.0, False, True)])
def test_samples_of_top_p_are_those_of_the_dense_head(top_p, temperature, is_fast, is_dense):
    """A sample outside of top_p is drawn again among all tokens."""
    options = dict(do_sample=True, top_k=0, top_p=top_p, temperature=temperature)
    model = gpt2()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)  # else one token has nearly all the probability
    want = made(model, **options)
    head = fast_head(model)
    assert torch.equal(made(model, **options), want)
    assert (head.fast_steps > 0) == is_fast and (head.dense_steps > 2) == is_dense


def test_samples_of_many_sequences_score_all_tokens():
    options = dict(do_sample=True, top_k=0, num_return_sequences=2)
    model = gpt2()
    want = made(model, **options)
    head = fast_head(model)
    assert torch.equal(made(model, **options), want) and head.fast_steps == 0


def test_tokens_that_tie_are_those_of_the_dense_head():
    """Rows occur twice each, so the last of top_k ties with the next token."""
    model = gpt2()
    with torch.no_grad():
        model.lm_head.weight[V // 2:] = model.lm_head.weight[:V // 2]
    for options in dict(do_sample=False), dict(do_sample=True,
                                               top_k=3), dict(do_sample=True, top_k=4):
        want = made(model, **options)
        head = fast_head(model)
        assert torch.equal(made(model, **options), want)
        assert (head.fast_steps == 0) == (options.get("top_k") == 3)
        slow_head(model)


def test_the_tokens_of_16_bits_are_the_best_up_to_rounding():
    model = gpt2(torch.bfloat16)
    head = fast_head(model)
    tokens = made(model)
    assert head.fast_steps > 0
    slow_head(model)
    logits = model(tokens).logits[:, PROMPT.shape[1] - 1:-1].float()
    chosen = logits.gather(2, tokens[:, PROMPT.shape[1]:, None]).squeeze(2)
    best = logits.amax(2)
    assert (chosen >= best - 2**-6 * best.abs()).all()


def test_a_head_with_a_bias_and_texts_that_may_not_end():
    model = gpt2()
    model.lm_head = torch.nn.Linear(D, V)
    torch.nn.init.normal_(model.lm_head.bias)
    ends = made(model, do_sample=False)[:, PROMPT.shape[1]:].unique()  # the usual best tokens
    options = dict(do_sample=False, min_new_tokens=10, eos_token_id=ends.tolist())
    want = made(model, **options)
    head = fast_head(model)
    assert torch.equal(made(model, **options), want) and head.fast_steps > 0


@pytest.mark.parametrize("options", DENSE)
def test_other_calls_score_all_tokens(options):
    model = gpt2()
    want = made(model, **options)
    head = fast_head(model)
    found = made(model, **options)
    if "output_logits" in options:
        assert all(torch.equal(one, other) for one, other in zip(found.logits, want.logits))
    else:
        assert torch.equal(found, want)
    assert head.fast_steps == 0 and (head.dense_steps > 2 or "custom_generate" in options)
    made(model)
    assert head.fast_steps > 0


def test_a_chunked_prompt_is_scored_as_before():
    model = gpt2()
    want = made(model, do_sample=False, prefill_chunk_size=2)
    head = fast_head(model)
    assert torch.equal(made(model, do_sample=False, prefill_chunk_size=2), want)
    assert head.fast_steps > 0


def test_the_index_is_built_again_for_the_hidden_states():
    model = gpt2()
    prompt = PROMPT.repeat(20, 1)
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=25, do_sample=False)
    want = model.generate(prompt, **options)
    head = fast_head(model)
    assert torch.equal(model.generate(prompt, **options), want)
    first = head.index()
    assert first is head.index()  # built for the first 512 of 960 states
    rows = xs.SearchIndex(model.lm_head.weight, None)
    assert not torch.equal(first.tensors[7], rows.tensors[7])


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True, top_k=0)])
def test_autocast_scores_all_tokens(options):
    model = gpt2()
    with torch.autocast("cpu"):
        want = made(model, **options)
        head = fast_head(model)
        assert torch.equal(made(model, **options), want) and head.fast_steps == 0


def test_samples_beside_another_call_score_all_tokens():
    options = dict(do_sample=True, top_k=0)
    model = gpt2()
    want = made(model, **options)
    head = fast_head(model)
    head._calls[-1] = None  # of another thread
    assert torch.equal(made(model, **options), want) and head.fast_steps == 0
    head._calls.clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(made(model, **options), want) and head.fast_steps > 0
    finally:
        torch.set_default_dtype(torch.float32)


def fused_step(weight):
    weight.grad = torch.randn(V, D)
    torch.optim.AdamW([weight], lr=1.0, fused=True).step()


@pytest.mark.parametrize(
    "change", [
        lambda weight: weight.copy_(torch.randn(V, D)), fused_step,
        lambda weight: weight.data.mul_(torch.randn(V, 1)),
        lambda weight: weight.data.copy_(weight.data.roll(2, 1)),
        lambda weight: weight[:, 1::2].data.neg_()
    ], ids=["in place", "a fused step", "through .data", "other columns", "other signs"])
def test_changed_weights_are_indexed_again(change):
    model = gpt2()
    head = fast_head(model)
    made(model)
    with torch.no_grad():
        change(model.lm_head.weight)
    dense = copy.deepcopy(model)
    slow_head(dense)
    assert torch.equal(made(model), made(dense)) and head.dense_steps == 4


def test_a_head_of_clusters_reads_few_cells():
    """Rows in clusters around hidden states, as training makes them."""
    model = gpt2()
    model.resize_token_embeddings(10_000)
    with torch.no_grad():
        hidden = model.transformer(torch.randint(V, (10, 10)))[0].reshape(100, D)
    rows = hidden.repeat_interleave(100, 0) + 0.1 * torch.randn(10_000, D)
    model.lm_head.weight = torch.nn.Parameter(rows)
    want = made(model)
    head = fast_head(model)
    assert torch.equal(made(model), want)
    assert head.cells_read < 0.4 * head.fast_steps * head.num_cells


def test_calls_outside_of_generate_and_hidden_states_that_are_not_finite():
    model = gpt2()
    want = model(PROMPT).logits
    head = fast_head(model)
    assert torch.equal(model(PROMPT).logits, want)
    assert (head.fast_steps, head.dense_steps) == (0, PROMPT.numel())
    model(PROMPT, labels=PROMPT).loss.backward()
    assert model.lm_head.weight.grad is not None
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(float("nan"))
        made(model)
    assert head.fast_steps == 0 and head.dense_steps == 2 * PROMPT.numel() + 24


@pytest.mark.parametrize("width, begin", [(D, 0), (5, 0), (D, 1)],
                         ids=["eight bytes", "an odd number", "a part of a buffer"])
def test_sums_of_rows_notice_any_row(width, begin):
    linear = torch.nn.Linear(width, V)
    linear.weight.data = torch.randn(begin + V * width)[begin:].view(V, width)
    for tensor in linear.weight, linear.bias:
        sums = _sums_of(linear)
        assert all(map(torch.equal, _sums_of(linear), sums))
        tensor.data.view(-1)[-1] += 1e-3
        assert not all(map(torch.equal, _sums_of(linear), sums))


def test_weights_that_are_not_finite_and_another_head_score_all_tokens():
    model = gpt2()
    head = fast_head(model)
    row = model.lm_head.weight.data[7].clone()
    for value in float("inf"), 1e36:
        model.lm_head.weight.data[7] = value
        made(model)
        assert head.fast_steps == 0
    model.lm_head.weight.data[7] = row
    made(model)
    assert head.fast_steps > 0
    fast_steps = head.fast_steps
    model.resize_token_embeddings(V + 8)
    with pytest.warns(UserWarning, match="fast_head: the model has another head"):
        made(model)
    assert head.fast_steps == fast_steps
    slow_head(model)
    fast_head(model)


def test_it_is_undone_and_refuses_other_models():
    model = gpt2()
    kinds = type(model), type(model.lm_head)
    assert isinstance(fast_head(model, k=3), glue.FastHead)
    with pytest.raises(
            ValueError, match="fast_head of GPT2LMHeadModel: expected a model whose "
            "head is not fast yet"):
        fast_head(model)
    slow_head(model)
    assert (type(model), type(model.lm_head)) == kinds and not hasattr(model, "_fast_head")
    with pytest.raises(ValueError, match="slow_head of GPT2LMHeadModel: expected a model of "
                       "fast_head"):
        slow_head(model)
    fast_head(model)
    with pytest.raises(TypeError, match="call slow_head first"):
        glue.replace_head(model, xs.LinearCrossEntropyLoss)
    slow_head(model)
    with pytest.raises(ValueError, match="k of at least 1"):
        fast_head(model, 0)
    with pytest.raises(TypeError, match="a PreTrainedModel that generates"):
        fast_head(torch.nn.Linear(2, 2))
    loss = glue.replace_head(model, xs.LinearCrossEntropyLoss)
    want = made(model)
    fast_head(model)
    assert torch.equal(made(model), want)
    with pytest.raises(ValueError, match="restore_head: .*: call slow_head first"):
        glue.restore_head(model, loss)
    slow_head(model)
    glue.restore_head(model, loss)
    assert (type(model), type(model.lm_head)) == kinds


def test_a_fast_model_can_be_pickled():
    model = gpt2()
    head = fast_head(model)
    want = made(model)
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(made(other), want)
    assert other._fast_head.fast_steps == 2 * head.fast_steps > 0
    slow_head(other)
    assert torch.equal(made(other), want)


def test_a_call_does_not_change_those_of_other_threads():
    model = gpt2()
    options = [dict(do_sample=False), dict(do_sample=False, num_beams=3)] * 4
    want = [made(model, **each) for each in options]
    head = fast_head(model)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: made(model, **each), options))
    assert all(map(torch.equal, found, want)) and head.fast_steps > 0


def test_assisted_generation_scores_all_tokens():
    model, prompt = gpt2(), PROMPT[:1].repeat(1, 3)

    def found():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12,
                              do_sample=False, prompt_lookup_num_tokens=2)

    want = found()
    head = fast_head(model)
    assert torch.equal(found(), want) and head.fast_steps == 0


class Reordered(transformers.GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs


def test_a_model_that_reorders_its_logits_scores_all_tokens():
    model = gpt2()
    model.__class__ = Reordered
    want = made(model)
    head = fast_head(model)
    with pytest.warns(UserWarning, match="fast_head: the model changes the logits"):
        assert torch.equal(made(model), want)
    assert head.fast_steps == 0


class Capped(transformers.GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = 30 * torch.tanh(outputs.logits / 30)
        return outputs


@pytest.mark.parametrize("options, is_known, is_fast",
                         [(dict(do_sample=False), True, True),
                          (dict(do_sample=True, top_k=5), True, True),
                          (dict(do_sample=False), False, False),
                          (dict(do_sample=True, top_k=0), True, False)],
                         ids=["greedy", "top_k", "not in the configuration", "the whole softmax"])
def test_capped_logits_keep_their_order(options, is_known, is_fast):
    model = gpt2()
    model.__class__ = Capped
    if is_known:
        model.config.final_logit_softcapping = 30.0
    want = made(model, **options)
    head = fast_head(model)
    if is_fast:
        assert torch.equal(made(model, **options), want)
        # all positions of the prompt have logits
        assert (head.fast_steps, head.dense_steps) == (22, 8)
    else:
        with pytest.warns(UserWarning, match="fast_head: the model changes the logits"):
            assert torch.equal(made(model, **options), want)
        assert head.fast_steps == 0


class Scaled(transformers.GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.config.logit_scale
        return outputs


@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_scaled_logits_keep_their_order_if_the_scale_is_positive(scale, recwarn):
    model = gpt2()
    model.__class__, model.config.logit_scale = Scaled, scale
    want = made(model)
    head = fast_head(model)
    assert torch.equal(made(model), want)
    assert (head.fast_steps > 0) == (scale > 0)
    assert any("changes the logits" in str(one.message) for one in recwarn) == (scale < 0)


@pytest.mark.parametrize("options", [dict(do_sample=False), dict(do_sample=True, top_k=5)])
def test_logits_that_are_equal_at_the_cap_are_those_of_the_dense_head(options):
    model = gpt2()
    model.__class__ = Capped
    model.config.final_logit_softcapping = 30.0
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    want = made(model, **options)
    head = fast_head(model)
    assert torch.equal(made(model, **options), want) and head.dense_steps > 8


def test_a_bias_after_the_head_is_refused():
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=V, d_model=D, encoder_layers=1, decoder_layers=1,
                                encoder_attention_heads=2, decoder_attention_heads=2,
                                encoder_ffn_dim=D, decoder_ffn_dim=D))
    with pytest.raises(glue.UnsupportedHeadError, match="a bias after it"):
        fast_head(model)
