"""docs/reference/operators.md: every operator of torch.ops.xsoftmax with its schema and the
contract in its header, by folder and stem."""

import re
from pathlib import Path

import torch

import pages
import xsoftmax  # noqa: F401

DOCS = Path(__file__).parent.parent
CSRC = DOCS.parent / "csrc"
FOLDERS = {
    "loss": "Losses, and the exact softmax",
    "estimator": "Estimators and candidate sets",
    "proposal": "Samplers",
    "table": "Class tables: scores, gradients, files, raw ids",
    "tree": "Trees of classes",
    "optim": "Row optimizers",
    "retrieval": "Search for the best classes",
    "matcher": "Extreme multi-label models",
    "nn": "Neural matcher",
    "cluster": "Clustering",
    "cpu": "Settings of the CPU kernels",
    "op": "Long-running work",
}
# Operators whose names are built from a prefix: the stem that documents the family.
FAMILIES = {
    "kernel_": "proposal/study/kernel_sample", "lsh_": "proposal/study/lsh_sample",
    "midx_": "proposal/midx/midx_sample", "row_adagrad_": "optim/row_adagrad",
    "row_adam_": "optim/row_adam", "row_sgd_": "optim/row_sgd",
    "candidate_": "estimator/candidate_loss"
}


def schemas() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("xsoftmax::"):
            found.setdefault(schema.name.split("::")[1], []).append(str(schema))
    return found


def stems(names) -> dict[str, list[str]]:
    """Groups operator names by the path (without suffix) of the source that registers them."""
    sources = {
        str(path.relative_to(CSRC).with_suffix("")): path.read_text()
        for path in sorted(CSRC.rglob("*.cpp"))
    }
    registers = re.compile("TORCH_LIBRARY|XSOFTMAX_OPERATORS")
    sources = {stem: text for stem, text in sources.items() if registers.search(text)}
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        homes = [stem for stem, text in sources.items() if f'"{name}(' in text]
        homes = homes or [stem for prefix, stem in FAMILIES.items() if name.startswith(prefix)]
        if not homes:
            raise RuntimeError(f"operators.py: no source in csrc registers {name}; add its family "
                               "to FAMILIES")
        found.setdefault(homes[0], []).append(name)
    return found


def contract(stem: str) -> str:
    """Returns the comment at the head of a stem's header."""
    header = CSRC / f"{stem}.h"
    found = re.search(r"namespace xsoftmax[\w:]* \{\n\n((?:// ?.*\n|\n)+)",
                      header.read_text()) if header.is_file() else None
    lines = [line.lstrip("/").removeprefix(" ") for line in found[1].splitlines()] if found else []
    text = "\n".join(lines).strip()
    return text if len(text.splitlines()) > 2 else ""


def public_functions() -> set[str]:
    text = "".join(
        (DOCS.parent / "include/xsoftmax" / name).read_text() for name in ("ops.h", "search.h"))
    return set(re.findall(r"^[\w:<>, ]+ (\w+)\(", text, re.MULTILINE))


def generate(app=None) -> None:
    found, public = schemas(), public_functions()
    by_stem = stems(found)
    missing = {stem.split("/")[0] for stem in by_stem} - set(FOLDERS)
    if missing:
        raise RuntimeError("operators.py: expected a title in FOLDERS for "
                           f"csrc/{', csrc/'.join(sorted(missing))}")
    parts = [("# Operators\n\nGenerated from the library. Each operator is "
              "`torch.ops.xsoftmax.NAME` in Python and TorchScript, and `xsoftmax::NAME` in the "
              "C++ dispatcher. The modules of both languages call them; most programs need none of "
              "them. Operators with a typed C++ function are documented "
              "[there](cpp/operators.md). A name that ends in `_` modifies an argument; names of "
              "the form `..._forward` and `..._backward` are used by autograd.\n")]
    for folder, title in FOLDERS.items():
        parts.append(f"## {title}\n")
        for stem in (stem for stem in by_stem if stem.split("/")[0] == folder):
            parts.append(f"### {stem.rpartition('/')[2]}\n")
            documented = [name for name in by_stem[stem] if name in public]
            if documented:
                parts.append("Documented under " + ", ".join(f"{{cpp:func}}`xsoftmax::{name}`"
                                                             for name in documented) + ".\n")
            parts += [
                f"```{{code-block}} text\n:class: wrapped\n\n{schema}\n```\n"
                for name in by_stem[stem] for schema in found[name]
            ]
            if contract(stem):
                parts.append(
                    f":::{{dropdown}} Contract, from `csrc/{stem}.h`\n```{{code-block}} text\n"
                    f":class: command\n\n{contract(stem)}\n```\n:::\n")
    pages.write(DOCS / "reference/operators.md", "\n".join(parts))


def setup(app) -> dict:
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
