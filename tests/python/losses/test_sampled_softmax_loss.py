"""sampled_softmax_loss equals the composition of its parts, and reduces, ignores and weights like
F.cross_entropy."""

import pytest
import torch
import torch.nn.functional as F

import xsoftmax as xs
from set_checks import columns, split
from xsoftmax.samplers import MidxSampler, UniformSampler, UnionSampler

ops = torch.ops.xsoftmax
REDUCTIONS = ("none", "mean", "sum")


def sampled_softmax_loss(input, weight, bias, target, class_weight=None, log_z=None, **arguments):
    sets, options = split(arguments)
    return ops.sampled_softmax_loss(input, weight, bias, target, *sets, class_weight, log_z,
                                    options)


def candidate_loss(scores, target, **arguments):
    sets, options = split(arguments)
    return ops.candidate_loss(scores, target, *sets, options)


def problem(dtype=torch.float32, ignored=3, shape=(4, 5), N=9, D=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    input, weight = torch.randn(*shape, D, generator=g,
                                dtype=torch.float64), torch.randn(N, D, generator=g,
                                                                  dtype=torch.float64)
    bias, target = torch.randn(N, generator=g,
                               dtype=torch.float64), torch.randint(N, shape, generator=g)
    target.view(-1)[:ignored] = -100
    return input.to(dtype), weight.to(dtype), bias.to(dtype), target


def value_and_gradients(function, input, weight, bias, target, **kwargs):
    leaves = [t.detach().clone().requires_grad_() for t in (input, weight, bias)]
    loss = function(*leaves, target, **kwargs)
    loss.backward(torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape))
    return [loss.detach()] + [leaf.grad.to_dense() for leaf in leaves]


def every_class(input, weight, bias, target, class_weight=None, reduction="mean", ignore_index=-100,
                label_smoothing=0.0, layout="shared", sparse_grad=True):
    """The loss with every class in the head: no randomness."""
    ids = torch.arange(weight.size(0))
    candidates = (dict(private_ids=ids.expand(target.numel(), -1), distinct_private=len(ids))
                  if layout == "private" else dict(shared_ids=ids, distinct_shared=len(ids)))
    return sampled_softmax_loss(input, weight, bias, target, class_weight, reduction=reduction,
                                ignore_index=ignore_index, label_smoothing=label_smoothing,
                                sparse_grad=sparse_grad, **candidates)


