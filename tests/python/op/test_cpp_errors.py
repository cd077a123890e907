"""A wrong call in a C++ program gives one short compiler error at that call."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[3]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
RIGHT = {
    "holder": "SampledSoftmaxLoss loss(64, 10000, uniform);",
    "pointer": "SampledSoftmaxLoss loss(64, 10000, uniform.ptr());",
    "name and number": 'SampledSoftmaxLoss loss(64, 10000, "uniform", 64);',
    "braced options": "SampledSoftmaxLoss loss(64, 10000, uniform, {.estimator = \"nce\"}, {.bias "
    "= true});",
}
WRONG = {
    "LossOptions as SamplingOptions": "SampledSoftmaxLoss loss(64, 10000, uniform, "
    "LossOptions{.bias = true});",
    "LossOptions after a name": 'SampledSoftmaxLoss loss(64, 10000, "uniform", '
    "LossOptions{.bias = true});",
    "braced LossOptions": "SampledSoftmaxLoss loss(64, 10000, uniform, {.bias = true});",
    "options in the wrong order": "SampledSoftmaxLoss loss(64, 10000, uniform, LossOptions{}, "
    "SamplingOptions{});",
    "options of another kind": "SampledSoftmaxLoss loss(64, 10000, uniform, CaneOptions{});",
    "an option that is misspelt": "SampledSoftmaxLoss loss(64, 10000, uniform, {.estimate = "
    "\"nce\"});",
    "a sampler and a number": "SampledSoftmaxLoss loss(64, 10000, uniform, 64);",
    "a number for a sampler": "SampledSoftmaxLoss loss(64, 10000, 64);",
    "no sampler": "SampledSoftmaxLoss loss(64, 10000);",
    "the sampler first": "SampledSoftmaxLoss loss(uniform, 64, 10000);",
    "a loss for a sampler": "SampledSoftmaxLoss loss(64, 10000, LinearCrossEntropyLoss(64, "
    "10000));",
    "a loss without arguments": "LinearCrossEntropyLoss loss;",
    "SamplingOptions of an exact loss": "LinearCrossEntropyLoss loss(64, 10000, "
    "SamplingOptions{});",
    "a sampler of CANE as an argument": "CaneLoss loss(64, 10000, uniform);",
    "a tree loss without a tree": "BeamTreeLoss loss(64, 10000, BeamTreeOptions{});",
    "towers with a number": "TwoTowerLoss loss(64);",
    "a sampler without draws": "UniformSampler sampler(10000);",
    "a sampler with a flag for options": "LogUniformSampler sampler(10000, 64, true);",
    "options of another sampler": "MidxSampler sampler(10000, 64, LshOptions{});",
    "a union with a number": "UnionSampler sampler(uniform, 64);",
    "a complement of a table": "ComplementSampler sampler(torch::ones({3}), 2);",
    "a tree of a number": "xsoftmax::LabelTree tree(10);",
    "a table of ids without a capacity": "IdTable ids(IdTableOptions{});",
    "topk as a number": "model.predict(rows, rows, rows, 5);",
}
MOST_LINES = 10  # per message: the error and what is expected, each with its line of source


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """Compiles a program with all calls; returns {number of the call: messages}."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    path = tmp_path_factory.mktemp("program") / "program.cpp"
    head = [
        "#include <xsoftmax/xsoftmax.h>", "using namespace xsoftmax;", "using namespace "
        "xsoftmax::nn;", "using namespace xsoftmax::samplers;",
        "void run(UniformSampler uniform, const XRLinear& model, const at::Tensor& rows) {"
    ]
    path.write_text("\n".join(head +
                              ["{ " + call + " }"
                               for call in (*RIGHT.values(), *WRONG.values())] + ["}"]))
    done = subprocess.run([
        COMPILER, "-std=c++20", "-fsyntax-only",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{ROOT / 'include'}",
        *(f"-isystem{path}" for path in include_paths()),
        str(path)
    ], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    found, current = {}, None
    for line in done.stderr.splitlines():
        if begins := re.match(r"(\S+?):(\d+):\d+: error: ", line):
            assert begins[1] == str(path), f"an error outside the program: {line}"
            current = found.setdefault(int(begins[2]) - len(head) - 1, [])
            current.append([])
        if current is not None:
            current[-1].append(line)
    return found


@pytest.mark.minutes
@pytest.mark.parametrize("number, call", list(enumerate([*RIGHT, *WRONG])), ids=[*RIGHT, *WRONG])
def test_a_wrong_constructor_call_gives_one_short_error(messages, number, call):
    """Otherwise a user would look for the mistake in the headers of torch."""
    errors = messages.get(number, [])
    if call in RIGHT:
        assert errors == [], "\n".join(map("\n".join, errors))
        return
    assert len(errors) == 1, "\n".join(map("\n".join, errors))
    text = "\n".join(errors[0])
    assert len(errors[0]) <= MOST_LINES, text
    assert WRONG[call] in text, "the message shows the line of the program"
    assert "expected: " in text or "predict" in WRONG[call], "the message names the parameters"
