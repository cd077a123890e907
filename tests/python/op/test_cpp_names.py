"""The table of docs/howto/cpp.md gives the C++ counterpart of every public Python name."""

import inspect
import re
from pathlib import Path

import torch

import xsoftmax as xs
import xsoftmax.distributed
import xsoftmax.integrations
import xsoftmax.sklearn

ROOT = Path(__file__).parents[3]
MODULES = {
    "": xs, "samplers.": xs.samplers, "optim.": xs.optim, "tables.": xs.tables,
    "metrics.": xs.metrics, "label_vectors.": xs.label_vectors, "functional.": xs.functional,
    "datasets.": xs.datasets, "distributed.": xs.distributed, "integrations.": xs.integrations,
    "sklearn.": xs.sklearn
}


def public_names():
    """Returns public names of modules and methods of their classes.

    A method of a public base class is listed for that class only.
    """
    names, classes = set(), {}
    for prefix, module in MODULES.items():
        for name in module.__all__:
            value = getattr(module, name, None)
            if inspect.ismodule(value) and f"{name}." in MODULES:
                continue
            names.add(prefix + name)
            # not sklearn: its classes have the methods of scikit-learn
            if inspect.isclass(value) and not issubclass(value, tuple) and prefix != "sklearn.":
                classes.setdefault(value, prefix + name)
    for cls in classes:
        inherited = torch.nn.Module if issubclass(
            cls, torch.nn.Module) else torch.optim.Optimizer if issubclass(
                cls, torch.optim.Optimizer) else object
        for method in dir(cls):
            found = inspect.getattr_static(cls, method)
            if not method.startswith("_") and not hasattr(inherited, method) and (
                    inspect.isfunction(found) or isinstance(found, (staticmethod, classmethod))):
                base = [each
                        for each in cls.__mro__ if each in classes and hasattr(each, method)][-1]
                names.add(f"{classes[base]}.{method}")
    return names


def test_every_public_name_of_python_is_in_the_table():
    text = (ROOT / "docs/howto/cpp.md").read_text()
    (section,) = re.findall(r"^## What there is\n(.*?)(?=^## )", text, re.M | re.S)
    cells = re.findall(r"^\| (`.*?) \|", section, re.M)
    listed = [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]
    assert sorted(public_names() - set(listed)) == [], "names that the table lacks"
    assert sorted(set(listed) - public_names()) == [], "names that Python does not have"
    assert len(listed) == len(set(listed)), "a name in two rows"