def plain(input, weight, bias, target, class_weight=None, reduction="mean", ignore_index=-100,
          label_smoothing=0.0):
    loss = F.cross_entropy(
        F.linear(input, weight, bias).flatten(0, -2), target.flatten(), class_weight,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return loss.view(target.shape) if reduction == "none" else loss


def assert_same(got, want):
    for a, b in zip(got, want):
        assert a.dtype == b.dtype
        torch.testing.assert_close(
            a, b, equal_nan=True,
            **({} if a.dtype == torch.float64 else dict(rtol=1e-5, atol=1e-5)))


@pytest.mark.parametrize("layout", ["shared", "private"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_class_in_the_head_is_the_exact_loss(impl, dtype, reduction, layout):
    """With ignored targets, class weights, label smoothing and any batch shape: values and
    gradients."""
    weights = torch.linspace(0.1, 2.0, 9, dtype=dtype)
    for shape, ignored in (((4, 5), 3), ((7,), 0), ((2, 0), 0)):
        args = problem(dtype, ignored, shape)
        for kwargs in ({}, dict(class_weight=weights), dict(label_smoothing=0.3),
                       dict(ignore_index=4)):
            if "ignore_index" in kwargs:
                args[3][args[3] < 0] = 4
            got = value_and_gradients(every_class, *args, reduction=reduction, layout=layout,
                                      **kwargs)
            assert_same(got, value_and_gradients(plain, *args, reduction=reduction, **kwargs))


def test_one_query_without_a_batch(impl):
    """[D] and a scalar target."""
    input, weight, bias, target = problem(shape=(1,), ignored=0)
    for reduction in REDUCTIONS:
        got = every_class(input[0], weight, bias, target[0], reduction=reduction)
        torch.testing.assert_close(
            got, F.cross_entropy(F.linear(input[0], weight, bias), target[0], reduction=reduction))


def test_no_second_derivative(impl):
    input, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for leaf in (input, weight):
        loss = sampled_softmax_loss(input, weight, None, torch.tensor([0, 1, 2]),
                                    shared_ids=torch.tensor([3, 4]), sparse_grad=False)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            grad.sum().backward()


def test_retain_graph(impl):
    input, weight = torch.randn(3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = sampled_softmax_loss(input, weight, None, torch.tensor([0, 1, 2]),
                                shared_ids=torch.tensor([3, 4]), sparse_grad=False)
    first = torch.autograd.grad(loss, (input, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (input, weight), torch.tensor(-3.0))
    for a, b in zip(first, second):
        torch.testing.assert_close(b, -3 * a)


def test_all_ignored(impl):
    """As in F.cross_entropy, the mean is NaN and the sum 0; the table gets no gradient either
    way."""
    args = problem(ignored=20)
    for reduction in REDUCTIONS:
        got, want = (value_and_gradients(f, *args, reduction=reduction)
                     for f in (every_class, plain))
        torch.testing.assert_close(got[0], want[0], equal_nan=True)
        assert all(t.eq(0).all() for t in got[1:])


def test_ignored_queries_may_be_anything(impl):
    """NaN in an ignored query reaches neither the loss nor a gradient."""
    input, weight, bias, target = problem(ignored=3)
    target[target == 0] = 1
    input.view(-1, 6)[:3] = float("nan")
    got = value_and_gradients(every_class, input, weight, bias, target)
    assert_same(got, value_and_gradients(plain, input.nan_to_num(), weight, bias, target))


def test_ignored_queries_may_be_anything_with_large_gradients():
    """Large gradients take another code path: see test_gradients_too_large_for_the_caches."""
    torch.manual_seed(0)
    queries, width, own = 80, 64, torch.randint(100_000, (80, 256))
    weight = torch.randn(100_000, width, requires_grad=True)
    input, target = torch.randn(queries, width), torch.randint(100_000, (queries,))
    target[::7], input[::7] = -100, float("inf")
    loss = sampled_softmax_loss(input.requires_grad_(), weight, None, target, private_ids=own)
    loss.backward()
    assert own.numel() * width * 4 > 4 << 20
    assert loss.isfinite() and weight.grad._values().isfinite().all() and input.grad.isfinite().all(
    )


def test_class_weights_of_another_dtype(impl):
    args = problem()
    weights = torch.linspace(0.1, 2.0, 9)
    for dtype in (torch.float64, torch.bfloat16):
        got = every_class(*args, class_weight=weights.to(dtype))
        torch.testing.assert_close(got, plain(*args, class_weight=weights.to(dtype).float()))


def test_equals_candidate_scores_and_candidate_loss(impl):
    """The sparse gradient has P + 1 rows for each query and one for each shared class."""
    input, weight, bias, target = problem(shape=(5,), ignored=0)
    g = torch.Generator().manual_seed(1)
    own, shared = torch.randint(9, (5, 3), generator=g), torch.randint(9, (4,), generator=g)
    candidates = dict(private_ids=own, shared_ids=shared,
                      private_log_count=torch.rand(5, 3, generator=g),
                      shared_log_count=torch.rand(4, generator=g),
                      target_log_count=torch.rand(5, generator=g), distinct_shared=2,
                      estimator="ranking")
    weight.requires_grad_()
    loss = sampled_softmax_loss(input, weight, bias, target, reduction="none", sparse_grad=True,
                                **candidates)
    scores = ops.candidate_scores(input, weight, bias, torch.cat([target[:, None], own], 1), shared)
    want = candidate_loss(scores, target, **candidates)
    assert torch.equal(loss, want)
    (grad,), (want_grad,) = torch.autograd.grad(loss.sum(),
                                                weight), torch.autograd.grad(want.sum(), weight)
    assert grad._nnz() == 5 * 4 + 4
    torch.testing.assert_close(grad.to_dense(), want_grad.to_dense())


def candidates(queries, classes, dtype, kinds="both", seed=1):
    """Candidates with hits and repeats."""
    g = torch.Generator().manual_seed(seed)
    own, shared = torch.randint(classes, (queries, 3),
                                generator=g), torch.randint(classes, (4,), generator=g)
    counts = [torch.rand(size, generator=g).to(dtype) for size in ((queries, 3), (4,), (queries,))]
    private = {} if kinds == "shared" else dict(private_ids=own, private_log_count=counts[0])
    return private | ({} if kinds == "private" else dict(
        shared_ids=shared, shared_log_count=counts[1])) | dict(target_log_count=counts[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator, label_smoothing", [("sampled_softmax", 0.0),
                                                        ("sampled_softmax", 0.2)] +
                         [(name, 0.0)
                          for name in ("ranking", "nce", "negative_sampling", "one_vs_each",
                                       "blackout", "importance", "cane", "cane_log_of_mean")])
@pytest.mark.parametrize("ids", ["private", "shared", "both"])
def test_gradients_made_in_the_forward_pass_equal_those_made_later(dtype, estimator,
                                                                   label_smoothing, ids):
    """linear_candidate_loss computes gradients with the loss; candidate_scores and candidate_loss
    compute them in the backward pass."""
    input, weight, bias, target = problem(shape=(40,), ignored=2)
    leaves = [t.to(dtype).requires_grad_() for t in (input, weight, bias)]
    drawn = candidates(40, 9, dtype, ids)
    if estimator.startswith("cane"):
        drawn |= {f"distinct_{kind}": 1 for kind in ("private", "shared") if f"{kind}_ids" in drawn}
    upstream = torch.linspace(-1, 2, 40)
    options = dict(estimator=estimator, label_smoothing=label_smoothing)
    loss = sampled_softmax_loss(*leaves, target, reduction="none", sparse_grad=False, **drawn,
                                **options)
    got = torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))

    kept = target != -100
    id = torch.where(kept, target, 0)
    rows = torch.cat([id[:, None]] + ([drawn["private_ids"]] if "private_ids" in drawn else []), 1)
    scores = ops.candidate_scores(*leaves, rows, drawn.get("shared_ids"), False)
    want = torch.where(kept, candidate_loss(scores, id, **drawn, **options), 0.0)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.02)
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    for a, b in zip(got, torch.autograd.grad(want, leaves, upstream.to(loss.dtype))):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False),
                                    (False, False, True), (False, False, False)])
