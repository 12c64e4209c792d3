"""The columns of some rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from numpy.typing import NDArray

Columns: TypeAlias = Mapping[str, NDArray[Any]]
"""Name of an array of the bundle's batch -> its values, whose first axis counts the rows."""
