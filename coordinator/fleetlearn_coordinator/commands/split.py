"""``fleetlearn-coordinator split``: devices with rows of their own train a model that is divided at
a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_protocol.typer_app import commands_under, say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.commands.options import AsJson
from fleetlearn_coordinator.commands.vertical import print_status, written_tokens

app = commands_under(
    "split", "A model divided at a layer, which devices with other rows train together."
)
File = Annotated[Path, typer.Argument(metavar="SPLIT.toml", help="The run's plan.")]
FILE = "split.toml"


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where the files are written.")],
    parts: Annotated[
        Path, typer.Argument(help='The folder that export_bundle(..., split="layer") wrote.')
    ],
    devices: Annotated[str, typer.Option(help="The devices' names: a,b,c.")],
    turns: Annotated[
        bool,
        typer.Option("--turns", help="One device after the other. Default: all at the same time."),
    ] = False,
) -> None:
    """Write a plan, and a token for each device. Overwrites nothing."""
    from fleetlearn_coordinator.service.vertical.rounds_settings import (
        check_new_plan,
        split_plan_file,
    )

    names = [name.strip() for name in devices.split(",") if name.strip()]
    with expected_errors():
        check_new_plan(parts, names)
        tokens = written_tokens(folder, FILE, names)
        (folder / FILE).write_text(split_plan_file(parts.absolute(), tokens, turns=turns), "utf-8")
    say(
        f"wrote {folder / FILE}. Give each device device.bundle and its token, NAME.token, and "
        "delete the tokens here"
    )


@app.command()
def serve(
    file: File,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Train, until the run's rounds are done or a signal ends it."""
    from fleetlearn_coordinator.service.vertical.rounds_settings import SplitPlan
    from fleetlearn_coordinator.service.vertical.rounds_work import serve_split

    with expected_errors():
        plan = SplitPlan.load(file)
        log_at(log_level, plan.log_format)
        serve_split(plan)


@app.command()
def status(file: File, as_json: AsJson = False) -> None:
    """Say how far the training is, and who is there."""
    from fleetlearn_coordinator.service.vertical.rounds_settings import SplitPlan
    from fleetlearn_coordinator.storage.vertical_folder import read_vertical_status

    with expected_errors():
        found = read_vertical_status(SplitPlan.load(file).data_dir)
    print_status(found, as_json=as_json)


@app.command()
def export(
    file: File,
    output: Annotated[Path, typer.Option(help="The ONNX file that is written.")],
) -> None:
    """Write the newest model, bottom and top, as one ONNX file."""
    from fleetlearn_coordinator.service.vertical.rounds_settings import SplitPlan
    from fleetlearn_coordinator.service.vertical.whole_model import split_model
    from fleetlearn_coordinator.storage.vertical_folder import newest_model

    with expected_errors():
        plan = SplitPlan.load(file)
        parts = plan.open_parts()
        part = newest_model(plan.data_dir, parts.top.sha256)
        output.write_bytes(split_model(parts, part))
    say(f"wrote {output}, the whole model after {part.step} {plan.unit}")