def test_subsets_of_gradients(impl, wanted):
    """Gradients are computed only for the inputs that require them."""
    input, weight, bias, target = problem(shape=(5,), ignored=1)
    drawn = candidates(5, 9, torch.float32)
    leaves = [t.requires_grad_(w) for t, w in zip((input, weight, bias), wanted)]
    _, grad_input, grad_scores, _ = ops.linear_candidate_loss_forward(
        *(t.detach() for t in leaves), target, *columns(**drawn, estimator="ranking"),
        [wanted[0], any(wanted[1:])])
    assert (grad_input.numel() > 0) == wanted[0] and (grad_scores.numel() > 0) == any(wanted[1:])
    loss = sampled_softmax_loss(*leaves, target, sparse_grad=False, **drawn)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
        assert tuple(t.grad is not None for t in leaves) == wanted


def test_gradcheck(impl):
    input, weight, bias, target = problem(shape=(4,), ignored=1)
    drawn = candidates(4, 9, torch.float64)
    leaves = [t.double().requires_grad_() for t in (input, weight, bias)]
    for estimator in ("sampled_softmax", "ranking"):
        assert torch.autograd.gradcheck(
            lambda *a: sampled_softmax_loss(*a, target, estimator=estimator, label_smoothing=0.1,
                                            sparse_grad=False, **drawn), leaves)


