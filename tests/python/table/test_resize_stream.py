"""Classes added one at a time: samplers draw them without rebuilding their tables, their counts are
exact, and their state is complete."""

import copy
import io

import pytest
import torch
from sampler_checks import chi_square
from torch import nn

import xsoftmax as xs

N, D, MORE = 40, 5, 7  # tables are rebuilt after growing by a quarter
COUNTS = 1 + torch.arange(N, 0, -1).double()**2
EXCLUDED = torch.tensor([1, 3])

STATIC = {
    "unigram": lambda n, **options: xs.samplers.UnigramSampler(
        torch.cat([COUNTS, torch.full((n - N,), 2.0)]), power=1.0, **options),
    "log_uniform": lambda n, **options: xs.samplers.LogUniformSampler(n, **options)
}
ADAPTIVE = {
    "midx": dict(codewords=4), "midx, updated": dict(codewords=4, update_every=3),
    "midx, shared": dict(codewords=4, shared=True, distinct=False),
    "midx_spread": dict(codewords=4), "lsh": dict(tables=4,
                                                  bits=2), "sphere": {}, "rff": dict(features=8)
}
STREAMED = {
    f"unigram, {kind}": dict(distinct=kind == "distinct")
    for kind in ("distinct", "independent")
}


def adaptive_loss(name, classes=N, num_samples=6, **options):
    chosen = xs.samplers.make_sampler(
        name.split(",")[0], classes, num_samples, dim=D, bias=True, exclude=EXCLUDED,
        **ADAPTIVE[name], **options)
    return xs.SampledSoftmaxLoss(D, classes, sampler=chosen, bias=True)


def streamed_loss(name, classes=N):
    counts = xs.samplers.StreamingCounts(classes, half_life=30.0)
    return xs.SampledSoftmaxLoss(
        D, classes, sampler=xs.samplers.UnigramSampler(counts, 6, shared=False, refresh_every=64,
                                                       **STREAMED[name]), bias=True)


def make_loss(name, classes=N):
    return streamed_loss(name, classes) if name in STREAMED else adaptive_loss(name, classes)


