"""Error messages of wrong use name the class, what it expected and got, and what to do."""

import importlib
import inspect

import numpy as np
import pytest
import torch

import xsoftmax as xs
from xsoftmax.samplers import (FixedSampler, LearnableMidxSampler, StaticSampler, UniformSampler,
                               UnigramSampler)

from gradient_checks import seeded  # noqa: F401 (an autouse fixture)

D, N, Q = 6, 20, 4
TREE = xs.LabelTree.balanced(N, 3)
OVER_CLASSES = [xs.LinearCrossEntropyLoss, xs.SampledSoftmaxLoss, xs.CaneLoss]
OVER_TREES = [xs.BeamTreeLoss, xs.HierarchicalSoftmaxLoss]
LOSSES = OVER_CLASSES + OVER_TREES
MODES = ["train", "eval", "scripted"]
NEEDED = {
    xs.SampledSoftmaxLoss: dict(sampler="uniform", num_samples=5), xs.CaneLoss: dict(candidates=4),
    xs.BeamTreeLoss: dict(num_candidates=3, num_noises=2)
}


def made(cls, *sizes, **more):
    """Returns a loss of a class, with its required arguments."""
    sizes = sizes or (D, TREE if cls in OVER_TREES else N)
    return cls(*sizes, **(NEEDED.get(cls, {}) | more))


def in_mode(loss, mode):
    return torch.jit.script(loss) if mode == "scripted" else loss.train(mode == "train")


def error_in(mode, error):
    """Returns the error type to expect: TorchScript turns errors into its own types."""
    return Exception if mode == "scripted" else error


def batch(dtype=torch.float32):
    return torch.randn(Q, D, dtype=dtype), torch.randint(N, (Q,))


