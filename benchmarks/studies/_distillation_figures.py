"""The figures of distillation.py, for docs/studies/distillation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from _distillation_models import PLANE
from _distillation_rounds import logits_of
from _dropout_figures import FILE, STYLE
from fleetlearn_protocol import Bundle
from fleetlearn_simulator.results.html_page import COLOURS
from matplotlib.figure import Figure

POINTS = 160
"""Of the plane, along each axis."""
CLASSES = ("#d9534f", "#4a9d5b", "#3f6fb5")
"""A colour for each of the three classes; a point of the plane has their mix by its
probabilities."""


def draw(
    plane: Mapping[str, Any],
    curves: Mapping[tuple[float, str], Sequence[Sequence[float]]],
    bundle: Bundle,
    folder: Path,
) -> list[Path]:
    """Write distillation-plane.png and distillation-skewed.svg. ``bundle``: of the plane's
    models."""
    files = folder / "distillation-plane.png", folder / "distillation-skewed.svg"
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "distillation", "axes.grid": False}):
        figure = _plane(plane, bundle)
        figure.savefig(files[0], facecolor="white", bbox_inches="tight", dpi=110, metadata={})
    with mpl.rc_context(STYLE | FILE | {"svg.hashsalt": "distillation"}):
        figure = _curves(curves)
        figure.savefig(files[1], facecolor="white", bbox_inches="tight", metadata={"Date": None})
    return [*files]


def _plane(plane: Mapping[str, Any], bundle: Bundle) -> Figure:
    """The probabilities of each model in the plane, as mixed colours; points are the clients'."""
    axis = np.linspace(-PLANE, PLANE, POINTS, dtype=np.float32)
    points = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    logits = {name: logits_of(bundle, model, points) for name, model in plane["models"].items()}
    ensemble = np.mean([logits["client 1"], logits["client 2"]], axis=0)
    shown = {
        "client 1": logits["client 1"],
        "client 2": logits["client 2"],
        "FedAvg's mean": logits["FedAvg's mean"],
        "the ensemble": ensemble,
        "FedDF": logits["FedDF"],
    }
    colours = np.array([mpl.colors.to_rgb(each) for each in CLASSES])
    figure = Figure(figsize=(2.1 * len(shown), 2.5))
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True)
    for place, (name, values) in enumerate(shown.items()):
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        mixed = powers / powers.sum(axis=1, keepdims=True) @ colours
        picture = mixed.reshape(POINTS, POINTS, 3)
        edge = (-PLANE, PLANE, -PLANE, PLANE)
        axes[place].imshow(picture, origin="lower", extent=edge, alpha=0.75)
        clients = plane["clients"]
        own = [clients[place]] if place < len(clients) else clients
        for data in own:
            for label, colour in enumerate(CLASSES):
                x = data["x"][data["y"] == label]
                axes[place].plot(
                    *x.T, ".", color=colour, markersize=4.5, markeredgecolor="black",
                    markeredgewidth=0.3,
                )  # fmt: skip
        right = 100 * plane["accuracy"][name]
        axes[place].set_title(f"{name}\n{right:.1f} % of all classes", fontsize=8)
        axes[place].set(xlim=(-PLANE, PLANE), ylim=(-PLANE, PLANE), xticks=[], yticks=[])
    return figure


def _curves(curves: Mapping[tuple[float, str], Sequence[Sequence[float]]]) -> Figure:
    """Test accuracy by round. A line is the median over seeds, a band goes from the least to the
    greatest."""
    alphas = list(dict.fromkeys(alpha for alpha, _ in curves))
    figure = Figure(figsize=(2.4 * len(alphas), 2.3))
    axes = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
    for place, alpha in enumerate(alphas):
        for number, name in enumerate(("fedavg", "feddf")):
            runs = 100 * np.array(curves[alpha, name])
            rounds = np.arange(1, runs.shape[1] + 1)
            colour = COLOURS[number]
            axes[place].plot(rounds, np.median(runs, axis=0), color=colour, label=name)
            axes[place].fill_between(
                rounds, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.2, linewidth=0
            )
        axes[place].set(title=f"alpha = {alpha:g}", xlabel="round", ylim=(0, 100))
    axes[0].set_ylabel("test accuracy, %")
    axes[-1].legend(frameon=False, loc="lower right")
    return figure
