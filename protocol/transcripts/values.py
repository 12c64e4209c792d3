"""Values of a transcript: placeholders, which are bound at their first use, and what may stand for
a range."""

from __future__ import annotations

import json
from typing import Any


class Mismatch(Exception):  # noqa: N818 - it is a finding, and not an error of this program
    """What the device did differs from the transcript; the text says how."""


def fill(value: Any, bound: dict[str, Any]) -> Any:
    """Return the value with what its placeholders ("$name") are bound to."""
    if isinstance(value, dict):
        return {key: fill(part, bound) for key, part in value.items()}
    if isinstance(value, list):
        return [fill(part, bound) for part in value]
    if isinstance(value, str) and value.startswith("$"):
        if value not in bound:
            raise Mismatch(f"the transcript uses {value} before anything was bound to it")
        return bound[value]
    return value


def compare(expected: Any, came: Any, bound: dict[str, Any], place: str = "") -> list[str]:
    """Return a line for each difference, and bind the placeholders that are new. Fields of ``came``
    that are not named in ``expected`` may be anything."""
    if isinstance(expected, str) and expected.startswith("$"):
        expected = bound.setdefault(expected, came)
    if isinstance(expected, list):
        expected = [bound.get(part, part) if isinstance(part, str) else part for part in expected]
    if isinstance(expected, dict) and expected.keys() & {"at least", "at most"}:
        least, most = expected.get("at least", float("-inf")), expected.get("at most", float("inf"))
        fits = isinstance(came, int | float) and least <= came <= most
        return (
            []
            if fits
            else [
                (
                    f"{place} is {shown(came)}; expected "
                    f"{' and '.join(f'{k} {v}' for k, v in expected.items())}"
                )
            ]
        )
    if isinstance(expected, dict) and expected.keys() == {"has"}:
        if isinstance(came, list) and all(part in came for part in expected["has"]):
            return []
        return [f"{place} is {shown(came)}; expected {shown(expected['has'])} in it"]
    if isinstance(expected, dict) and isinstance(came, dict):
        lines = []
        for key, value in expected.items():
            where = f"{place}.{key}".lstrip(".")
            lines += (
                compare(value, came[key], bound, where)
                if key in came
                else [f"{where} is not there"]
            )
        return lines
    return (
        []
        if expected == came
        else [f"{place or 'it'} is {shown(came)}; expected {shown(expected)}"]
    )


def shown(value: Any) -> str:
    """Return the value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 300 else f"{text[:300]}..."