def step(loss, optimizer, seed):
    made = torch.Generator().manual_seed(seed)
    value = loss(torch.randn(4, D, generator=made),
                 torch.randint(loss.num_classes, (4,), generator=made),
                 generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.detach()


def stream(loss, optimizer, classes, seed=0):
    """Adds a class, takes a step, adds a class, ..."""
    for _ in range(classes):
        loss.resize_classes(loss.num_classes + 1)
        step(loss, optimizer, seed + loss.num_classes)


def count_added(sampler):
    """Number of classes added since the tables were last rebuilt."""
    return sampler.num_classes - int(sampler.laid_out) if isinstance(
        sampler, xs.samplers.StaticSampler) else int(sampler.recent)


# ---- distributions


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("exclude", [None, EXCLUDED])
@pytest.mark.parametrize("distribution", STATIC)
def test_a_static_distribution_equals_one_built_at_that_size(distribution, exclude, distinct):
    options = dict(num_samples=9, shared=False, distinct=distinct, exclude=exclude)
    grown = STATIC[distribution](N, **options)
    for classes in range(N + 1, N + MORE + 1):
        grown.resize(classes)
    built, ids, queries = STATIC[distribution](N + MORE,
                                               **options), torch.arange(N + MORE), torch.zeros(
                                                   20_000, D)
    has_table = grown.probability.numel() > 0
    assert not has_table or count_added(grown) == MORE
    torch.testing.assert_close(grown.log_count(queries[:1], ids), built.log_count(queries[:1], ids),
                               rtol=1e-6, atol=1e-6)
    torch.manual_seed(0)
    drawn = grown.sample(queries)[0]
    count = grown.log_count(queries, ids).exp().double()
    assert count.sum().item() == pytest.approx(9, rel=1e-5)
    torch.testing.assert_close(drawn.log_count, grown.log_count(queries, drawn.ids), rtol=0, atol=0)
    seen = torch.bincount(drawn.ids.flatten(), minlength=N + MORE)
    if distinct:
        assert (drawn.ids.sort(1).values.diff(dim=1) > 0).all()
        spread = (len(queries) * count * (1 - count)).sqrt()
        assert ((seen - len(queries) * count).abs() <= 5 * spread + 1e-3).all()
    else:
        assert chi_square(seen, len(queries) * count) > 1e-4


@pytest.mark.parametrize("samples", [1, N - 1, N, N + 3])
@pytest.mark.parametrize("distribution", STATIC)
def test_sets_of_nearly_all_classes(distribution, samples):
    # Fails if classes with probability 1 are in the tail, or if a set of all classes misses the
    # tail.
    grown = STATIC[distribution](N + 3, num_samples=samples)
    for classes in (N + 4, N + 5, N + 6):
        grown.resize(classes)
    count = grown.log_count(torch.zeros(1, D), torch.arange(N + 6)).exp()
    assert count.sum().item() == pytest.approx(samples, rel=1e-5) and (count <= 1).all()
    for seed in range(20):
        torch.manual_seed(seed)
        ids = grown.sample(torch.zeros(1, D))[0].ids
        assert (ids.diff()
                > 0).all() and len(ids) == samples and 0 <= ids.min() and ids.max() < N + 6


@pytest.mark.parametrize("name", ADAPTIVE)
def test_draws_of_an_index_match_its_counts(name):
    torch.manual_seed(1)
    loss = adaptive_loss(name, num_samples=4000)
    nn.init.normal_(loss.linear.weight)
    loss.sampler.refresh(loss.linear.weight, loss.linear.bias)
    for _ in range(MORE):
        loss.resize_classes(loss.num_classes + 1)
    assert count_added(loss.sampler) == MORE
    ids, queries = torch.arange(loss.num_classes), torch.randn(3, D)
    target = torch.tensor([[0, N + 2], [N, -1], [5, 1]])
    drawn = loss.sampler.sample(queries, target)[0]
    log_count = loss.sampler.log_count(queries, ids).expand(3, -1)
    assert (log_count[:, EXCLUDED] == -torch.inf).all() and torch.isfinite(log_count[:, N:]).all()
    assert log_count.exp().sum(1).tolist() == pytest.approx([4000] * 3, rel=1e-3)
    for q in range(3):
        mine = drawn.ids if drawn.ids.dim() == 1 else drawn.ids[q]
        counts = drawn.log_count if drawn.ids.dim() == 1 else drawn.log_count[q]
        torch.testing.assert_close(counts, log_count[q][mine], rtol=1e-5, atol=1e-5)
        assert chi_square(torch.bincount(mine, minlength=len(ids)),
                          log_count[q].exp().double()) > 1e-4
        of_target = torch.where(target[q] < 0, -torch.inf, log_count[q][target[q]])
        torch.testing.assert_close(drawn.target_log_count[q], of_target, rtol=1e-5, atol=1e-5)
    with xs.use_impl("reference"):
        torch.testing.assert_close(
            loss.sampler.log_count(queries, ids).expand(3, -1), log_count, rtol=1e-4, atol=1e-4)
    # as for a uniform distribution
    torch.testing.assert_close(log_count[:, N:], torch.full((3, MORE), 4000 / (N + MORE - 2)).log())


def test_draws_of_old_and_new_classes_are_independent():
    # Fails if the choice of the part and of the class in it share random bits.
    sampler = STATIC["unigram"](N, num_samples=5000, shared=False, distinct=False)
    sampler.resize(N + MORE)
    adaptive = adaptive_loss("lsh", num_samples=5000).sampler  # uniform before its first refresh
    adaptive.resize(N + MORE)
    for each in (sampler, adaptive):
        ids = each.sample(torch.zeros(1, D))[0].ids[0]
        old = ids[ids < N]
        count = each.log_count(torch.zeros(1, D), torch.arange(N)).view(-1).exp().double()
        assert chi_square(torch.bincount(old, minlength=N), count * len(old) / count.sum()) > 1e-4


# ---- when tables are rebuilt


@pytest.mark.parametrize("name", [*ADAPTIVE, *STREAMED])
def test_tables_are_rarely_rebuilt(name):
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    laid_out = set()
    for _ in range(3 * N):
        loss.resize_classes(loss.num_classes + 1)
        laid_out.add(loss.num_classes - count_added(loss.sampler))
    assert len(laid_out) <= 8  # 40 * 1.25 ** 7 > 160
    step(loss, optimizer, 1)
    assert loss.sampler.num_classes == 4 * N and (loss.sampler.sample(torch.randn(3, D))[0].ids
                                                  < 4 * N).all()


@pytest.mark.parametrize("name", [*ADAPTIVE, *STREAMED])
def test_added_and_removed_classes_leave_no_trace(name):
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    loss.catch_up()
    before = copy.deepcopy(loss.state_dict())
    for classes in (N + 1, N + 5, N + 2, N):
        loss.resize_classes(classes)
    after = loss.state_dict()
    assert before.keys() == after.keys() and count_added(loss.sampler) == 0
    for key, value in before.items():
        assert "late_" in key or torch.equal(after[key], value), key


@pytest.mark.parametrize("name", ["midx", "lsh", "sphere"])
def test_a_refresh_rebuilds_the_index_with_all_classes(name):
    torch.manual_seed(0)
    loss, built = adaptive_loss(name), adaptive_loss(name, N + MORE)
    loss.sampler.refresh(loss.linear.weight, loss.linear.bias)
    for classes in range(N + 1, N + MORE + 1):
        loss.resize_classes(classes)
    built.load_state_dict(loss.state_dict())
    built.sampler.recent.zero_()  # a refresh must not read it
    for each in (loss, built):
        torch.manual_seed(1)
        each.sampler.refresh(loss.linear.weight, loss.linear.bias)
    assert count_added(loss.sampler) == 0
    assert all(
        torch.equal(value, other) for value, other in zip(loss.state_dict().values(),
                                                          built.state_dict().values(), strict=True))


def test_an_update_rebuilds_the_index_with_all_classes():
    torch.manual_seed(0)
    loss = adaptive_loss("midx, updated")
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    loss.resize_classes(N + 2)
    assert count_added(loss.sampler) == 2
    for seed in range(4):
        step(loss, optimizer, seed)
    sampler = loss.sampler
    assert count_added(sampler) == 0 and sampler.start[-1] == len(sampler.order) == N
    assert (sampler.order.sort().values == torch.tensor(
        [i for i in range(N + 2) if i not in (1, 3)])).all()


@pytest.mark.parametrize("options", [dict(distinct=True), dict(shared=True)])
def test_an_index_that_draws_distinct_sets_is_rebuilt_at_once(options):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N,
                                 sampler=xs.samplers.MidxSampler(N, D, 8, codewords=4, **options))
    loss.sampler.refresh(loss.linear.weight)
    loss.resize_classes(N + 1)
    assert count_added(loss.sampler) == 0 and loss.sampler.start[-1] == N + 1


