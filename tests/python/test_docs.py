"""The documentation: its programs run, every public name is in the reference, links between files lead somewhere, figures come from records."""

import argparse
import ast
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
import torch
from documents import ROOT, programs_of

import xsoftmax as xs

DOCS = ROOT / "docs"
# What is generated, and tutorials, which are notebooks with tests of their own.
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if not {"tutorials", "generated", "benchmarks"} & set(path.relative_to(DOCS).parts)
         and path.name not in ("operators.md", "command_line.md", "papers.md")]


# distributed.md: below; deployment.md: test_deployment.py.
@pytest.mark.parametrize("path", [path for path in PAGES if programs_of(path) and path.name not in ("distributed.md", "deployment.md")],
                         ids=lambda path: str(path.relative_to(DOCS)))
def test_programs_of_a_page_run(path, tmp_path):
    names = {"__name__": "page"}
    for number, program in enumerate(programs_of(path)):
        exec(compile(program.replace("/tmp/", f"{tmp_path}/"), f"<{path.name}, block {number}>", "exec"), names)
    assert "value" not in names or torch.as_tensor(names["value"]).isfinite()


# What the blocks of distributed.md take as given: a model, its batches, and a group of one process.
GIVEN = """
import scipy.sparse, torch, xsoftmax as xs
class Model(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = xs.SampledSoftmaxLoss(8, 9000, sampler="log_uniform", num_samples=16) if loss is ... else loss
        self.encoder = torch.nn.Linear(8, self.loss.in_features)
    def forward(self, input, target):
        return self.loss(self.encoder(input), target)
X, Y = (scipy.sparse.random(60, 30, 0.2, format="csr", dtype="float32") for _ in range(2))
steps, loader = 2, [(torch.randn(4, 8), torch.randint(9000, (4,)))] * 2
"""
BEFORE = {
    "init_process_group": "\nif torch.distributed.is_initialized(): torch.distributed.destroy_process_group()\n",
    "fully_shard": "\nimport torch.distributed.fsdp; model = Model(...); mesh = torch.distributed.device_mesh.init_device_mesh('cpu', (1,))\n",
}


def test_programs_of_several_machines_run(tmp_path):
    blocks = programs_of(DOCS / "howto/distributed.md")
    text = GIVEN
    for block in blocks:
        text += "".join(setup for word, setup in BEFORE.items() if word in block)
        text += re.sub(r"\b1(00)?_000_000\b", "9_000", block).replace("num_samples=8192", "num_samples=64")
    environment = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    program = tmp_path / "page.py"
    program.write_text(text + "\ntorch.distributed.destroy_process_group()\nprint('end of the page', len(loader), flush=True)\nimport os; os._exit(0)\n")
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "end of the page" in done.stdout, done.stderr
    assert len(blocks) >= 4


def test_there_are_programs():
    assert sum(len(programs_of(path)) for path in PAGES) >= 25


# ---- names

def entries():
    """Full names that the Python reference lists."""
    found = []
    for path in (DOCS / "reference").glob("*.rst"):
        found += re.findall(r"^   (xsoftmax\.[\w.]+)$|^\.\. py:data:: (xsoftmax\.[\w.]+)$", path.read_text(), re.MULTILINE)
    return [one or other for one, other in found]


def public_modules():
    yield xs
    for info in pkgutil.walk_packages(xs.__path__, "xsoftmax."):
        if not any(part.startswith("_") for part in info.name.split(".")) and "cli" not in info.name:
            module = importlib.import_module(info.name)
            if hasattr(module, "__all__"):
                yield module


def resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture
def other_libraries():
    for name in ("lightning", "recbole", "torchmetrics", "transformers"):  # xsoftmax.integrations imports them
        pytest.importorskip(name)


@pytest.mark.usefixtures("other_libraries")
def test_every_public_name_has_an_entry():
    listed = entries()
    documented = [resolve(name) for name in listed]  # a name that is not there any more raises
    missing = []
    for module in public_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            if type(thing) is type(xs):  # a module: its names have entries
                continue
            if f"{module.__name__}.{name}" not in listed and not any(thing is other for other in documented):
                missing.append(f"{module.__name__}.{name}")
    assert not missing, f"list these in a page of docs/reference/*.rst: {', '.join(missing)}"
    assert len(listed) == len(set(listed))


