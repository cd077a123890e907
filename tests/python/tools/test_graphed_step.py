"""make_graphed_step: the plain loop on a CPU, and the logic around a capture with a stand-in for
the device."""

import copy

import pytest
import torch

import xsoftmax as xs
from combinations import COMBINATIONS, SAMPLERS, make_sampler
from graph_stand_in import log  # noqa: F401 (a fixture)
from graph_stand_in import StandIn
from xsoftmax.tools import graphed_step

D, N, Q, STEPS = 5, 23, 7, 12
SCALAR = {name: made for name, made in COMBINATIONS.items() if made.options["reduction"] != "none"}


class Model(torch.nn.Module):
    """A loss, and how its combination calls it."""
    def __init__(self, made):
        super().__init__()
        self.made, self.loss = made, made.make(torch.float32)

    def forward(self, input, target):
        return self.made.call(self.loss, input, target, None)


def encoder_of(seed=3):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Dropout(0.2))


def batches(steps=STEPS, queries=Q):
    made = torch.Generator().manual_seed(11)
    return [(torch.randn(queries, D, generator=made), torch.randint(N, (queries,), generator=made))
            for _ in range(steps)]


def plain(loss, optimizers, encoder, data, max_norm=None, accumulate=1,
          between=lambda number: None):
    values, params = (
        [],
        [
            param for optimizer in optimizers for group in optimizer.param_groups
            for param in group["params"]
        ],
    )
    for number, (input, target) in enumerate(data):
        torch.manual_seed(number)
        value = loss(encoder(input), target)
        (value if accumulate == 1 else value / accumulate).backward()
        if (number + 1) % accumulate == 0:
            if max_norm is not None:
                xs.clip_grad_norm_(params, max_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        values.append(value.detach())
        between(number)
    return values


def graphed(loss, optimizers, encoder, data, between=lambda number: None, **options):
    step, values = xs.make_graphed_step(loss, optimizers, encoder, **options), []
    for number, (input, target) in enumerate(data):
        torch.manual_seed(number)
        values.append(step(input, target))
        between(number)
    return step, values


def state_of(loss, optimizers, encoder, values):
    for optimizer in optimizers:
        if hasattr(optimizer, "flush"):
            optimizer.flush()
    return [*values, *loss.state_dict().values(), *encoder.state_dict().values()]


def assert_same(a, b):
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def both(make, data=None, between=lambda *_: lambda number: None, **options):
    """Runs the plain loop and the graphed step from the same state, checks that results are equal
    bit for bit, and returns the step."""
    results = []
    for run in (plain, graphed):
        loss, optimizers, encoder = make()
        given = ({name: value
                  for name, value in options.items()
                  if name != "warmup_steps"} if run is plain else options)
        made = run(loss, optimizers, encoder, data or batches(), between=between(loss, optimizers),
                   **given)
        step, values = made if run is graphed else (None, made)
        results.append(state_of(loss, optimizers, encoder, values))
    assert_same(*results)
    return step


def small(sampler="uniform", optimizer=xs.optim.RowAdam, **options):
    def make():
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(
            D,
            N,
            sampler=sampler() if callable(sampler) else sampler,
            **({} if callable(sampler) else dict(num_samples=6)),
            **options,
        )
        encoder = encoder_of()
        return loss, [optimizer([*loss.parameters(), *encoder.parameters()], lr=0.05)], encoder

    return make


@pytest.mark.parametrize("name", SCALAR)
def test_replayed_steps_equal_the_plain_loop(name, log):
    """For every loss, sampler and optimizer, with refreshes, balancing and streamed counts."""
    def make():
        made, encoder = SCALAR[name], encoder_of()
        model = Model(made)
        return (
            model,
            [made.make_optimizer(model.loss),
             xs.optim.RowSGD(encoder.parameters(), lr=0.1)],
            encoder,
        )

    step = both(make, warmup_steps=2)
    assert (log.count("eager") + log.count("replay") == STEPS
            and log.count("capture") == step.num_graphs)
    due = any(module._eager_step_due()
              for module in step._modules if hasattr(module, "_eager_step_due"))
    assert due or step.num_graphs == 1


@pytest.mark.parametrize(
    "options",
    [{}, dict(accumulate=3),
     dict(max_norm=0.1),
     dict(accumulate=2, max_norm=0.1)],
    ids=str,
)
def test_a_cpu_runs_the_plain_loop(options):
    step = both(small(), **options)
    assert step.num_graphs == 0


def test_order_of_calls(log):
    both(small(), batches(6), warmup_steps=2)
    assert log == ["eager"] * 2 + ["capture"] + ["replay"] * 4


def test_refreshes_run_between_replays(log):
    """In steps 0, 4 and 8 for refresh_every=4, and in the early steps 1 and 2."""
    both(
        small(lambda: xs.samplers.MidxSampler(N, D, 4, codewords=4, refresh_every=4)),
        batches(12),
        warmup_steps=1,
    )
    assert log == [
        "eager",
        "eager",
        "eager",
        "capture",
        "replay",
        "eager",
        "replay",
        "replay",
        "replay",
        "eager",
        "replay",
        "replay",
        "replay",
    ]


@pytest.mark.parametrize(
    "sampler",
    ["uniform", lambda: xs.samplers.MidxSampler(N, D, 4, codewords=4, refresh_every=5)],
    ids=["static", "adaptive"],
)
@pytest.mark.parametrize("sparse_grad", [True, False])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_accumulated_gradients(log, sampler, sparse_grad, max_norm):
    """Also with a refresh within a cycle: the part already replayed is kept."""
    both(
        small(sampler, sparse_grad=sparse_grad),
        batches(21),
        warmup_steps=1,
        accumulate=3,
        max_norm=max_norm,
    )
    assert log.count("capture") % 3 == 0 and log.count("replay") > 0
    if callable(sampler):
        replayed = "".join(call[0] for call in log if call != "capture")
        assert "re" in replayed  # a refresh is due in step 10, the second of its cycle


def test_other_shapes(log):
    data = batches(5) + batches(2, 3) + batches(2) + batches(4, 3)
    step = both(small(), data, warmup_steps=2)
    assert step.num_graphs == 2
    assert (log == ["eager"] * 2 + ["capture"] + ["replay"] * 3 + ["eager"] * 2 + ["replay"] * 2 +
            ["capture"] + ["replay"] * 4)


def test_another_shape_within_a_cycle(log):
    """In the last steps of an epoch the cycle continues eagerly from the gradient so far."""
    data = batches(4) + batches(1) + batches(1, 3) + batches(2)
    both(small(), data, warmup_steps=1, accumulate=2)
    assert log == ["eager"] * 2 + ["capture"] * 2 + ["replay"] * 3 + ["eager"] + ["replay"] * 2


def schedules(kind):
    def between(loss, optimizers):
        if kind == "scheduler":
            # Reads the groups, so it may be created before or after the graphed step makes
            # tensors of the learning rates.
            schedulers = [
                torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers
            ]
            return lambda number: [scheduler.step() for scheduler in schedulers]

        def assign(number):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group[kind] = 0.05 / (number + 2)

        return assign

    return between


@pytest.mark.parametrize("kind", ["scheduler", "lr"])
@pytest.mark.parametrize("optimizer", [xs.optim.RowAdam, xs.optim.RowSGD, xs.optim.RowAdagrad])
def test_learning_rates_are_followed(log, kind, optimizer):
    both(small(optimizer=optimizer), between=schedules(kind), warmup_steps=2)
    assert log.count("capture") == 1 and log.count("replay") == STEPS - 2


def test_a_changed_option_is_captured_again(log):
    def between(loss, optimizers):
        return lambda number: [
            group.update(weight_decay=0.1) for optimizer in optimizers
            for group in optimizer.param_groups if number == 5
        ]

    both(small(), between=between, warmup_steps=2)
    assert (log == ["eager"] * 2 + ["capture"] + ["replay"] * 4 + ["eager"] * 2 + ["capture"] +
            ["replay"] * 4)


def test_loaded_state_and_new_classes_are_captured_again(log):
    """An optimizer that loads state, and a table with more classes."""
    def between(loss, optimizers):
        def change(number):
            if number == 4:
                optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            if number == 8:
                loss.resize_classes(N + 4)

        return change

    both(small(), between=between, warmup_steps=1)
    assert log.count("capture") == 3


def following(spec):
    """A sampler whose new classes wait for a refresh; a number on the host counts them."""
    if spec["name"] == "unigram":
        spec = {**spec, "stream": dict(half_life=None, refresh_every=8)}
    else:
        spec = {**spec, "options": {**spec["options"], "refresh_every": 8}}
    return lambda: make_sampler(spec, bias=False)


GROWING = ("unigram, streamed", "unigram, streamed, private", "midx", "lsh", "sphere", "rff")


@pytest.mark.parametrize("name", GROWING)
def test_a_refresh_after_new_classes_is_captured_again(log, name):
    """Until the refresh, new classes are drawn separately from the index; the old graph would
    continue to do so."""
    changes = []

    def between(loss, optimizers):
        def change(number):
            if number == 8:
                loss.resize_classes(N + 3)
            changes.append([number.item() for number in loss.sampler._host_numbers()])

        return change

    both(small(following(SAMPLERS[name])), batches(22), between=between, warmup_steps=1)
    assert changes[7] != changes[8] != changes[16]  # new classes were added, and then indexed
    assert log[-2:] == ["replay"] * 2 and log.count("capture") >= 3


def test_the_next_layer_of_a_matcher_is_captured_again(log):
    def make():
        torch.manual_seed(0)
        matcher, encoder = xs.HierarchicalMatcher(D, xs.LabelTree.random(N, 3),
                                                  beam=2), encoder_of()
        return matcher, [xs.optim.RowAdam([*matcher.parameters(), *encoder.parameters()],
                                          lr=0.05)], encoder

    def between(loss, optimizers):
        return lambda number: loss.next_layer() if number == 5 else None

    data = [(input, target.unsqueeze(1)) for input, target in batches(10)]
    both(make, data, between=between, warmup_steps=1)
    assert log == ["eager", "capture"] + ["replay"] * 5 + ["eager", "capture"] + ["replay"] * 3


def test_another_sampler_is_captured_again(log):
    """Its refreshes run, too."""
    def between(loss, optimizers):
        def change(number):
            if number == 5:
                loss.sampler = xs.samplers.MidxSampler(N, D, 4, codewords=4, refresh_every=2)

        return change

    both(small(), batches(10), between=between, warmup_steps=1)
    assert log.count("capture") == 2 and log[-5:].count("eager") >= 2


def test_user_defined_samplers(log):
    """One that follows the table may refresh in any step; a static one is captured."""
    class Static(xs.samplers.Sampler):
        def sample(self, queries, target=None, generator=None):
            ids = torch.randint(N, (self.num_samples,), generator=generator)
            count = torch.full(ids.shape, self.num_samples / N).log()
            of_target = (None if target is None else torch.full(target.shape, self.num_samples /
                                                                N).log())
            return [xs.samplers.CandidateSet(ids, count, of_target, False)]

        def log_count(self, queries, ids):
            return torch.full(ids.shape, self.num_samples / N).log()

    class Follows(Static):
        def __init__(self):
            super().__init__(N, 4, shared=True, distinct=False)
            self.follows_table = True

    both(small(Follows), batches(4), warmup_steps=1)
    assert log == ["eager"] * 4
    log.clear()
    both(small(lambda: Static(N, 4, shared=True, distinct=False)), batches(4), warmup_steps=1)
    assert log == ["eager", "capture"] + ["replay"] * 3


def test_a_failed_capture_changes_nothing(log, monkeypatch):
    loss, (optimizer,), encoder = small(
        lambda: xs.samplers.MidxSampler(N, D, 4, codewords=4, refresh_every=0))()
    step = xs.make_graphed_step(loss, optimizer, encoder, warmup_steps=1)
    ((input, target),) = batches(1)
    step(input, target)

    def refuse(self, function, pool, generators):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StandIn, "capture", refuse)
    with pytest.raises(
            RuntimeError,
            match=
            "make_graphed_step: expected a step that a CUDA graph can capture, got RuntimeError: "
            "operation not permitted",
    ):
        step(input, target)
    assert (int(loss.sampler.step) == 1 and all(param.grad is None for param in loss.parameters())
            and step.num_graphs == 0)


