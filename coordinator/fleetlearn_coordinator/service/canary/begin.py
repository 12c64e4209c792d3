"""Beginning a canary: its plan, its run, its first model, and what does not go together."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.paths import in_home

from fleetlearn_coordinator.plan.canary_settings import CanarySettings
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.scaled_plan import scale_plan
from fleetlearn_coordinator.plan.service_settings import ServiceError
from fleetlearn_coordinator.plan.toml_errors import read_tables
from fleetlearn_coordinator.service.backup_contents import is_path, path_strings, plain
from fleetlearn_coordinator.service.canary.about import (
    CanaryAbout,
    CanaryAsked,
    FirstModel,
    encoded,
)
from fleetlearn_coordinator.service.canary.acts import free_name
from fleetlearn_coordinator.service.canary.decision import CanaryState
from fleetlearn_coordinator.service.canary.first_model import find_first_model, why_misfit
from fleetlearn_coordinator.service.several.operations import Operations
from fleetlearn_coordinator.storage.canaries import CanaryRow
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.runs import WantedRun

CANARY = ".canary"
"""What the name of a canary's run ends with by default."""


class BegunCanary(NamedTuple):
    """A canary that was begun."""

    name: str
    """Of its run."""
    first: FirstModel
    remark: str
    """Why its first model is none of the old run's, for people. Empty: it is."""


def begin_canary(operations: Operations, of: str, asked: CanaryAsked) -> BegunCanary:
    """Begin a canary of a run. Raises FleetError, and begins nothing."""
    old = operations.find(of)
    _check_old(old)
    if not (asked.plan or asked.bundle or asked.model) or (asked.plan and asked.bundle):
        text = (
            "what is new? Name another plan, another bundle, a version or a file of the model; a "
            "plan names its bundle itself"
        )
        raise ServiceError(Code.BAD_MESSAGE, text)
    settings = _settings(operations, asked)
    old_plan = Plan.load(old.plan)
    folder = operations.runs.path.parent
    runs = {run.name for run in operations.runs.runs()}
    taken = runs | {each.stem for each in folder.iterdir()}
    name = asked.name or free_name(f"{of}{CANARY}", taken)
    if name in (runs if asked.plan else taken):
        what = "a run" if name in runs else f"a file in {folder}"
        text = f"there is {what} called {name} already: take another name with --name"
        raise StoreError(Code.DUPLICATE, text)
    draft = None if asked.plan else _plan_text(old.plan, folder / f"{name}.toml", asked.bundle)
    file = folder / f"{name}.toml" if draft is not None else in_home(asked.plan)
    plan = Plan.load(file) if draft is None else Plan.parse(draft, folder, file=str(file))
    operations.check(name, plan)
    _check_families(old_plan, plan)
    first, remark = _first_model(old_plan, plan, asked)
    _check_new(operations, old_plan, plan, settings, asked)
    about = CanaryAbout(settings, first, time.time(), operations.who)
    said = {"of": of, "plan": str(file.absolute()), "model": first.words}
    with operations.logged("canary began", name, **said):
        old = operations.find(of)
        _check_old(old)  # somebody may have begun another one, or stopped the run, meanwhile
        if draft is not None:
            file.write_text(draft, "utf-8")
        operations.runs.add(name, file, old.population)
        number = next(run.number for run in operations.runs.runs() if run.name == name)
        row = CanaryRow(
            run=number,
            of=old.number,
            phase="running",
            share=settings.steps[0],
            devices=(),
            tags=asked.tags,
            about=encoded(about),
            state=encoded(CanaryState()),
        )
        operations.runs.canaries.add(row)
    return BegunCanary(name, first, remark)


def _check_old(old: WantedRun) -> None:
    if old.split is not None:
        what = "is a canary" if old.split.is_canary else "has a canary"
        text = (
            f"the run {old.name} {what}: let it come to its end, or send it back with "
            "`fleetlearn-coordinator canary back`"
        )
        raise StoreError(Code.OUT_OF_TURN, text)
    if old.wanted == "stopped" or old.failed:
        text = (
            f"the run {old.name} is stopped: it has no devices that could try something. "
            "`fleetlearn-coordinator resume` lets it go on"
        )
        raise StoreError(Code.OUT_OF_TURN, text)


def _settings(operations: Operations, asked: CanaryAsked) -> CanarySettings:
    """Return the settings that are asked for, else those of the service file. Raises
    ServiceError."""
    given = operations.service.canary or CanarySettings()
    keys = {**msgspec.structs.asdict(given), **asked.settings}
    try:
        if unknown := keys.keys() - {*CanarySettings.__struct_fields__}:
            raise ValueError(f"canary.{min(unknown)} is no key of [canary]")
        found = read_tables(keys, "canary", CanarySettings, prefix="canary.")
        found.check()
    except ValueError as error:
        raise ServiceError(Code.BAD_MESSAGE, str(error)) from None
    return found


