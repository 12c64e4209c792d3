"""What came out of fedprox.py: means of the last rounds, paired differences with intervals, tables
and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np

LAST = 20
"""Rounds at the end that a run's figures are of."""
STUDENT = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}
"""97.5 % quantile of Student's t by degrees of freedom."""
PAIRS = (
    ("fedprox-1", "fedavg"),
    ("fedprox-0", "fedavg"),
    ("fedprox-1", "fedprox-0"),
    ("fedprox-adaptive", "fedprox-1"),
)
NAMES = {
    "fedavg": "FedAvg",
    "fedprox-0": "FedProx, mu = 0",
    "fedprox-1": "FedProx, mu = 1",
    "fedprox-adaptive": "FedProx, mu adaptive",
}
COLORS = {
    "fedavg": "#d55e00",
    "fedprox-0": "#009e73",
    "fedprox-1": "#0072b2",
    "fedprox-adaptive": "#cc79a7",
}
MEASURED = ("accuracy", "throughout", "loss")
Key = tuple[str, float, str]
"""Data, share of stragglers, method."""
Runs = Mapping[Key, Sequence[Mapping[str, Any]]]
"""The curves of each, by seed."""


def figures(run: Mapping[str, Any]) -> dict[str, float]:
    """A run's means of its last rounds; ``throughout``, the mean accuracy of all rounds; and
    ``swing``, the standard deviation of the training loss in the last rounds."""
    accuracy, loss = np.array(run["accuracy"]), np.array(run["loss"][-LAST:])
    return {
        "accuracy": float(accuracy[-LAST:].mean()),
        "throughout": float(accuracy.mean()),
        "loss": float(loss.mean()),
        "swing": float(loss.std()),
    }


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Their mean, and half the width of its 95 % interval by Student's t; 0 degrees of freedom have
    none."""
    half = STUDENT.get(len(values) - 1)
    spread = half * float(np.std(values, ddof=1)) / len(values) ** 0.5 if half else None
    return {"mean": float(np.mean(values)), "half": spread, "values": [*values]}


def levels_of(runs: Runs) -> dict[Key, list[dict[str, float]]]:
    """The figures of each run, by seed."""
    return {key: [figures(run) for run in rows] for key, rows in runs.items()}


def paired_of(levels: Mapping[Key, Sequence[Mapping[str, float]]]) -> dict[Key, dict[str, Any]]:
    """Return for each pair of methods the differences within a seed, and how many times less the
    first one's loss swings. If there are several data sets, also return the means over those that
    are not iid."""
    paired: dict[Key, dict[str, Any]] = {}
    for drop in dict.fromkeys(key[1] for key in levels):
        for one, other in PAIRS:
            name, others = f"{one} - {other}", []
            for data in dict.fromkeys(key[0] for key in levels):
                if (data, drop, one) not in levels or (data, drop, other) not in levels:
                    continue
                pairs = [*zip(levels[data, drop, one], levels[data, drop, other], strict=True)]
                values = {
                    key: [first[key] - second[key] for first, second in pairs] for key in MEASURED
                }
                swing = measure.middle(
                    [second["swing"] / first["swing"] for first, second in pairs]
                )
                paired[data, drop, name] = {key: interval(row) for key, row in values.items()} | {
                    "swing": swing
                }
                others += [values] if data != "iid" else []
            if len(others) > 1:
                means = {
                    key: np.mean([values[key] for values in others], axis=0).tolist()
                    for key in MEASURED
                }
                paired["mean without iid", drop, name] = {
                    key: interval(row) for key, row in means.items()
                }
    return paired


def nested(rows: Mapping[Key, Any]) -> dict[str, Any]:
    """The same by data, stragglers and method, as the JSON has it."""
    found: dict[str, Any] = {}
    for (data, drop, what), row in rows.items():
        found.setdefault(data, {}).setdefault(f"{drop:g}", {})[what] = row
    return found


def tables(
    levels: Mapping[Key, Sequence[Mapping[str, float]]], paired: Mapping[Key, Mapping[str, Any]]
) -> str:
    """Means of the methods, and the paired differences, as Markdown."""
    first = [("data", "stragglers", *NAMES.values())]
    for data, drop in dict.fromkeys(key[:2] for key in levels):
        cells = [
            level(levels[data, drop, name]) if (data, drop, name) in levels else "as FedAvg"
            for name in NAMES
        ]
        first.append((data, f"{100 * drop:.0f} %", *cells))
    titles = ("test accuracy", "of all rounds", "training loss", "swing, times smaller")
    second: list[tuple[str, ...]] = [("data", "stragglers", "difference", *titles)]
    for (data, drop, name), row in paired.items():
        swing = measure.show(row["swing"]) if "swing" in row else ""
        second.append(
            (data, f"{100 * drop:.0f} %", name, *(signed(row[key]) for key in MEASURED), swing)
        )
    return "\n".join(
        (
            (
                "Test accuracy [least-greatest of the seeds] / training loss / swing, of the last "
                f"{LAST} rounds:\n"
            ),
            measure.table(first),
            "\nPaired differences, with 95 % intervals:\n",
            measure.table(second),
        )
    )


def level(rows: Sequence[Mapping[str, float]]) -> str:
    accuracy, loss, swing = ([row[key] for row in rows] for key in ("accuracy", "loss", "swing"))
    shown = (
        f"{np.mean(accuracy):.3f} [{min(accuracy):.3f}-{max(accuracy):.3f}] / {np.mean(loss):.3f}"
    )
    return f"{shown} / {np.median(swing):.4f}"


def signed(value: Mapping[str, Any]) -> str:
    half = "" if value["half"] is None else f" ± {value['half']:.3f}"
    return f"{value['mean']:+.3f}{half}"


def draw(runs: Runs, file: Path) -> None:
    """The training loss against the round, a panel for each kind of data and share of stragglers:
    the mean of the seeds, and from the least to the greatest."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    rows, columns = (
        [*dict.fromkeys(key[0] for key in runs)],
        [*dict.fromkeys(key[1] for key in runs)],
    )
    figure, panels = plt.subplots(
        len(rows),
        len(columns),
        figsize=(3.4 * len(columns), 2.3 * len(rows) + 0.5),
        squeeze=False,
        sharex=True,
        sharey="row",
    )
    for row, data in enumerate(rows):
        for column, drop in enumerate(columns):
            panel = panels[row][column]
            for method, name in NAMES.items():
                if (data, drop, method) in runs:
                    losses = np.array([run["loss"] for run in runs[data, drop, method]])
                    rounds = np.arange(1, losses.shape[1] + 1)
                    panel.fill_between(
                        rounds, losses.min(0), losses.max(0), color=COLORS[method], alpha=0.15, lw=0
                    )
                    panel.plot(rounds, losses.mean(0), color=COLORS[method], lw=1, label=name)
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.set_title(
                f"{data if data == 'iid' else f'synthetic({data})'}, {100 * drop:.0f} % stragglers",
                fontsize=9,
            )
            panel.grid(alpha=0.3, which="both", lw=0.4)
            panel.tick_params(labelsize=8, which="both")
        panels[row][0].set_ylabel("training loss", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("round", fontsize=9)
    lines = {name: mpl.lines.Line2D([], [], color=COLORS[method]) for method, name in NAMES.items()}
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="upper center",
        ncols=len(lines),
        fontsize=9,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    figure.savefig(file, dpi=110)
    plt.close(figure)
