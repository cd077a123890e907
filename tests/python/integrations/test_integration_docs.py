"""The programs of docs/howto/integrations.md.

Each runs before and after its change, and the exact loss trains like the plain program.
"""

import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/howto/integrations.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
# Files in examples/integrations, in the order of the page, and the packages that each needs.
PROGRAMS = {
    "causal_lm": ("transformers", "accelerate"), "masked_lm": ("transformers", "accelerate"),
    "peft_head": ("peft", "accelerate"), "lightning_words": ("lightning",),
    "accelerate_words": ("accelerate",), "fsdp2": (), "text_labels": ()
}


def side(diff, sign):
    """Returns the program before ("-") or after ("+") the change."""
    return "".join(line[1:] or "\n"
                   for line in diff.splitlines(keepends=True) if line[0] in (sign, " ", "\n"))


def exact(program):
    """Returns the program with the exact loss instead of the sampled one."""
    program = re.sub(r",\s+sparse_grad=True", "", program)
    return re.sub(r'xs\.SampledSoftmaxLoss(.*?),\s+sampler="\w+",\s+num_samples=\d+',
                  r"xs.LinearCrossEntropyLoss\1", program, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                            MASTER_PORT="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    random = torch.Generator().manual_seed(0)
    os.makedirs("data/tiny")
    rows = [
        f"{user}\t{torch.randint(200, (), generator=random)}\t{time}\n" for user in range(30)
        for time in range(8)
    ]
    Path("data/tiny/tiny.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" +
                                            "".join(rows))
    Path("tiny.yaml").write_text(
        "data_path: data\nload_col: {inter: [user_id, item_id, timestamp]}\nloss_type: "
        "CE\ntrain_neg_sample_args: ~\nepochs: 3\nuse_gpu: False\n"
        "train_batch_size: 64\nhidden_size: 16\ninner_size: 16\nn_layers: 1\nstate: "
        "ERROR\nshow_progress: False\n")
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


def needs(*packages):
    for package in packages:
        pytest.importorskip(
            package, reason=f"{package} is not installed: pip install "
            "xsoftmax[integrations]")


@pytest.mark.parametrize("name, diff", list(zip(PROGRAMS, DIFFS)), ids=list(PROGRAMS))
def test_a_program_runs_and_trains_like_the_plain_program(name, diff, folder, monkeypatch):
    needs(*PROGRAMS[name])
    names = run(side(diff, "+"))
    if name == "text_labels":
        assert names["suggested"] == run(side(diff, "-"))["suggested"] == [("ships", "stars")]
        return
    assert len(names["losses"]) >= 3 and all(torch.tensor(names["losses"]).isfinite())
    plain, ours = run(side(diff, "-"))["losses"], run(exact(side(diff, "+")))["losses"]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-5, atol=1e-5)
    assert ours != names["losses"]  # exact() replaced the loss


def test_recbole_with_the_exact_loss_trains_like_recbole(folder, monkeypatch):
    needs("recbole", "pandas")
    import numpy as np
    # RecBole uses names that NumPy 2 removed
    for old, new in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
        monkeypatch.setattr(np, old, new, raising=False)
    program = (ROOT / "examples/integrations/recbole_sasrec.py").read_text()
    sampled = run(program)["losses"]
    ours = run(exact(program))["losses"]
    plain = run(
        program.replace("= SampledSASRec(",
                        "= SASRec(").replace("xs.optim.RowAdam", "torch.optim.AdamW").replace(
                            "import xsoftmax", "import torch\nimport xsoftmax"))["losses"]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-5, atol=1e-5)
    assert ours != sampled and len(sampled) >= 3 and all(torch.tensor(sampled).isfinite())


def test_every_program_of_the_page_is_tested():
    assert len(DIFFS) == len(PROGRAMS)


def python_program(word):
    """Returns the program of the page, other than those shown as changes, that has a word."""
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (program,) = (each for each in programs if word in each)
    return program


def test_the_metrics_program_runs(folder):
    pytest.importorskip(
        "torchmetrics", reason="torchmetrics is not installed: pip install "
        "xsoftmax[integrations]")
    assert 0 <= run(python_program("torchmetrics"))["value"] < 0.1  # random among 5,000 classes


def test_the_generation_program_runs():
    result = run(python_program("fast_head"))
    assert result["counts"][0] > 0 and result["tokens"].shape == (1, 22)