@pytest.mark.usefixtures("other_libraries")
def test_every_public_name_has_a_docstring():
    assert not [name for name in entries() if callable(resolve(name)) and not (resolve(name).__doc__ or "").strip()]


PACKAGE = ROOT / "python_bindings/xsoftmax"


def docstrings():
    """Of classes and functions of the sources, which need not be installed, by name."""
    return {node.name: ast.get_docstring(node) or "" for path in PACKAGE.rglob("*.py") for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def exported(path):
    """``__all__`` of a source."""
    return next(ast.literal_eval(node.value) for node in ast.parse((PACKAGE / path).read_text()).body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")


def says(pattern, name, known, seen=()):
    """Whether a docstring has the pattern, or says that it is as in that of another class, which has it."""
    text = known[name]
    others = re.findall(r"\b(?:[Ss]hapes?|[Dd]types|[Ee]rrors)[^.]*? as :class:`[~\w.]*?(\w+)`", text)
    return bool(re.search(pattern, text, re.MULTILINE)) or any(says(pattern, other, known, (*seen, name)) for other in others if other not in (*seen, name))


def test_docstrings_of_what_users_build_have_shapes_and_errors():
    """What a call takes, and what it raises where it is given something else, is known without a look at the source."""
    known = docstrings()
    names = [name for path in ("__init__.py", "samplers/__init__.py", "optim/__init__.py", "functional.py") for name in exported(path)]
    models = {"XRLinear", "HierarchicalMatcher", "IdTable", "StreamingCounts"}
    built = [name for name in names if name.endswith(("Loss", "Sampler")) or name in models or re.fullmatch(r"Row[A-Z]\w+", name)]
    asked = built + exported("functional.py")
    shape = r"\[(?:\*|[A-Z])(?:, \w+)*\]"  # [N, D], [*] or [*, T]
    errors = r"^Raises:$|Errors as :meth:`"
    assert len(built) > 25 and {"SampledSoftmaxLoss", "MidxSampler", "RowAdam", "XRLinear"} <= set(built)
    assert [name for name in asked if not says(shape, name, known)] == []
    assert [name for name in asked if not says(errors, name, known)] == []


def test_every_header_has_a_place():
    text = "\n".join(path.read_text() for path in (DOCS / "reference/cpp").glob("*.md"))
    shown = re.findall(r"```\{doxygenfile\} (\S+)", text)
    assert sorted(shown) == sorted({path.name for path in (ROOT / "include/xsoftmax").glob("*.h")} - {"xsoftmax.h"})


def written_arguments(text):
    """Of a call in a comment: each argument's words, without its shape, its default and what stands in brackets."""
    text = re.sub(r"\[[^][]*\]|\([^()]*\)|=[^,]*", "", text)
    return [re.findall(r"\w+|\.\.\.", part) for part in text.split(",")]


def names_in_order(written, names):
    """Whether each written argument has its name among its words. "..." stands for any number of arguments."""
    if not written:
        return not names
    if written[0] == ["..."]:
        return any(names_in_order(written[1:], names[skipped:]) for skipped in range(len(names) + 1))
    return bool(names) and names[0] in written[0] and names_in_order(written[1:], names[1:])


def test_contracts_name_the_arguments_of_their_operators():
    """Where a header says ``operator(arguments) -> result``, which the reference of operators may show, the arguments are those of the schema, in order."""
    schemas = {schema.name.removeprefix("xsoftmax::"): schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("xsoftmax::")}
    checked, wrong = set(), []
    for header in sorted((ROOT / "csrc").rglob("*.h")):
        comments = " ".join(re.findall(r"^ *//[/!]? ?(.*)$", header.read_text(), re.MULTILINE))
        comments = re.sub(r"\bX_(?=\w)", "midx_", comments)  # what all families of samplers/adaptive.h have
        for name, call in re.findall(r"\b(\w+)\(((?:[^()]|\([^()]*\))+)\) ->", comments):
            if name in schemas:
                checked.add(name)
                if not names_in_order(written_arguments(call), [argument.name for argument in schemas[name].arguments]):
                    wrong.append(f"{header.relative_to(ROOT)}: {name}({call}), but the schema is {schemas[name]}")
    assert not wrong, "\n".join(wrong)
    assert len(checked) > 90


# ---- links and words

def anchors(page):
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_links_between_files_lead_somewhere():
    bad = []
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("README.md")]:
        text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            generated = re.search(r"reference/(operators|command_line|papers)\.md$|^(operators|command_line)\.md$|^\.\./operators\.md$", target)
            record = re.search(r"benchmarks/(\w+)\.md$", target)  # a page of the site
            if "://" in target or generated or record and list((DOCS / "benchmarks").glob(f"{record[1]}.*json")):
                continue
            there = (path.parent / target) if target else path
            if not there.exists() or anchor and there.suffix == ".md" and anchor not in anchors(there):
                bad.append(f"{path.relative_to(ROOT)}: {link}")
    assert not bad


# ---- figures

@pytest.fixture
def records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module("records"), importlib.import_module("benchmark_pages")


def write(records, path):
    rows = [{"layer": "exact", "time": "2 ms"}, {"layer": "sampled | fast", "time": "1 ms"}]
    records.report(argparse.Namespace(json=str(path)), "What it costs.\n\n    python usage_line.py\n\nHow it is\nmeasured.\n", question="What does it cost?",
                   against="PyTorch", tables=[records.table(rows, "A step")], figures=[1.5])


def test_a_record_becomes_a_page(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    (tmp_path / "gone.md").write_text("a page whose record is gone")
    assert [path.name for path in records[1].generate(folder=tmp_path)] == ["step.md"]
    page = (tmp_path / "step.md").read_text()
    found = json.loads((tmp_path / "step.json").read_text())
    for text in ("# What does it cost?", "How it is measured.", "| exact | 2 ms |", r"| sampled \| fast | 1 ms |", found["machine"]["cpu"], found["date"],
                 found["machine"]["torch"], "PyTorch", found["command"]):
        assert text in page
    assert "usage_line" not in page and not (tmp_path / "gone.md").exists() and found["figures"] == [1.5]
    assert found["loaded"] == (found["other_programs_cores"] > 0.1)


def test_records_of_one_machine_are_told_apart_by_their_options(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    (found := json.loads((tmp_path / "step.json").read_text()))["command"] = "python benchmarks/step.py --classes 7"
    (tmp_path / "step.growth.json").write_text(json.dumps(found))
    (page,) = records[1].generate(folder=tmp_path)
    titles = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert len(titles) == len(set(titles)) == 2 and titles[0].endswith("`--classes 7`")


@pytest.mark.parametrize("field", ["question", "against", "command", "date", "commit", "machine", "loaded", "tables", "machine.cpu", "machine.threads",
                                   "machine.torch"])
def test_a_page_is_refused_without_what_a_figure_needs(records, tmp_path, field):
    write(records[0], tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    found["commit"] = found["commit"] or "0123456789ab"
    holder = found["machine"] if "." in field else found
    del holder[field.rpartition(".")[2]]
    (tmp_path / "step.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=f"step.json: expected a record of benchmarks/records.py, got one without {field}"):
        records[1].generate(folder=tmp_path)
    assert not (tmp_path / "step.md").exists()


def test_committed_records_are_whole(records):
    for path in [*(DOCS / "benchmarks").glob("*.json"), *(DOCS / "experiments").glob("*.json")]:
        records[1].read(path)


def test_a_page_shows_a_record(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    record = json.loads((tmp_path / "step.json").read_text()) | {"loaded": False}
    whole, part = records[1].shown(record), records[1].shown(record, columns=["time"], bare=True)
    whole = whole.replace(" \\\n    ", " ")  # the lines of the command
    for shown in (record["command"], record["date"], record["machine"]["torch"], "**A step**", "| exact | 2 ms |"):
        assert shown in whole
    assert "beside" not in whole and "beside" in records[1].shown(record | {"loaded": True})
    assert [line for line in part.splitlines() if line.startswith("|")] == ["| time |", "| --- |", "| 2 ms |", "| 1 ms |"] and record["date"] not in part


def test_commands_of_records_are_what_a_shell_takes(records):
    pages = importlib.import_module("benchmark_pages")
    command = "python benchmarks/some.py --only 'a method, of many words' " + "--option 'two words' " * 10 + "-- --more 1"
    lines = pages.wrapped(command).split(" \\\n")
    assert len(lines) > 1 and max(map(len, lines)) <= 84 and shlex.split(" ".join(lines)) == shlex.split(command)
    assert "dropdown" not in pages.commands({"command": "one\ntwo"})
    assert ":::{dropdown} The 3 commands" in pages.commands({"command": "one\ntwo\nthree"})


def test_tables_of_experiments_come_from_records():
    for page in sorted((DOCS / "experiments").glob("*.md")):
        text = re.sub(r"^```(?!\{record\}).*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        typed = re.findall(r"^\|.*\|$", text, re.MULTILINE)
        assert not typed, f"{page.name}: expected tables by {{record}}, got {typed[:1]}"
        assert page.stem == "index" or "```{record} " in text


def test_tables_of_examples_become_a_record(records, monkeypatch, tmp_path, capsys):
    examples = importlib.import_module("example_tables")
    assert examples.split(["--", "a", "-b", "--", "c"]) == [["a", "-b"], ["c"]]
    assert examples.differences([["e.py", "--lr", "1"], ["e.py", "--lr", "2", "--row-wise"]]) == ["--lr 1", "--lr 2 --row-wise"]
    items = torch.randint(20, (30, 6), generator=torch.Generator().manual_seed(0))
    (tmp_path / "stream.txt").write_text("".join(f"{user} {' '.join(map(str, row))}\n" for user, row in enumerate(items.tolist())))
    example = ["examples/recommend/stream.py", "--data", str(tmp_path / "stream.txt"), "--rows", "full", "--threads", "1", "--batch-size", "16"]
    command = [str(ROOT / "benchmarks/example_tables.py"), "--question", "Which?", "--against", "none", "--out", str(tmp_path / "out"),
               "--json", str(tmp_path / "stream.json"), "--columns", "rows of", "Recall@10"]

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        try:
            examples.main()
        except SystemExit as error:
            return f"{error} {capsys.readouterr().err}"
        return ""

    assert "expected a program of examples/ in 'benchmarks/midx.py'" in run("--", "benchmarks/midx.py")
    assert "expected a command after --" in run()
    assert "exit 2" in run("--", *example, "--lr", "fast")
    assert run("--", *example, "--", *example, "--lr", "0.3") == ""
    assert "expected some of rows of, rows, Recall@10" in run("--columns", "speed", "--", *example)  # of runs that are there
    found = json.loads((tmp_path / "stream.json").read_text())
    assert found["tables"][0]["columns"] == ["options", "rows of", "Recall@10"] and found["machine"]["threads"] == 1
    assert [row[:2] for row in found["tables"][0]["rows"]] == [["", "full"], ["--lr 0.3", "full"]]
    assert found["command"].splitlines()[1] == "python examples/recommend/stream.py --data stream.txt --rows full --threads 1 --batch-size 16 --lr 0.3"

    assert "expected one for each of 2 commands, got 1" in run("--names", "slow", "--", *example, "--", *example, "--lr", "0.3")
    assert run("--mean", "--names", "slow", "--", *example, "--lr", "0.3") == ""
    assert json.loads((tmp_path / "stream.json").read_text())["tables"][0]["columns"] == ["run", "rows of", "Recall@10"]


def test_means_over_seeds(records):
    examples = importlib.import_module("example_tables")
    commands = [["e.py", "--seed", "1", "--lr", "1"], ["e.py", "--lr", "1", "--seed", "2"], ["e.py", "--lr", "2", "--seed", "1"]]
    found = [(["loss", "test"], [["full", "1,000.0"]], "a"), (["loss", "test"], [["full", "1002.0"]], "b"), (["loss", "test"], [["half", "7.25"]], "c")]
    assert examples.over_seeds(commands, found) == ([["e.py", "--lr", "1"], ["e.py", "--lr", "2"]],
                                                    [(["loss", "test"], [["full", "1,001.0 +- 1.0"]], "a"), (["loss", "test"], [["half", "7.25"]], "c")])
    assert examples.mean(("a", "b")) == ""


def test_the_table_of_steps_in_the_readme_is_that_of_its_record():
    record = json.loads((DOCS / "benchmarks/training_step.json").read_text())
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if "`benchmarks/training_step.py`" in line) + 2
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:begin + 5]]
    assert [columns[1:], *(row[1:] for row in rows)] == [record["tables"][0]["columns"][1:], *(row[1:] for row in record["tables"][0]["rows"])]
    assert [re.findall(r"\w+", row[0])[1] for row in rows] == [re.findall(r"\w+", row[0])[1] for row in record["tables"][0]["rows"]]
    assert "AMD EPYC" in lines[begin - 2] and record["machine"]["cpu"].startswith("AMD EPYC") and record["machine"]["threads"] == 2


GPU_RECORDS = ("cuda", "gpu_language_model")


def test_figures_of_a_gpu_are_those_of_their_records():
    records = [json.loads((DOCS / f"benchmarks/{name}.json").read_text()) for name in GPU_RECORDS]
    cells = [cell for record in records for table in record["tables"] for row in table["rows"]
             for cell in row[1:]]  # fmt: skip
    measured = [float(number) for cell in cells for number in re.findall(r"\d+(?:\.\d+)?", cell)]
    for path, title in ((DOCS / "howto/cuda.md", "Measured on an H100"), (ROOT / "README.md",
                                                                         "On a GPU")):
        (text,) = re.findall(rf"^## {title}\n(.*?)^## ", path.read_text(), re.M | re.S)
        for record in records:
            assert record["commit"][:7] in text and record["date"] in text
            assert record["machine"]["torch"].partition("+")[0] in text
        assert "not been measured again" in text
        figure = r"(?<![\d.])([\d,]*\d\.\d+|[\d,]+(?= MB))(?: ms| MB| with| \||:)"
        for number in re.findall(figure, text):
            number = number.replace(",", "")
            decimals = len(number.partition(".")[2])
            assert any(round(value, decimals) == float(number) for value in measured), number


def test_the_picture_of_loss_against_time_is_drawn_from_its_record(monkeypatch, tmp_path):
    record, name = DOCS / "benchmarks/gpu_language_model.json", "loss_against_time"
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    curves = importlib.import_module(name).curves_of(json.loads(record.read_text()))
    (table,) = json.loads(record.read_text())["tables"]
    assert [(layer, [f"{loss:.3f}" for loss in losses]) for layer, (_, losses) in curves.items()
            ] == [(row[0], row[2:6]) for row in table["rows"]]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [name, str(record), str(tmp_path / "picture.svg")])
    importlib.import_module(name).main()
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")
    assert (DOCS / f"howto/figures/{name}.svg").exists()


def test_a_record_of_a_gpu_is_named_after_it(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    found["machine"] |= {"gpu": "NVIDIA H100", "cuda": "13.0"}
    del found["machine"]["threads"]
    (tmp_path / "step.json").write_text(json.dumps(found))
    records[1].generate(folder=tmp_path)
    page = (tmp_path / "step.md").read_text()
    assert "## NVIDIA H100\n" in page and f"NVIDIA H100; {found['machine']['cpu']}, " in page
    assert "Machine: NVIDIA H100, of" in records[1].shown(found)


@pytest.mark.parametrize("given, typed", [(["--threads", "1", "--json", "out/x.json"], "python benchmarks/step.py --threads 1"),
                                          (["--json", "--only", "kill"], "python benchmarks/step.py --only kill"),
                                          (["--json=x.json", "--gowalla", "/data/gowalla"], "python benchmarks/step.py --gowalla gowalla")])
def test_a_record_says_its_command(records, monkeypatch, given, typed):
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/step.py", *given])
    assert records[0].command() == typed
