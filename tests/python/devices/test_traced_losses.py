"""Steps and predictions under torch.compile, torch.export and AOTInductor equal eager ones.

For every loss with every sampler. XSOFTMAX_TEST_DEVICE is the device, by default a GPU if there is
one. On the emulator it is "cpu", where CPU tensors are dispatched like CUDA tensors
(tests/cuda_emulation). test_device_consistency.py traces the same calls with fake CUDA tensors.
"""

import contextlib
import copy
import os
import shutil

import pytest
import torch

import xsoftmax as xs
from traced_losses import KINDS, OTHERS, TRACED, Predictions
from xsoftmax.samplers.static import SCALARS

DEVICE = os.environ.get("XSOFTMAX_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "cpu")
EMULATED = hasattr(torch.ops.cuda_emulator, "findings")
STEPS = 5  # a CUDA graph is recorded in the second one
ON_HOST = ("steps", "step", "recent", "layer", *SCALARS)  # buffers that modules keep on the CPU
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU, and a CUDA build")
slow_on_a_cpu = [] if DEVICE != "cpu" else [pytest.mark.minutes]  # it compiles C++
with_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler: apt-get install g++")
each = pytest.mark.parametrize("name", TRACED)

MODES = {
    "aot_eager": dict(backend="aot_eager"),
    "default": dict(),
    "reduce-overhead": dict(mode="reduce-overhead"),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def as_on_a_device():
    """On the emulator, forbids the host to read values of tensors."""
    if not EMULATED:
        yield
        return
    torch.ops.cuda_emulator.let_host_read(False)
    try:
        yield
    finally:
        torch.ops.cuda_emulator.let_host_read(True)


def made(call):
    loss = call.make().to(DEVICE)
    for name, buffer in loss.named_buffers() if EMULATED else ():
        if name.rpartition(".")[2] in ON_HOST:
            torch.ops.cuda_emulator.lies_on_host(buffer)
    return loss


def inputs_of(call, seed=0):
    torch.manual_seed(seed)
    return call.inputs(DEVICE)


def trained(call, loss, run):
    """Returns losses and gradients of the input, and the parameters at the end."""
    parameters = [*loss.parameters()]
    optimizer, results = xs.optim.RowSGD(parameters, lr=0.1) if parameters else None, []
    for step in range(STEPS):
        inputs = inputs_of(call, step)
        torch.manual_seed(step)
        value = run(*inputs)
        value.sum().backward()
        results += [value.detach().clone(), inputs[0].grad.clone()]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if optimizer is not None:
        optimizer.flush()
    return results + [parameter.detach().clone() for parameter in parameters]


def predicted(call, loss, run, seed=0):
    inputs = inputs_of(call)
    torch.manual_seed(seed)
    with torch.no_grad():
        return [result.clone() for result in run(*inputs)]


def assert_close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "aot_eager",
        pytest.param("default", marks=slow_on_a_cpu),
        pytest.param("reduce-overhead", marks=on_a_gpu),
    ],
)
@each
def test_compiled_steps_and_predictions_equal_eager_ones(name, mode):
    call = TRACED[name]
    eager = made(call)
    loss = copy.deepcopy(eager)
    with as_on_a_device():
        want = trained(call, eager, eager)
        assert_close(
            trained(call, loss, torch.compile(loss, fullgraph=call.fullgraph, **MODES[mode])), want)
        if call.predict is not None:
            eager.eval(), loss.eval()
            predict = torch.compile(lambda *inputs: call.predict(loss, *inputs),
                                    fullgraph=call.fullgraph, **MODES[mode])
            for seed in range(3):
                assert_close(
                    predicted(call, loss, predict, seed),
                    predicted(call, eager, lambda *inputs: call.predict(eager, *inputs), seed),
                )


def same_twice(found, module, inputs):
    """Compares two calls with those of the eager module, so that buffers are compared too."""
    for seed in range(2):
        torch.manual_seed(seed)
        a = found(*inputs)
        torch.manual_seed(seed)
        b = module(*inputs)
        assert_close(*([result] if isinstance(result, torch.Tensor) else list(result)
                       for result in (a, b)))


def serving(call):
    """Returns a module that predicts with a loss in eval()."""
    return (made(call) if call.predict is None else Predictions(call, made(call))).eval()


@each
def test_exported_modules_equal_eager_ones(name):
    call = TRACED[name]
    inputs = inputs_of(call)
    with as_on_a_device(), torch.no_grad():
        for module in [serving(call)] + ([made(call)] if call.exports else []):
            same_twice(torch.export.export(copy.deepcopy(module), inputs).module(), module, inputs)


# A model in eval() does not depend on the sampler. Two losses in training draw samples.
PACKAGED = {
    f"{name}, in training" * training or name: (call, training)
    for training, names in (
        (False, (*OTHERS, "sampled-uniform-sampled_softmax", *KINDS)),
        (True, ("sampled-uniform-sampled_softmax", "sampled-midx-sampled_softmax")),
    )
    for name in names
    for call in [TRACED[name]]
}


@pytest.mark.minutes
@with_a_compiler
@pytest.mark.parametrize("name", PACKAGED)
def test_aot_inductor_packages_equal_eager_modules(name, tmp_path):
    call, training = PACKAGED[name]
    inputs, module = inputs_of(call), made(call) if training else serving(call)
    with torch.no_grad():
        program = torch.export.export(copy.deepcopy(module), inputs)
        path = torch._inductor.aoti_compile_and_package(program,
                                                        package_path=str(tmp_path / "model.pt2"))
        same_twice(torch._inductor.aoti_load_package(path), module, inputs)
