"""What the demos' commands have in common: options that are numbers, and a folder that one demo has for itself."""

from __future__ import annotations

import argparse
import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from examples.demo.processes import DemoError


def number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """Return what reads an option that is a number from ``low`` to ``high``, and says what is wrong with another."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} was given; expected {what} from {low:g} to {high:g}")
        return value

    return convert


@contextmanager
def own_folder(folder: Path, fresh: Sequence[Path]) -> Iterator[None]:
    """Have the folder for this demo alone, without the folders ``fresh`` that an earlier one left. Raises DemoError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DemoError(f"another demo is running in {folder}; give this one another: --output DIR") from None
        for each in fresh:
            shutil.rmtree(each, ignore_errors=True)
        yield
