"""The figure of robust.py, for docs/studies/robust.md.

It shows accuracy against the share of hostile devices, by attack and data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _dropout_figures import FILE, MARKERS, STYLE
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure


def draw(results: Mapping[Any, Sequence[float]], folder: Path) -> Path:
    """Write robust.svg. A point is the median over seeds."""
    kinds, recipes, attacks, shares = (
        list(dict.fromkeys(getattr(cell, key) for cell in results))
        for key in ("data", "recipe", "attack", "share")
    )
    attacks = [attack for attack in attacks if attack]
    file = folder / "robust.svg"
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "robust"}):
        figure = Figure(figsize=(2.2 * len(attacks), 2.2 * len(kinds) + 0.5))
        axes = figure.subplots(len(kinds), len(attacks), squeeze=False, sharex=True, sharey=True)
        for line, data in enumerate(kinds):
            axes[line, 0].set_ylabel(f"test accuracy, %\ndata: {data}")
            for column, attack in enumerate(attacks):
                axes[0, column].set_title(attack)
                axes[-1, column].set_xlabel("hostile devices, %")
                axes[line, column].set_ylim(0, 100)
                for number, recipe in enumerate(recipes):
                    points = [
                        (cell.share, runs)
                        for cell, runs in results.items()
                        if (cell.data, cell.recipe) == (data, recipe)
                        and cell.attack in ("", attack)
                    ]
                    x = [100 * share for share, _ in points]
                    y = [100 * float(np.median(runs)) for _, runs in points]
                    look = {
                        "color": COLOURS[number % len(COLOURS)],
                        "marker": MARKERS[number % len(MARKERS)],
                    }
                    axes[line, column].plot(
                        x, y, label=recipe, markersize=3.5, linewidth=1.1, **look
                    )
        axes[0, -1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        axes[0, 0].set_xticks([100 * share for share in shares])
        figure.savefig(file, facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return file
