"""docs/howto/integrations.md: each program runs before and after its change, at most five lines change, and the exact loss is that of the plain program."""

import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/integrations.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
# Files in examples/integrations, in the order of the page, and what each needs.
PROGRAMS = {"causal_lm": ("transformers", "accelerate"), "masked_lm": ("transformers", "accelerate"), "peft_head": ("peft", "accelerate"),
            "lightning_words": ("lightning",), "accelerate_words": ("accelerate",), "fsdp2": (), "recbole_sasrec": ("recbole", "pandas"), "text_labels": ()}
MOST_LINES = 5


def side(diff, sign):
    """The program before ("-") or after ("+") the change."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n"))


def exact(program):
    return re.sub(r'xs\.SampledSoftmaxLoss(.*?), sampler="\w+", num_samples=\d+', r"xs.LinearCrossEntropyLoss\1", program)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    random = torch.Generator().manual_seed(0)
    os.makedirs("data/tiny")
    rows = [f"{user}\t{torch.randint(200, (), generator=random)}\t{time}\n" for user in range(30) for time in range(8)]
    Path("data/tiny/tiny.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(rows))
    Path("tiny.yaml").write_text(
        "data_path: data\nload_col: {inter: [user_id, item_id, timestamp]}\nloss_type: CE\ntrain_neg_sample_args: ~\nepochs: 3\nuse_gpu: False\n"
        "train_batch_size: 64\nhidden_size: 16\ninner_size: 16\nn_layers: 1\nstate: ERROR\nshow_progress: False\n")
    monkeypatch.setattr(sys, "argv", ["program"])
    return tmp_path


def run(program):
    names = {"__name__": "__main__"}
    try:
        exec(compile(program, "<docs/howto/integrations.md>", "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return names


def needs(name, monkeypatch):
    for package in PROGRAMS[name]:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install xsoftmax[integrations]")
    if name == "recbole_sasrec":
        import numpy as np
        for old, new in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):  # which NumPy 2 does not have
            monkeypatch.setattr(np, old, new, raising=False)


@pytest.mark.parametrize("name, diff", list(zip(PROGRAMS, DIFFS)), ids=list(PROGRAMS))
def test_program(name, diff, folder, monkeypatch):
    needs(name, monkeypatch)
    names = run(side(diff, "+"))
    if name == "text_labels":
        assert names["suggested"] == run(side(diff, "-"))["suggested"] == [("ships", "stars")]
        return
    assert len(names["losses"]) >= 3 and all(torch.tensor(names["losses"]).isfinite())
    plain, ours = run(side(diff, "-"))["losses"], run(exact(side(diff, "+")))["losses"]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-5, atol=1e-5)
    assert ours != names["losses"]  # or the exact loss was not put in


@pytest.mark.parametrize("name, diff", list(zip(PROGRAMS, DIFFS)), ids=list(PROGRAMS))
def test_at_most_five_lines_change(name, diff):
    assert 1 <= sum(line.startswith("+") for line in diff.splitlines()) <= MOST_LINES
    assert (ROOT / f"examples/integrations/{name}.py").read_text().split('"""\n\n', 1)[1] == side(diff, "+")


def test_there_are_as_many_programs_as_files():
    assert len(DIFFS) == len(PROGRAMS) == len(list((ROOT / "examples/integrations").glob("*.py")))


def test_metrics(folder):
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install xsoftmax[integrations]")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert 0 <= run(program)["value"] < 0.1  # of 5,000 classes at random


def test_versions_are_those_of_the_extra():
    pins = re.search(r"^integrations = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    found = re.findall(r'"(\w+)==(\d+\.\d+)\.', pins)
    assert len(found) == 5 and all(f"{name} {version}" in PAGE for name, version in found)
