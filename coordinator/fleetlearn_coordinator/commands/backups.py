"""The commands ``fleetlearn-coordinator backup`` and ``restore``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.backup import back_up
from fleetlearn_coordinator.service.backup import restore as restore_backup
from fleetlearn_coordinator.service.backup_manifest import (
    BackedUpRun,
    BackupManifest,
    verify_backup,
)
from fleetlearn_coordinator.service.training_run.private_budget import (
    count_releases as count_made_elsewhere,
)
from fleetlearn_coordinator.storage.identities import COMMAND

app = typer.Typer()
AsJson = Annotated[bool, typer.Option("--json", help="Print the backup's manifest as JSON.")]
Backup = Annotated[Path, typer.Argument(metavar="BACKUP", help="The folder of a backup.")]


@app.command()
def backup(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help=(
                "A service file that names a folder of runs, or a plan; or a data directory alone. "
                "With --verify: the folder of a backup."
            ),
        ),
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="TARGET", help="The folder to write, a new one.")
    ] = None,
    service: Annotated[
        Path | None,
        typer.Option(metavar="SERVICE.toml", help="The service file with which a plan is served."),
    ] = None,
    keys: Annotated[
        bool,
        typer.Option(help="Also copy the private keys, passwords and tokens of the service file."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Make no backup: check the one that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy all that a run or a host needs into one folder, also while it is served. The copy is
    whole, or not there."""
    with expected_errors():
        if verify:
            if target is not None or service is not None or keys:
                raise typer.BadParameter("--verify takes the folder of a backup, and nothing else")
            manifest = verify_backup(source)
        elif target is None:
            raise typer.BadParameter("a folder to write is expected", param_hint="TARGET")
        else:
            manifest = back_up(source, target, service=service, keys=keys)
    if as_json:
        print(msgspec.json.encode(manifest).decode())
        return
    size = sum(file.size for file in manifest.files)
    what = f"{len(manifest.files)} files, {size / 2**20:.1f} MiB"
    print(f"{source} is whole: {what}" if verify else f"wrote {target}: {what}")
    for run in manifest.runs:
        print(_about(run))
    if not verify:
        _say_what_is_secret(manifest)


@app.command()
def restore(
    source: Backup,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to write, a new one.")
    ],
    as_json: AsJson = False,
) -> None:
    """Write what a backup has into a new folder, from which it can be served. The backup is
    verified, and stays as it is."""
    with expected_errors():
        manifest = restore_backup(source, target)
    if as_json:
        print(msgspec.json.encode(manifest).decode())
        return
    print(f"restored {source} to {target}")
    for run in manifest.runs:
        print(_about(run))
    for name in manifest.left_out:
        say(f"put the secret file back first, which the backup does not have: {target / name}")
    if manifest.serve is not None:
        words = ["fleetlearn-coordinator serve", str(target / manifest.serve)]
        if manifest.service not in (None, manifest.serve):
            words += ["--service", str(target / str(manifest.service))]
        say(f"once the original is stopped for good: {' '.join(words)}")
    for run in manifest.runs:
        if run.releases is not None:
            say(
                f"run {run.name} is private: before it is served, say how many releases the "
                f"original has made since this backup, which has {run.releases}. They count "
                f"towards epsilon: fleetlearn-coordinator count-releases {target / run.data} NUMBER"
            )
    say("what was revoked after the backup was made is to be revoked again")


@app.command("move-ledger")
def move_ledger(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan of the run.")],
    service: Annotated[
        Path,
        typer.Option(
            metavar="SERVICE.toml", help="The service file whose key ledger says where to."
        ),
    ],
) -> None:
    """Move the ledger of a run that is not served from its data directory into PostgreSQL. Models
    and updates stay in the data directory."""
    from fleetlearn_coordinator.storage.move_ledger import MOVED
    from fleetlearn_coordinator.storage.move_ledger import move_ledger as move

    with expected_errors():
        settings, run = ServiceSettings.load(service), Plan.load(plan)
        if settings.ledger is None:
            raise typer.BadParameter(f"{service} has no ledger: it says where the rows are to go")
        where = move(run.data_dir, run.name, settings.ledger)
    print(f"the ledger of {run.name} is in {where}")
    say(f"{run.data_dir / MOVED} is the earlier one: remove it once the run goes on")


@app.command()
def count_releases(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA_DIR", help="The data directory of the copy, or its store's URL."
        ),
    ],
    number: Annotated[
        int,
        typer.Argument(
            help="How many releases the original has made since; if nobody knows, the most.", min=0
        ),
    ],
) -> None:
    """Let a copy of a private run be served: count what the original has released since it was
    copied. Those releases stay counted."""
    with expected_errors():
        account = count_made_elsewhere(data, number, time.time(), COMMAND)
    left = "" if account.left is None else f"; within the budget are {account.left} more"
    of = "" if account.budget is None else f" of {budget_text(account.budget)}"
    spent = spent_text(account.epsilon, account.budget, 4)
    epsilon = f"epsilon {spent}{of} at delta {account.delta:g}"
    print(f"{many(account.releases, 'release')} in all, {epsilon}{left}")


def _about(run: BackedUpRun) -> str:
    text = f"run {run.name}: "
    text += "no model yet" if run.version is None else f"model version {run.version}"
    if run.round is not None and not run.given_up:
        text += f", round {run.round} open"
    if run.updates:
        text += f", {run.updates} updates not added up yet"
    if run.given_up:
        text += (
            f"; without what was reported in round {run.round}, which changed faster than it could "
            "be copied"
        )
    return text


def _say_what_is_secret(manifest: BackupManifest) -> None:
    secret = [file.path for file in manifest.files if file.secret]
    say(
        f"keep it as carefully as the coordinator's own folder: {len(secret)} of its files are "
        "secret (what devices sent, who they are, keys); only you may read it"
    )
    if manifest.left_out:
        say(f"without these secrets (--keys copies them): {', '.join(manifest.left_out)}")