def test_log_z(impl):
    """log_z is subtracted from all scores and has a gradient; ignored queries do not contribute."""
    input, weight, bias, target = problem(shape=(6,), ignored=2)
    input[0] = float("nan")
    drawn, log_z = candidates(6, 9, torch.float32), torch.tensor(0.7, requires_grad=True)
    loss = sampled_softmax_loss(input, weight, bias, target, log_z=log_z, estimator="nce",
                                reduction="sum", **drawn)
    kept = drawn | {
        name: value[2:]
        for name, value in drawn.items() if name != "shared_ids" and name != "shared_log_count"
    }
    scores = ops.candidate_scores(input[2:], weight, bias,
                                  torch.cat([target[2:, None], kept["private_ids"]], 1),
                                  drawn["shared_ids"])
    want = candidate_loss(scores - log_z, target[2:], estimator="nce", **kept).sum()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(value, log_z)[0] for value in (loss, want)))


@pytest.mark.parametrize("options, log_z", [(dict(label_smoothing=0.1, reduction="sum"), None),
                                            (dict(estimator="nce", ignore_index=3), 1.5)])
def test_the_function_equals_the_module(options, log_z):
    """Also with label smoothing and log_z."""
    loss = xs.SampledSoftmaxLoss(6, 9, sampler=UniformSampler(9, 4), bias=True, **options,
                                 **({} if log_z is None else dict(log_z="learned")))
    input, target = torch.randn(5, 6), torch.tensor([0, 3, 8, 3, 1])
    if log_z is not None:
        loss.log_z.data.fill_(log_z)
    want = loss(input, target, generator=torch.Generator().manual_seed(0))
    ignored = target == options.get("ignore_index", -100)
    sets = loss.sampler.sample(input.masked_fill(ignored[:, None], 0.0),
                               target.masked_fill(ignored, -1),
                               torch.Generator().manual_seed(0))
    got = xs.functional.sampled_softmax_loss(input, loss.linear.weight, target, sets,
                                             bias=loss.linear.bias,
                                             log_z=None if log_z is None else loss.log_z, **options)
    assert torch.equal(got, want)
    for one, other in zip(*(torch.autograd.grad(value, list(loss.parameters()))
                            for value in (got, want))):
        assert torch.equal(one.to_dense(), other.to_dense())
    with pytest.raises(ValueError, match="expected options among estimator, .*, got 'sparse'"):
        xs.functional.sampled_softmax_loss(input, loss.linear.weight, target, sets, sparse=True)


def test_the_order_of_candidate_sets_does_not_matter(impl):
    """Sets are private or shared, drawn with or without replacement."""
    input, weight, bias, target = problem(shape=(6,), ignored=0)
    g = torch.Generator().manual_seed(3)
    sets = [(torch.randint(9, (6, 2), generator=g), torch.rand(6, 2, generator=g),
             torch.rand(6, generator=g), False), (torch.tensor([0, 1]), torch.zeros(2), None, True),
            (torch.randint(9, (3,), generator=g), torch.rand(6, 3, generator=g), None, False),
            (torch.tensor([[2, 3]]).expand(6, 2), torch.rand(6, 2, generator=g),
             torch.rand(6, generator=g), True)]
    for estimator in ("sampled_softmax", "ranking", "cane"):
        want = None
        for turn in range(4):
            ids, counts, of_target, distinct = (list(column)
                                                for column in zip(*sets[turn:], *sets[:turn]))
            loss = ops.sampled_softmax_loss(input, weight, bias, target, ids, counts, of_target,
                                            distinct, None, None, f"estimator={estimator}")
            want = loss if want is None else want
            torch.testing.assert_close(loss, want)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reduced_loss(reduction):
    """Per-query losses are reduced as in F.cross_entropy, whatever ignored entries hold."""
    input, weight, bias, target = problem()
    class_weight = torch.linspace(0.1, 2.0, 9)
    for weights in (None, class_weight):
        each = F.cross_entropy(
            F.linear(input, weight, bias).flatten(0, -2), target.flatten(), reduction="none")
        each[target.flatten() < 0] = float("nan")
        got = ops.reduced_loss(each, target, weights, f"reduction={reduction}")
        torch.testing.assert_close(got, plain(input, weight, bias, target, weights, reduction))
    with pytest.raises(
            ValueError,
            match='reduced_loss: expected reduction to be "mean", "sum" or "none", got "max"'):
        ops.reduced_loss(each, target, None, "reduction=max")


