"""Checks of sources and pages, which need no built library; `make lint` runs them.

Each function is one check: it yields what is wrong, and its docstring says why that matters.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE, HEADERS = ROOT / "docs", ROOT / "python_bindings/xsoftmax", ROOT / "include/xsoftmax"
PAGES = [
    *ROOT.glob("*.md"), *DOCS.rglob("*.md"),
    *(path for folder in ("csrc", "tests", "benchmarks", "examples")
      for path in (ROOT / folder).rglob("README.md")), *(ROOT / "packaging").glob("*.md")
]


def read(name):
    return (ROOT / name).read_text()


def anchors(page):
    """Returns the anchors that GitHub and the site make of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def check_links():
    """Links of pages, and the names of files in them, lead readers to something that exists."""
    generated = re.compile(r"(^|/)(operators|command_line|papers)\.md$")  # pages of the site
    folders = "csrc|include|tests|docs|examples|benchmarks|cmake|packaging|python_bindings|\\.ci"
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)\s]+)\)",
                               re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
            target, _, anchor = link.partition("#")
            record = re.search(r"benchmarks/(\w+)\.md$", target)
            if "://" in target or generated.search(target) or record and list(
                (DOCS / "benchmarks").glob(f"{record[1]}.*json")):
                continue
            path = page.parent / target if target else page
            if not path.exists() or anchor and path.suffix == ".md" and anchor not in anchors(path):
                yield f"{page.relative_to(ROOT)}: the link {link} leads nowhere"
        for name in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", text):
            if not (ROOT / name).exists():
                yield f"{page.relative_to(ROOT)}: there is no {name}"


def check_headers():
    """A header that the C++ reference leaves out cannot be found there."""
    text = "".join(path.read_text() for path in (DOCS / "reference/cpp").glob("*.md"))
    headers = {path.name for path in HEADERS.glob("*.h")} - {"xsoftmax.h"}
    for name in headers ^ set(re.findall(r"```\{doxygenfile\} (\S+)", text)):
        yield f"docs/reference/cpp and include/xsoftmax differ in {name}"


def check_cpp_names():
    """Names in the table of docs/howto/cpp.md are copied into programs."""
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in HEADERS.glob("*.h"))))
    (section,) = re.findall(r"^## What there is\n(.*?)(?=^## )", read("docs/howto/cpp.md"),
                            re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE)
    for python, cpp in rows:
        if cpp.startswith("none"):
            if ": " not in cpp:
                yield f"docs/howto/cpp.md does not say why there is no {python} in C++"
            continue
        names = re.findall(r"`([\w:.>()-]+)`", cpp)
        if cpp.startswith("the same"):
            names += re.findall(r"`([\w.]+)`", python)
        for name in names:
            if re.findall(r"\w+", name)[-1] not in words:
                yield f"docs/howto/cpp.md: no header has {name}, the C++ name of {python}"
        if not names:
            yield f"docs/howto/cpp.md has no C++ name of {python}"


def check_filesystem():
    """Builds of torch export another release's std::filesystem, which the library would call."""
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        if "<filesystem>" in path.read_text():
            yield f"{path.relative_to(ROOT)}: expected table/files/paths.h, got <filesystem>"


def check_batches():
    """Sources of a folder are compiled together: when a file is added, its neighbours change, and
    types and constants of one name would clash."""
    name = re.compile(r"^(?:struct|class|enum(?: class)?|constexpr [\w:<>* ]+?) (\w+) ?[{=:[]",
                      re.M)
    for suffix in ("*.cpp", "*_cuda.cu"):
        seen = {}
        for path in sorted((ROOT / "csrc").rglob(suffix)):
            for found in set(name.findall(path.read_text())):
                first = seen.setdefault((path.parent, path.suffixes[0], found), path.name)
                if first != path.name:
                    yield f"{path.relative_to(ROOT)}: {first} defines {found}, too"


