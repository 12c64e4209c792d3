"""What the demos' commands have in common: options that are numbers, and a folder that one demo has
for itself."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.demo.processes import DemoError


def number(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """Return what reads an option that is a number from ``low`` to ``high``, and says what is wrong
    with another."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"{text!r} was given; expected {what} from {low:g} to {high:g}"
            )
        return value

    return convert


def parser_of(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a demo's parser. command: its name after ``make`` and as a module of examples/."""
    module = command.replace("-", "_")
    return argparse.ArgumentParser(
        prog=f"make {command}" if "MAKELEVEL" in os.environ else f"python -m examples.{module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_number(
    parser: argparse.ArgumentParser, name: str, default: float, kind: Any, text: str
) -> None:
    """Add an option that is a number, read by ``kind``."""
    parser.add_argument(
        name, default=default, type=kind, metavar="N", help=f"{text}; default: %(default)s"
    )


@contextmanager
def own_folder(folder: Path, fresh: Sequence[Path]) -> Iterator[None]:
    """Have the folder for this demo alone, without the folders ``fresh`` that an earlier one left.
    Raises DemoError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DemoError(
                f"another demo is running in {folder}; give this one another: --output DIR"
            ) from None
        for each in fresh:
            shutil.rmtree(each, ignore_errors=True)
        yield
