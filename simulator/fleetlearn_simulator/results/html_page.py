"""A page of figures in one file: HTML with Plotly's JavaScript in it, which needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.errors import SimulatorError

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f", "#6a51a3", "#a6761d",
)  # fmt: skip
"""Told apart by the colour-blind, as far as eight go (Okabe and Ito, Color Universal Design)."""
ABSENT = "-"
"""In place of a figure that there is not."""
SWITCH = """<fieldset><span class="soft">against</span>
<label><input type="radio" name="axis" value="rounds" checked> rounds</label>
<label><input type="radio" name="axis" value="time"> virtual time</label>
<label><input type="radio" name="axis" value="bytes"> bytes sent</label>
<label><input type="checkbox" id="logarithmic"> logarithmic scale</label></fieldset>"""


class Chart(NamedTuple):
    """A figure. With ``meta`` in its layout and its traces, both by axis, it follows the page's switch."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def chart(title: str, data: Sequence[dict[str, Any]], x: str = "", y: str = "", note: str = "", **more: Any) -> Chart:
    """A chart with the names of its axes and the page's manners."""
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


def write_page(file: Path, title: str, parts: Iterable[str | Sequence[Chart]]) -> Path:
    """Write a page of pieces of HTML and rows of charts. Raises SimulatorError: Plotly is not installed, no such
    folder."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise SimulatorError(f"reports need the extra: pip install 'fleetlearn[simulator]' ({error})") from None
    charts: dict[str, Any] = {}
    body = []
    for part in parts:
        if isinstance(part, str):
            body.append(part)
            continue
        figures = []
        for row in part:
            charts[name := f"chart{len(charts)}"] = {"data": row.data, "layout": row.layout}
            note = f'<p class="soft">{escape(row.note)}</p>' if row.note else ""
            figures.append(
                f"<figure><figcaption><h3>{escape(row.title)}</h3>{note}</figcaption>"
                f'<div class="chart" id="{name}" style="height: {row.layout.get("height", 320)}px"></div></figure>'
            )
        body.append(f'<div class="charts">{"".join(figures)}</div>')
    # Within a script, "<" could end it.
    content = msgspec.json.encode(charts).decode().replace("<", "\\u003c")
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    text = template.substitute(title=escape(title), body="\n".join(body), plotly=get_plotlyjs(), charts=content)
    temporary = file.with_name(f".{file.name}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(file)
    except OSError as error:
        raise SimulatorError(f"{file} cannot be written: {error}") from None
    return file


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """Names, figures, and what is said of them in small."""
    rows = []
    for name, value, small in values:
        words = f"<small>{escape(small)}</small>" if small else ""
        rows.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{words}</dd></div>")
    return f'<dl class="tiles">{"".join(rows)}</dl>'


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of words have them at the left and wrap."""
    rows = list(rows)
    words = [any(len(row[place]) > 24 for row in rows) for place in range(len(headers))]

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="words"' if wide else "" for wide in words)
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells("th", headers)}</tr></thead><tbody>{lines}</tbody></table></div>'
    )


def numbers(values: NDArray[Any] | Iterable[float]) -> list[float | int | None]:
    """For JSON, with six digits; None for what is not a number."""
    rounded = (float(f"{float(value):.6g}") for value in np.asarray(list(values), np.float64).tolist())
    return [None if not math.isfinite(value) else int(value) if value == int(value) else value for value in rounded]


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in seconds, and its name, for times up to this."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * unit:
            return unit, name
    return 1.0, "seconds"


def byte_unit(most: float) -> tuple[float, str]:
    """The unit in bytes, and its name, for numbers up to this."""
    for power, name in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if most >= 10.0**power:
            return 10.0**power, name
    return 1.0, "bytes"


def span(seconds: float) -> str:
    """A time in words: 2 d 3 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    small, large, names = (1, 60, ("min", "s")) if seconds < 3600 else (60, 60, ("h", "min"))
    if seconds >= 86400:
        small, large, names = 3600, 24, ("d", "h")
    whole, rest = divmod(round(seconds / small), large)
    return f"{whole:,} {names[0]} {rest} {names[1]}" if rest else f"{whole:,} {names[0]}"


def size(count: float) -> str:
    """Bytes in words: 3.2 GB."""
    unit, name = byte_unit(count)
    return f"{count / unit:.3g} {name}"


def share(part: float, whole: float) -> str:
    """In per cent."""
    return f"{100 * part / whole:.3g} %" if whole else ABSENT


def listed(counts: Mapping[str, float]) -> str:
    """Counts in words, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{value:,} {name}" for name, value in ordered) or "none"
