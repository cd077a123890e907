"""The documentation: programs run, every public name has an entry, and operators are described
with their arguments."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys

import pytest
import torch
from documents import ROOT, programs_of

import xsoftmax as xs

DOCS = ROOT / "docs"
# Without generated pages, and without tutorials, which have their own tests.
PAGES = [
    path for path in sorted(DOCS.rglob("*.md"))
    if not {"tutorials", "generated", "benchmarks"} & set(path.relative_to(DOCS).parts)
    and path.name not in ("operators.md", "command_line.md", "papers.md")
]


# distributed.md is tested below, deployment.md in test_deployment.py.
@pytest.mark.parametrize("path", [
    path
    for path in PAGES if programs_of(path) and path.name not in ("distributed.md", "deployment.md")
], ids=lambda path: str(path.relative_to(DOCS)))
def test_programs_of_a_page_run(path, tmp_path):
    names = {"__name__": "page"}
    for number, program in enumerate(programs_of(path)):
        exec(
            compile(program.replace("/tmp/", f"{tmp_path}/"), f"<{path.name}, block {number}>",
                    "exec"), names)
    assert "value" not in names or torch.as_tensor(names["value"]).isfinite()


# Names that the blocks of distributed.md assume: a model, its batches, and a group of one process.
GIVEN = """
import scipy.sparse, torch, xsoftmax as xs
class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        if loss is ...:
            self.loss = xs.SampledSoftmaxLoss(8, 9000, sampler="log_uniform", num_samples=16)
        self.encoder = torch.nn.Linear(8, self.loss.in_features)
    def forward(self, input, target):
        return self.loss(self.encoder(input), target)
X, Y = (scipy.sparse.random(60, 30, 0.2, format="csr", dtype="float32") for _ in range(2))
steps, loader = 2, [(torch.randn(4, 8), torch.randint(9000, (4,)))] * 2
"""
BEFORE = {
    "init_process_group": "\nif torch.distributed.is_initialized(): "
    "torch.distributed.destroy_process_group()\n",
    "fully_shard": "\nimport torch.distributed.fsdp; model = Model(...); mesh = "
    "torch.distributed.device_mesh.init_device_mesh('cpu', (1,))\n",
}


@pytest.mark.slow
def test_programs_of_the_distributed_page_run(tmp_path):
    blocks = programs_of(DOCS / "howto/distributed.md")
    text = GIVEN
    for block in blocks:
        text += "".join(setup for word, setup in BEFORE.items() if word in block)
        text += re.sub(r"\b1(00)?_000_000\b", "9_000", block).replace("num_samples=8192",
                                                                      "num_samples=64")
    environment = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
                       MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    program = tmp_path / "page.py"
    program.write_text(text + "\ntorch.distributed.destroy_process_group()\nprint('end of the "
                       "page', len(loader), flush=True)\nimport os; os._exit(0)\n")
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=120)
    assert "end of the page" in done.stdout, done.stderr
    assert len(blocks) >= 4


def test_pages_have_at_least_25_programs():
    assert sum(len(programs_of(path)) for path in PAGES) >= 25


# ---- names


def entries():
    """Returns the full names that the Python reference lists."""
    found = []
    for path in (DOCS / "reference").glob("*.rst"):
        found += re.findall(r"^   (xsoftmax\.[\w.]+)$|^\.\. py:data:: (xsoftmax\.[\w.]+)$",
                            path.read_text(), re.MULTILINE)
    return [one or other for one, other in found]


def public_modules():
    yield xs
    for info in pkgutil.walk_packages(xs.__path__, "xsoftmax."):
        if not any(part.startswith("_")
                   for part in info.name.split(".")) and "cli" not in info.name:
            module = importlib.import_module(info.name)
            if hasattr(module, "__all__"):
                yield module


def resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture
def other_libraries():
    # xsoftmax.integrations imports them
    for name in ("lightning", "recbole", "torchmetrics", "transformers"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("other_libraries")
def test_every_public_name_has_an_entry():
    listed = entries()
    documented = [resolve(name) for name in listed]  # raises for a removed name
    missing = []
    for module in public_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if type(thing) is type(xs):  # a module: its names have entries
                continue
            if f"{module.__name__}.{name}" not in listed and not any(thing is other
                                                                     for other in documented):
                missing.append(f"{module.__name__}.{name}")
    assert not missing, f"list these in a page of docs/reference/*.rst: {', '.join(missing)}"
    assert len(listed) == len(set(listed))


@pytest.mark.usefixtures("other_libraries")
def test_every_public_name_has_a_docstring():
    assert not [
        name for name in entries()
        if callable(resolve(name)) and not (resolve(name).__doc__ or "").strip()
    ]


def written_arguments(text):
    """Returns the words of each argument of a call in a comment, without shapes, defaults and
    text in brackets."""
    text = re.sub(r"\[[^][]*\]|\([^()]*\)|=[^,]*", "", text)
    return [re.findall(r"\w+|\.\.\.", part) for part in text.split(",")]


def names_in_order(written, names):
    """Whether the words of each written argument include its name; "..." is any number of
    arguments."""
    if not written:
        return not names
    if written[0] == ["..."]:
        return any(
            names_in_order(written[1:], names[skipped:]) for skipped in range(len(names) + 1))
    return bool(names) and names[0] in written[0] and names_in_order(written[1:], names[1:])


def test_comments_in_headers_name_the_arguments_of_operators():
    """In ``operator(arguments) -> result`` of a header, which the reference may show, the arguments
    are those of the schema, in order."""
    schemas = {
        schema.name.removeprefix("xsoftmax::"): schema
        for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("xsoftmax::")
    }
    checked, wrong = set(), []
    for header in sorted((ROOT / "csrc").rglob("*.h")):
        comments = " ".join(re.findall(r"^ *//[/!]? ?(.*)$", header.read_text(), re.MULTILINE))
        # proposal/adaptive.h writes X_ for the name of a family
        comments = re.sub(r"\bX_(?=\w)", "midx_", comments)
        for name, call in re.findall(r"\b(\w+)\(((?:[^()]|\([^()]*\))+)\) ->", comments):
            if name in schemas:
                checked.add(name)
                if not names_in_order(written_arguments(call),
                                      [argument.name for argument in schemas[name].arguments]):
                    wrong.append(f"{header.relative_to(ROOT)}: {name}({call}), but the schema is "
                                 f"{schemas[name]}")
    assert not wrong, "\n".join(wrong)
    assert len(checked) > 90
