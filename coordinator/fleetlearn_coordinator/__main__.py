"""The command fleetlearn-coordinator. commands/table.py has all that it does."""

from __future__ import annotations

from fleetlearn_protocol.command_line import needs

with needs("fleetlearn-coordinator", "coordinator"):
    import typer  # noqa: F401
    from fleetlearn_protocol.typer_app import command_app

    from fleetlearn_coordinator.commands.lazy_group import LazyCommands

HELP = """Lead the training of a model on devices that keep their data.

To begin: `init --bundle BUNDLE` writes a plan and a service file, `serve plan.toml` lets devices
in, and `status` says how far the training is. `COMMAND --help` says more of each command.

Most commands take WHERE: a plan (one run), a service file (a host of several runs), a data
directory, or the URL of an administrators' port. Without it they take the service file or the plan
of this folder.
"""
app = command_app("fleetlearn-coordinator", HELP, LazyCommands, completion=True)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