def test_samplers_see_no_ignored_queries():
    """Samplers get zeros and target -1 in place of an ignored query."""
    input, weight, _, target = problem()
    input.view(-1, 6)[:3] = float("nan")
    queries, counted = ops.counted_queries(input.requires_grad_(), target, weight, -100)
    assert not queries.requires_grad and queries[:3].eq(0).all() and counted[:3].eq(-1).all()
    assert torch.equal(queries[3:],
                       input.detach().view(-1, 6)[3:]) and torch.equal(
                           counted[3:],
                           target.view(-1)[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    input, weight, bias, target = problem(shape=(5,), ignored=1)
    leaves = [t.to(dtype).requires_grad_() for t in (input, weight, bias)]
    plain = [t.detach() for t in leaves]
    for kinds in ("both", "private", "shared"):
        lists = columns(**candidates(5, 9, torch.float32, kinds), label_smoothing=0.1,
                        sparse_grad=False)
        torch.library.opcheck(ops.linear_candidate_loss.default, (*leaves, target, *lists))
        for mask in ([True, True], [False, True], [False, False]):
            torch.library.opcheck(ops.linear_candidate_loss_forward.default,
                                  (*plain, target, *lists, mask))
    drawn = candidates(5, 9, torch.float32)
    own, shared = drawn["private_ids"], drawn["shared_ids"]
    scale = torch.rand(5)
    torch.library.opcheck(
        ops.candidate_scores_backward.default,
        (torch.randn(5, 7), plain[0], plain[1], own, shared, [True, True, True], scale))
    torch.library.opcheck(ops.scale_gradient.default,
                          (plain[0], scale[:, None].to(dtype), plain[0]))


@pytest.mark.parametrize("sparse_grad", [True, False])
def test_compile(sparse_grad):
    """One graph, without a break at the composite."""
    args = problem()

    def step(input, weight, bias, target):
        return every_class(input * 2, weight, bias, target, sparse_grad=sparse_grad)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(value_and_gradients(compiled, *args), value_and_gradients(step, *args))


def test_autocast():
    args = problem()

    def cast(*a, **k):
        with torch.autocast("cpu", torch.bfloat16):
            return every_class(*a, **k)

    got, want = value_and_gradients(cast, args[0].bfloat16(),
                                    *args[1:]), value_and_gradients(every_class,
                                                                    args[0].bfloat16().float(),
                                                                    *args[1:])
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16
    assert_same(got[:1] + got[2:], want[:1] + want[2:])


@pytest.mark.parametrize("change, error, message", [
    (dict(target=torch.tensor([0, 9])), IndexError, r"sampled_softmax_loss: expected target in "
     r"\[0, 9\) or ignore_index, got 9 at \[1\]"),
    (dict(target=torch.tensor([-1, 0])), IndexError, r"got -1 at \[0\]"),
    (dict(target=torch.zeros(2)), TypeError, "expected target of dtype int64, got float32"),
    (dict(target=torch.zeros(3, dtype=torch.int64)), ValueError, r"expected target of shape \[2\], "
     r"or \[2, T\] for several "
     r"positives, got \[3\]"),
    (dict(target=torch.zeros(2, device="meta", dtype=torch.int64)), TypeError,
     "expected target on input's device cpu"),
    (dict(input=torch.tensor(1.0)), ValueError, "expected input of shape .*, got a tensor without "
     "dimensions"),
    (dict(weight=torch.zeros(9)), ValueError, "expected weight with 2 dimensions"),
    (dict(private_ids=torch.tensor([[0, 1], [2, 9]])), IndexError, r"expected private ids in \[0, "
     r"9\), got 9 at \[1, 1\]"),
    (dict(private_ids=torch.zeros(3, 2, dtype=torch.int64)), ValueError, "expected private_ids "
     "with size 2 .the rows of "
     "input. in dimension 0"),
    (dict(private_ids=torch.zeros(2, 1, 1, dtype=torch.int64)), ValueError, r"expected ids of a "
     r"set of shape \[M\], "
     r"or \[Q, M\]"),
    (dict(shared_ids=torch.tensor([-2])), IndexError, r"expected shared ids in \[0, 9\), got -2 at "
     r"\[0\]"),
    (dict(estimator="nce2"), ValueError,
     'sampled_softmax_loss: expected estimator to be one of "sampled_softmax", '
     '"ranking", .*got "nce2"'),
    (dict(estimator="cane", target_log_count=torch.zeros(2)), ValueError, "expected candidates, "
     "sets of distinct "
     "classes .* 0 of 1 sets "
     "distinct"),
    (dict(weight=torch.zeros(9, 4)), ValueError, "expected weight with size 3"),
    (dict(shared_ids=torch.tensor([9])), IndexError, r"expected shared ids in \[0, 9\), got 9 at "
     r"\[0\]"),
    (dict(class_weight=torch.zeros(8)), ValueError, "expected class_weight with size 9"),
    (dict(class_weight=torch.zeros(9), label_smoothing=0.1), ValueError, "expected label_smoothing "
     "of 0 with class weights"),
    (dict(log_z=torch.zeros(2)), ValueError, "expected log_z with 0 dimensions"),
    (dict(reduction="max"), ValueError,
     'expected reduction to be "mean", "sum" or "none", got "max"'),
    (dict(label_smoothing=-0.1), ValueError, r"expected label_smoothing in \[0, 1\]"),
    (dict(estimator="full"), ValueError, "expected estimator to be one of"),
    (dict(ignore=3), ValueError, "sampled_softmax_loss: expected options among estimator, .*, got "
     "'ignore"),
])
def test_bad_inputs(change, error, message):
    arguments = dict(input=torch.zeros(2, 3), weight=torch.zeros(9, 3), bias=None,
                     target=torch.tensor([0, 1]), shared_ids=torch.arange(3)) | change
    with pytest.raises(error, match=message):
        sampled_softmax_loss(**arguments)


@pytest.mark.parametrize("queries, width, own, shared", [(3, 0, None, None), (0, 4, None, None),
                                                         (3, 4, 0, None), (3, 4, None, 0),
                                                         (0, 0, 0, 0), (3, 0, 2, 2)])
def test_nothing_to_score(impl, queries, width, own, shared):
    """With no candidates the loss is 0; with no features it is log(1 + C) over C equal scores; no
    queries are accepted."""
    input, weight = torch.randn(queries, width,
                                requires_grad=True), torch.randn(5, width, requires_grad=True)
    drawn = ({} if own is None else dict(private_ids=torch.arange(own).expand(queries, own))) | (
        {} if shared is None else dict(shared_ids=torch.arange(shared)))
    target = torch.full((queries,), 4)
    loss = sampled_softmax_loss(input, weight, None, target, reduction="none", sparse_grad=True,
                                **drawn)
    loss.sum().backward()
    count = 1 + (own or 0) + (shared or 0)
    torch.testing.assert_close(loss, torch.full((queries,), float(count)).log())
    assert input.grad.shape == input.shape and weight.grad._nnz() == queries * (1 + (own or 0)) + (
        shared or 0)


@pytest.mark.parametrize(
    "head, most, make",
    [(0, 45, lambda: UniformSampler(1000, 16)), (8, 45, lambda: UniformSampler(1000, 16)),
     (0, 60, lambda: MidxSampler(1000, 8, 16)),
     (8, 75, lambda: UnionSampler(UniformSampler(1000, 16), MidxSampler(1000, 8, 8)))])
def test_a_step_makes_few_calls(head, most, make):
    """Counts the operators of ATen and of the library in a whole step, as benchmarks/host_cost.py
    does. nn.Linear, nn.CrossEntropyLoss and SGD make 44."""
    loss = xs.SampledSoftmaxLoss(8, 1000, sampler=make(), head_classes=head)
    optimizer = xs.optim.RowAdam(loss.parameters(), lr=1e-3)
    input, target = torch.randn(4, 8, requires_grad=True), torch.randint(1000, (4,))

    def step():
        loss(input, target).backward()
        optimizer.step()
        optimizer.zero_grad()
        input.grad = None

    for _ in range(5):  # the first steps refresh the index
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    calls = [
        event.name for event in profile.events() if event.name.startswith(("aten::", "xsoftmax::"))
    ]
    assert 20 < len(calls) <= most, calls
