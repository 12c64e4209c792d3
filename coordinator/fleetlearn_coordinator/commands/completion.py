"""What the Tab key offers: names of runs and of devices. Where nothing is offered, a shell
completes files by itself.

Only files of this machine are read, since a shell waits for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fleetlearn_coordinator.commands.local import LocalTarget

MOST = 100
"""Names that are offered at most."""


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of runs after the words so far, and plans and service files in place of the
    first word."""
    return _complete(ctx, incomplete, lambda target: [run.name for run in target.runs()])


def complete_device(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same for the names of enrolled devices."""
    return _complete(ctx, incomplete, lambda target: target.identities.names(incomplete, MOST))


def _complete(
    ctx: typer.Context, incomplete: str, names_in: Callable[[LocalTarget], Iterable[str]]
) -> list[str]:
    words: Sequence[str] = ctx.params.get("words") or ()
    files: list[str] = []
    if not words:
        with suppress(OSError):
            files = sorted(path.name for path in Path().glob("*.toml"))
    names: Any = ()
    # Nothing that is wrong with a file may fill the line that somebody types.
    with suppress(Exception, SystemExit):
        from fleetlearn_coordinator.commands.local import open_local
        from fleetlearn_coordinator.commands.target import split

        where, others = split(words, 0, 1, "")
        if not others and "://" not in where:
            with open_local(where, None, make=False) as target:
                names = list(names_in(target))
    offered = (name for name in (*names, *files) if name.startswith(incomplete))
    return list(dict.fromkeys(islice(offered, MOST)))
