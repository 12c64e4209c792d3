"""Importing this lets a benchmark import studies."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "studies"))