def check_kernels():
    """The page of kernels tells which operations have a kernel, with its registers and bytes."""
    kernels = {
        name
        for path in (ROOT / "csrc").rglob("*.cu*")
        for name in re.findall(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(",
                               path.read_text())
    }
    for name in kernels ^ set(re.findall(r"\w+_kernel\b", read("docs/reference/kernels.md"))):
        yield f"docs/reference/kernels.md and csrc differ in {name}"


def check_papers():
    """A paper named by author and year has to be in CITATION.cff, where readers look it up."""
    cited = {(re.search(r'family-names: "(.*)"',
                        entry)[1].split("-")[0], re.search(r"year: (\d+)", entry)[1])
             for entry in read("CITATION.cff").split("  - type: ")[1:]}
    year = (r"(?:,? (?:[A-Z]\w+ )?(?:et al\.|and [A-Z]\w+))?,? ?\(?"
            r"(?:\"[^\"]*\", (?:\w+ )?|[A-Z]\w+ )?((?:19|20)\d\d)\b")
    for path in [*PACKAGE.rglob("*.py"), *HEADERS.glob("*.h"), *DOCS.glob("[chst]*/*.md")]:
        text = re.sub(r"\s*\n\s*(///|//|#)?\s*", " ", path.read_text())
        for paper in set(re.findall(rf"\b([A-Z]\w+){year}", text)) - cited:
            yield f"{path.relative_to(ROOT)}: CITATION.cff lacks {' '.join(paper)}"


def check_versions():
    """The citation and the changelog would name another version than the package."""
    (version,) = re.findall(r'^__version__ = "(.*)"$', (PACKAGE / "__init__.py").read_text(), re.M)
    for named in set(re.findall(r"\bxsoftmax[-=]+(\d+\.\d+\.\d+)", read("docs/start/install.md"))):
        if named != version:
            yield f"docs/start/install.md: expected version {version}, got {named}"
    if f'version: "{version}"\n' not in read("CITATION.cff"):
        yield f"CITATION.cff: expected version {version}, that of the package"
    if f'  version: "{version}"\n' not in read("packaging/conda/recipe.yaml"):
        yield f"packaging/conda/recipe.yaml: expected version {version}, that of the package"
    first = re.search(r"^## \[Unreleased\]\n\n.*?\b(\d+\.\d+\.\d+)\b|^## \[(\d+\.\d+\.\d+)\]",
                      read("CHANGELOG.md"), re.MULTILINE | re.DOTALL)
    if version not in first.groups():
        yield f"CHANGELOG.md: expected version {version}, that of the package, first"


def check_torch_versions():
    """Some files refuse an older torch than the first of TORCH_VERSIONS, or say that they do; the
    workflow has a job for each."""
    (versions,) = re.findall(r"^TORCH_VERSIONS \?= (.*)$", read("Makefile"), re.M)
    oldest = versions.split()[0]
    (jobs,) = re.findall(r"torch: (\[.*\])", read(".github/workflows/wheels.yml"))
    if json.loads(jobs) != versions.split():
        yield f".github/workflows/wheels.yml: expected TORCH_VERSIONS of Makefile, got {jobs}"
    for file, text in {
            "CMakeLists.txt": f"Torch_VERSION VERSION_LESS {oldest})",
            "README.md": f"torch {oldest} or later",
            "packaging/conda/recipe.yaml": f"- pytorch >={oldest}\n",
            "pyproject.toml": f'"torch>={oldest}"',
            "python_bindings/xsoftmax/_core/library.py": f"_OLDEST = ({oldest.replace('.', ', ')})",
            "setup.py": f'"torch>={oldest}"'
    }.items():
        if text not in read(file):
            yield f"{file}: expected {text.strip()}, the first of TORCH_VERSIONS in Makefile"


def check_default_torch():
    """What is built without TORCH and its relatives is built for one torch."""
    (default,) = re.findall(r"^TORCH \?= torch==(\S+)$", read("Makefile"), re.M)
    for file in ("tests/wheel/run", ".ci/cuda_check", ".ci/aarch64_check", ".ci/gpu",
                 "packaging/docker/Dockerfile", "packaging/docker/Dockerfile.cuda"):
        found = set(re.findall(r"\btorch===?(\d[\w.]*)", read(file)))
        if found != {default}:
            yield f"{file}: expected torch {default} of Makefile, got {', '.join(sorted(found))}"


def exported(path):
    """Returns ``__all__`` of a source file."""
    return next(
        ast.literal_eval(node.value) for node in ast.parse((PACKAGE / path).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")


def check_docstrings():
    """Users can see what a call takes and raises without reading the source."""
    docstrings = {
        node.name: ast.get_docstring(node) or ""
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }

    def says(pattern, name, seen=()):
        """Whether a docstring has the pattern, or refers to a class whose docstring has it."""
        text = docstrings[name]
        others = re.findall(r"\b(?:[Ss]hapes?|[Dd]types|[Ee]rrors)[^.]*? as :class:`[~\w.]*?(\w+)`",
                            text)
        return bool(re.search(pattern, text, re.MULTILINE)) or any(
            says(pattern, other, (*seen, name)) for other in others if other not in (*seen, name))

    classes = [
        name for path in ("__init__.py", "samplers/__init__.py", "optim/__init__.py")
        for name in exported(path) if re.fullmatch(
            r"\w+(Loss|Sampler)|Row[A-Z]\w+|XRLinear|HierarchicalMatcher|IdTable|StreamingCounts",
            name)
    ]
    for name in classes + exported("functional.py"):
        if not says(r"\[(?:\*|[A-Z])(?:, \w+)*\]", name):  # [N, D], [*] or [*, T]
            yield f"the docstring of {name} has no shapes"
        if not says(r"^Raises:$|Errors as :meth:`", name):
            yield f"the docstring of {name} has no errors"


def check_deleted_constructors():
    """A compiler quotes this line for a wrong call, so it has to name the parameters."""
    for path in HEADERS.glob("*.h"):
        text = path.read_text()
        for line in re.findall(r"\.\.\.\)\s*=\s*delete;.*", text):
            if not re.fullmatch(r"\.\.\.\) =\s+delete; // expected: .+", line):
                yield f"{path.name}: a deleted constructor without \"// expected: \": {line}"
        if "TORCH_MODULE(" in text:
            yield f"{path.name}: TORCH_MODULE forwards any arguments"


def check_hooks():
    """What runs in every optimizer step of the process is in one module, and documented there."""
    hooks = (PACKAGE / "_core/hooks.py").read_text()
    registers = re.compile(r"register_optimizer_step_\w+|register_module_\w+|atexit|excepthook|"
                           r"Weak\w+|finalize")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Attribute, ast.Name))
        }
        for name in filter(registers.fullmatch, names if path.name != "hooks.py" else ()):
            yield f"{path.relative_to(ROOT)}: {name} belongs into _core/hooks.py"
        if re.search(r"hooks\.(before_steps|after_steps|at_exit)\(",
                     text) and f"- ``{path.stem}``, " not in hooks:
            yield f"the docstring of _core/hooks.py lacks the hook of {path.stem}"


