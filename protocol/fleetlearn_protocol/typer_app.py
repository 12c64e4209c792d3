"""What the commands that are made with Typer have in common. The device's is not: it has neither
Typer nor rich.

What commands print is plain text: names and texts may hold brackets, such as [tls], which rich
would take for its markup and leave out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from fleetlearn_protocol.command_line import version_of
from fleetlearn_protocol.errors import FleetError, in_words


class WholeSentences(TyperGroup):
    """A group of commands whose help shows the first sentence of each, where Typer would cut it
    after 45 letters."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and what each does."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, _first_sentence(command.help or ""))
            for name, command in commands.items()
            if command
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    line = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z])", line)[0].rstrip(".")


def command_app(
    command: str, about: str, cls: type[TyperGroup] = WholeSentences, *, completion: bool = False
) -> typer.Typer:
    """Return a Typer application without commands yet, which has ``--version``. ``cls``: the group
    that finds and shows its commands. ``completion``: whether a shell can have its words completed
    (``--install-completion``)."""

    def show_version(wanted: bool) -> None:
        if wanted:
            print(version_of(command))
            raise typer.Exit

    app = typer.Typer(
        help=about,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=cls,
    )
    option = typer.Option(
        False, "--version", help="Show the version and end.", is_eager=True, callback=show_version
    )

    @app.callback()
    def options(version: bool = option) -> None:
        """What comes before a command."""

    return app


def commands_under(name: str, about: str) -> typer.Typer:
    """Return a Typer application without commands yet, for ``add_typer``: its commands come after
    the word ``name``."""
    return typer.Typer(name=name, help=about, no_args_is_help=True, cls=WholeSentences)


def say(text: str) -> None:
    """Print a sentence about what was done, on standard error."""
    print(text, file=sys.stderr)


def plain_table(*columns: str, wraps: str = "", title: str | None = None) -> Table:
    """Return a table without rows yet, for ``show_table``. Each column stays on one line but
    ``wraps``, which a narrow terminal gives several."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in columns:
        table.add_column(name, no_wrap=name != wraps, overflow="fold")
    return table


def show_table(table: Table, *, stderr: bool = False) -> None:
    """Print a table with every cell whole. In a narrow terminal headings take several lines.

    By itself rich cuts cells that do not fit in the terminal, or in 80 columns where the output is
    no terminal."""
    console = Console(stderr=stderr, markup=False, highlight=False)
    wide = Console(width=100_000, markup=False)
    narrow = console.is_terminal and wide.measure(table).maximum > console.width
    for column in table.columns:
        if narrow:
            column.header = str(column.header).replace(" ", "\n")
        # by itself rich takes the longest word of such a column for its least width
        if column.no_wrap:
            column.min_width = max(
                wide.measure(cell).maximum for cell in (column.header, *column.cells)
            )
    needed = wide.measure(table)
    if not narrow or needed.minimum > console.width:
        console.width = needed.maximum
    if console.is_terminal:
        console.print(table)
        return
    # For a pipe or a file: no empty line, and no spaces at the end of a line.
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        if line.strip():
            print(line.rstrip(), file=sys.stderr if stderr else sys.stdout)


def complain(label: str, text: str) -> None:
    """Print an error that the user can correct on standard error."""
    line = f"{label}: {text}"
    Console(stderr=True, soft_wrap=True).print(line, style="red", markup=False, highlight=False)


def complain_of(label: str, error: FleetError | OSError) -> None:
    """Print what an error says on standard error. Where a user's own algorithm raised, its
    traceback stands below, without our frames."""
    # here, so that commands which end well do not wait for these imports
    from fleetlearn_protocol.extensions import allowed_modules
    from fleetlearn_protocol.user_errors import own_traceback

    complain(label, in_words(error, file=True))
    for line in own_traceback(error, allowed_modules()):
        print(f"  {line}", file=sys.stderr)


def fail(label: str, text: str) -> NoReturn:
    """Print an error that the user can correct on standard error, and end with status 1."""
    complain(label, text)
    sys.exit(1)


@contextmanager
def expected_errors() -> Iterator[None]:
    """Tell the errors that a user can correct (FleetError, OSError) as one line, and end with
    status 1."""
    try:
        yield
    except (FleetError, OSError) as error:
        fail("error", in_words(error, file=True))
