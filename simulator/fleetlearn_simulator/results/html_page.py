"""An HTML page of charts and tables in one file. Plotly's JavaScript is in it: it needs no
network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.errors import in_words
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError

COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#8c6d31",
    "#7f7f7f",
    "#6a51a3",
    "#a6761d",
)
"""Colour-blind people can tell the first eight apart (Okabe and Ito, Color Universal Design)."""
ABSENT = "-"
"""Shown instead of a number that is not known."""


class PagePart(NamedTuple):
    """A part of a page. ``page.html`` lays it out, and escapes its texts."""

    kind: Literal[
        "title", "section", "text", "note", "switch", "tiles", "table", "charts", "folded"
    ]
    """``switch`` lets the reader choose the horizontal axis of the charts. ``folded`` is text that
    a click shows."""
    content: Any = None
    """A text. For ``folded``: a heading and a text. For ``tiles``: rows of a name, a figure and a
    small text. For ``charts``: a list of ``Chart``. For ``table``: a ``Table``."""


class Chart(NamedTuple):
    """A chart: Plotly's data and layout. If they have ``meta`` for each axis, the chart follows the
    page's switch."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def chart(
    title: str,
    data: Sequence[dict[str, Any]],
    x: str = "",
    y: str = "",
    note: str = "",
    **more: Any,
) -> Chart:
    """Make a chart with named axes, in the page's style. ``more``: more of Plotly's layout."""
    layout = {
        "margin": {"l": 50, "r": 15, "t": 10, "b": 40},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": len(data) > 1,
        "hovermode": "x unified",
    }
    for key, value in more.items():
        layout[key] = {**layout[key], **value} if isinstance(layout.get(key), dict) else value  # type: ignore[dict-item]
    return Chart(title, note, list(data), layout)


def write_page(file: Path, title: str, parts: Iterable[PagePart]) -> Path:
    """Write a page. Raises SimulatorError if the extra is not installed, or the file cannot be
    written."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise SimulatorError(
            f'reports need the extra: pip install "fleetlearn[simulator]" ({error})'
        ) from None
    numbered, charts = [], dict[str, Any]()
    for part in parts:
        if part.kind == "charts":
            names = [f"chart{len(charts) + number}" for number in range(len(part.content))]
            charts |= {
                name: {"data": cells.data, "layout": cells.layout}
                for name, cells in zip(names, part.content, strict=True)
            }
            part = PagePart("charts", list(zip(names, part.content, strict=True)))
        numbered.append(part)
    # "<" could end the script that this is written into.
    content = msgspec.json.encode(charts).decode().replace("<", "\\u003c")
    environment = Environment(
        loader=PackageLoader("fleetlearn_simulator.results", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    page = environment.get_template("page.html")
    text = page.render(title=title, parts=numbered, plotly=get_plotlyjs(), charts=content)
    temporary = file.with_name(f".{file.name}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(file)
    except OSError as error:
        raise SimulatorError(f"{file} cannot be written: {in_words(error)}") from None
    return file


class Table(NamedTuple):
    """A table. Columns of words are aligned at the left and are wrapped."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[bool]
    """Whether each column holds words."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> PagePart:
    """Make a table. A column with a long cell is one of words."""
    return PagePart(
        "table",
        Table(
            headers, rows, [any(len(row[at]) > 24 for row in rows) for at in range(len(headers))]
        ),
    )


def numbers(values: NDArray[Any] | Iterable[float]) -> list[float | int | None]:
    """Return the values for JSON, with six digits. None stands for what is not a finite number."""
    rounded = (
        float(f"{float(value):.6g}") for value in np.asarray(list(values), np.float64).tolist()
    )
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else value
        for value in rounded
    ]


def time_unit(seconds: float) -> tuple[float, str]:
    """Return a unit for times up to this, in seconds, and its name."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * unit:
            return unit, name
    return 1.0, "seconds"


def byte_unit(most: float) -> tuple[float, str]:
    """Return a unit for sizes up to this, in bytes, and its name."""
    for power, name in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if most >= 10.0**power:
            return 10.0**power, name
    return 1.0, "bytes"


def span(seconds: float) -> str:
    """Return a time as people write it: 2 d 3 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    small, large, names = (1, 60, ("min", "s")) if seconds < 3600 else (60, 60, ("h", "min"))
    if seconds >= 86400:
        small, large, names = 3600, 24, ("d", "h")
    whole, rest = divmod(round(seconds / small), large)
    return f"{whole:,} {names[0]} {rest} {names[1]}" if rest else f"{whole:,} {names[0]}"


def size(count: float) -> str:
    """Return bytes as people write them: 3.2 GB."""
    unit, name = byte_unit(count)
    return f"{count / unit:.3g} {name}"


def share(part: float, whole: float) -> str:
    """Return a share in per cent."""
    return f"{100 * part / whole:.3g} %" if whole else ABSENT


def listed(counts: Mapping[str, float]) -> str:
    """Return counts as a list in words, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{value:,} {name}" for name, value in ordered) or "none"
