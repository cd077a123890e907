"""Records of measurements: the pages made of them, and figures that agree with them."""

import argparse
import importlib
import json
import re
import shlex
import sys

import pytest
import torch
from documents import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module("common.records"), importlib.import_module("benchmark_pages")


def write(records, path):
    rows = [{"layer": "exact", "time": "2 ms"}, {"layer": "sampled | fast", "time": "1 ms"}]
    records.report(argparse.Namespace(json=str(path)), "What it costs.\n\n    python "
                   "usage_line.py\n\nHow it is\nmeasured.\n", question="What does it cost?",
                   against="PyTorch", tables=[records.table(rows, "A step")], figures=[1.5])


def test_a_record_becomes_a_page(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    (tmp_path / "gone.md").write_text("a page whose record is gone")
    assert [path.name for path in records[1].generate(folder=tmp_path)] == ["step.md"]
    page = (tmp_path / "step.md").read_text()
    found = json.loads((tmp_path / "step.json").read_text())
    for text in ("# What does it cost?", "How it is measured.", "| exact | 2 ms |",
                 r"| sampled \| fast | 1 ms |", found["machine"]["cpu"], found["date"],
                 found["machine"]["torch"], "PyTorch", found["command"]):
        assert text in page
    assert "usage_line" not in page and not (tmp_path /
                                             "gone.md").exists() and found["figures"] == [1.5]
    assert found["loaded"] == (found["other_programs_cores"] > 0.1)


def test_titles_of_records_differ_by_their_options(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    (found := json.loads(
        (tmp_path / "step.json").read_text()))["command"] = "python benchmarks/step.py --classes 7"
    (tmp_path / "step.growth.json").write_text(json.dumps(found))
    (page,) = records[1].generate(folder=tmp_path)
    titles = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert len(titles) == len(set(titles)) == 2 and titles[1].endswith("`--classes 7`")


@pytest.mark.parametrize("field", [
    "question", "against", "command", "date", "commit", "machine", "loaded", "tables",
    "machine.cpu", "machine.threads", "machine.torch"
])
def test_an_incomplete_record_is_refused(records, tmp_path, field):
    write(records[0], tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    found["commit"] = found["commit"] or "0123456789ab"
    holder = found["machine"] if "." in field else found
    del holder[field.rpartition(".")[2]]
    (tmp_path / "step.json").write_text(json.dumps(found))
    with pytest.raises(
            ValueError, match="step.json: expected a record of benchmarks/common/records.py, "
            f"got one without {field}"):
        records[1].generate(folder=tmp_path)
    assert not (tmp_path / "step.md").exists()


def test_committed_records_are_complete(records):
    for path in [*(DOCS / "benchmarks").glob("*.json"), *(DOCS / "experiments").glob("*.json")]:
        records[1].read(path)


def test_a_page_shows_the_tables_of_a_record(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    record = json.loads((tmp_path / "step.json").read_text()) | {"loaded": False}
    whole, part = records[1].shown(record), records[1].shown(record, columns=["time"], bare=True)
    whole = whole.replace(" \\\n    ", " ")  # the lines of the command
    for shown in (record["command"], record["date"], record["machine"]["torch"], "**A step**",
                  "| exact | 2 ms |"):
        assert shown in whole
    note = "Other programs were running"
    assert note not in whole and note in records[1].shown(record | {"loaded": True})
    assert [line for line in part.splitlines() if line.startswith("|")
            ] == ["| time |", "| --- |", "| 2 ms |", "| 1 ms |"] and record["date"] not in part


def test_wrapped_commands_of_records_are_valid_shell(records):
    pages = importlib.import_module("benchmark_pages")
    command = "python benchmarks/some.py --only 'a method, of many words' "
    command += "--option 'two words' " * 10 + "-- --more 1"
    lines = pages.wrapped(command).split(" \\\n")
    assert len(lines) > 1 and max(map(len, lines)) <= 84 and shlex.split(
        " ".join(lines)) == shlex.split(command)
    assert "dropdown" not in pages.commands({"command": "one\ntwo"})
    assert "python" not in pages.commands({"command": "python b.py", "study": "make experiments"})
    assert ":::{dropdown} The 3 commands" in pages.commands({"command": "one\ntwo\nthree"})


def test_comparisons_take_cells_of_records(records):
    comparison = importlib.import_module("comparison").comparison
    record = {
        "command": "words.py", "tables": [{
            "title": "", "columns": ["method", "ratio"], "rows": [["unigram", "1.6"],
                                                                  ["unigram, ranking", "1.1"],
                                                                  ["midx", "1.2"]]
        }]
    }
    text = """sampler
paper
here = words.json: ratio
ranking = words.json: ratio: {}, ranking

1-gram | unigram | 1.3
MIDX | midx | 1.0
"""
    lines = comparison(text, {"words.json": record}.__getitem__).splitlines()
    assert lines[0] == "| sampler | paper | here | ranking |"
    assert lines[2:] == ["| 1-gram | 1.3 | 1.6 | 1.1 |", "| MIDX | 1.0 | 1.2 |  |"]
    for old, new, message in (("| midx |", "| sphere |",
                               "expected a row 'sphere' in one of the records, got none"),
                              ("json: ratio\n", "json: ration\n",
                               "expected a column 'ration' in the record of 'words.py'"),
                              ("{}, ranking", "{}, rank",
                               "expected some of the rows in column 'ranking', got none"),
                              (" | 1.3", "", "expected a cell for each column without a record")):
        with pytest.raises(ValueError, match=message):
            comparison(text.replace(old, new), {"words.json": record}.__getitem__)


@pytest.mark.slow
def test_tables_of_examples_become_a_record(records, monkeypatch, tmp_path, capsys):
    examples = importlib.import_module("example_tables")
    assert examples.split(["--", "a", "-b", "--", "c"]) == [["a", "-b"], ["c"]]
    assert examples.differences([["e.py", "--lr", "1"],
                                 ["e.py", "--lr", "2",
                                  "--row-wise"]]) == ["--lr 1", "--lr 2 --row-wise"]
    items = torch.randint(20, (30, 6), generator=torch.Generator().manual_seed(0))
    (tmp_path / "stream.txt").write_text("".join(f"{user} {' '.join(map(str, row))}\n"
                                                 for user, row in enumerate(items.tolist())))
    example = [
        "examples/recommend/stream.py", "--data",
        str(tmp_path / "stream.txt"), "--rows", "full", "--threads", "1", "--batch-size", "16"
    ]
    command = [
        str(ROOT / "benchmarks/example_tables.py"), "--question", "Which?", "--against", "none",
        "--out",
        str(tmp_path / "out"), "--json",
        str(tmp_path / "stream.json"), "--columns", "table", "Recall@10"
    ]

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        try:
            examples.main()
        except SystemExit as error:
            return f"{error} {capsys.readouterr().err}"
        return ""

    assert "expected a program of examples/ in 'benchmarks/midx.py'" in run(
        "--", "benchmarks/midx.py")
    assert "expected a command after --" in run()
    assert "exit 2" in run("--", *example, "--lr", "fast")
    assert run("--", *example, "--", *example, "--lr", "0.3") == ""
    # uses the runs above
    assert "expected some of table, rows, Recall@10" in run("--columns", "speed", "--", *example)
    found = json.loads((tmp_path / "stream.json").read_text())
    assert found["tables"][0]["columns"] == ["options", "table", "Recall@10"
                                             ] and found["machine"]["threads"] == 1
    assert [row[:2] for row in found["tables"][0]["rows"]] == [["", "full"], ["--lr 0.3", "full"]]
    assert found["command"].splitlines()[1] == (
        "python examples/recommend/stream.py --data stream.txt --rows full --threads 1 "
        "--batch-size 16 --lr 0.3")

    assert "expected one for each of 2 commands, got 1" in run("--names", "slow", "--", *example,
                                                               "--", *example, "--lr", "0.3")
    assert run("--mean", "--names", "slow", "--", *example, "--lr", "0.3") == ""
    assert json.loads(
        (tmp_path /
         "stream.json").read_text())["tables"][0]["columns"] == ["run", "table", "Recall@10"]


def test_means_over_seeds(records):
    examples = importlib.import_module("example_tables")
    commands = [["e.py", "--seed", "1", "--lr", "1"], ["e.py", "--lr", "1", "--seed", "2"],
                ["e.py", "--lr", "2", "--seed", "1"]]
    found = [(["loss", "test"], [["full", "1,000.0"]], "a"),
             (["loss", "test"], [["full", "1002.0"]], "b"),
             (["loss", "test"], [["half", "7.25"]], "c")]
    assert examples.over_seeds(commands,
                               found) == ([["e.py", "--lr", "1"],
                                           ["e.py", "--lr",
                                            "2"]], [(["loss", "test"], [["full",
                                                                         "1,001.0 +- 1.0"]], "a"),
                                                    (["loss", "test"], [["half", "7.25"]], "c")])
    assert examples.mean(("a", "b")) == "" == examples.mean(("1 s", "2 ms"))
    assert examples.mean(("12.0 %", "14.0 %")) == "13.0 +- 1.0 %"


def test_the_table_in_the_readme_equals_its_record():
    record = json.loads((DOCS / "benchmarks/training_step.json").read_text())
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = next(
        number for number, line in enumerate(lines) if "`benchmarks/training_step.py`" in line) + 2
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")]
                         for line in lines[begin:begin + 5]]
    assert [columns[1:], *(row[1:] for row in rows)] == [
        record["tables"][0]["columns"][1:], *(row[1:] for row in record["tables"][0]["rows"])
    ]
    assert [re.findall(r"\w+", row[0])[1] for row in rows
            ] == [re.findall(r"\w+", row[0])[1] for row in record["tables"][0]["rows"]]
    assert "AMD EPYC" in lines[begin - 2] and record["machine"]["cpu"].startswith(
        "AMD EPYC") and record["machine"]["threads"] == 2


GPU_RECORDS = ("cuda", "gpu_language_model")


def test_gpu_figures_in_pages_equal_their_records():
    records = [json.loads((DOCS / f"benchmarks/{name}.json").read_text()) for name in GPU_RECORDS]
    cells = [
        cell for record in records for table in record["tables"] for row in table["rows"]
        for cell in row[1:]
    ]  # fmt: skip
    measured = [float(number) for cell in cells for number in re.findall(r"\d+(?:\.\d+)?", cell)]
    for path, title in ((DOCS / "howto/cuda.md", "Measured on an H100"), (ROOT / "README.md",
                                                                          "On a GPU")):
        (text,) = re.findall(rf"^## {title}\n(.*?)^## ", path.read_text(), re.M | re.S)
        for record in records:
            assert record["commit"][:7] in text and record["date"] in text
            assert record["machine"]["torch"].partition("+")[0] in text
        figure = r"(?<![\d.])([\d,]*\d\.\d+|[\d,]+(?= MB))(?: ms| MB| with| \||:)"
        for number in re.findall(figure, text):
            number = number.replace(",", "")
            decimals = len(number.partition(".")[2])
            assert any(round(value, decimals) == float(number) for value in measured), number


def test_the_plot_of_loss_against_time_is_drawn_from_its_record(monkeypatch, tmp_path):
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


def test_a_gpu_record_is_titled_with_the_gpu(records, tmp_path):
    write(records[0], tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    found["machine"] |= {"gpu": "NVIDIA H100", "cuda": "13.0"}
    del found["machine"]["threads"]
    (tmp_path / "step.json").write_text(json.dumps(found))
    records[1].generate(folder=tmp_path)
    page = (tmp_path / "step.md").read_text()
    assert "## NVIDIA H100\n" in page and f"NVIDIA H100; {found['machine']['cpu']}, " in page
    assert "Machine: NVIDIA H100, of" in records[1].shown(found)


@pytest.mark.parametrize("given, typed", [
    (["--threads", "1", "--json", "out/x.json"], "python benchmarks/step.py --threads 1"),
    (["--json", "--only", "kill"], "python "
     "benchmarks/step.py "
     "--only kill"),
    (["--json=x.json", "--gowalla", "/data/gowalla"], "python benchmarks/step.py --gowalla gowalla")
])
def test_a_record_keeps_its_command(records, monkeypatch, given, typed):
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/step.py", *given])
    assert records[0].command() == typed
