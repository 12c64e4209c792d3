"""``fleetlearn-coordinator vertical``: parties with other features of the same rows train a split
model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import commands_under, say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.commands.options import AsJson

if TYPE_CHECKING:
    from fleetlearn_coordinator.storage.vertical_folder import VerticalStatus

app = commands_under(
    "vertical", "A model that parties with other features of the same rows train together."
)
File = Annotated[Path, typer.Argument(metavar="VERTICAL.toml", help="The run's plan.")]
FILE = "vertical.toml"


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where the files are written.")],
    bundle: Annotated[Path, typer.Argument(help="top.bundle of what export_vertical wrote.")],
    labels: Annotated[
        str, typer.Option(help="The party that has the labels. Default: the first one.")
    ] = "",
) -> None:
    """Write a plan, and a token for each party. Overwrites nothing."""
    from fleetlearn_protocol import open_bundle
    from fleetlearn_protocol.manifest import SplitPart

    from fleetlearn_coordinator.service.vertical.settings import vertical_plan_file

    file = folder / FILE
    with expected_errors():
        split = open_bundle(bundle).manifest.split
        if not isinstance(split, SplitPart) or split.part != "top":
            raise FleetError(Code.BAD_MESSAGE, f"{bundle} is no top of a split model")
        names = [cut.party for cut in split.cuts]
        if labels and labels not in names:
            raise FleetError(
                Code.BAD_MESSAGE, f"there is no party {labels}; {bundle} is for {', '.join(names)}"
            )
        tokens = written_tokens(folder, FILE, names)
        text = vertical_plan_file(str(bundle.absolute()), tokens, labels or names[0])
        file.write_text(text, "utf-8")
    say(
        f"wrote {file}, in which {labels or names[0]} has the labels. Give each party its bundle "
        "and its token, NAME.token, and delete both here"
    )


@app.command()
def serve(
    file: File,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Train, until the run's steps are done or a signal ends it."""
    from fleetlearn_coordinator.service.vertical.settings import VerticalPlan
    from fleetlearn_coordinator.service.vertical.vertical_work import serve_vertical

    with expected_errors():
        plan = VerticalPlan.load(file)
        log_at(log_level, plan.log_format)
        serve_vertical(plan)


@app.command()
def status(file: File, as_json: AsJson = False) -> None:
    """Say how far the training is, and who is there."""
    from fleetlearn_coordinator.service.vertical.settings import VerticalPlan
    from fleetlearn_coordinator.storage.vertical_folder import read_vertical_status

    with expected_errors():
        found = read_vertical_status(VerticalPlan.load(file).data_dir)
    print_status(found, as_json=as_json)


@app.command()
def export(
    file: File,
    output: Annotated[Path, typer.Option(help="The ONNX file that is written.")],
    bottom: Annotated[
        list[Path] | None,
        typer.Option(
            help="What a party's `fleetlearn-device export-bottom` wrote. Once for each party: "
            "the file is then the whole model."
        ),
    ] = None,
) -> None:
    """Write the newest top as an ONNX model: activations of all parties in, the model's outputs
    out. With --bottom for each party: the whole model, from the arrays of all parties on."""
    from fleetlearn_protocol import write_inference_model
    from fleetlearn_protocol.vertical.joined_model import PartOrigin, with_origin

    from fleetlearn_coordinator.service.vertical.settings import VerticalPlan
    from fleetlearn_coordinator.service.vertical.whole_model import whole_model
    from fleetlearn_coordinator.storage.vertical_folder import newest_model

    with expected_errors():
        plan = VerticalPlan.load(file)
        bundle, split = plan.open_top()
        part = newest_model(plan.data_dir, bundle.sha256)
        content = write_inference_model(bundle, part.local)
        if bottom:
            files = {str(path): path.read_bytes() for path in bottom}
            content = whole_model(split.cuts, files, content, part.step)
        else:
            content = with_origin(content, PartOrigin(bundle.sha256, part.step))
        output.write_bytes(content)
    say(f"wrote {output}, the {'whole model' if bottom else 'top'} after step {part.step}")


def written_tokens(folder: Path, plan: str, names: Sequence[str]) -> dict[str, str]:
    """Write a token for each party. Returns what the plan has of them. Raises FleetError where one
    of the files, or the plan's, is there."""
    from fleetlearn_coordinator.service.vertical.settings import hash_of_token

    files = {name: folder / f"{name}.token" for name in names}
    there = next((path for path in (folder / plan, *files.values()) if path.exists()), None)
    if there is not None:
        raise FleetError(Code.DUPLICATE, f"{there} is there already: it stays as it is")
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {}
    for name, path in files.items():
        token = secrets.token_urlsafe(32)
        path.touch(mode=0o600)
        path.write_text(f"{token}\n", "utf-8")
        tokens[name] = hash_of_token(token)
    return tokens


def print_status(found: VerticalStatus, *, as_json: bool) -> None:
    """Print how a run is."""
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    there = [name for name, connected in found.parties.items() if connected]
    missing = [name for name in found.parties if name not in there]
    whose, unit, kept, somebody = {
        "vertical": ("", "step", "top", "party"),
        "splitfed": (" (SplitFed)", "round", "model", "device"),
        "turns": (" (turns)", "turn", "model", "device"),
    }[found.kind]
    served = "" if found.served else ", not served now"
    lines = {
        "run": f"{found.run}{whose}, {found.phase}{served}",
        unit: f"{found.step} of {found.steps}; the {kept} is kept after {unit} {found.checkpoint}",
        "rows": f"{found.rows} common to all parties" if found.kind == "vertical" else "",
        "there": ", ".join(there) or f"no {somebody}",
        "missing": ", ".join(missing) or f"no {somebody}",
        "loss": "not known yet" if found.loss is None else f"{found.loss:.6g}",
        "because": found.why,
    }
    for label, text in lines.items():
        if text:
            print(f"{label:<8} {text}")