def refused(error, words, call, *args, **kwargs):
    """Checks that a call raises `error` with all of `words`; returns the message."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    for word in [words] if isinstance(words, str) else words:
        assert word in str(caught.value)
    return str(caught.value).strip()


def short(dtype):
    return str(dtype).removeprefix("torch.")


# ---- one step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize("table, dtype", [(torch.float32, torch.float16),
                                          (torch.float32, torch.float64),
                                          (torch.bfloat16, torch.float32)], ids=short)
def test_input_of_another_dtype_is_refused(cls, mode, table, dtype):
    loss, (input, target) = in_mode(made(cls, dtype=table), mode), batch(dtype)
    words = [
        f"expected input of the table's dtype {short(table)}, got {short(dtype)}",
        f"cast the input, input.to({table}), or call loss.to({dtype})"
    ]
    before = [buffer.clone() for buffer in loss.buffers()]
    refused(error_in(mode, TypeError), words, loss, input, target)
    refused(error_in(mode, TypeError), words, loss.topk, input, 2)
    assert all(map(torch.equal, before, loss.buffers()))  # nothing has changed
    if hasattr(loss, "log_prob") and mode != "scripted":
        refused(TypeError, words, loss.log_prob, input)
    if dtype != torch.float64:  # autocast casts the input
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert loss(input.bfloat16(), target).isfinite()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32], ids=short)
def test_targets_of_another_dtype_are_refused(cls, mode, dtype):
    input, target = batch()
    words = f"expected target of dtype int64, got {short(dtype)}: use target.long()"
    loss = in_mode(made(cls), mode)
    refused(error_in(mode, TypeError), words, loss, input, target.to(dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", LOSSES)
def test_targets_of_wrong_range_or_shape_are_refused(cls, mode):
    loss, (input, target) = in_mode(made(cls), mode), batch()
    outside = target.index_fill(0, torch.tensor([2]), N)
    words = f"expected target in [0, {N}) or ignore_index, got {N} at [2]"
    refused(error_in(mode, IndexError), words, loss, input, outside)
    several = ", or with one more dimension for several positives" * (cls in OVER_CLASSES)
    words = f"expected target of shape [{Q}]{several}, got [{Q - 1}]"
    refused(error_in(mode, ValueError), words, loss, input, target[1:])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", OVER_CLASSES)
def test_swapped_in_features_and_num_classes_are_named(cls, mode):
    loss, error = in_mode(made(cls), mode), error_in(mode, ValueError)
    words = [
        f"{cls.__name__}: expected input of shape [*, {D}], got [{Q}, {N}]",
        "whose width is num_classes: in_features comes before num_classes"
    ]
    refused(error, words, loss, torch.randn(Q, N), torch.randint(D, (Q,)))
    refused(error, words, loss.topk, torch.randn(Q, N), 2)
    message = refused(error, "got", loss.topk, torch.randn(Q, D + 1), 2)  # not swapped
    assert "comes before" not in message.splitlines()[-1]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize("make, kind", [(np.asarray, "ndarray"), (torch.Tensor.tolist, "list")])
def test_arrays_and_lists_in_a_step_are_refused(cls, mode, make, kind):
    loss, (input, target) = in_mode(made(cls), mode), batch()

    def words(argument):
        return (f"{cls.__name__}: expected {argument} as a tensor, got {kind}: "
                f"use torch.as_tensor({argument})")

    refused(TypeError, words("input"), loss, make(input), target)
    refused(TypeError, words("target"), loss, input, make(target))
    refused(TypeError, words("input"), loss.topk, make(input), 2)
    refused(TypeError, words("exclude"), loss.topk, input, 2, exclude=make(target[:, None]))


def test_arrays_and_lists_in_other_calls_are_refused():
    input, target = batch()
    towers, sampled = xs.TwoTowerLoss(N), made(xs.SampledSoftmaxLoss)
    for place, name in enumerate(("query", "item", "item_id")):
        args = [input, input, target]
        args[place] = args[place].numpy()
        refused(TypeError, f"TwoTowerLoss: expected {name} as a tensor, got ndarray", towers, *args)
    words = "two_tower_loss_: expected item_id of dtype int64, got float32: use item_id.long()"
    refused(TypeError, words, towers, input, input, target.float())
    assert towers.counts.total == 0  # nothing was counted
    words = "SampledSoftmaxLoss: expected negatives as a tensor, got list"
    refused(TypeError, words, sampled, input, target, negatives=[1, 2])
    words = "SampledSoftmaxLoss: expected input as a tensor, got ndarray"
    refused(TypeError, words, sampled.search, input.numpy(), 2)
    weight = sampled.linear.weight.detach()
    for call in (xs.functional.linear_cross_entropy,
                 lambda *args: xs.functional.sampled_softmax_loss(*args, [])):
        for place, name in enumerate(("input", "weight", "target")):
            args = [input, weight, target]
            args[place] = args[place].tolist()
            refused(TypeError, f": expected {name} as a tensor, got list", call, *args)
    refused(TypeError, "tower_loss: expected query as a tensor, got list", xs.functional.tower_loss,
            input.tolist(), input, target, [])
    refused(TypeError, "HierarchicalMatcher: expected target as a tensor, got list",
            xs.HierarchicalMatcher(D, TREE), input, [[1]] * Q)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("cls", [xs.SampledSoftmaxLoss, xs.BeamTreeLoss])
@pytest.mark.parametrize(
    "given, hint",
    [(torch.ones(N), ": class weights are an argument of the constructor, weight=..."),
     (7, "")], ids=["weights", "seed"])
def test_a_wrong_generator_is_refused(cls, mode, given, hint):
    """In particular class weights as the third argument, where F.cross_entropy has them."""
    kind = type(given).__name__
    words = f"{cls.__name__}: expected generator as a torch.Generator or None, got {kind}{hint}"
    refused(TypeError, words, in_mode(made(cls), mode), *batch(), given)


@pytest.mark.parametrize("name", ["uniform", "midx", "lsh", "sphere", "rff"])
def test_samplers_refuse_wrong_generators(name):
    sampler, weights = xs.samplers.make_sampler(name, N, 3, dim=D), torch.ones(N)
    words = "expected generator as a torch.Generator or None, got Tensor"
    refused(TypeError, words, sampler.sample, torch.randn(Q, D), None, weights)
    if sampler.follows_table:
        refused(TypeError, words, sampler.prepare, torch.randn(N, D), None, weights)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("own", [4, None])
@pytest.mark.parametrize(
    "given, words",
    [(torch.ones(N), "of dtype int64, got float32: class weights are an argument of the construct"),
     (torch.ones(N, dtype=torch.int32), "of dtype int64, got int32: use candidates.long()"),
     (torch.Generator(), "as a tensor, got Generator: pass it by name, generator=...")])
def test_wrong_candidates_are_refused(own, mode, given, words):
    loss = in_mode(made(xs.CaneLoss, candidates=own), mode)
    refused(TypeError, "CaneLoss: expected candidates " + words, loss, *batch(), given)


# ---- input with NaN or infinity


def steps_of(loss):
    yield lambda input, target: loss.train()(input, target)
    yield lambda input, target: loss.eval()(input, target)
    yield lambda input, target: loss.topk(input, 2)
    for name in ("log_prob", "entropy"):
        if hasattr(loss, name):
            yield lambda input, target, name=name: getattr(loss, name)(input)
    if isinstance(loss, xs.LinearLoss):
        yield loss.log_prob
    if hasattr(loss, "search"):
        yield lambda input, target: loss.search(input, 2)


@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_finds_input_that_is_not_finite(impl, cls, value):
    loss, (input, target) = made(cls), batch()
    input[2, 3] = value
    for step in steps_of(loss):
        step(input, target)  # without anomaly detection nothing is checked
        with torch.autograd.detect_anomaly():
            words = f"expected input with finite values, got {value} at [2, 3]"
            refused(ValueError, words, step, input, target)
        with torch.autograd.detect_anomaly(check_nan=False):
            step(input, target)
    target[2] = -100
    with torch.autograd.detect_anomaly():  # ignored queries are not checked
        assert loss.train()(input, target).isfinite()
        loss.eval()(input, target)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_with_several_positives_and_towers():
    input, target = batch()
    input[1, 0] = float("nan")
    several, towers = torch.stack([target, (target + 1) % N], 1), xs.TwoTowerLoss(N)
    sampled, exact = made(xs.SampledSoftmaxLoss), made(xs.LinearCrossEntropyLoss)
    with torch.autograd.detect_anomaly():
        for loss in (sampled, exact, torch.jit.script(sampled)):
            words = "expected input with finite values, got nan at [1, 0]"
            refused(Exception, words, loss, input, several)
        words = "two_tower_loss_: expected item with finite values, got nan at [1, 0]"
        refused(ValueError, words, towers, torch.randn(Q, D), input, target)
        assert towers.counts.total == 0
        several[1] = -100
        sampled(input, several)


@pytest.mark.parametrize("cls", OVER_CLASSES)
def test_topk_of_a_nan_query_leaves_other_queries_alone(cls):
    """As documented, such a query gets NaN at the first classes."""
    loss, input = made(cls).eval(), torch.randn(Q, D)
    want, others = loss.topk(input, 3)[1], [0, 2, 3]
    input[1, 2] = float("nan")
    for values, ids in (loss.topk(input, 3), loss.search(input, 3)[:2]):
        assert values[1].isnan().all() and ids[1].tolist() == [0, 1, 2]
        assert torch.equal(ids[others], want[others])


# ---- constructors

CONSTRUCTORS = {
    name: found
    for module in (xs, xs.samplers, xs.optim)
    for name in module.__all__
    if inspect.isclass(found := getattr(module, name)) and "__init__" in vars(found)
}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_misspelt_constructor_arguments_are_named(name):
    """The error suggests the nearest argument, and the signature stays visible to tools."""
    cls = CONSTRUCTORS[name]
    parameters = inspect.signature(cls).parameters
    assert list(inspect.signature(cls.__init__).parameters)[1:] == list(parameters)
    known = [name for name, one in parameters.items() if one.kind not in VARIADIC]
    start = f"{name}: expected arguments of the constructor, got "
    if all(one.kind != inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        refused(TypeError, start + "qqqqqq: ", cls, qqqqqq=1)
        longest = max(known, key=len, default="")
        words = f"{start}{longest}x: did you mean {longest}?" if longest else start
        refused(TypeError, words, cls, **{longest + "x": 1})
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    if needed:
        refused(TypeError, f"{name}: expected argument {needed[0]}, got none", cls)


def sampled(*args, **kwargs):
    return xs.SampledSoftmaxLoss(D, N, *args, **kwargs)


def replaced(**kwargs):
    model = torch.nn.Sequential(torch.nn.Linear(D, N))
    return xs.replace_head(model, "0", xs.SampledSoftmaxLoss, sampler="uniform", **kwargs)


LINEAR, SAMPLER = torch.nn.Linear(D, N), UniformSampler(N, 5)
TABLE = [  # call, error type, and a part of its message
    (lambda: sampled(num_negatives=5), TypeError, "got num_negatives: did you mean num_samples?"),
    (lambda: xs.CaneLoss(hidden_size=D), TypeError, "did you mean in_features?"),
    (lambda: xs.CaneLoss(D, vocab_size=N), TypeError, "did you mean num_classes?"),
    (lambda: xs.CaneLoss(D, N, class_weights=[1.0]), TypeError, "did you mean weight?"),
    (lambda: xs.CaneLoss.from_linear(LINEAR, padding_idx=1), TypeError, "mean ignore_index?"),
    (lambda: replaced(num_sampled=4), TypeError, "did you mean num_samples?"),
    (lambda: xs.TwoTowerLoss(num_classes=N), TypeError, "did you mean num_items?"),
    (lambda: xs.optim.RowAdam([], learning_rate=0.1), TypeError, "did you mean lr?"),
    (lambda: UniformSampler(N, 3, zipf=True), TypeError,
     "got zipf: it has num_classes, num_samples, shared, distinct, exclude"),
    (
        lambda: LearnableMidxSampler(N, D, codeword=4),
        TypeError,  # a class with **options
        "LearnableMidxSampler: expected arguments of the constructor, got codeword: did you mean "
        "cod"),
    (lambda: sampled(), TypeError,
     'SampledSoftmaxLoss: expected argument sampler, got none: give one of "in_batch", "log_'),
    (lambda: sampled("uniform", 5), TypeError,
     "expected at most 2 arguments without a name (in_features, num_classes), got 4"),
    (lambda: xs.BeamTreeLoss(D), TypeError, "expected argument tree, got none: give a LabelTree"),
    (lambda: xs.HierarchicalSoftmaxLoss(D, N), TypeError,
     "expected tree as a LabelTree, such as LabelTree.balanced(num_classes), got int"),
    (lambda: sampled(sampler=None, num_samples=5), TypeError,
     '"uniform", "unigram" with num_samples=5, got None'),
    (lambda: sampled(sampler=3), TypeError, '"uniform", "unigram", got int'),
    (lambda: sampled(sampler="unifom", num_samples=5), ValueError, 'one of "in_batch", "log_un'),
    (lambda: sampled(sampler=SAMPLER, num_samples=5), ValueError,
     "expected no num_samples with a sampler object, got num_samples=5: pass it to the constr"),
    (lambda: sampled(sampler="uniform", num_samples=21), ValueError,
     "UniformSampler: expected num_samples of at most 20, the number of classes that can be drawn"),
    (lambda: sampled(sampler="log_uniform", num_samples=21), ValueError,
     "got 21: draw fewer, or with replacement (distinct=False)"),
    (lambda: sampled(sampler="midx", num_samples=21, shared=True), ValueError,
     "MidxSampler: expected num_samples of at most 20"),
    (lambda: xs.SampledSoftmaxLoss(1000, N, sampler="uniform", num_samples=64), ValueError,
     "of in_features=1000 and num_classes=20, in_features comes first"),
    (lambda: xs.CaneLoss(D, N, candidates="midx"), TypeError, "a Sampler object, not its name"),
    (lambda: xs.CaneLoss(D, N, candidates=4, noise_sampler=3), TypeError,
     'expected noise_sampler as a Sampler or one of "in_batch"'),
    (lambda: xs.TwoTowerLoss(N, counts=[1] * N), TypeError,
     "TwoTowerLoss: expected counts as a StreamingCounts, None or False, got list"),
    (lambda: UnigramSampler({0: 1}, 3), TypeError,
     "UnigramSampler: expected counts as a tensor, an array or a list of numbers, got dict"),
    (lambda: UnigramSampler([[1], [2, 3]], 3), TypeError, "list of numbers, got list (expected"),
    (lambda: StaticSampler("abc", 3), TypeError, "StaticSampler: expected weights as a tensor,"),
    (lambda: sampled(sampler="unigram", num_samples=3), ValueError,
     "use xs.samplers.UnigramSampler(counts, num_samples)"),
    (lambda: xs.SampledSoftmaxLoss(64, 10**13, sampler="uniform", num_samples=3), RuntimeError,
     "of shape [10000000000000, 64], 2.384e+06 GiB, got none: keep the table in a file with xs.tab"
     ),
    (lambda: xs.LinearCrossEntropyLoss(64, 2**62), RuntimeError, "expected memory on cpu for a"),
    # other errors of nn.Linear are not changed
    (lambda: xs.LinearCrossEntropyLoss(D, N, dtype=torch.int64), RuntimeError, "floating point"),
]


@pytest.mark.parametrize("call, error, words", TABLE, ids=range(len(TABLE)))
def test_wrong_constructor_calls_are_refused(call, error, words):
    refused(error, words, call)


def read_only(numbers):
    array = np.array(numbers)
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize("make", [np.array, list, tuple, read_only])
def test_constructors_accept_arrays_and_lists_of_class_weights(cls, make):
    weights, (input, target) = [1.0 + i for i in range(N)], batch()
    want = made(cls, weight=torch.tensor(weights)).eval()
    got = made(cls, weight=make(weights)).eval()
    got.load_state_dict(want.state_dict())
    torch.testing.assert_close(got(input, target), want(input, target))
    assert made(cls, weight=make([1] * N)).weight.is_floating_point()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [np.array, list, tuple, read_only])
def test_constructors_accept_arrays_and_lists_of_counts_and_ids(make):
    counts, ids, given = range(1, N + 1), [3, 1], make(range(1, N + 1))
    want = UnigramSampler(torch.tensor(counts), 4, exclude=torch.tensor(ids)).probability
    sampler = UnigramSampler(given, 4, exclude=make(ids))
    assert torch.equal(sampler.probability, want)
    if make is np.array:
        given[:] = 1  # the sampler has a copy
        assert torch.equal(sampler.probability, want)
    static = StaticSampler(torch.tensor(counts), 4).probability
    assert torch.equal(StaticSampler(make(counts), 4).probability, static)
    named = xs.samplers.make_sampler("unigram", N, 4, counts=make(counts))
    assert torch.equal(named.probability, UnigramSampler(torch.tensor(counts), 4).probability)
    assert FixedSampler(N, make(ids)).order.tolist() == [1, 3]
    assert made(xs.SampledSoftmaxLoss, head_classes=make(ids)).head.tolist() == [1, 3]
    assert made(xs.CaneLoss, candidates=make(ids)).candidates.tolist() == [1, 3]
    assert UniformSampler(N, 2, exclude=make([])).options == UniformSampler(N, 2).options
    for tree in (xs.LabelTree.huffman, lambda given: xs.LabelTree.from_frequencies(given, 3)):
        assert torch.equal(tree(make(counts)).parent, tree(torch.tensor(counts)).parent)


# ---- checkpoints


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("cls", OVER_CLASSES)
def test_a_checkpoint_of_another_number_of_classes_is_refused(cls, strict):
    loss, saved = made(cls), made(cls, D, N + 5)
    model = torch.nn.ModuleDict({"loss": loss})
    state = {"loss." + name: value for name, value in saved.state_dict().items()}
    words = [
        f"{cls.__name__}: expected a checkpoint of {N} classes, got one of {N + 5}: ",
        f"call resize_classes({N + 5}) first, then load_state_dict; to keep {N} classes",
        "loss.linear.weight"
    ]
    refused(RuntimeError, words, model.load_state_dict, state, strict)
    loss.resize_classes(N + 5)  # what the message suggests
    model.load_state_dict(state)
    assert torch.equal(loss.linear.weight, saved.linear.weight)
    wider = made(cls, D + 1, N).state_dict()
    message = refused(RuntimeError, "size mismatch", loss.load_state_dict, wider)
    assert "resize_classes" not in message  # it would not help here


@pytest.mark.parametrize("cls", OVER_TREES)
def test_a_checkpoint_of_another_tree_is_refused(cls):
    saved = made(cls, D, xs.LabelTree.balanced(N + 5, 3)).state_dict()
    words = [
        f"{cls.__name__}: expected a checkpoint of a tree of {TREE.num_edges} edges, got one",
        "make the loss with the tree that was saved, xs.LabelTree("
    ]
    refused(RuntimeError, words, made(cls).load_state_dict, saved)
    names = ("first_child", "parent", "node_class", "class_node")
    tree = xs.LabelTree(*(saved["tree." + name] for name in names))  # what the message suggests
    made(cls, D, tree).load_state_dict(saved)


# ---- empty batches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cls", LOSSES)
def test_a_batch_without_queries_has_a_mean_of_nan_and_a_sum_of_zero(cls, reduction, mode):
    input, target = batch()
    loss = in_mode(made(cls, reduction=reduction), mode)
    for queries, classes in ((input[:0], target[:0]), (input, torch.full_like(target, -100))):
        value = loss(queries, classes)
        assert value.isnan() if reduction == "mean" else value == 0
        value.backward()
    if reduction == "sum":
        for parameter in loss.parameters():
            assert parameter.grad is None or (parameter.grad.to_dense() == 0).all()


# ---- names


@pytest.mark.parametrize("name", [
    "", "._core.config", ".datasets", ".distributed", ".functional", ".integrations",
    ".label_vectors", ".metrics", ".optim", ".samplers", ".sklearn", ".tables"
])
def test_dir_shows_only_public_names(name):
    """Imports of a module must not look like a part of the library."""
    module = importlib.import_module("xsoftmax" + name)
    lazy = set() if name else {"distributed", "integrations"}
    shown = {shown for shown in dir(module) if not shown.startswith("__")}
    assert shown == {*module.__all__, *lazy}
    if name != ".integrations":  # its packages are optional
        assert all(hasattr(module, shown) for shown in shown)


def test_the_package_does_not_expose_its_imports():
    for name in ("torch", "importlib", "TYPE_CHECKING", "sys", "typing"):
        assert not hasattr(xs, name), name
