"""What is left of the demo: a summary as JSON and as text, a plot, and the model, tried out."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples import digits, predict
from examples.demo.fleet import Paths
from examples.demo.processes import DemoError, run_command
from examples.demo.screen import Round, size
from examples.demo.strikes import Kill, Strikes

BLUE, ORANGE, RED, GREEN, PURPLE, GREY = (
    "#2563a8",
    "#d9822b",
    "#c0392b",
    "#2e8b57",
    "#7d3c98",
    "#8a8f98",
)


def summarize(
    rounds: list[Round], strikes: Strikes, exported: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The content of summary.json. ``rounds`` holds at least one that was committed."""
    committed = [round_ for round_ in rounds if round_.outcome == "committed"]
    dropped: Counter[str] = Counter()
    for row in rounds:
        dropped.update(row.dropped)
    up, down = (
        sum(round_.bytes_up for round_ in rounds),
        sum(round_.bytes_down for round_ in rounds),
    )
    return {
        "accuracy": committed[-1].accuracy,
        "loss": committed[-1].loss,
        "rounds": len(committed),
        "abandoned": len(rounds) - len(committed),
        "devices": len(strikes.fleet.devices),
        "runtimes": dict(Counter(device.runtime for device in strikes.fleet.devices)),
        "killed": len(strikes.kills),
        "resumed": sum(kill.returned_in_round is not None for kill in strikes.kills),
        "coordinator_killed": int(strikes.coordinator is not None),
        "reports": sum(round_.reports for round_ in rounds),
        "dropped": dict(dropped),
        "bytes": up + down,
        "bytes_up": up,
        "bytes_down": down,
        **more,
        "export": exported,
        "kills": [asdict(kill) for kill in strikes.kills],
        "coordinator_kill": strikes.coordinator and asdict(strikes.coordinator),
        "history": [{**asdict(round_), "cohort": round_.cohort} for round_ in rounds],
    }


