"""Modules of static and in-batch samplers: eager, TorchScript and compiled calls agree; state,
names, wrong input."""

import copy
import io
import math

import numpy as np
import pytest
import torch

import xsoftmax  # noqa: F401
from sampler_checks import queries, seed, zipf
from xsoftmax.samplers import (FixedSampler, InBatchSampler, LogUniformSampler, StaticSampler,
                               StreamingCounts, UniformSampler, UnigramSampler, make_sampler,
                               register)
from xsoftmax.samplers.static import SCALARS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ops = torch.ops.xsoftmax
MAX_SEED = 2**63 - 1


@pytest.mark.parametrize("make", [
    lambda shared: UniformSampler(1000, 30, shared=shared),
    lambda shared: LogUniformSampler(1000, 30, shared=shared),
    lambda shared: UnigramSampler(zipf(1000), 30, shared=shared)
])
@pytest.mark.parametrize("shared", [True, False])
def test_the_torch_generator_determines_draws(make, shared):
    sampler = make(shared)

    def ids(generator=None):
        return sampler.sample(queries(3), generator=generator)[0].ids

    torch.manual_seed(5)
    first, second = ids(), ids()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(ids(), first) and torch.equal(ids(), second)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(ids(generator), first) and torch.equal(ids(generator), second)
    # a call draws one int64, so later random numbers are predictable
    torch.manual_seed(5)
    ids()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    torch.randint(0, MAX_SEED, [])
    assert torch.equal(torch.get_rng_state(), state)


class Use(torch.nn.Module):
    def __init__(self, sampler):
        super().__init__()
        self.sampler = sampler

    def forward(self, input, target):
        drawn = self.sampler.sample(input, target)[0]
        return drawn.ids, drawn.log_count, drawn.target_log_count, self.sampler.log_count(
            input, target)


def front_end_samplers():
    yield UniformSampler(50, 7)
    yield UniformSampler(50, 7, shared=False)
    yield UniformSampler(50, 7, exclude=torch.tensor([2, 9]), shared=False)
    yield LogUniformSampler(50, 7, distinct=False)
    yield LogUniformSampler(50, 7)
    yield UnigramSampler(zipf(50), 7)
    yield UnigramSampler(zipf(50), 7, shared=False, distinct=True)
    yield UnigramSampler(zipf(50), 7, shared=False)
    yield FixedSampler(50, 7)
    yield UnigramSampler(StreamingCounts(50, half_life=20), 7)
    yield UnigramSampler(StreamingCounts(50), 7, shared=False)
    yield InBatchSampler(50)
    yield InBatchSampler(50, counts=StreamingCounts(50, half_life=20))
    yield InBatchSampler(50, counts=StreamingCounts(None, buckets=64))


@pytest.mark.parametrize("sampler", list(front_end_samplers()))
def test_torchscript(sampler):
    input, target = queries(5), torch.tensor([1, 2, -1, 3, 49])
    eager = Use(copy.deepcopy(sampler))
    scripted = torch.jit.script(Use(copy.deepcopy(sampler)))
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    results = []
    for module in (eager, scripted, loaded):
        torch.manual_seed(1)
        results.append(module(input, target))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    generator = torch.Generator().manual_seed(2)
    state = generator.get_state()
    torch.jit.script(copy.deepcopy(sampler)).sample(input, target, generator)
    assert isinstance(sampler, InBatchSampler) or not torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("sampler", list(front_end_samplers()))
def test_compile_and_export(sampler):
    input, target = queries(5), torch.tensor([1, 2, -1, 3, 49])
    module = Use(copy.deepcopy(sampler))
    torch.manual_seed(1)
    want = copy.deepcopy(module)(input, target)
    exported = torch.export.export(copy.deepcopy(module), (input, target)).module()
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(exported(input, target), want))
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(compiled(input, target), want))


