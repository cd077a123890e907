"""Example programs start from any folder, as files and as modules."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from example_checks import run_file
from examples.extreme_labels import train
from examples.image_classes import features
from examples.language_model import compare_samplers


# Programs that no other test starts.
@pytest.mark.parametrize("program", [train, features, compare_samplers],
                         ids=lambda program: program.__name__)
def test_a_file_starts_from_any_folder(program, tmp_path):
    assert run_file(program, tmp_path, "--help").startswith("usage: ")


def test_a_module_starts_from_the_checkout():
    """Imports are absolute, so no module is loaded twice, as a file and as part of the package."""
    checkout = Path(train.__file__).parents[2]
    subprocess.run([sys.executable, "-m", "examples.recommend.train", "--help"], cwd=checkout,
                   check=True, capture_output=True)