def check_experiments():
    """Figures that are typed into a page may differ from the record of the measurement."""
    for page in DOCS.glob("experiments/*.md"):
        text = re.sub(r"^```(?!\{record\}).*?^```$", "", page.read_text(),
                      flags=re.DOTALL | re.MULTILINE)
        if re.search(r"^\|.*\|$", text, re.MULTILINE):
            yield f"docs/experiments/{page.name}: a table that is not a {{record}}"


def statements(program):
    """Returns the simple statements of a program, whatever their layout."""
    return [
        ast.dump(node) for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.stmt) and not hasattr(node, "body")
    ]


def check_integrations():
    """The tests run the programs of the page; readers start those in examples/integrations."""
    page = read("docs/howto/integrations.md")
    programs = [
        statements("".join(line[1:] or "\n"
                           for line in diff.splitlines(keepends=True) if line[0] != "-"))
        for diff in re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    ]
    for path in (ROOT / "examples/integrations").glob("*.py"):
        program = statements(path.read_text().split('"""\n\n', 1)[1])
        if path.stem != "recbole_sasrec" and program not in programs:
            yield f"docs/howto/integrations.md lacks the program of {path.relative_to(ROOT)}"
    (pins,) = re.findall(r"^integrations = (\[.*\])", read("pyproject.toml"), re.MULTILINE)
    for pin in json.loads(pins):
        name, version = re.match(r"(\w+)==(\d+\.\d+)\.", pin).groups()
        if f"{name} {version}" not in page:
            yield f"docs/howto/integrations.md does not name {name} {version}, which is tested"


def check_tutorials():
    """Jupyter opens a page as a notebook only with this header."""
    header = "---\njupytext:\n  text_representation:\n    extension: .md\n    format_name: myst\n"
    for path in DOCS.glob("tutorials/*.md"):
        if path.name != "index.md" and not path.read_text().startswith(header):
            yield f"docs/tutorials/{path.name}: not a MyST notebook"


def check_workflows():
    """A workflow that calls a missing target fails only after it is merged; that of the GPU must
    start only by hand, where there is a runner."""
    targets = set(re.findall(r"^([\w-]+):(?!=)", read("Makefile"), re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        (matrix,) = re.findall(r"target: \[(.*)\]", text) or [""]
        called = {
            *re.findall(r"(?:^|[:;&|]) *make ([\w-]+)", text, re.M),
            *filter(None, matrix.split(", "))
        }
        for name in called - targets:
            yield f"{path.name}: the Makefile has no target {name}"
    text = read(".github/workflows/gpu.yml")
    if "\non:\n  workflow_dispatch:\n\n" not in text or re.findall(
            r"^  \w+:\n    (.*)\n    (.*)\n",
            text.partition("jobs:\n")[2], re.MULTILINE) != [
                ("if: vars.GPU_RUNNER != ''", "runs-on: ${{ vars.GPU_RUNNER }}")
            ]:
        yield "gpu.yml: expected a job that starts by hand, on the runner vars.GPU_RUNNER"


if __name__ == "__main__":
    problems = [
        problem for name, check in sorted(globals().items()) if name.startswith("check_")
        for problem in check()
    ]
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)
    sys.exit(bool(problems))
