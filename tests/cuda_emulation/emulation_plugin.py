"""A pytest plugin (-p emulation_plugin) that makes CPU tensors take the path of CUDA tensors, whose
kernels run on the emulator.

Environment variables:
    XSOFTMAX_EMULATE_LIBRARY   path of libxsoftmax_emulated.so
    XSOFTMAX_EMULATE_ORDER     order in which threads and blocks run: forward (default), reverse,
                               or a number, the seed of random orders
    XSOFTMAX_EMULATE_BLOCKS    maximal number of blocks in x, so that grid-stride loops do stride;
                               0 (default): as launched

Tests whose results differ by nature are skipped; differs.txt lists them with the reasons. Operators
that do something they must not do on a device (emulator/take_over.cpp) fail the run; allowed.txt
lists the exceptions.
"""

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import xsoftmax  # noqa: F401 (the library whose operators are taken over)

ORDER = os.environ.get("XSOFTMAX_EMULATE_ORDER", "forward")
BLOCKS = int(os.environ.get("XSOFTMAX_EMULATE_BLOCKS", "0"))
DIFFERS = Path(__file__).with_name("differs.txt")
ALLOWED = Path(__file__).with_name("allowed.txt")

torch.ops.load_library(os.environ["XSOFTMAX_EMULATE_LIBRARY"])
emulator = torch.ops.cuda_emulator
emulator.set_order(ORDER)
emulator.set_max_blocks(BLOCKS)
no_way = emulator.take_over()
launched: dict[str, list[int]] = {}  # kernel -> launches, blocks, threads
findings: set[str] = set()  # forbidden actions of operators on a device


def patterns(file):
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def matches(item, pattern):
    """Matches like a shell pattern, except that brackets are literal."""
    name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
    return fnmatchcase(name.replace("[", "("), pattern.replace("[", "("))


def pytest_report_header():
    return (f"CPU tensors run CUDA kernels, threads {ORDER}; operators without such a kernel: "
            f"{', '.join(no_way) or 'none'}")


@pytest.hookimpl(tryfirst=True)  # before -k deselects tests
def pytest_collection_modifyitems(config, items):
    left_out, files = set(), {item.path.name for item in items}
    for pattern in patterns(DIFFERS):
        found = {item for item in items if matches(item, pattern)}
        if not found and pattern.partition("::")[0] in files and not any(
                "::" in argument for argument in config.args):
            raise pytest.UsageError(f"{DIFFERS.name}: {pattern} matches no test")
        left_out |= found
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))


def add(kernels):
    for kernel, numbers in kernels.items():
        launched[kernel] = [a + b for a, b in zip(launched.get(kernel, [0, 0, 0]), numbers)]


def faults():
    return sorted(finding for finding in findings
                  if not any(fnmatchcase(finding, pattern) for pattern in patterns(ALLOWED)))


@pytest.hookimpl(trylast=True)  # after all processes have reported
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launched"] = dict(emulator.launched())
        session.config.workeroutput["findings"] = list(emulator.findings())
        return
    add(emulator.launched())
    findings.update(emulator.findings())
    if faults():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    output = getattr(node, "workeroutput", {})
    add(output.get("launched", {}))
    findings.update(output.get("findings", []))


def pytest_terminal_summary(terminalreporter):
    for kernel, (launches, blocks, threads) in sorted(launched.items()):
        terminalreporter.write_line(f"emulated {kernel}: {launches} launches, {blocks} blocks, "
                                    f"{threads} threads")
    for fault in faults():
        terminalreporter.write_line(f"FAILED {fault}", red=True)
