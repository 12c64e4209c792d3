"""A TOML file of settings: its values by dotted key, and the line on which each stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec.toml  # Python's own tomllib, or the package tomli for Python 3.10
from fleetlearn_protocol.paths import in_home


class SettingsFile:
    """A settings file that was read. Its errors are of the class ``error``."""

    def __init__(self, path: Path, text: str, raw: dict[str, Any], error: type[ValueError]) -> None:
        self.path, self._text, self._raw, self._error = path, text, raw, error
        self.values = dict(_flat(raw))

    @classmethod
    def load(cls, given: str, error: type[ValueError]) -> SettingsFile:
        """Read a file. Raises ``error``."""
        try:
            path = in_home(given)
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise error(f"{given}: this is not UTF-8; expected a TOML file") from None
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise error(f"{given}: the settings file cannot be read: {why}") from None
        try:
            return cls(path, text, msgspec.toml.decode(text), error)
        except ImportError:
            raise error(
                f"{given}: Python 3.10 needs a package to read TOML: pip install tomli"
            ) from None
        except (msgspec.DecodeError, RecursionError) as problem:
            raise error(f"{given}: this is not TOML: {problem}") from None

    def refuse_unknown(self, keys: Iterable[str], groups: Iterable[str]) -> None:
        """Raise the error for the first key that is no setting, or a table that is none."""
        known, tables = [*keys], [*groups]
        for group in tables:
            if not isinstance(self._raw.get(group, {}), dict):
                names = ", ".join(key for key in known if key.startswith(f"{group}."))
                raise self._error(
                    f"{self.where(group)}: {group} = {self._raw[group]!r} was given; expected the "
                    f"table [{group}], with {names}"
                )
        for key, value in self.values.items():
            empty_table = value == {} and key in tables
            if key not in known and not empty_table:
                raise self._error(f"{self.where(key)}: {key} is not a setting; {_hint(key, known)}")

    def where(self, key: str) -> str:
        """Return the file and, where it is found, the line of a key."""
        line = _line_of(self._text, key)
        return str(self.path) if line is None else f"{self.path}, line {line}"

    def beside(self, value: str, before: re.Pattern[str] | None = None) -> str:
        """Return a path of the file: a relative one begins at the file's folder. ``before``: what
        may stand before the path; a value that does not match is no path."""
        mark = ""
        if before is not None:
            found = before.match(value)
            if found is None:
                return value
            mark, value = found[0], value[found.end() :]
        whole = value if value.startswith("~") else str(self.path.absolute().parent / value)
        return mark + whole


def _flat(raw: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in raw.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _hint(key: str, known: list[str]) -> str:
    """Return the end of the sentence on an unknown key: what may have been meant. A key may be
    right but in a wrong table, so its last word counts."""
    last = {each: each.rpartition(".")[2] for each in known}
    near = difflib.get_close_matches(key.rpartition(".")[2], last.values(), n=2, cutoff=0.7)
    close = [each for each in known if last[each] in near]
    return f"did you mean {' or '.join(close)}?" if close else "see `fleetlearn-device config`"


def _line_of(text: str, key: str) -> int | None:
    """Return the line of a key, counted from 1. tomllib does not tell; None where a file writes the
    key in an unusual way."""
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.\s-]+?)\s*\]", line):
            table = re.sub(r"\s", "", header[1]) + "."
            if table == f"{key}.":
                return number
        elif name := re.match(r"""\s*([\w.\s"'-]+?)\s*=""", line):
            found = table + re.sub(r"""[\s"']""", "", name[1])
            # An inline table has its keys on its own line.
            if found == key or (key.startswith(f"{found}.") and "{" in line):
                return number
    return None
