"""Tests of the emulator: correct kernels give the right result in any order of threads, and
deliberate faults are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from translate import translate

ORDERS = ["forward", "reverse", "1", "2", "3"]
BUILD = Path(os.environ["XSOFTMAX_EMULATE_LIBRARY"]).parent
SANITIZED = BUILD.with_name(BUILD.name + "-sanitize")

torch.ops.load_library(str(BUILD / "libexamples.so"))
emulator = torch.ops.cuda_emulator


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    emulator.set_order("forward")
    emulator.set_max_blocks(0)
    emulator.count_bytes(False)


def run(name, order="forward", x=None):
    emulator.set_order(order)
    return torch.ops.emulator_examples.run(name, tiles(1) if x is None else x)


def tiles(count, dtype=torch.float32):
    return torch.arange(128 * count, dtype=torch.float32).to(dtype)


def turned(x):
    return x.view(-1, 128).flip(1).flatten()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["turn", "turn_dynamic", "turn_by_intrinsics"])
def test_right_kernels_pass_in_any_order(name, order):
    x = tiles(5)
    assert torch.equal(run(name, order, x), turned(x))
    assert torch.equal(run("turn", order, x.half()), turned(x.half()))


def test_most_blocks_make_kernels_stride():
    emulator.set_max_blocks(2)
    x = tiles(5)
    assert torch.equal(run("turn", x=x), turned(x))
    # one block per tile: it does not stride
    assert not torch.equal(run("turn_dynamic", x=x), turned(x))


@pytest.mark.parametrize("name", ["no_barrier", "no_barrier_in_loop", "no_syncwarp"])
def test_missing_barriers_give_another_result(name):
    x = tiles(3 if name == "no_barrier_in_loop" else 1)
    assert all(not torch.equal(run(name, order, x), turned(x)) for order in ORDERS)


WAITING = "threads wait for others that never come"
FAULTS = {
    "barrier_of_some": f"{WAITING}, 40 in __syncthreads at .*examples.cu:|__syncthreads after "
    "[0-9]+ threads of the block have ended",
    "barrier_after_the_end": f"__syncthreads after 1 threads of the block have ended|{WAITING}, "
    "127 in __syncthreads",
    "two_barriers": "__syncthreads for some threads of the block, while others are in "
    "__syncthreads at .*examples.cu:",
    "lane_outside_the_mask": r"__shfl_sync: lane [0-9]+ reads lane 16, which is not in the mask, "
    r"at .*examples.cu:",
    "lane_that_does_not_come": f"{WAITING}, 124 in __shfl_xor_sync at .*, 4 in __syncthreads at",
    "masks_differ": "__ballot_sync: lane [0-9]+ of the mask is in __ballot_sync at .* with mask "
    "[0-9]+, not [0-9]+|" + WAITING,
    "half_a_warp": "__shfl_xor_sync: lane 16 of the mask is beyond the end of the block",
    "shared_write_too_far": "byte 512 from the beginning of shared variable tile was written to, "
    "which has 512 bytes",
    "assert": r"device-side assert: `threadIdx.x != 3` does not hold at .*examples.cu:[0-9]+; "
    r"block \(0, 0, 0\), thread \(3, 0, 0\)",
    "no_dynamic_memory": "dynamic shared memory, of which the launch has none",
    "much_shared_memory": "the block has 65536 bytes of shared memory, 0 of them dynamic, more "
    "than 49152",
    "both_kinds_of_much_memory": "the block has 49156 bytes of shared memory, 16388 of them "
    "dynamic, more than 49152",
    "many_threads": r"invalid configuration argument: nothing_kernel at .*examples.cu:[0-9]+, grid "
    r"\(1, 1, 1\), block \(64, 32, 1\)",
    "no_blocks": r"invalid configuration argument: .*grid \(0, 1, 1\)",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_what_a_device_leaves_undefined_is_an_error(name, order):
    with pytest.raises(RuntimeError, match=FAULTS[name]):
        run(name, order)
    x = tiles(2)
    assert torch.equal(run("turn", order, x), turned(x)), "a failed launch spoiled the next"


# For each kernel, the bytes that it reads and writes for 8 tiles of 512 bytes: as requested, per
# block, per launch.
TRAFFIC = {
    "turn": ("turn_kernel<float>", (4096, 4096), (4096, 4096), (4096, 4096)),
    "turn_dynamic": ("turn_dynamic_kernel", (4096, 4096), (4096, 4096), (4096, 4096)),
    "copy_packs": ("copy_packs_kernel", (4096, 4096), (4096, 4096), (4096, 4096)),
    "one_of_eight": ("one_of_eight_kernel", (512, 512), (4096, 4096), (4096, 4096)),
    "same_tile": ("same_tile_kernel", (8192, 4096), (4096, 4096), (512, 4096)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TRAFFIC)
def test_bytes_of_global_memory_are_counted(name, order):
    kernel, *expected = TRAFFIC[name]
    base = torch.empty(8 * 128 + 8)
    x = base[-base.data_ptr() % 32 // 4:][:8 * 128].copy_(tiles(8))  # sectors are 32 bytes
    run(name, order, x)  # not counted
    emulator.forget()
    emulator.count_bytes(True)
    for times in (1, 2):
        run(name, order, x)
        launches, blocks, threads, *found = emulator.launched()[kernel]
        assert (launches, blocks, threads) == (times, times * 8, times * 1024)
        # The output of a run is aligned to 64 bytes.
        assert found == [times * count for pair in expected for count in pair]


def test_more_dynamic_shared_memory_is_asked_for_first():
    with pytest.raises(RuntimeError, match="invalid configuration argument: .*, 65536 bytes of "
                       "shared memory"):
        run("much_dynamic_memory_refused")
    x = tiles(2)
    assert torch.equal(run("much_dynamic_memory", x=x),
                       torch.cat([x[:128].flip(0), torch.zeros(128)]))
    # Permission for one kernel does not apply to others.
    with pytest.raises(RuntimeError, match=FAULTS["both_kinds_of_much_memory"]):
        run("both_kinds_of_much_memory")


def test_dynamic_shared_memory_counts_with_what_the_kernel_declares():
    for name in ("both_kinds_of_memory", "both_kinds_of_more_memory"):
        assert torch.equal(run(name), tiles(1).flip(0) + 1)


def test_unknown_orders_are_refused():
    with pytest.raises(ValueError,
                       match='expected forward, reverse or a number below 10\\^8, got "backward"'):
        emulator.set_order("backward")


@pytest.mark.skipif(not (SANITIZED / "libexamples.so").exists(), reason="make cuda-emulate builds "
                    "it")
@pytest.mark.parametrize("name, report", [("turn", ""), ("turn_by_intrinsics", ""),
                                          ("shared_write_too_far", "use-after-poison"),
                                          ("shared_read_too_far", "use-after-poison"),
                                          ("global_write_too_far", "heap-buffer-overflow")])
def test_sanitizers_find_an_index_too_far(name, report):
    program = f"""
