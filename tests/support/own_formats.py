"""Own encodings for tests: the one of the page, and ours written as own ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fleetlearn_protocol import BlockFormat
from fleetlearn_protocol.encodings import find_encoding

PAGE = Path(__file__).parents[2] / "docs" / "start" / "your-own-algorithm.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
OURS = ("float32", "float16", "bfloat16", "int8", "int4", "topk-0.1", "topk-0.25-int8")
OURS_AS_OWN = """
from fleetlearn_protocol import BlockFormat
from fleetlearn_protocol.encodings import INT8, find_encoding


def int8():
    return BlockFormat(INT8.block, *INT8.format[:3])


def top_k(percent: int):
    ours = find_encoding(f"topk-0.{percent}")
    return BlockFormat(ours.block, *ours.format[:3])
"""
"""A module with ours as their authors would have written them for another package."""


def signs(block: int = 1024) -> BlockFormat:
    """The encoding of the page."""
    names: dict[str, Any] = {"__name__": "thin_updates"}
    exec(compile(BLOCKS["thin_updates"], "thin_updates", "exec"), names)
    found: BlockFormat = names["signs"](block)
    return found


def as_own(name: str) -> BlockFormat:
    """Ours, as its author would have written it."""
    ours = find_encoding(name)
    return BlockFormat(ours.block, *ours.format[:3])
