"""What `py.typed` promises: a user's program passes mypy in strict mode, and mypy sees the types of the package."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, TUTORIALS, cells_of, programs_of, written_by

import xsoftmax

PROGRAM = Path(__file__).parent / "typed_program.py"
# `make lint` and `make test` set it up; it is no part of a user's environment.
MYPY = shutil.which("mypy") or shutil.which("mypy", path=str(ROOT / "build" / "lint-venv" / "bin"))
# scipy has no types, and torch does not say what its modules export, or what some of its functions take. mypy does not look for mistakes in
# what is installed; the package may lie elsewhere here.
CONFIG = """
[mypy]
strict = true
untyped_calls_exclude = torch
[mypy-torch.*]
implicit_reexport = true
[mypy-scipy.*,sklearn.*]
ignore_missing_imports = true
[mypy-xsoftmax.*]
ignore_errors = true
"""
MISTAKES = {
    "xs.SampledSoftmaxLoss(8, '60', sampler='uniform', num_samples=4)": 'has incompatible type "str"; expected "int"',
    "xs.optim.RowAdam([], learning_rate=0.1)": 'Unexpected keyword argument "learning_rate"',
    "xs.clip_grad_norm_([], None)": 'has incompatible type "None"; expected "float"',
    "xs.no_such_name": 'Module has no attribute "no_such_name"',
}
MODULES = {"xs": xsoftmax, "xs.samplers": xsoftmax.samplers, "xs.optim": xsoftmax.optim, "xs.distributed": xsoftmax.distributed}
NAMES = [f"{module}.{name}" for module, found in MODULES.items() for name in found.__all__]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What mypy says of each program: a list of lines. One run, which reads torch once."""
    if MYPY is None:
        pytest.skip("needs mypy: make lint")
    folder = tmp_path_factory.mktemp("programs")
    texts = {f"readme_{number}": text for number, text in enumerate(programs_of(ROOT / "README.md"))}
    for path in TUTORIALS:
        program = "\n\n".join(cells_of(path))
        texts |= {f"tutorial_{path.stem}": program, **{f"tutorial_{path.stem}_{name}": text for name, text in written_by(program).items()}}
    texts |= {f"mistake_{number}": f"import xsoftmax as xs\n\n{line}\n" for number, line in enumerate(MISTAKES)}
    texts |= {"names": "import xsoftmax as xs\n\n" + "".join(f"reveal_type({name})\n" for name in NAMES), "typed_program": PROGRAM.read_text()}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "mypy.ini").write_text(CONFIG)
    package = Path(xsoftmax.__file__).parent.parent
    path = {} if package.name == "site-packages" else {"MYPYPATH": str(package)}
    done = subprocess.run([MYPY, "--config-file", "mypy.ini", "--python-executable", sys.executable, "--cache-dir", ROOT / "build" / "mypy-of-tests",
                           "--no-error-summary", *(f"{name}.py" for name in texts)],
                          capture_output=True, text=True, cwd=folder, env={"PATH": "/usr/bin:/bin", **path})
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in texts}


def test_a_program_that_names_what_is_public(said):
    assert said["typed_program"] == []


def test_the_program_runs():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(xsoftmax.__version__)


def test_programs_of_the_readme(said):
    programs = {name: lines for name, lines in said.items() if name.startswith("readme")}
    assert len(programs) >= 4 and not any(programs.values()), programs


def test_programs_of_tutorials(said):
    programs = {name: lines for name, lines in said.items() if name.startswith("tutorial")}
    assert len(programs) > len(TUTORIALS) >= 8 and not any(programs.values()), "\n".join(sum(programs.values(), []))


def test_mistakes_are_seen(said):
    """Where a name of the package had no type, mypy would take anything."""
    for number, complaint in enumerate(MISTAKES.values()):
        assert any(complaint in line for line in said[f"mistake_{number}"]), (complaint, said[f"mistake_{number}"])


def test_public_names_have_types(said):
    """Of each name in `__all__`, mypy knows more than that there is one."""
    assert len(said["names"]) == len(NAMES), said["names"]
    for name, line in zip(NAMES, said["names"]):
        assert "Revealed type is" in line and 'is "Any"' not in line and "def (*args: Any" not in line, f"{name}: {line}"
