"""The group of all commands, which imports a command's module when the command is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer.main
from fleetlearn_protocol.command_line import needs
from typer.core import TyperGroup

try:
    from typer._click.shell_completion import CompletionItem
except ImportError:  # before Typer had its own copy of Click
    from click.shell_completion import CompletionItem  # type: ignore[assignment]

from fleetlearn_coordinator.commands.table import GROUPS, PACKAGE, find_command


class LazyCommands(TyperGroup):
    """The commands of table.py. Its help shows them in their groups, a line for each."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands' names, in the order of the help."""
        return [each.name for group in GROUPS.values() for each in group]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name or alias, or None."""
        listed = find_command(cmd_name)
        if listed is None:
            return None
        with needs("fleetlearn-coordinator", "coordinator"):
            app = import_module(f"{PACKAGE}.{listed.module}").app
        app.rich_markup_mode = None  # else [tls] in a help text would be taken for markup
        if app.info.name == listed.name:  # a command with commands below it, such as run
            return typer.main.get_group(app)
        return typer.main.get_group(app).commands[listed.name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and what each does."""
        width = max(map(len, self.list_commands(ctx)))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(each.name.ljust(width), each.help) for each in group])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands that begin so, for the shell."""
        return [
            CompletionItem(each.name, help=each.help)
            for group in GROUPS.values()
            for each in group
            if each.name.startswith(incomplete)
        ]
