"""What the commands that are made with Typer have in common. The device's is not: it has neither Typer nor rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console

from fleetlearn_protocol.command_line import version_of
from fleetlearn_protocol.errors import FleetError


def command_app(command: str, about: str) -> typer.Typer:
    """Return a Typer application without commands yet, which has ``--version``."""

    def show_version(wanted: bool) -> None:
        if wanted:
            print(version_of(command))
            raise typer.Exit

    app = typer.Typer(help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    option = typer.Option(False, "--version", help="Show the version and end.", is_eager=True, callback=show_version)

    @app.callback()
    def options(version: bool = option) -> None:
        """What comes before a command."""

    return app


def fail(label: str, text: str) -> NoReturn:
    """Print an error that the user can correct on standard error, and end with status 1."""
    line = f"{label}: {text}"
    Console(stderr=True, soft_wrap=True).print(line, style="red", markup=False, highlight=False)
    sys.exit(1)


@contextmanager
def expected_errors() -> Iterator[None]:
    """Tell the errors that a user can correct (FleetError, OSError) as one line, and end with status 1."""
    try:
        yield
    except (FleetError, OSError) as error:
        fail("error", str(error))
