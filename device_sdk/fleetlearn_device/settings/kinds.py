"""What kinds of value a setting can have, and how each is read: from a text (a flag, a variable) or
from a TOML value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class SettingKind(NamedTuple):
    """A kind of value."""

    expected: str
    """What a person is to write, as "expected ..." ends."""
    read: Callable[[Any], Any]
    """Returns the value of a text or a TOML value. Raises ValueError."""
    metavar: str = "TEXT"
    """What the help shows for the value."""
    switch: bool = False
    """The flag takes no value: ``--NAME`` or ``--no-NAME``."""
    many: bool = False
    """A tuple of values: the flag may be given again, a variable has them with spaces between, a
    file has a list."""
    path: bool = False
    """A file or folder. A relative path in a settings file begins at that file's folder."""
    before_path: re.Pattern[str] | None = None
    """What may stand before the path. A text that does not match is no path."""


def text(metavar: str = "TEXT", expected: str = "a text that is not empty") -> SettingKind:
    """Return the kind of a text."""
    return SettingKind(expected, _text, metavar)


def path(metavar: str = "FILE") -> SettingKind:
    """Return the kind of a path."""
    return SettingKind("a path", _text, metavar, path=True)


DATA_KINDS = ("npz", "npy", "npy-folder", "csv", "parquet", "sqlite", "buffer", "images", "sounds")
"""The keys of ``data.sources.SOURCES``, which imports more than a help text may."""


def data() -> SettingKind:
    """Return the kind of a device's data: ``PATH``, ``KIND:PATH`` or ``MODULE:FUNCTION``."""
    kinds = "|".join(DATA_KINDS)
    before = re.compile(rf"((?:{kinds}):)?(?![A-Za-z_][\w.]*:[A-Za-z_]\w*$)")
    return SettingKind(
        "a path, KIND:PATH or MODULE:FUNCTION", _text, "DATA", path=True, before_path=before
    )


def texts(metavar: str = "TEXT", expected: str = "a list of texts") -> SettingKind:
    """Return the kind of several texts."""
    return SettingKind(expected, _text, metavar, many=True)


def whole(low: int, high: int, metavar: str = "N", unit: str = "") -> SettingKind:
    """Return the kind of a whole number from ``low`` to ``high``. ``unit``: such as ``MiB``."""

    def read(given: Any) -> int:
        if isinstance(given, str) and given.isdecimal():
            given = int(given)
        if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
            raise ValueError
        return given

    of = f" of {unit}" if unit else ""
    return SettingKind(f"a whole number{of} from {low} to {high}", read, metavar)


def number(low: float, high: float, metavar: str = "X", unit: str = "") -> SettingKind:
    """Return the kind of a number from ``low`` to ``high``. ``unit``: such as ``seconds``."""

    def read(given: Any) -> float:
        if isinstance(given, bool) or not isinstance(given, str | int | float):
            raise ValueError
        found = float(given)
        if not (math.isfinite(found) and low <= found <= high):
            raise ValueError
        return found

    of = f" of {unit}" if unit else ""
    return SettingKind(f"a number{of} from {low:g} to {high:g}", read, metavar)


def choice(*words: str) -> SettingKind:
    """Return the kind of one of these words."""

    def read(given: Any) -> str:
        if given not in words:
            raise ValueError
        return str(given)

    last = f"{', '.join(words[:-1])} or {words[-1]}"
    return SettingKind(last, read, f"{{{','.join(words)}}}")


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError
    return given


def _yes(given: Any) -> bool:
    words = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if isinstance(given, str):
        given = words.get(given.lower())
    if not isinstance(given, bool):
        raise ValueError
    return given


SWITCH = SettingKind("true or false", _yes, switch=True)
YES_OR_NO = SettingKind("yes or no (in a file: true or false)", _yes, "{yes,no}")