def _first_model(old: Plan, plan: Plan, asked: CanaryAsked) -> tuple[FirstModel, str]:
    """Return where the first model comes from, and why not from the old run. Raises FleetError
    where it cannot be had."""
    manifest, remark = open_bundle(plan.bundle).manifest, ""
    if asked.model.isdecimal():
        first = FirstModel(version=int(asked.model))
    elif asked.model:
        first = FirstModel(file=str(in_home(asked.model).absolute()))
    else:
        remark = why_misfit(open_bundle(old.bundle, files=()).manifest, manifest)
        first = FirstModel(of_bundle=bool(remark))
    own = bool(asked.model) or first.of_bundle
    if first.of_bundle and asked.take_over == "newest":
        text = f"the canary cannot go on from the old run's newest model: {remark}"
        raise ServiceError(Code.BAD_MESSAGE, text)
    take_over = asked.take_over or ("own" if own else "newest")
    first = msgspec.structs.replace(first, take_over=take_over)
    find_first_model(old, manifest, first)
    return first, remark


def _check_families(old: Plan, plan: Plan) -> None:
    """Raise PlanError where the canary's run or the old one has several models."""
    if families := [each.file for each in (old, plan) if each.is_family]:
        text = (
            f"{' and '.join(families)}: with [family] there is no canary. What decides about one "
            "compares the devices of two runs, and those of a family train different models. Try "
            "the new plan in a run of its own"
        )
        raise PlanError(Code.BAD_MESSAGE, text)


def _check_new(
    operations: Operations, old: Plan, plan: Plan, settings: CanarySettings, asked: CanaryAsked
) -> None:
    """Raise FleetError where the canary's run could not be served beside the old one."""
    if private := [each.file for each in (old, plan) if each.privacy is not None]:
        text = (
            f"{' and '.join(private)}: with [privacy] there is no canary. It is another run of the "
            "same devices with a privacy budget of its own, and neither counts what the other "
            "releases. Try the new plan in the simulator, then change the run's own plan"
        )
        raise PlanError(Code.BAD_MESSAGE, text)
    if secure := [each.file for each in (old, plan) if each.secure is not None]:
        text = (
            f"{' and '.join(secure)}: with [secure] there is no canary. It is another run of the "
            "same devices that begins from the same model, and two sums of that model's updates, "
            "one of each run, tell more than one. Try the new plan in the simulator, then change "
            "the run's own plan"
        )
        raise PlanError(Code.BAD_MESSAGE, text)
    if without := [each.file for each in (old, plan) if not each.algorithm.has_model]:
        text = (
            f"{' and '.join(without)}: a run without a model has no canary: there is nothing "
            "whose measurements could be compared. Start it as another run"
        )
        raise PlanError(Code.BAD_MESSAGE, text)
    for share in settings.steps:
        scale_plan(plan, share).check_served(operations.service)
    bundles = [open_bundle(each.bundle, files=()).sha256 for each in (old, plan)]
    if plan.tied and old.tied and bundles[0] == bundles[1]:
        text = (
            f"{plan.file}: devices keep vectors of this bundle for {old.file} ("
            f"{', '.join(plan.tied)}), and a canary of the same bundle would replace them. Export "
            "the model once more, under another name, and give it with --bundle"
        )
        raise PlanError(Code.BUSY, text)
    storage = find_storage(plan.data_dir)
    try:
        with storage.read_ledger() as ledger:
            is_new = ledger.newest_model() is None
    except StoreError as error:
        if error.code is not Code.UNKNOWN_CONTENT:
            raise
        is_new = True
    if not is_new:
        text = (
            f"{plan.file}: there is a run in {storage.where} already, and a canary begins with a "
            "model of its own: give the plan another data_dir"
        )
        raise PlanError(Code.DUPLICATE, text)


def _plan_text(old: Path, new: Path, bundle: str) -> str:
    """Return the old run's plan for another run beside it: in another file, with a data directory
    of its own, and with another bundle if there is one. Raises PlanError."""
    try:
        text = old.read_text("utf-8")
        raw = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise PlanError(Code.BAD_MESSAGE, f"{old}: the plan cannot be read: {error}") from None
    places = {"data_dir": new.with_suffix(".run")}
    if bundle:
        places["bundle"] = in_home(bundle)
    for table, key, value in path_strings(
        raw, ("bundle", "initial", "data_dir", "evaluation.data")
    ):
        if not is_path(value):
            _refuse_plan(old, f"{key} = {value} is no path")
        place = places.get(key, old.parent / in_home(value))
        table[key] = os.path.relpath(plain(place), plain(new.parent))
        for quote in "\"'":
            text = text.replace(f"{quote}{value}{quote}", f"{quote}{table[key]}{quote}")
    if "data_dir" not in raw:
        raw["data_dir"] = f"{new.stem}.run"
        text = f'data_dir = "{new.stem}.run"\n{text}'
    if tomllib.loads(text) != raw:
        _refuse_plan(old, "its paths cannot be replaced in its text")
    return f"# Made by `fleetlearn-coordinator canary start` from {old.name}.\n{text}"


def _refuse_plan(old: Path, why: str) -> None:
    text = (
        f"{old}: a canary's plan cannot be made of this one: {why}. Copy it, give the copy another "
        "data_dir, and name it with --plan"
    )
    raise PlanError(Code.BAD_MESSAGE, text)
