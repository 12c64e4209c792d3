"""What a backup has of a run or a host: which files, where they lie in it, and what is secret.

The files keep their places relative to each other, below the folder that all of them are in. Paths
that a plan or a service file writes out whole ("/var/lib/...") are written relative in the copy, so
that a restored copy never uses the original's files.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.paths import in_home

from fleetlearn_coordinator.plan.distil_files import distillation_bundles
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, is_service_file
from fleetlearn_coordinator.storage.runs import Runs

PLAN_PATHS = (
    "bundle", "initial", "family.*.bundle", "family.*.distil", "data_dir", "evaluation.data",
    "secure.roster", "distil.data", "distil.bundle",
)  # fmt: skip
"""The keys of a plan that are paths. ``*``: each table there is."""
SERVICE_PATHS = (
    "identities", "runs", "signing_keys", "tls.certificate", "tls.key", "tls.clients",
    "page.folder", "alerts.webhook_ca", "nats.password_file", "nats.token_file", "nats.credentials",
    "nats.ca", "nats.certificate", "nats.key", "gateway.data_dir",
    "plugins.folder",
)  # fmt: skip
"""The keys of a service file that are paths."""


class BackupError(FleetError):
    """A backup that cannot be made, or one that cannot be restored."""


class RunPlaces(NamedTuple):
    """Where a run is."""

    name: str
    plan: Path | None
    """None: the backup is of a data directory alone."""
    data: Path


@dataclass
class BackupContents:
    """What is to be backed up. Paths are absolute, without ``..``."""

    serve: Path | None = None
    """The plan or the service file that `serve` takes."""
    service: Path | None = None
    """The service file, if there is one."""
    runs: list[RunPlaces] = field(default_factory=list)
    toml: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    """Each plan and service file, and its keys that are paths."""
    files: list[Path] = field(default_factory=list)
    """Other files that they name, to be copied as they are."""
    secret: set[Path] = field(default_factory=set)
    """The files and folders that are secret."""
    left_out: list[Path] = field(default_factory=list)
    """Private keys, passwords and tokens that are not to be copied."""
    run_folder: Path | None = None
    """The folder of the database of a host's runs."""
    identities: Path | None = None
    """The folder of the database of who may connect."""

    def base(self) -> Path:
        """Return the folder that all of it is in."""
        paths = [*self.toml, *self.files, *self.left_out, *(run.data for run in self.runs)]
        paths += [folder for folder in (self.run_folder, self.identities) if folder is not None]
        return Path(os.path.commonpath([path.parent for path in paths]))


def find_contents(source: Path, service: Path | None, *, keys: bool) -> BackupContents:
    """Return what a backup of ``source`` has: a plan, a service file that names a folder of runs,
    or a data directory.

    ``service``: the service file with which a plan is served. ``keys``: whether private keys,
    passwords and tokens are to be copied. Raises PlanError, ServiceError, StoreError, BackupError.
    """
    source = plain(source)
    if source.is_dir():
        if service is not None:
            text = f"{source} is a folder, and --service goes with a plan: name the plan"
            raise BackupError(Code.BAD_MESSAGE, text)
        return BackupContents(runs=[RunPlaces(source.name, None, source)], secret={source})
    found = BackupContents(source)
    if is_service_file(source):
        if service is not None:
            text = f"{source} is a service file, and --service goes with a plan: leave one out"
            raise BackupError(Code.BAD_MESSAGE, text)
        found.service = source
    elif service is not None:
        found.service = plain(service)
    if found.service is not None:
        _add_service(found, ServiceSettings.load(found.service), keys=keys)
    if found.run_folder is None:
        _add_plan(found, "", source)
    elif source != found.service:
        text = f"{found.service} names a folder of runs: back it up alone, with all of its runs"
        raise BackupError(Code.BAD_MESSAGE, text)
    return found