def show(summary: dict[str, Any], paths: Paths) -> None:
    """The summary for people, and the command that uses the model."""
    table = Table(show_header=False, title="summary", title_justify="left")
    dropped = (
        ", ".join(f"{count} {cause}" for cause, count in sorted(summary["dropped"].items()))
        or "none"
    )
    rows = {
        "held-out accuracy": f"{summary['accuracy']:.1%} (loss {summary['loss']:.3f})",
        "rounds": f"{summary['rounds']} committed, {summary['abandoned']} abandoned",
        "reports": f"{summary['reports']} accepted; dropped: {dropped}",
        "devices": (
            f"{summary['devices']}: {summary['killed']} were killed, {summary['resumed']} came back"
        ),
        "runtimes": ", ".join(
            f"{count} on {name}" for name, count in sorted(summary["runtimes"].items())
        ),
        "coordinator": _of_death(summary["coordinator_kill"]),
        "bytes": f"{size(summary['bytes_up'])} up, {size(summary['bytes_down'])} down",
        "time": f"{summary['seconds']:.0f} s, {summary['training_seconds']:.0f} s of them training",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    console = Console(highlight=False, markup=False)
    console.print(table)
    python = _short(sys.executable)
    for what, path in {"summary": paths.summary, "plot": paths.plot, "model": paths.model}.items():
        console.print(f"{what:8} {_short(path)}", soft_wrap=True)
    script = _short(predict.__file__)
    console.print(f"use it   {shlex.join([python, script, _short(paths.model)])}", soft_wrap=True)


def _of_death(death: dict[str, Any] | None) -> str:
    """Return what became of the coordinator, and of the reports that it had accepted before."""
    if death is None:
        return ""
    killed = f"killed in round {death['round']}, up again after {death['down']:.1f} s"
    return f"{killed}; the {death['reports']} reports that it had all counted"


def _short(path: str | os.PathLike[str]) -> str:
    """Relative to the working directory where it is below that."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def write_summary(summary: dict[str, Any], path: Path) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    draft.replace(path)


def export_model(paths: Paths, expected: float) -> None:
    """Write the trained model with the coordinator's command. Raises DemoError where that file, run
    by ONNX Runtime, does not have the accuracy on the held-out test set that was ``expected``."""
    command = [Path(sys.executable).with_name("fleetlearn-coordinator"), "export-model", paths.plan]
    run_command(
        "export-model",
        [*command, "--output", paths.model],
        paths.logs / "export-model.log",
        timeout=60.0,
    )
    data = digits.data()
    accuracy = float((predict.predict(paths.model, data.x_test) == data.y_test).mean())
    if abs(accuracy - expected) > 1.5 / len(data.y_test):  # one near tie may fall either way
        raise DemoError(
            f"{paths.model} has accuracy {accuracy:.4f}, the model it was made of {expected:.4f}"
        )


def plot(rounds: list[Round], strikes: Strikes, path: Path, target: float) -> None:
    """Held-out accuracy and loss, and what became of each round's tasks, with the deaths and
    returns marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    measured = [
        round_ for round_ in rounds if round_.accuracy is not None and round_.loss is not None
    ]
    numbers = [row.number for row in measured]
    figure, panels = plt.subplots(
        3,
        1,
        figsize=(10, 7.2),
        sharex=True,
        height_ratios=(2.6, 1.2, 1.2),
        layout="constrained",
        dpi=130,
    )
    above, losses, tasks = panels
    above.plot(numbers, [row.accuracy for row in measured], color=BLUE, lw=2, marker="o", ms=3.5)
    above.axhline(target, color=GREY, lw=0.8, ls="--")
    above.set_ylabel("held-out accuracy")
    above.set_ylim(0, 1.03)
    above.set_yticks(
        [0, 0.2, 0.4, 0.6, 0.8, target], ["0", "20%", "40%", "60%", "80%", f"{target:.0%}"]
    )
    losses.plot(numbers, [row.loss for row in measured], color=ORANGE, lw=2, marker="o", ms=3.5)
    losses.set_yscale("log")
    losses.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter(NullFormatter())
    losses.set_ylabel("held-out loss")

    bottom = [round_.reports for round_ in rounds]
    tasks.bar([round_.number for round_ in rounds], bottom, color=BLUE, width=0.7, label="reports")
    causes = sorted(
        {cause for round_ in rounds for cause in round_.dropped},
        key=lambda cause: (cause != "lost", cause),
    )
    for cause, colour in zip(
        causes, (RED, "#c9ccd1", "#e0b04b", "#7d5ba6", GREEN) * 9, strict=False
    ):
        counts = [round_.dropped.get(cause, 0) for round_ in rounds]
        tasks.bar(
            [round_.number for round_ in rounds],
            counts,
            bottom=bottom,
            color=colour,
            width=0.7,
            label=cause,
        )
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    tasks.set_ylabel("tasks")
    tasks.set_xlabel("round")
    tasks.set_xlim(0.2, rounds[-1].number + 0.8)
    tasks.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    tasks.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)

    before, height = -float(len(rounds)), 0.62
    for number, text, colour in sorted(_marks(strikes)):
        close = number - before < len(rounds) / 8
        # a near one's text stands lower
        before, height = number, 0.36 if close and height > 0.5 else 0.62
        for panel in panels:
            panel.axvline(number, color=colour, lw=1.1, ls=":", zorder=0.5)
        above.annotate(
            text,
            (number, height),
            color=colour,
            fontsize=9,
            va="top",
            xytext=(4, 0),
            textcoords="offset points",
        )
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    final = measured[-1]
    title = (
        f"{len(strikes.fleet.devices)} devices, {len(measured)} rounds: {final.accuracy:.1%} on "
        "held-out digits"
    )
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path)
    plt.close(figure)


def _marks(strikes: Strikes) -> list[tuple[float, str, str]]:
    """(round, text, colour) of what happened, one mark for a round and kind."""
    marks: dict[tuple[int, str], list[Kill]] = {}
    for kill in strikes.kills:
        marks.setdefault((kill.round, "killed"), []).append(kill)
        if kill.returned_in_round is not None and kill.returned_in_round != kill.round:
            marks.setdefault((kill.returned_in_round, "back"), []).append(kill)
    found = []
    for (number, what), kills in sorted(marks.items()):
        count = f"{len(kills)} device{'s' if len(kills) > 1 else ''}"
        at_once = sum(kill.returned_in_round == number for kill in kills)
        text = f"{count}\n{what}" + (
            f",\n{at_once} back\nat once" if what == "killed" and at_once else ""
        )
        found.append((float(number), text, RED if what == "killed" else GREEN))
    if strikes.coordinator is not None:
        found.append(
            (float(strikes.coordinator.round), "coordinator\nkilled and\nrestarted", PURPLE)
        )
    return found
