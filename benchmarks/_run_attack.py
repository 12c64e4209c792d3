"""Runs one attack in a process of its own, until the process is ended: ``_run_attack.py MODULE NAME ADDRESS``."""

from __future__ import annotations

import asyncio
import importlib
import sys


def main(module: str, name: str, address: str) -> None:
    attack = getattr(importlib.import_module(module), name)
    asyncio.run(attack(address, asyncio.Event()))


if __name__ == "__main__":
    main(*sys.argv[1:])
