"""Runs the command line: ``python -m xsoftmax``."""

import sys

from .tools.cli import main

sys.exit(main())
