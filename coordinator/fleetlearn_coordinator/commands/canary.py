"""``fleetlearn-coordinator canary``: a new plan, bundle or model for a few devices first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from fleetlearn_protocol.typer_app import commands_under, plain_table, say, show_table

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import AsJson, Ca, Token, WordsAndName, WordsAndRun
from fleetlearn_coordinator.commands.show import causes, date, span, tell
from fleetlearn_coordinator.commands.target import Access, reach, split
from fleetlearn_coordinator.service.views.records import CanaryView, OperationView

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.canary.decision import Action

app = commands_under("canary", "Try a new plan, bundle or model on a few devices.")
AT_FIRST = "; by default the service file's [canary]"
SAID: dict[Action, str] = {
    "widen": "goes to the next share of the devices",
    "back": "goes back: the old run gets its devices again",
    "finish": "takes the old run's place and its name",
}


@app.command()
def start(
    words: WordsAndName,
    plan: Annotated[
        str, typer.Option(metavar="PLAN.toml", help="Another plan, with a data_dir of its own.")
    ] = "",
    bundle: Annotated[
        str, typer.Option(metavar="BUNDLE", help="Another bundle, with the run's own plan.")
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="VERSION|FILE",
            help="The model: a version of the run, or a safetensors file. Default: the newest.",
        ),
    ] = "",
    name: Annotated[
        str, typer.Option(help="Of the canary's run. Default: the run's, with .canary.")
    ] = "",
    tag: Annotated[
        list[str] | None,
        typer.Option(help="A tag of the devices that have it first; may be given again."),
    ] = None,
    take_over: Annotated[
        str, typer.Option(metavar="newest|own", help="The model of the last step.")
    ] = "",
    step: Annotated[
        list[float] | None,
        typer.Option(help=f"A share of the devices; may be given again{AT_FIRST}."),
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Tasks that end in each step.")] = None,
    hold: Annotated[float | None, typer.Option(help="Minutes of each step, at least.")] = None,
    probation: Annotated[
        float | None, typer.Option(help="Minutes of the last step, at least.")
    ] = None,
    as_json: AsJson = False,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Let a few devices of a run have a new plan, bundle or model, beside the run.

    It goes on to more of them by itself, and back if they fail or are lost more often, or are
    slower, than the others. Over a port, files are those of the coordinator's machine."""
    from fleetlearn_coordinator.service.canary.about import CanaryAsked

    where, (of,) = split(words, 1, 1, "RUN")
    if take_over not in ("", "newest", "own"):
        raise typer.BadParameter(f"{take_over} was given; newest or own is expected")
    given = {"steps": step, "tasks": tasks, "hold": hold, "probation": probation}
    settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if "://" not in where:
        plan, bundle = (str(Path(each).absolute()) if each else "" for each in (plan, bundle))
        model = model if not model or model.isdecimal() else str(Path(model).absolute())
    asked = CanaryAsked(
        plan=plan,
        bundle=bundle,
        model=model,
        name=name,
        tags=tuple(tag or ()),
        take_over=take_over or None,  # type: ignore[arg-type]
        settings=settings,
    )
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        done = target.begin_canary(of, asked)
    if done.remark and not as_json:
        say(f"the model begins with the initial values of the new bundle: {done.remark}")
    _tell(done, f"{done.name} is a canary of {of}; it begins {done.when}", as_json=as_json)


@app.command()
def status(
    words: WordsAndRun = None, as_json: AsJson = False, token: Token = None, ca: Ca = None
) -> None:
    """Show the canaries of a host, or of one run: the step, what both kinds of devices did, the
    bounds, and why one went back."""
    where, names = split(words, 0, 1, "RUN")
    with expected_errors(), reach(where, Access(token=token, ca=ca)) as target:
        found = target.canaries(names[0] if names else None)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    if not found:
        print("there is no canary")
    for each in found:
        _print(each)


@app.command()
def widen(words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None) -> None:
    """Go on to the next share of the devices now."""
    _act(words, "widen", Access(token=token, ca=ca), as_json=as_json)


@app.command()
def back(words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None) -> None:
    """Stop a canary. The old run has all its devices again."""
    _act(words, "back", Access(token=token, ca=ca), as_json=as_json)


@app.command()
def finish(
    words: WordsAndName, as_json: AsJson = False, token: Token = None, ca: Ca = None
) -> None:
    """Let a canary that all devices have take the old run's place, before its probation is over.
    That cannot be undone."""
    _act(words, "finish", Access(token=token, ca=ca), as_json=as_json)


def _act(words: list[str], action: Action, access: Access, *, as_json: bool) -> None:
    where, (name,) = split(words, 1, 1, "RUN")
    with expected_errors(), reach(where, access) as target:
        done = target.act_on_canary(name, action)
    _tell(done, f"{done.name} {SAID[action]} {done.when}", as_json=as_json)


def _tell(done: OperationView, text: str, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(done).decode())
    else:
        say(text)


def _print(canary: CanaryView) -> None:
    steps = ", ".join(f"{100 * share:g} %" for share in canary.steps)
    head = f"{canary.name}: canary of {canary.of}, begun {date(canary.began)} by {canary.who}"
    tell(f"{head} from {canary.model}")
    step = f"step {canary.step} of {len(canary.steps)} ({steps})"
    where = {
        "running": f"{step} for {span(canary.seconds)}",
        "back": f"went back in {step}",
        "finished": "has taken the old run's place",
    }
    tell(f"{where[canary.phase]}: {canary.next}")
    table = plain_table("devices", "tasks", "done", "interrupted", "seconds", "ends", wraps="ends")
    for whose, arm in (("the canary's", canary.canary), ("the old run's", canary.control)):
        table.add_row(
            f"{arm.devices} {whose}",
            str(arm.given),
            str(arm.done),
            str(arm.interrupted),
            "" if arm.seconds is None else f"{arm.seconds:.3g}",
            causes(arm.causes),
        )
    show_table(table)
    for bound in canary.bounds:
        if bound.beyond or canary.phase == "running":
            tell(f"{'beyond the bound: ' * bound.beyond}{bound.text}")
