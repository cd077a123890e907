"""Classes that come one at a time: samplers know them without laying out their tables anew, their counts are exact, and their state is all there is."""

import copy
import io

import pytest
import torch
from sampler_checks import chi_square
from torch import nn

import xsoftmax as xs

N, D, MORE = 40, 5, 7  # up to a quarter of what was laid out may have come
COUNTS = 1 + torch.arange(N, 0, -1).double() ** 2
EXCLUDED = torch.tensor([1, 3])

STATIC = {"unigram": lambda n, **options: xs.samplers.UnigramSampler(torch.cat([COUNTS, torch.full((n - N,), 2.0)]), power=1.0, **options),
          "log_uniform": lambda n, **options: xs.samplers.LogUniformSampler(n, **options)}
ADAPTIVE = {"midx": dict(codewords=4), "midx, updated": dict(codewords=4, update_every=3), "midx, shared": dict(codewords=4, shared=True, distinct=False),
            "midx_spread": dict(codewords=4), "lsh": dict(tables=4, bits=2), "sphere": {}, "rff": dict(features=8)}
STREAMED = {f"unigram, {kind}": dict(distinct=kind == "distinct") for kind in ("distinct", "independent")}


def adaptive_loss(name, classes=N, num_samples=6, **options):
    chosen = xs.samplers.make_sampler(name.split(",")[0], classes, num_samples, dim=D, bias=True, exclude=EXCLUDED, **ADAPTIVE[name], **options)
    return xs.SampledSoftmaxLoss(D, classes, sampler=chosen, bias=True)


def streamed_loss(name, classes=N):
    counts = xs.samplers.StreamingCounts(classes, half_life=30.0)
    return xs.SampledSoftmaxLoss(D, classes, sampler=xs.samplers.UnigramSampler(counts, 6, shared=False, refresh_every=64, **STREAMED[name]), bias=True)


def make_loss(name, classes=N):
    return streamed_loss(name, classes) if name in STREAMED else adaptive_loss(name, classes)


