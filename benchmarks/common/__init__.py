"""Modules that benchmarks share. Importing the package makes `examples` importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
