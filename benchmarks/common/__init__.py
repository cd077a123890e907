"""What the programs of this folder share. Importing it makes the package `examples` importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