# inductor has its own random numbers, so only what does not depend on them is compared
def test_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(Use(UnigramSampler(zipf(50), 7)), fullgraph=True)
    target = torch.tensor([1, 2, 3, 3, 49])
    first, second = compiled(queries(5), target), compiled(queries(5), target)
    eager = Use(UnigramSampler(zipf(50), 7))(queries(5), target)
    assert (first[0].diff() > 0).all() and not torch.equal(first[0], second[0])
    torch.testing.assert_close(first[2], eager[2])


def test_state_dict_holds_only_what_training_made():
    """Tables are rebuilt from constructor arguments, so a loss keeps the keys of
    torch.nn.LinearCrossEntropyLoss. Counts are saved."""
    for sampler in (UnigramSampler(zipf(30), 5), UniformSampler(30, 5),
                    UniformSampler(30, 5, exclude=torch.tensor([3])), FixedSampler(30, 5)):
        assert sampler.state_dict() == {}
    source, other = InBatchSampler(30), InBatchSampler(30)
    source.sample(queries(3), torch.tensor([1, 2, 2]))
    assert set(source.state_dict()) == {"counts", "total"}
    other.load_state_dict(source.state_dict())
    for sampler in (source, other):
        sampler.eval()
    results = [
        sampler.sample(queries(3), torch.tensor([1, 2, 2]))[0].log_count
        for sampler in (source, other)
    ]
    assert torch.equal(*results) and results[0].isfinite().sum() == 6


def test_excluding():
    """A sampler that excludes classes later equals one built so, and draws as many samples."""
    for make in (lambda **k: UnigramSampler(zipf(30), 9, **k),
                 lambda **k: UniformSampler(30, 9, **k), lambda **k: LogUniformSampler(30, 9, **k)):
        for options in (dict(), dict(shared=False), dict(distinct=False)):
            for exclude in (torch.arange(4), torch.tensor([2,
                                                           7]), torch.tensor([],
                                                                             dtype=torch.int64)):
                later, built = make(**options).excluding(exclude), make(exclude=exclude, **options)
                torch.testing.assert_close(later.log_count(queries(1), torch.arange(30)),
                                           built.log_count(queries(1), torch.arange(30)))
                assert later.num_samples == 9 and (later.shared, later.distinct) == (built.shared,
                                                                                     built.distinct)
            twice = make(exclude=torch.arange(4), **options).excluding(torch.tensor([4, 5]))
            torch.testing.assert_close(
                twice.log_count(queries(1), torch.arange(30)),
                make(exclude=6, **options).log_count(queries(1), torch.arange(30)))
    assert UniformSampler(30, 9, exclude=4).excluding(torch.tensor([4, 5])).probability.numel() == 0
    assert InBatchSampler(30).excluding(torch.arange(3)) is None
    with pytest.raises(ValueError, match="UniformSampler: expected num_samples of at most 7, .* "
                       "got 9"):
        UniformSampler(10, 9).excluding(torch.tensor([0, 5, 7]))


def test_casting_a_model_keeps_the_tables():
    sampler = UnigramSampler(zipf(1000), 30)
    [want] = sampler.sample(queries(1), generator=torch.Generator().manual_seed(0))
    torch.nn.Sequential(sampler).half().float().bfloat16()
    assert sampler.probability.dtype == sampler.cumulative.dtype == torch.float64
    [got] = sampler.sample(queries(1), generator=torch.Generator().manual_seed(0))
    assert torch.equal(got.ids, want.ids) and torch.equal(got.log_count, want.log_count)


def test_ten_million_classes_need_no_tables():
    """Uniform samplers and log-uniform ones with replacement hold only three scalars, so 2^62
    classes work like 10."""
    n = 10_000_000
    for shared in (True, False):
        for sampler in (UniformSampler(n, 50, shared=shared, exclude=512),
                        LogUniformSampler(n, 50, shared=shared, distinct=False)):
            assert sum(table.numel() for table in sampler.buffers()) == len(SCALARS)
            ids = sampler.sample(queries(4))[0].ids
            assert ids.min() >= 0 and ids.max() < n
    ids = ops.uniform_sample(seed(1), 0, 2**62, None, 1000, True)
    assert ids.unique().numel() == 1000 and (ids > 2**61).double().mean() == pytest.approx(
        0.5, abs=0.1)


