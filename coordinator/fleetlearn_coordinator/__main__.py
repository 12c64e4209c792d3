"""The command fleetlearn-coordinator. commands/table.py has all that it does."""

from __future__ import annotations

from fleetlearn_protocol.command_line import needs

with needs("fleetlearn-coordinator", "coordinator"):
    import typer  # noqa: F401
    from fleetlearn_protocol.typer_app import command_app

    from fleetlearn_coordinator.commands.lazy_group import LazyCommands

app = command_app(
    "fleetlearn-coordinator", "Federated learning's coordinator.", LazyCommands, completion=True
)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
