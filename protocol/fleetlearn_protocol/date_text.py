"""Moments as people read them."""

from __future__ import annotations

import time


def date_text(at: float) -> str:
    """Return a Unix time as text: ``2026-11-27 17:28:54Z``."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))