def test_counts_may_be_numpy_integers():
    sampler = UniformSampler(np.int64(50), np.int32(7), exclude=np.int64(3))
    assert (sampler.num_classes, sampler.num_samples) == (50, 7) and type(
        sampler.num_classes) is int
    torch.jit.script(sampler)


def test_names():
    assert isinstance(make_sampler("in_batch", 30), InBatchSampler)
    with pytest.raises(ValueError, match='expected no num_samples for "in_batch"'):
        make_sampler("in_batch", 30, 5)
    sampler = make_sampler("unigram", 30, 5, counts=zipf(30), shared=False, dim=8, bias=True)
    assert isinstance(sampler, UnigramSampler) and sampler.num_samples == 5 and not sampler.shared

    @register("every_third")
    class EveryThird(StaticSampler):
        def __init__(self, num_classes, num_samples):
            super().__init__(torch.arange(num_classes) % 3 == 0, num_samples)

    assert isinstance(make_sampler("every_third", 30, 5), EveryThird)
    assert (make_sampler("every_third", 30, 5).sample(queries(1))[0].ids % 3 == 0).all()
    with pytest.raises(ValueError, match="a name that is not taken, got 'every_third'"):
        register("every_third")(EveryThird)


def test_a_sampler_belongs_to_one_loss():
    sampler = UniformSampler(30, 5)
    sampler._claim("SampledSoftmaxLoss")
    with pytest.raises(
            ValueError, match="CaneLoss: expected a sampler that no other module uses, "
            "got a UniformSampler that belongs to a "
            "SampledSoftmaxLoss"):
        sampler._claim("CaneLoss")


# ---- bad input