def _add_plan(found: BackupContents, name: str, path: Path) -> None:
    plan = Plan.load(path)
    found.toml[path] = PLAN_PATHS
    if not is_path(str(plan.data_dir)):
        raise BackupError(
            Code.BAD_MESSAGE,
            f"{path}: data_dir = {plan.data_dir} is a store, and no folder: its own tools make its "
            "backups",
        )
    data = plain(plan.data_dir)
    found.runs.append(RunPlaces(name or plan.name, path, data))
    found.secret.add(data)
    for bundle in {*plan.members.values()}:
        found.files += _files_of(plain(bundle))  # an archive, or a folder
    if plan.initial is not None and plan.initial.is_file():  # a run that has begun needs it no more
        found.files.append(plain(plan.initial))
    if plan.evaluation.data is not None:
        found.files.append(plain(plan.evaluation.data))
        found.secret.add(plain(plan.evaluation.data))
    if plan.secure is not None and plan.secure.roster is not None:
        found.files.append(plain(plan.secure.roster))
    if plan.distil is not None:
        found.files.append(plain(plan.distil.data))
        found.secret.add(plain(plan.distil.data))
        for bundle in {*distillation_bundles(plan)}:
            found.files += _files_of(plain(bundle))


def _add_service(found: BackupContents, settings: ServiceSettings, *, keys: bool) -> None:
    assert found.service is not None
    found.toml[found.service] = SERVICE_PATHS
    private = [*settings.signing_keys]
    if settings.tls is not None:
        found.files.append(plain(settings.tls.certificate))
        private.append(settings.tls.key)
        if settings.tls.clients is not None:
            found.files.append(plain(settings.tls.clients))
    if settings.alerts is not None and settings.alerts.webhook_ca is not None:
        found.files.append(plain(settings.alerts.webhook_ca))
    if (nats := settings.nats) is not None:
        public = (nats.ca, nats.certificate)
        found.files += [plain(file) for file in public if file is not None]
        bus_secrets = (nats.password_file, nats.token_file, nats.credentials, nats.key)
        private += [file for file in bus_secrets if file is not None]
    (found.files if keys else found.left_out).extend(map(plain, private))
    found.secret.update(map(plain, private))
    if settings.identities is not None:
        found.identities = plain(settings.identities)
        found.secret.add(found.identities)
    if settings.runs is not None:
        found.run_folder = plain(settings.runs)
        with closing(Runs(settings.runs)) as runs:
            for run in runs.runs():
                _add_plan(found, run.name, plain(run.plan))
    if settings.page is not None:
        found.files += _files_of(plain(settings.page.folder))


def _files_of(path: Path) -> list[Path]:
    """Return the file itself, or all files of a folder."""
    if not path.is_dir():
        return [path]
    return [each for each in sorted(path.rglob("*")) if each.is_file()]


def is_path(text: str) -> bool:
    """Return whether this is a path, and no URL of a store."""
    return re.match("[a-z][a-z0-9+.-]+:/", text) is None


def plain(path: Path) -> Path:
    """Return the absolute path without ``..``. Links stay as they are."""
    return Path(os.path.normpath(in_home(path).absolute()))


def with_relative_paths(text: str, file: Path, keys: Iterable[str]) -> str:
    """Return a plan's or a service file's text, in which the whole paths of these keys are relative
    to the file. Raises BackupError where that cannot be done."""
    raw = tomllib.loads(text)
    for table, key, value in path_strings(raw, keys):
        if not is_path(value) or not in_home(value).is_absolute():
            continue
        relative = os.path.relpath(plain(Path(value)), file.parent)
        text = text.replace(f'"{value}"', f'"{relative}"').replace(f"'{value}'", f"'{relative}'")
        table[key] = relative
    if tomllib.loads(text) != raw:
        raise BackupError(
            Code.BAD_MESSAGE,
            f"{file}: its whole paths, such as those of {', '.join(keys)}, are to be relative in "
            "the copy, and cannot be replaced there. Write them relative to the file",
        )
    return text


def path_strings(raw: dict[str, Any], keys: Iterable[str]) -> Iterator[tuple[Any, Any, str]]:
    """Yield (table or list, key or index, value) of the strings under these dotted keys."""
    for dotted in keys:
        *path, key = dotted.split(".")
        tables: list[Any] = [raw]
        for name in path:
            tables = [
                each
                for table in tables
                for each in (table.values() if name == "*" else [table.get(name, {})])
            ]
        for table in tables:
            value = table.get(key)
            if isinstance(value, str):
                yield table, key, value
            elif isinstance(value, list):
                for index, each in enumerate(value):
                    yield value, index, each
