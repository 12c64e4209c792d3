"""``fleetlearn-simulate data-quality``: which devices a plan's looks at their data name, and which
of them the scenario has damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_coordinator.commands.data_quality import (
    QualityView,
    named,
    quality_lines,
    view_of,
)
from fleetlearn_protocol.errors import FleetError, in_words, many
from fleetlearn_protocol.typer_app import fail, say

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.fleet.looks import DAMAGED
from fleetlearn_simulator.fleet.simulated_contributions import FAILED
from fleetlearn_simulator.results.run_folder import ROUNDS, SCENARIO, exchanges_file, read_rows
from fleetlearn_simulator.scenario.corruptions import damaged
from fleetlearn_simulator.scenario.scenario import Scenario

app = typer.Typer()
LISTED = 20
"""Most devices that a line lists."""


class SimulatedQuality(msgspec.Struct, frozen=True):
    """What a simulated look found, beside what is true."""

    look: QualityView
    damaged: dict[str, str]
    """Each device that was looked at, or whose updates were measured, and is damaged by the
    scenario -> its corruption (``failures.corrupt``)."""
    found: list[str]
    """Those of them that are named."""
    accused: list[str]
    """The other devices that are named."""
    not_measured: str
    """Why what updates are worth was not measured in some round; empty: it was."""


@app.command("data-quality")
def data_quality(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whose data look unlike the others', as `fleetlearn-coordinator data-quality` does in a
    run of a plan with [quality], and which devices the scenario has damaged."""
    try:
        found = simulated_quality(folder)
    except (FleetError, OSError) as error:
        fail("fleetlearn-simulate", in_words(error, file=True))
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    for line in (*quality_lines(found.look), *truth_lines(found)):
        say(line)


def simulated_quality(folder: Path) -> SimulatedQuality:
    """Return the last look of a run. Raises SimulatorError where there is none."""
    if not (folder / SCENARIO).exists():
        raise SimulatorError(f"{folder} holds no run")
    scenario = Scenario.load_of_run(folder / SCENARIO)
    quality = scenario.plan.quality
    if quality is None:
        raise SimulatorError(
            f"{folder}: the plan has no [quality], so that nobody looks at the devices' data. Add "
            "the line [plan.quality] to the scenario, and run it again"
        )
    file = folder / exchanges_file("quality")
    looks = read_rows(folder, file.name) if file.exists() else []
    if not looks:
        raise SimulatorError(
            f"{folder}: no look at the devices' data is over yet: there is one after "
            f"{many(quality.every, 'committed round')}, and one after the last"
        )
    rounds = [row for row in read_rows(folder, ROUNDS) if row["how"] == "committed"]
    last = looks[-1]
    about = {"number": last["quality"], "closed": last["time"]}
    view = view_of(quality.alarm, {**last, **about}, rounds)
    measured = [device_of(each.device) for each in view.contributions]
    of_updates = damaged(scenario, measured, of_data=False)
    truth = {**last[DAMAGED], **{name_of(device): kind for device, kind in of_updates.items()}}
    told = named(view)
    why = next((row[FAILED] for row in reversed(rounds) if FAILED in row), "")
    return SimulatedQuality(
        view,
        dict(sorted(truth.items())),
        sorted(told & truth.keys()),
        sorted(told - truth.keys()),
        why,
    )


def truth_lines(found: SimulatedQuality) -> Iterator[str]:
    """Yield what is true, for people, a line each."""
    if found.not_measured:
        yield f"what updates are worth was not measured in some rounds: {found.not_measured}"
    if not found.damaged:
        yield "the scenario has damaged none of the devices that were looked at"
    else:
        yield (
            f"the scenario has damaged {many(len(found.damaged), 'device')} of those that were "
            f"looked at: {_listed([f'{name} ({kind})' for name, kind in found.damaged.items()])}"
        )
        missed = sorted(found.damaged.keys() - {*found.found})
        yield f"of them are named: {_listed(found.found)}; not named: {_listed(missed)}"
    yield f"named without damage: {_listed(found.accused)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more if names else "none"