def test_wrong_arguments():
    loss, optimizers, encoder = small()()
    for error, message, call in (
        (
            TypeError,
            "optimizer as an optimizer or a sequence of them, got int",
            lambda: xs.make_graphed_step(loss, [3]),
        ),
        (
            TypeError,
            "optimizer as an optimizer or a sequence of them, got none",
            lambda: xs.make_graphed_step(loss, []),
        ),
        (
            ValueError,
            "accumulate of at least 1, got 0",
            lambda: xs.make_graphed_step(loss, optimizers, accumulate=0),
        ),
        (
            ValueError,
            "warmup_steps of at least 1, got 0",
            lambda: xs.make_graphed_step(loss, optimizers, warmup_steps=0),
        ),
        (
            ValueError,
            "inputs without gradient",
            lambda: xs.make_graphed_step(loss, optimizers)
            (torch.ones(2, D, requires_grad=True), torch.arange(2)),
        ),
        (
            ValueError,
            r"a loss that is a scalar, got one of shape \[2\]",
            lambda: xs.make_graphed_step(lambda *pair: loss(*pair).expand(2), optimizers)
            (torch.ones(2, D), torch.arange(2)),
        ),
    ):
        with pytest.raises(error, match=f"make_graphed_step: expected {message}"):
            call()