@pytest.mark.parametrize("make, error, message", [
    (lambda: UniformSampler(0, 1), ValueError, "UniformSampler: expected num_classes of at least "
     "1, got 0"),
    (lambda: LogUniformSampler(2.5, 1), TypeError, "LogUniformSampler: expected num_classes of "
     "type int, got float"),
    (lambda: InBatchSampler(-1), ValueError, "InBatchSampler: expected num_classes"),
    (lambda: InBatchSampler(5, counts=torch.ones(5)), TypeError, "InBatchSampler: expected counts "
     "as a StreamingCounts or None, "
     "got Tensor"),
    (lambda: InBatchSampler(5, counts=StreamingCounts(4)), ValueError, "InBatchSampler: expected "
     "counts of 5 ids or of open "
     "ones, got 4"),
    (lambda: UnigramSampler(StreamingCounts(None), 2), ValueError, "UnigramSampler: expected "
     "counts of dense ids, got those "
     "of open ids"),
    (lambda: UnigramSampler(StreamingCounts(5), 6), ValueError, "UnigramSampler: expected "
     "num_samples of at most 5"),
    (lambda: UnigramSampler(StreamingCounts(5), 2, uniform_share=0.0), ValueError,
     r"UnigramSampler: expected uniform_share in \(0, 1\], got 0"),
    (lambda: UnigramSampler(StreamingCounts(5), 2, power=math.inf), ValueError,
     "UnigramSampler: expected power as a finite number of at least 0, got inf"),
    (lambda: UnigramSampler(StreamingCounts(5), 2, refresh_every=-1), ValueError,
     "UnigramSampler: expected refresh_every of at least 0, got -1"),
    (lambda: make_sampler("unigram", 4, 2, counts=StreamingCounts(5)), ValueError,
     'make_sampler: expected counts of 4 classes for "unigram", got 5'),
    (lambda: UniformSampler(5, -1), ValueError, "UniformSampler: expected num_samples of at least "
     "0, got -1"),
    (lambda: UniformSampler(5, 2.0), TypeError, "UniformSampler: expected num_samples of type int, "
     "got float"),
    (lambda: UniformSampler(5, 1, exclude=5), ValueError, "UniformSampler: expected exclude to "
     "leave at least one of 5 classes, got "
     "all of them"),
    (lambda: UniformSampler(5, 1, exclude=-1), ValueError, "UniformSampler: expected exclude of at "
     "least 0, got -1"),
    (lambda: LogUniformSampler(5, 1, exclude=10**15), ValueError, "LogUniformSampler: expected "
     "exclude to leave at least one"),
    (lambda: UniformSampler(5, 1, exclude=torch.arange(5)), ValueError, "got all of them"),
    (lambda: UniformSampler(5, 1, exclude=torch.tensor([1, 5])), IndexError, r"UniformSampler: "
     r"expected exclude in "
     r"\[0, 5\), got ids "
     r"from 1 to 5"),
    (lambda: UniformSampler(5, 1, exclude=torch.tensor([1.0])), ValueError, "exclude as int64 ids"),
    (lambda: UniformSampler(5, 1, exclude=[1.0]), ValueError, "UniformSampler: expected exclude as "
     "int64 ids with 1 dimension, got "
     "float32"),
    (lambda: UniformSampler(5, 1, distinct="yes"), TypeError, "distinct as True, False or None"),
    (lambda: UniformSampler(5, 1, shared=1), TypeError, "UniformSampler: expected shared as True, "
     "False or None, got 1"),
    (lambda: UniformSampler(5, 6), ValueError, "UniformSampler: expected num_samples of at most 5, "
     "the number of classes that can be drawn, .* got 6"),
    (lambda: UniformSampler(5, 4, exclude=2, shared=False, distinct=True), ValueError,
     "UniformSampler: expected num_samples of at most 3"),
    (lambda: UnigramSampler(torch.tensor([0, 1, 2]), 3), ValueError, "UnigramSampler: expected "
     "num_samples of at most 2, "
     ".*got 3"),
    (lambda: UnigramSampler(torch.tensor([1.0, -2.0]), 1), ValueError, r"UnigramSampler: expected "
     r"counts .* got -2 at \[1\]"),
    (lambda: UnigramSampler(torch.tensor([math.nan]), 1), ValueError, "got nan"),
    (lambda: UnigramSampler(torch.tensor([1, math.inf]), 1), ValueError, "got inf"),
    (lambda: UnigramSampler(torch.zeros(3), 1), ValueError, "UnigramSampler: expected counts that "
     "are not all zero"),
    (lambda: UnigramSampler(torch.ones(3, 2), 1), ValueError, r"got shape \[3, 2\]"),
    (lambda: UnigramSampler(torch.ones(0), 1), ValueError, r"got shape \[0\]"),
    (lambda: UnigramSampler("ab", 1), TypeError, "UnigramSampler: expected counts as a tensor, "
     ".*got str"),
    (lambda: UnigramSampler(torch.ones(2, dtype=torch.complex64), 1), TypeError,
     "UnigramSampler: expected counts of a real dtype"),
    (lambda: UnigramSampler(torch.ones(3), 1, power=-1), ValueError, "power as a finite number of "
     "at least 0, got -1"),
    (lambda: UnigramSampler(torch.ones(3), 1, power=math.nan), ValueError, "power"),
    (lambda: UnigramSampler(torch.tensor([0, 3, 0]), 1, exclude=torch.tensor([1])), ValueError,
     "positive weight that is not excluded"),
    (lambda: StaticSampler(torch.ones(2, 2), 1), ValueError, "StaticSampler: expected weights as a "
     "tensor"),
    (lambda: FixedSampler(5, torch.tensor([5])), IndexError, r"FixedSampler: expected ids in \[0, "
     r"5\)"),
    (lambda: FixedSampler(0, torch.tensor([0])), ValueError, "FixedSampler: expected num_classes "
     "of at least 1"),
    (lambda: make_sampler("unigram", 3, 1), ValueError,
     'expected counts of 3 classes for "unigram", got none'),
    (lambda: make_sampler("unigram", 3, 1, counts=torch.ones(4)), ValueError,
     'counts of 3 classes for "unigram", got 4'),
    (lambda: make_sampler("uniform", 3), ValueError, "make_sampler: expected num_samples for a "
     "UniformSampler, got None"),
    (lambda: make_sampler("zipf", 3, 1), ValueError, "got 'zipf'"),
    (lambda: register("x")(int), TypeError, "register: expected a class that derives from Sampler"),
    (lambda: UniformSampler(5, 1).sample(queries(1), torch.tensor([5])), IndexError,
     r"static_sample: expected target in \[0, 5\)"),
    (lambda: UniformSampler(5, 1).log_count(queries(1), torch.tensor([-2])), IndexError,
     r"static_log_count: expected ids in \[0, 5\).*-2"),
    (lambda: UnigramSampler(torch.ones(5), 1).log_count(queries(1), torch.tensor([5])), IndexError,
     r"static_log_count: expected ids in \[0, 5\)"),
    (lambda: UniformSampler(5, 1).log_count(queries(1), torch.tensor([1.0])), TypeError,
     "static_log_count: expected ids of dtype int64"),
    (lambda: ops.static_log_count(seed(1), [], "distribution=uniform,num_classes=5"), ValueError,
     "static_log_count: expected 7 tables, got 0"),
    (lambda: ops.static_tables("X", None, None, None, "distribution=uniform,size=5"), ValueError,
     "X: expected options among distribution, low, .*got 'size'"),
    (lambda: ops.uniform_sample(torch.zeros(1, dtype=torch.int64), 0, 5, None, 1, False),
     ValueError, r"seed of shape \[\], or \[2\]"),
    (lambda: ops.uniform_sample(torch.tensor(1.0), 0, 5, None, 1, False), TypeError,
     "seed of dtype int64"),
    (lambda: ops.uniform_sample(seed(0), 5, 5, None, 1, False), ValueError, "0 <= low < high, got "
     "low = 5 and high = 5"),
    (lambda: ops.log_uniform_sample(seed(0), -1, 5, None, 1), ValueError, "low = -1"),
    (lambda: ops.uniform_sample(seed(0), 0, 5, -1, 1, False), ValueError, "num_queries of at least "
     "0, got -1"),
    (lambda: ops.alias_table(torch.ones(3)), TypeError, "weights of dtype float64, got float32"),
    (lambda: ops.alias_table(torch.ones(0).double()), ValueError, "at least 1 weight"),
    (lambda: ops.alias_table(torch.zeros(3).double()), ValueError, "a weight above zero"),
    (lambda: ops.systematic_table(torch.tensor([1, math.nan]).double()), ValueError,
     r"got nan at \[1\]"),
    (lambda: ops.alias_sample(seed(0),
                              torch.zeros(3, 3).long(), None, 1, []), ValueError,
     "bins with size 2"),
    (lambda: ops.alias_sample(seed(0), torch.tensor([[0, 3]] * 3), None, 1, []), IndexError,
     r"in \[0, 3\), got 3"),
    (lambda: ops.systematic_sample(seed(0),
                                   torch.ones(3).double(), torch.full((3,), -1),
                                   torch.ones(3).double(), None, 1, []), IndexError,
     "order in .*got -1"),
])
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_generator_of_another_device():
    with pytest.raises(ValueError, match="expected generator on the queries' device meta, got one "
                       "on cpu"):
        UniformSampler(5, 1).sample(queries(1).to("meta"), generator=torch.Generator())


def test_meta_tensors():
    for sampler in (UnigramSampler(zipf(50), 4, shared=False), UniformSampler(50, 4, shared=False)):
        [drawn] = sampler.to("meta").sample(
            queries(3).to("meta"), torch.zeros(3, dtype=torch.int64, device="meta"))
        assert drawn.ids.shape == (3,
                                   4) and drawn.ids.is_meta and drawn.target_log_count.shape == (3,)


@pytest.mark.parametrize("description", [
    "cane:0:", "head:0:", "given:0:", "in_batch:0:", "union:0:", "static:0:", "midx:0:",
    "complement:1:"
])
def test_options_of_another_kind_are_refused(description):
    state = [torch.zeros(1)] * int(description.split(":")[1])
    with pytest.raises(
            ValueError, match="sampler_sample: expected the tensors and parts of a "
            "sampler of kind"):
        torch.ops.xsoftmax.sampler_sample(torch.randn(2, 3), None, state, description)
