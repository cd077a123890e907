"""Operators and training steps on a GPU.

Operators equal those on the CPU and their composites, no step synchronizes with the device, steps
can be captured in a CUDA graph, and results have the same bits twice.

XSOFTMAX_TEST_DEVICE: another device than "cuda". On the emulator it is "cpu", where CPU tensors are
    dispatched like CUDA tensors (tests/cuda_emulation).
"""

import contextlib
import dataclasses
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import op_samples
import xsoftmax as xs
from combinations import COMBINATIONS
from xsoftmax.samplers.static import SCALARS

DEVICE = torch.device(os.environ.get("XSOFTMAX_TEST_DEVICE", "cuda"))
CUDA = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(CUDA and not torch.cuda.is_available(),
                                reason="needs a GPU, and a CUDA build")
EMULATED = hasattr(torch.ops.cuda_emulator, "findings")
on_a_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
each = pytest.mark.parametrize("made", COMBINATIONS.values(), ids=COMBINATIONS.keys())

# Operators that run only on the host, and those that read or set state of the process.
OF_THE_HOST = {
    "advise_huge_pages", "canonical_rows", "end_long_work", "forget_pending", "get_impl",
    "id_table_check", "id_table_find", "id_table_ids", "id_table_insert_", "id_table_remove_",
    "label_layers", "label_tree_cuts", "label_tree_of_clusters", "layer_negatives",
    "linear_layers_train", "mapped_table_changes", "mapped_table_fill_", "mapped_table_flush_",
    "mapped_table_path", "mapped_table_prefetch", "node_rows", "parent_rows", "read_examples",
    "register_pending", "set_impl", "sparse_row_sums", "watch_long_work", "xr_linear_check_target",
    "xr_linear_load"
}
# Their arguments include internal results of a forward kernel.
AFTER_FORWARD = {"hierarchical_softmax_backward", "linear_cross_entropy_backward"}
# K-means and operators that use it: sums in another order may move a row to another centre.
BY_KMEANS = {
    "label_tree_from_vectors", "label_tree_kmeans_order", "label_tree_clusters", "kmeans",
    "adaptive_refresh_", "adaptive_step_", "midx_refresh_", "midx_step_", "midx_update_"
}
# They draw random planes with the generator of the device, which differs from that of the CPU.
BY_ANOTHER_GENERATOR = {"adaptive_index", "lsh_index"}
# Their composites read all cells (tested in test_search_devices.py).
BY_INDEX = {"perturbed_argmax", "search_budget", "search_topk"}
# Padded on a device (tested in test_hierarchical_matcher.py).
PADDED = {"shortlist"}


