"""Importing this lets a study import what the benchmarks share (``_measure`` and others), which is
one folder up."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