import torch
torch.ops.load_library({str(SANITIZED / 'libexamples.so')!r})
torch.ops.emulator_examples.run({name!r}, torch.zeros(256))
"""
    done = subprocess.run([Path(__file__).with_name("sanitized"), sys.executable, "-c", program],
                          capture_output=True, text=True)
    assert (done.returncode == 0) == (report == ""), done.stderr
    wanted = [f"AddressSanitizer: {report}", "examples.cu"] if report else []
    assert all(words in done.stderr for words in wanted), done.stderr


# ---- take_over.cpp


def test_operators_are_found_that_do_what_no_device_should():
    program = f"""
import torch, xsoftmax
library = torch.library.Library("xsoftmax", "FRAGMENT")
def goes_on_too(x):
    found = x.scatter_reduce(0, x.long(), x, "amax").put_(x.long(), x)
    return found.repeat_interleave(x.long(), output_size=3)
functions = dict(
    reads=lambda x: x * x.item(),
    waits_for_a_value=lambda x: x * x.sum().item(),
    waits_for_a_size=lambda x: x[x > 0],
    goes_on=lambda x: x * x.sum() + torch.ones_like(x, dtype=int).cumsum(0),
    goes_on_too=goes_on_too,
    adds=lambda x: x.cumsum(0),
    reduces=lambda x: x.scatter_reduce(0, x.long(), x, "sum"),
    puts=lambda x: x.clone().put_(x.long(), x, accumulate=True),
    repeats=lambda x: x.repeat_interleave(x.long()),
    asks_another=lambda x: torch.ops.xsoftmax.goes_to_the_cpu(x),
    goes_to_the_cpu=lambda x: torch.ops.xsoftmax.goes_to_the_cpu(x.cpu()))
for name, function in functions.items():
    library.define(name + "(Tensor x) -> Tensor")
    library.impl(name, function, "CompositeExplicitAutograd")
library.impl("goes_to_the_cpu", lambda x: x * x.sum().item(), "CPU")
torch.ops.load_library({str(BUILD / "libxsoftmax_emulated.so")!r})
torch.ops.cuda_emulator.take_over()
for name in ("waits_for_a_value", "waits_for_a_size", "goes_on", "goes_on_too", "adds", "reduces",
             "puts", "repeats", "asks_another", "adds"):
    getattr(torch.ops.xsoftmax, name)(torch.ones(3))
torch.ops.cuda_emulator.lies_on_host(known := torch.ones(()))
torch.ops.xsoftmax.reads(known)
for finding, times in torch.ops.cuda_emulator.findings().items():
    print(times, finding)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "2 adds: adds in any order (aten::cumsum)", "1 goes_to_the_cpu: runs the CPU's kernel",
        "1 puts: adds in any order (aten::put_)",
        "1 reduces: adds in any order (aten::scatter_reduce)",
        "2 repeats: waits (aten::_local_scalar_dense)", "1 waits_for_a_size: waits (aten::nonzero)",
        "1 waits_for_a_value: waits (aten::_local_scalar_dense)"
    ], done.stderr


# ---- translate.py


def test_translation_keeps_lines_and_comments():
    source = ('// __shared__ int x; f<<<1, 2>>>();\nint a;\nf<T, g<int>><<<dim3(1, (2 >> 1)),\n'
              '  3>>>(a,\n b);\n/* __shared__ int x; */ "<<<";\n')
    result = translate(source)
    assert result.count("\n") == source.count("\n")
    assert result.startswith("// __shared__ int x; f<<<1, 2>>>();\nint a;\n") and result.endswith(
        '(a,\n b);\n/* __shared__ int x; */ "<<<";\n')
    assert '"f<T, g<int>>", dim3(1, (2 >> 1)),\n  3).of(' in result
    assert "{ f<T, g<int>>(launched...); }" in result


@pytest.mark.parametrize("declaration, names",
                         [("__shared__ float tile[32][33];", ["tile"]),
                          ("__shared__ alignas(Pair<int, 2>) char a[2], b;", ["a", "b"]),
                          ("alignas(16) __shared__ Pack<T, N> "
                           "packs[sizeof(T)];", ["packs"])])
def test_translation_of_shared_variables(declaration, names):
    result = translate(declaration)
    assert "__shared__" not in result and all(f"auto& {name} = emulated0.{name};" in result
                                              for name in names)


def test_translation_of_dynamic_shared_memory():
    assert translate("extern __shared__ __align__(16) float tile[];"
                     ) == "auto* const tile = static_cast<float*>(::emulator::dynamic_shared());"