def step(loss, optimizer, seed):
    made = torch.Generator().manual_seed(seed)
    value = loss(torch.randn(4, D, generator=made), torch.randint(loss.num_classes, (4,), generator=made), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value.detach()


def stream(loss, optimizer, classes, seed=0):
    """A class, a step, a class, ..."""
    for _ in range(classes):
        loss.resize_classes(loss.num_classes + 1)
        step(loss, optimizer, seed + loss.num_classes)


def come(sampler):
    """How many classes have come since the tables were laid out."""
    return sampler.num_classes - int(sampler.laid_out) if isinstance(sampler, xs.samplers.StaticSampler) else int(sampler.recent)


# ---- laws

@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("exclude", [None, EXCLUDED])
@pytest.mark.parametrize("law", STATIC)
def test_a_static_law_is_that_of_one_that_was_built_at_that_size(law, exclude, distinct):
    options = dict(num_samples=9, shared=False, distinct=distinct, exclude=exclude)
    grown = STATIC[law](N, **options)
    for classes in range(N + 1, N + MORE + 1):
        grown.resize(classes)
    built, ids, queries = STATIC[law](N + MORE, **options), torch.arange(N + MORE), torch.zeros(20_000, D)
    has_table = grown.probability.numel() > 0
    assert not has_table or come(grown) == MORE
    torch.testing.assert_close(grown.log_count(queries[:1], ids), built.log_count(queries[:1], ids), rtol=1e-6, atol=1e-6)
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
@pytest.mark.parametrize("law", STATIC)
def test_sets_of_nearly_all_classes(law, samples):
    # What fails: certain classes that are in the tail, or a tail that a set of all classes does not hold.
    grown = STATIC[law](N + 3, num_samples=samples)
    for classes in (N + 4, N + 5, N + 6):
        grown.resize(classes)
    count = grown.log_count(torch.zeros(1, D), torch.arange(N + 6)).exp()
    assert count.sum().item() == pytest.approx(samples, rel=1e-5) and (count <= 1).all()
    for seed in range(20):
        torch.manual_seed(seed)
        ids = grown.sample(torch.zeros(1, D))[0].ids
        assert (ids.diff() > 0).all() and len(ids) == samples and 0 <= ids.min() and ids.max() < N + 6


@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_index_draws_by_the_counts_that_it_says(name):
    torch.manual_seed(1)
    loss = adaptive_loss(name, num_samples=4000)
    nn.init.normal_(loss.linear.weight)
    loss.sampler.refresh(loss.linear.weight, loss.linear.bias)
    for _ in range(MORE):
        loss.resize_classes(loss.num_classes + 1)
    assert come(loss.sampler) == MORE
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
        assert chi_square(torch.bincount(mine, minlength=len(ids)), log_count[q].exp().double()) > 1e-4
        of_target = torch.where(target[q] < 0, -torch.inf, log_count[q][target[q]])
        torch.testing.assert_close(drawn.target_log_count[q], of_target, rtol=1e-5, atol=1e-5)
    with xs.use_impl("reference"):
        torch.testing.assert_close(loss.sampler.log_count(queries, ids).expand(3, -1), log_count, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(log_count[:, N:], torch.full((3, MORE), 4000 / (N + MORE - 2)).log())  # as if all were drawn alike


def test_which_part_is_drawn_from_says_nothing_about_the_draw():
    # What fails: the same random bits for the part and for the class in it.
    sampler = STATIC["unigram"](N, num_samples=5000, shared=False, distinct=False)
    sampler.resize(N + MORE)
    adaptive = adaptive_loss("lsh", num_samples=5000).sampler  # before its first refresh, all alike
    adaptive.resize(N + MORE)
    for each in (sampler, adaptive):
        ids = each.sample(torch.zeros(1, D))[0].ids[0]
        old = ids[ids < N]
        count = each.log_count(torch.zeros(1, D), torch.arange(N)).view(-1).exp().double()
        assert chi_square(torch.bincount(old, minlength=N), count * len(old) / count.sum()) > 1e-4


# ---- when tables are laid out

@pytest.mark.parametrize("name", [*ADAPTIVE, *STREAMED])
def test_tables_are_laid_out_seldom(name):
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    laid_out = set()
    for _ in range(3 * N):
        loss.resize_classes(loss.num_classes + 1)
        laid_out.add(loss.num_classes - come(loss.sampler))
    assert len(laid_out) <= 8  # 40 * 1.25 ** 7 > 160
    step(loss, optimizer, 1)
    assert loss.sampler.num_classes == 4 * N and (loss.sampler.sample(torch.randn(3, D))[0].ids < 4 * N).all()


@pytest.mark.parametrize("name", [*ADAPTIVE, *STREAMED])
def test_classes_that_came_and_went_leave_nothing(name):
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    loss.settle()
    before = copy.deepcopy(loss.state_dict())
    for classes in (N + 1, N + 5, N + 2, N):
        loss.resize_classes(classes)
    after = loss.state_dict()
    assert before.keys() == after.keys() and come(loss.sampler) == 0
    for key, value in before.items():
        assert "late_" in key or torch.equal(after[key], value), key


@pytest.mark.parametrize("name", ["midx", "lsh", "sphere"])
def test_a_refresh_lays_out_all(name):
    torch.manual_seed(0)
    loss, built = adaptive_loss(name), adaptive_loss(name, N + MORE)
    loss.sampler.refresh(loss.linear.weight, loss.linear.bias)
    for classes in range(N + 1, N + MORE + 1):
        loss.resize_classes(classes)
    built.load_state_dict(loss.state_dict())
    built.sampler.recent.zero_()  # which a refresh must not read
    for each in (loss, built):
        torch.manual_seed(1)
        each.sampler.refresh(loss.linear.weight, loss.linear.bias)
    assert come(loss.sampler) == 0
    assert all(torch.equal(value, other) for value, other in zip(loss.state_dict().values(), built.state_dict().values(), strict=True))


def test_an_update_lays_out_all():
    torch.manual_seed(0)
    loss = adaptive_loss("midx, updated")
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    loss.resize_classes(N + 2)
    assert come(loss.sampler) == 2
    for seed in range(4):
        step(loss, optimizer, seed)
    sampler = loss.sampler
    assert come(sampler) == 0 and sampler.start[-1] == len(sampler.order) == N
    assert (sampler.order.sort().values == torch.tensor([i for i in range(N + 2) if i not in (1, 3)])).all()


@pytest.mark.parametrize("options", [dict(distinct=True), dict(shared=True)])
def test_distinct_sets_of_an_index_are_laid_out_at_once(options):
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(D, N, sampler=xs.samplers.MidxSampler(N, D, 8, codewords=4, **options))
    loss.sampler.refresh(loss.linear.weight)
    loss.resize_classes(N + 1)
    assert come(loss.sampler) == 0 and loss.sampler.start[-1] == N + 1


# ---- state

@pytest.mark.parametrize("name", [*ADAPTIVE, *STREAMED])
def test_a_checkpoint_amid_the_stream_goes_on_bit_for_bit(name):
    # What fails: what has come is not in the state, or another sampler reads it otherwise.
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    stream(loss, optimizer, 7)
    assert come(loss.sampler) > 0
    other = make_loss(name, loss.num_classes)
    other_optimizer = xs.optim.RowAdam(other.parameters())
    other.load_state_dict(loss.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its_optimizer in ((loss, optimizer), (other, other_optimizer)):
        torch.manual_seed(2)
        stream(each, its_optimizer, 3, seed=50)
    assert all(torch.equal(value, again) for value, again in zip(loss.state_dict().values(), other.state_dict().values(), strict=True))
    values = [step(each, its_optimizer, 99) for each, its_optimizer in ((loss, optimizer), (other, other_optimizer))]
    assert torch.equal(*values)


@pytest.mark.parametrize("name", ["midx", "lsh", "sphere", *STREAMED])
def test_torchscript_and_copies_keep_what_has_come(name):
    torch.manual_seed(0)
    loss = make_loss(name)
    optimizer = xs.optim.RowAdam(loss.parameters())
    step(loss, optimizer, 0)
    stream(loss, optimizer, 3)
    loss.settle()  # a copy owes nothing
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(loss), file)
    file.seek(0)
    scripted, copied = torch.jit.load(file), copy.deepcopy(loss)
    input, target = torch.randn(4, D), torch.tensor([0, N, N + 2, 7])
    values = []
    for each in (loss, scripted, copied):
        torch.manual_seed(3)
        values.append([each(input, target).detach() for _ in range(3)])
    assert torch.equal(torch.stack(values[0]), torch.stack(values[1])) and torch.equal(torch.stack(values[0]), torch.stack(values[2]))


def test_a_union_and_noise_outside_follow():
    torch.manual_seed(0)
    union = xs.samplers.UnionSampler(STATIC["unigram"](N, num_samples=6), xs.samplers.MidxSampler(N, D, 4, codewords=4))
    losses = [xs.SampledSoftmaxLoss(D, N, sampler=union),
              xs.CaneLoss(D, N, candidates=torch.tensor([0, 2]), num_noises=3, noise_sampler=xs.samplers.LshSampler(N, D, 12))]
    for loss in losses:
        optimizer = xs.optim.RowAdam(loss.parameters())
        step(loss, optimizer, 0)
        stream(loss, optimizer, MORE)
        assert [come(each) for each in loss.modules() if isinstance(each, (xs.samplers.StaticSampler, xs.samplers.MidxSampler, xs.samplers.LshSampler))
                and hasattr(each, "num_classes")] and loss.num_classes == N + MORE
    assert come(union.parts[0]) == come(union.parts[1]) == MORE


def test_recent_classes_that_a_state_makes_up_are_refused():
    loss = adaptive_loss("lsh")
    loss.sampler.recent.fill_(N - 2)
    with pytest.raises(ValueError, match=r"recent in \[0, 38\)"):
        loss.sampler.sample(torch.randn(2, D))
    tail = STATIC["unigram"](N, num_samples=3)
    tail.resize(N + 1)
    for laid_out, weight, message in ((N + 2, 1, r"laid_out in \[1, 41\]"), (N, -1, "finite weight above 0")):
        tail.laid_out.fill_(laid_out)
        tail.late_weight.fill_(weight)
        with pytest.raises(ValueError, match=message):
            tail.sample(torch.randn(2, D))


def test_operators_are_what_their_schemas_say():
    import op_samples

    made = op_samples.samples()
    for name in ("adaptive_grow", "adaptive_grow_", "lsh_grow", "midx_grow", "kernel_grow", "static_grow_"):
        torch.library.opcheck(getattr(torch.ops.xsoftmax, name).default, made[name], test_utils=("test_schema",))
