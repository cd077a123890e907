"""Types of the package: user programs pass mypy in strict mode, and mypy finds mistakes in them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, TUTORIALS, cells_of, programs_of, written_by

import xsoftmax

PROGRAM = Path(__file__).parents[1] / "shared/typed_program.py"
# Set up by `make lint` and `make test`; not part of a user's environment.
MYPY = shutil.which("mypy") or shutil.which("mypy", path=str(ROOT / "build" / "lint-venv" / "bin"))
# scipy has no types, and torch lacks some types and explicit exports. mypy ignores errors in
# installed packages; here the package may not be installed.
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
A_TEXT_FOR_A_NUMBER = "xs.SampledSoftmaxLoss(8, '60', sampler='uniform', num_samples=4)"
MISTAKES = {
    A_TEXT_FOR_A_NUMBER: 'has incompatible type "str"; expected "int"',
    "xs.optim.RowAdam([], learning_rate=0.1)": 'Unexpected keyword argument "learning_rate"',
    "xs.clip_grad_norm_([], None)": 'has incompatible type "None"; expected "float"',
    "xs.no_such_name": 'Module has no attribute "no_such_name"',
}
MODULES = {
    "xs": xsoftmax, "xs.samplers": xsoftmax.samplers, "xs.optim": xsoftmax.optim,
    "xs.distributed": xsoftmax.distributed
}
pytestmark = pytest.mark.slow  # mypy has to read torch
NAMES = [f"{module}.{name}" for module, found in MODULES.items() for name in found.__all__]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Returns {program: lines of mypy} from one run, since reading torch takes long."""
    if MYPY is None:
        pytest.skip("needs mypy: make lint")
    folder = tmp_path_factory.mktemp("programs")
    texts = {
        f"readme_{number}": text
        for number, text in enumerate(programs_of(ROOT / "README.md"))
    }
    for path in TUTORIALS:
        program = "\n\n".join(cells_of(path))
        texts |= {
            f"tutorial_{path.stem}": program,
            **{f"tutorial_{path.stem}_{name}": text
               for name, text in written_by(program).items()}
        }
    texts |= {
        f"mistake_{number}": f"import xsoftmax as xs\n\n{line}\n"
        for number, line in enumerate(MISTAKES)
    }
    texts |= {
        "names": "import xsoftmax as xs\n\n" + "".join(f"reveal_type({name})\n" for name in NAMES),
        "typed_program": PROGRAM.read_text()
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "mypy.ini").write_text(CONFIG)
    package = Path(xsoftmax.__file__).parent.parent
    path = {} if package.name == "site-packages" else {"MYPYPATH": str(package)}
    done = subprocess.run([
        MYPY, "--config-file", "mypy.ini", "--python-executable", sys.executable, "--cache-dir",
        ROOT / "build" / "mypy-of-tests", "--no-error-summary", *(f"{name}.py" for name in texts)
    ], capture_output=True, text=True, cwd=folder, env={"PATH": "/usr/bin:/bin", **path})
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in texts}


def test_a_program_with_all_public_names_passes_mypy(said):
    assert said["typed_program"] == []


def test_the_typed_program_runs():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(xsoftmax.__version__)


def test_programs_of_the_readme_pass_mypy(said):
    programs = {name: lines for name, lines in said.items() if name.startswith("readme")}
    assert len(programs) >= 4 and not any(programs.values()), programs


def test_programs_of_tutorials_pass_mypy(said):
    programs = {name: lines for name, lines in said.items() if name.startswith("tutorial")}
    assert len(programs) > len(TUTORIALS) >= 8 and not any(programs.values()), "\n".join(
        sum(programs.values(), []))


def test_mypy_finds_mistakes(said):
    """A name without a type would accept anything."""
    for number, complaint in enumerate(MISTAKES.values()):
        assert any(complaint in line
                   for line in said[f"mistake_{number}"]), (complaint, said[f"mistake_{number}"])


def test_public_names_have_types(said):
    """mypy reveals a type other than Any for each name in `__all__`."""
    assert len(said["names"]) == len(NAMES), said["names"]
    for name, line in zip(NAMES, said["names"]):
        assert "Revealed type is" in line and 'is "Any"' not in line, f"{name}: {line}"
        assert "def (*args: Any" not in line, f"{name}: {line}"
