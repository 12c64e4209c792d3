"""What commands are about: a coordinator over its administrators' port, or its files."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.commands.exits import NoAnswerError

if TYPE_CHECKING:
    from fleetlearn_coordinator.commands.local import LocalTarget
    from fleetlearn_coordinator.commands.remote import RemoteTarget

ADMIN = "FLEETLEARN_ADMIN"
"""The environment's variable with the URL of an administrators' port."""
DEFAULTS = ("service.toml", "plan.toml")


class Access(NamedTuple):
    """How a coordinator is reached, as options say."""

    service: Path | None = None
    """The service file that a plan is served by."""
    token: str | None = None
    """An administrator's."""
    ca: Path | None = None
    """PEM: the CA of the port's certificate."""


def is_place(word: str) -> bool:
    """Return whether a word of the command line says where the coordinator is."""
    return "://" in word or word.endswith(".toml") or os.path.sep in word or Path(word).is_dir()


def split(words: Sequence[str] | None, least: int, most: int, what: str) -> tuple[str, list[str]]:
    """Return where the coordinator is, and the other words, ``least`` to ``most`` of them. ``what``
    they are, for the error. Ends with a usage error."""
    rest = list(words or ())
    where = rest.pop(0) if rest and (is_place(rest[0]) or len(rest) > most) else ""
    if not least <= len(rest) <= most:
        given = " ".join(words or ()) or "nothing"
        raise typer.BadParameter(f"{given} was given; [WHERE] {what} is expected")
    return where or _default(), rest


def _default() -> str:
    if url := os.environ.get(ADMIN):
        return url
    for name in DEFAULTS:
        if Path(name).is_file() and (name != "service.toml" or _has_runs(Path(name))):
            return name
    raise typer.BadParameter(
        "say where the coordinator is: PLAN.toml, SERVICE.toml, a data directory or the URL of its "
        f"administrators' port; or set {ADMIN}"
    )


def _has_runs(path: Path) -> bool:
    """Return whether a service file names runs. Without them it says nothing of the run that is
    served."""
    with suppress(OSError, ValueError):
        return "runs" in tomllib.loads(path.read_text("utf-8"))
    return False


def refuse_url(where: str, otherwise: str) -> None:
    """Refuse a URL where a command reads files. ``otherwise``: a sentence on what to do. Raises
    FleetError."""
    if "://" in where:
        text = (
            f"{where}: this command reads files, and takes PLAN.toml, SERVICE.toml or a data "
            f"directory. {otherwise}"
        )
        raise FleetError(Code.BAD_MESSAGE, text)


@contextmanager
def reach(where: str, access: Access) -> Iterator[LocalTarget | RemoteTarget]:
    """Reach the coordinator that is meant, until the block is left: over the administrators' port
    of a URL, or of a service file if there is a token; else by its files. If nobody listens at a
    service file's port, by its files too. Raises FleetError."""
    if "://" in where and where.startswith("http"):
        from fleetlearn_coordinator.commands.remote import RemoteTarget

        if access.token is None:
            raise FleetError(
                Code.BAD_MESSAGE,
                f"{where} needs an administrator's token: set FLEETLEARN_TOKEN, or give --token",
            )
        yield RemoteTarget(where, access.token, access.ca)
        return
    from fleetlearn_coordinator.commands.local import open_local

    with open_local(where, access.service) as local:
        target: LocalTarget | RemoteTarget = local
        if access.token is not None and (port := local.admin_url()) is not None:
            from fleetlearn_coordinator.commands.remote import RemoteTarget

            remote = RemoteTarget(port, access.token, access.ca)
            with suppress(NoAnswerError):
                remote.greet()
                target = remote
        yield target
