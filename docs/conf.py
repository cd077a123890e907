"""Sphinx configuration: `make docs` builds the site into build/docs/html and fails on warnings."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_ext"))

from sphinx.util import logging as sphinx_logging  # noqa: E402

import xsoftmax  # noqa: E402

project = "xsoftmax"
author = "The xsoftmax authors"
copyright = author
release = version = xsoftmax.__version__

extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon",
    "sphinx.ext.viewcode", "breathe", "sphinx_copybutton", "sphinx_design", "benchmark_pages",
    "command_line", "notebooks", "operators", "overview", "paper_page", "record_directive"
]
exclude_patterns = ["_ext", "_templates", "requirements.txt", "README.md"]
templates_path = ["_templates"]
nitpicky = True
suppress_warnings = ["duplicate_declaration.cpp"]  # headers share namespaces

# ---- pages

smartquotes = False  # keeps the `--` of commands

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
# The output of notebooks is cached until they change. XSOFTMAX_DOCS_EXECUTE=off omits it.
nb_execution_mode = os.environ.get("XSOFTMAX_DOCS_EXECUTE", "cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_cache_path = str(ROOT / "build/docs/jupyter")
copybutton_exclude = ".linenos, .gp, .go, .gd"  # removed lines of a diff are not copied

# ---- Python

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_attr_annotations = True
# Maps the last part of each name listed in the reference to the full name.
PUBLIC = {
    name.rpartition(".")[2]: name
    for path in (DOCS / "reference").glob("*.rst")
    for name in re.findall(r"^   (xsoftmax\.[\w.]+)$", path.read_text(), re.MULTILINE)
}
default_role = "code"  # docstrings write `code` as Markdown does
# Names that other projects document.
nitpick_ignore_regex = [
    ("py:.*",
     r"(torch|numpy|np|scipy|sp|sklearn|faiss|nn|os|collections|accelerate|datasets|lightning|"
     r"torchmetrics|transformers)(\..*)?"),
    ("py:.*",
     r"(Tensor|Module|Parameter|Optimizer|Generator|Path|PathLike|csr_matrix|ClassifierMixin|"
     r"BaseEstimator)"),
    ("py:.*",
     r"(ParallelStyle|DeviceMesh|device|dtype|Nested|Dropout|BatchNorm|Dataset|IterableDataset)"),
    # base classes that are not public
    ("py:class", r"xsoftmax\.(_core|distributed|losses|matcher|optim|samplers|tables|tools|trees)"
     r"\.\w+\.\w+"),
    ("py:class", r"xsoftmax\.[\w.]+\.Loss"),  # a type variable
    ("py:class", "TorchOptions"),  # its keywords are in its docstring
    # names of ATen, c10, torch and the standard library, and names that Doxygen does not resolve
    ("cpp:.*", r".*"),
]

# ---- C++

breathe_projects = {"xsoftmax": str(ROOT / "build/docs/doxygen/xml")}
breathe_default_project = "xsoftmax"
breathe_default_members = ("members",)
breathe_show_include = False
breathe_domain_by_extension = {"h": "cpp"}
cpp_maximum_signature_line_length = 100

# ---- look

html_theme = "pydata_sphinx_theme"
html_title = "xsoftmax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_domain_indices = False
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "xsoftmax"},
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 8,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}


def run_doxygen(app) -> None:
    """Writes the XML of the public headers. Warnings of Doxygen count as warnings of the site."""
    folder = ROOT / "build/docs/doxygen"
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["doxygen", "docs/Doxyfile"], cwd=ROOT, capture_output=True, text=True)
    for line in filter(None, done.stderr.splitlines()):
        sphinx_logging.getLogger("doxygen").warning(line)
    if done.returncode:
        raise RuntimeError(f"doxygen ended with {done.returncode}")


def plain_text(app, what, name, obj, options, lines) -> None:
    """Escapes stars and bars outside of code in docstrings; expands roles to full names."""
    margin = None  # indentation of the paragraph before a literal block
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if margin is not None and (not line.strip() or indent > margin):
            continue
        margin = indent if line.rstrip().endswith("::") else None
        line = re.sub(r"(:\w+:`[^`]*`|`+[^`]*`+)|\[\*|\|(?=\S)|(?<=\S)\|",
                      lambda found: found[1] or found[0].replace("*", r"\*").replace("|", r"\|"),
                      line)
        lines[number] = re.sub(r":(class|func|meth):`(?:([^<`]+) <)?([\w.]+)>?`", full_name, line)


def full_name(role: re.Match) -> str:
    """Expands a role whose target is part of the path of a public class or function."""
    parts = role[3].split(".")
    for place, part in enumerate(parts):
        if part in PUBLIC and (place == len(parts) - 1 or part[0].isupper()):
            target = ".".join([PUBLIC[part], *parts[place + 1:]])
            return f":{role[1]}:`{role[2] or '.'.join(parts[place:])} <{target}>`"
    return role[0]


def public_bases(app, name, obj, options, bases) -> None:
    """Replaces base classes that are not public by their nearest public base."""
    def is_shown(base: type) -> bool:
        return not base.__module__.startswith("xsoftmax") or base.__name__ in PUBLIC

    bases[:] = [
        next(filter(is_shown, base.__mro__)) if isinstance(base, type) else base for base in bases
    ]


class NoEmptyGlob(logging.Filter):
    """Drops warnings about toctree patterns that match no page."""
    def filter(self, record) -> bool:
        return not str(record.msg).startswith("toctree glob pattern")


def setup(app) -> None:
    for handler in logging.getLogger("sphinx").handlers:
        handler.filters.insert(0, NoEmptyGlob())
    app.connect("builder-inited", run_doxygen)
    app.connect("autodoc-process-docstring", plain_text)
    app.connect("autodoc-process-bases", public_bases)