def tensors_in(value):
    """Returns all tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value
            for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    return type(value)(moved(part, device)
                       for part in value) if isinstance(value, (list, tuple)) else value


NAMES = [
    name for name, arguments in op_samples.samples().items()
    if tensors_in(arguments) and name not in OF_THE_HOST | AFTER_FORWARD | BY_KMEANS | PADDED
]


def called(name, device, dtype=None, impl="kernel"):
    """Returns the results of an operator and its arguments after the call, on the CPU."""
    arguments = moved(op_samples.samples()[name], device)
    if dtype is not None:  # backward: gradients of scores stay float32
        arguments = tuple(
            cast(argument, dtype) if not name.endswith("backward") or i in (1, 2) else argument
            for i, argument in enumerate(arguments))
    with xs.use_impl(impl):
        results = getattr(torch.ops.xsoftmax, name)(*arguments)
    return [tensor.cpu() for tensor in tensors_in([results, arguments])]


def cast(value, dtype):
    return value.to(dtype) if isinstance(value,
                                         torch.Tensor) and value.dtype == torch.float32 else value


def assert_close(found, expected, tolerance):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        a, b = (tensor.coalesce().to_dense() if tensor.is_sparse else tensor for tensor in (a, b))
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance,
                                   equal_nan=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_ANOTHER_GENERATOR])
def test_operators_equal_those_on_the_cpu(name):
    """Including random draws, since the seed is an argument."""
    assert_close(called(name, DEVICE), called(name, "cpu"), 1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_INDEX])
def test_kernels_equal_composites(name):
    assert_close(called(name, DEVICE), called(name, DEVICE, impl="reference"), 1e-4)


def layouts(results):
    return [(tensor.dtype, tuple(tensor.shape),
             tensor.stride() if tensor.layout == torch.strided else tensor.layout)
            for tensor in tensors_in(results)]


@pytest.mark.parametrize("name", [
    name for name in NAMES
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"xsoftmax::{name}", "Meta")
])
def test_results_have_the_traced_dtypes_shapes_and_strides(name):
    """The code that torch.compile generates relies on them."""
    operator, arguments, mode = getattr(torch.ops.xsoftmax,
                                        name), moved(op_samples.samples()[name],
                                                     DEVICE), FakeTensorMode()
    fake = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
    with mode:
        traced = operator(*fake)
    assert layouts(traced) == layouts(operator(*arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", [
    "candidate_scores", "candidate_scores_backward", "ragged_scores", "ragged_scores_backward",
    "linear_topk"
])
def test_kernels_equal_composites_in_low_precision(name, dtype):
    assert_close(called(name, DEVICE, dtype), called(name, DEVICE, dtype, "reference"),
                 5e-2 if dtype == torch.bfloat16 else 1e-2)


# ---- steps


def waits():
    """Returns {finding: count} of synchronizations that the emulator has seen.

    Adam and Adagrad of torch read the step counter on the CPU, but not on CUDA, so theirs are left
    out.
    """
    found = torch.ops.cuda_emulator.findings()
    return {
        finding: times
        for finding, times in found.items()
        if "waits" in finding and not finding.startswith(("row_adam_step_", "row_adagrad_step_"))
    }


@contextlib.contextmanager
def no_waiting():
    """Makes synchronizing with the device an error."""
    before = waits() if EMULATED else {}
    if CUDA:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if CUDA:
            torch.cuda.set_sync_debug_mode("default")
    if EMULATED:
        assert waits() == before


ON_HOST = ("steps", "step", "recent", *SCALARS)  # buffers that modules keep on the CPU


class Training:
    def __init__(self, made, dtype=torch.float32):
        self.made, self.loss = made, made.make(dtype).to(DEVICE)
        self.optimizer = made.make_optimizer(self.loss)
        self.input, self.target = (tensor.to(DEVICE) for tensor in made.batch(dtype))
        self.input.requires_grad_()
        if EMULATED:
            for name, buffer in self.loss.named_buffers():
                if name.rpartition(".")[2] in ON_HOST:
                    torch.ops.cuda_emulator.lies_on_host(buffer)

    def step(self):
        self.optimizer.zero_grad()
        self.input.grad = None
        value = self.made.call(self.loss, self.input, self.target, None)
        value.sum().backward()
        self.optimizer.step()
        return value.detach()

    def tensors(self):
        return {
            **dict(self.loss.named_parameters()),
            **dict(self.loss.named_buffers()), "input.grad": self.input.grad
        }


def trained(made, steps):
    training = Training(made)
    for step in range(steps):
        torch.manual_seed(step)
        training.step()
    return training


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor is None and b[name] is None or torch.equal(tensor, b[name]), name


@each
def test_no_step_waits_and_all_values_are_finite(made):
    """The first three steps may wait: they create state and refresh samplers (refresh_every is 2 or
    4)."""
    training = Training(made)
    torch.manual_seed(1)
    values = [training.step() for step in range(3)]
    with no_waiting():
        values.append(training.step())
    assert all(value.isfinite().all() for value in values)
    assert all(tensor.isfinite().all() for tensor in training.loss.parameters())


@pytest.mark.skipif(not CUDA and not EMULATED, reason="needs a GPU, or the emulator")
def test_a_step_that_refreshes_waits():
    """The test above can detect a synchronization."""
    training = Training(COMBINATIONS["sampled-midx-sampled_softmax"])
    with pytest.raises((RuntimeError, AssertionError)), no_waiting():
        training.step()


@each
def test_the_same_bits_twice(made):
    assert_same_bits(trained(made, 3).tensors(), trained(made, 3).tensors())


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_the_16_bit_loss_is_close_to_that_of_float32(dtype):
    losses = []
    for of in (torch.float32, dtype):
        torch.manual_seed(0)
        loss = xs.SampledSoftmaxLoss(64, 1000, sampler="uniform", num_samples=32,
                                     device=DEVICE).to(of)
        input, target = torch.randn(16, 64).to(DEVICE, of), torch.randint(1000, (16,)).to(DEVICE)
        torch.manual_seed(1)
        losses.append(loss(input, target).float())
    torch.testing.assert_close(*losses, rtol=3e-2, atol=3e-2)


# Not captured: samplers that follow the table, and balanced trees, whose refreshes the host counts.
CAPTURED = {
    name: made
    for name, made in COMBINATIONS.items()
    if not made.follows_table and made.options.get("balance_every", 0) == 0
}
# Between refreshes they can be captured: with refresh_every=0 only the first step refreshes.
for refreshed_once in ("sampled-midx-sampled_softmax", "sampled-lsh-sampled_softmax",
                       "sampled-sphere-sampled_softmax", "sampled-rff-sampled_softmax"):
    spec = COMBINATIONS[refreshed_once].sampler
    CAPTURED[f"{refreshed_once}, refreshed once"] = dataclasses.replace(
        COMBINATIONS[refreshed_once],
        sampler={**spec, "options": {**spec["options"], "refresh_every": 0}})


@on_a_gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_equals_an_eager_one(name):
    made, steps = CAPTURED[name], 4
    eager = trained(made, steps)
    training, side = Training(made), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(steps - 1):
            torch.manual_seed(step)
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            training.step()
    # the generator may still think that it is captured, which would break other tests
    except Exception:
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(
            torch.Generator("cuda").graphsafe_get_state())
        raise
    torch.manual_seed(steps - 1)
    graph.replay()
    assert_same_bits(training.tensors(), eager.tensors())


@on_a_gpu
@each
def test_graphed_steps_equal_eager_ones(made):
    """Also with refreshes between replays, a changed learning rate, and a second batch shape."""
    if made.options["reduction"] == "none":
        pytest.skip("a step has a scalar loss")
    results = []
    for graphed in (False, True):
        loss = made.make(torch.float32).to(DEVICE)
        optimizer = made.make_optimizer(loss)
        batches = [[tensor.to(DEVICE) for tensor in made.batch(torch.float32, seed)]
                   for seed in range(12)]
        if not graphed:  # computed on the device as in a graph, with the same rounding
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device=DEVICE)
        call = xs.make_graphed_step(lambda pair: made.call(loss, *pair, None), optimizer,
                                    _Pair(loss), warmup_steps=2) if graphed else None
        values = []
        for number, (input, target) in enumerate(batches):
            if number == 7:
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 if graphed else group["lr"].fill_(0.02)
            if number == 9:
                input, target = input[:4], target[:4]
            torch.manual_seed(number)
            if graphed:
                values.append(call((input, target)))
            else:
                value = made.call(loss, input, target, None)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(value.detach())
        optimizer.flush()
        results.append({
            **dict(loss.named_parameters()), **dict(loss.named_buffers()),
            **{str(k): value
               for k, value in enumerate(values)}
        })
    assert_same_bits(*results)


class _Pair(torch.nn.Module):
    """Holds the loss, so that make_graphed_step finds its samplers; returns its inputs."""
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, input, target):
        return input, target


@on_a_gpu
def test_each_replay_draws_new_samples():
    torch.manual_seed(0)
    loss = xs.SampledSoftmaxLoss(8, 1000, sampler="uniform", num_samples=16, device=DEVICE)
    step = xs.make_graphed_step(loss, xs.optim.RowSGD(loss.parameters(), lr=0.0), warmup_steps=1)
    input, target = torch.randn(4, 8, device=DEVICE), torch.arange(4, device=DEVICE)
    values = [float(step(input, target)) for _ in range(6)]
    assert step.num_graphs == 1 and len(set(values)) == 6