# ---- state


@pytest.mark.parametrize("name", [*ADAPTIVE, *STREAMED])
def test_a_checkpoint_within_the_stream_continues_bit_for_bit(name):
    # Fails if added classes are missing from the state, or are loaded differently.
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    stream(loss, optimizer, 7)
    assert count_added(loss.sampler) > 0
    other = make_loss(name, loss.num_classes)
    other_optimizer = xs.optim.RowAdam(other.parameters())
    other.load_state_dict(loss.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((loss, optimizer), (other, other_optimizer)):
        torch.manual_seed(2)
        stream(each, its_optimizer, 3, seed=50)
    assert all(
        torch.equal(value, again) for value, again in zip(loss.state_dict().values(),
                                                          other.state_dict().values(), strict=True))
    values = [
        step(each, its_optimizer, 99)
        for each, its_optimizer in ((loss, optimizer), (other, other_optimizer))
    ]
    assert torch.equal(*values)


@pytest.mark.parametrize("name", ["midx", "lsh", "sphere", *STREAMED])
def test_torchscript_and_copies_keep_added_classes(name):
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    stream(loss, optimizer, 3)
    loss.catch_up()  # so that no updates are pending
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(loss), file)
    file.seek(0)
    scripted, copied = torch.jit.load(file), copy.deepcopy(loss)
    input, target = torch.randn(4, D), torch.tensor([0, N, N + 2, 7])
    values = []
    for each in (loss, scripted, copied):
        torch.manual_seed(3)
        values.append([each(input, target).detach() for _ in range(3)])
    assert torch.equal(torch.stack(values[0]), torch.stack(values[1])) and torch.equal(
        torch.stack(values[0]), torch.stack(values[2]))


def test_a_union_and_noise_outside_follow():
    torch.manual_seed(0)
    union = xs.samplers.UnionSampler(STATIC["unigram"](N, num_samples=6),
                                     xs.samplers.MidxSampler(N, D, 4, codewords=4))
    losses = [
        xs.SampledSoftmaxLoss(D, N, sampler=union),
        xs.CaneLoss(D, N, candidates=torch.tensor([0, 2]), num_noises=3,
                    noise_sampler=xs.samplers.LshSampler(N, D, 12))
    ]
    for loss in losses:
        optimizer = xs.optim.RowAdam(loss.parameters())
        step(loss, optimizer, 0)
        stream(loss, optimizer, MORE)
        assert [
            count_added(each) for each in loss.modules()
            if isinstance(each, (xs.samplers.StaticSampler, xs.samplers.MidxSampler,
                                 xs.samplers.LshSampler)) and hasattr(each, "num_classes")
        ] and loss.num_classes == N + MORE
    assert count_added(union.parts[0]) == count_added(union.parts[1]) == MORE


def test_a_state_with_an_invalid_number_of_recent_classes_is_refused():
    loss = adaptive_loss("lsh")
    loss.sampler.recent.fill_(N - 2)
    with pytest.raises(ValueError, match=r"recent in \[0, 38\)"):
        loss.sampler.sample(torch.randn(2, D))
    tail = STATIC["unigram"](N, num_samples=3)
    tail.resize(N + 1)
    for laid_out, weight, message in ((N + 2, 1, r"laid_out in \[1, 41\]"),
                                      (N, -1, "finite weight above 0")):
        tail.laid_out.fill_(laid_out)
        tail.late_weight.fill_(weight)
        with pytest.raises(ValueError, match=message):
            tail.sample(torch.randn(2, D))


def test_opcheck():
    import op_samples

    made = op_samples.samples()
    for name in ("adaptive_grow", "adaptive_grow_", "lsh_grow", "midx_grow", "kernel_grow",
                 "static_grow_"):
        torch.library.opcheck(
            getattr(torch.ops.xsoftmax, name).default, made[name], test_utils=("test_schema",))
