"""Layers of the library: a file includes or imports only layers below it, in C++ and in Python."""

import ast
import graphlib
import re

from documents import ROOT


def layers_of(folder):
    """Returns the names on each line of layers.txt, lowest layer first."""
    lines = (ROOT / folder / "layers.txt").read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def test_folders_of_csrc_include_only_lower_layers():
    height = {name: number for number, layer in enumerate(layers_of("csrc")) for name in layer}
    assert set(height) == {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    for path in (ROOT / "csrc").rglob("*.*"):
        parts = path.relative_to(ROOT / "csrc").parts
        if len(parts) == 1:
            continue
        for folder in set(re.findall(r'#include "(\w+)/', path.read_text())) & set(height):
            assert folder == parts[0] or height[folder] < height[parts[0]], \
                f"{path.relative_to(ROOT)} includes a header of {folder}"


PACKAGE = ROOT / "python_bindings/xsoftmax"


def modules_of_the_package():
    """Returns {dotted name below `xsoftmax`: file}; the package itself is "__init__"."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name, path, modules):
    """Yields the modules of the package that a file imports anywhere.

    Importing a module of another subpackage also runs the `__init__` of that subpackage.
    """
    folder = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            wanted = [each.name.split(".") for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ["xsoftmax", *folder][:len(folder) + 2 - node.level] if node.level else []
            start += node.module.split(".") if node.module else []
            wanted = [[*start, each.name] for each in node.names]
        else:
            is_call = isinstance(node, ast.Call)
            called = ast.unparse(node.func).split(".")[-1] if is_call else ""
            by_text = called in ("import_module", "__import__")
            assert not by_text or path.name == "__init__.py", f"{name} imports by text"
            continue
        for parts in wanted:
            if parts[0] != "xsoftmax":
                continue
            whole = ".".join(parts[1:])
            target = whole if whole in modules else ".".join(parts[1:-1]) or "__init__"
            yield target
            if "." in target and target.split(".")[0] not in folder:
                yield target.split(".")[0]


def imports_of_the_package():
    modules = modules_of_the_package()
    return {name: set(imports_of(name, path, modules)) for name, path in modules.items()}


def test_modules_of_the_package_import_only_lower_layers():
    """Imports upwards or in a cycle would depend on the order of imports."""
    layers = layers_of("python_bindings/xsoftmax")
    height = {name: number for number, layer in enumerate(layers) for name in layer}
    imports = imports_of_the_package()
    known = {*imports, *(name.split(".")[0] for name in imports)}
    assert set(height) <= known, "layers.txt names existing modules"
    assert {name.split(".")[0] for name in imports} <= set(height), "layers.txt names all modules"

    def height_of(name):
        return height[name if name in height else name.split(".")[0]]

    for name, targets in imports.items():
        for target in targets:
            assert height_of(target) <= height_of(
                name), f"{name} imports {target}, which is above it"
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names a cycle


def test_only_the_package_itself_imports_distributed():
    """A single process never needs it, and a build of torch may lack torch.distributed."""
    knows = {
        name
        for name, targets in imports_of_the_package().items() if any(
            target.split(".")[0] == "distributed" for target in targets)
    }
    assert {name for name in knows if name.split(".")[0] != "distributed"} == {"__init__"}
