"""Writing TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w


def dump(tables: Mapping[str, Any]) -> str:
    """Return the text of a TOML file with these tables. Leaves out None, empty lists and empty
    tables."""
    return tomli_w.dumps(_without_empty(tables))


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = {key: _without_empty(item) for key, item in value.items()}
        return {
            key: item
            for key, item in items.items()
            if item is not None and item != [] and item != {}
        }
    return [_without_empty(item) for item in value] if isinstance(value, list | tuple) else value