def test_calls_of_torch_cuda(monkeypatch):
    """On a device: warm-up on a side stream with synchronisation before and after, capture on it
    from the pool with the generator registered, and a replay."""
    calls = []

    class Named:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Context:
        def __init__(self, *arguments, **options):
            calls.extend(f"{name} {getattr(value, 'name', value)}"
                         for name, value in options.items())

        __enter__ = lambda self: None
        __exit__ = lambda self, *arguments: False

    class Graph:
        def register_generator_state(self, generator):
            calls.append("generator")

        def replay(self):
            calls.append("replay")

    for name, stand_in in dict(
            Stream=lambda: Named("side"),
            current_stream=lambda: Named("current"),
            stream=Context,
            device=Context,
            CUDAGraph=Graph,
            graph=Context,
            graph_pool_handle=lambda: "7",
    ).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "record_stream",
                        lambda self, stream: calls.append(f"loss on {stream.name}"))
    device = graphed_step._Cuda(torch.device("cpu"))
    device.run(lambda: calls.append("step") or torch.ones(()))
    assert calls == ["side waits for current", "step", "current waits for side", "loss on current"]
    calls.clear()
    replay = device.capture(lambda: calls.append("step"), device.pool(), [torch.Generator()])
    assert calls == ["generator", "pool 7", "stream side", "step"]
    replay()
    assert calls[-1] == "replay"
    assert graphed_step._Cuda.suits(
        torch.device("cuda")) and not graphed_step._Cuda.suits(torch.device("cpu"))
