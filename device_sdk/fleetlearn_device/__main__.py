"""The command ``fleetlearn-device``. commands/table.py has all that it does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.commands.table import COMMANDS, FORMERLY, PACKAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    # The other commands' modules are not imported: their flags and help are not asked for.
    if words and words[0] in FORMERLY:
        words[0] = FORMERLY[words[0]]
    used = next((word for word in words if word in COMMANDS), None)
    parser, its_parser = _parsers(used)
    options, unknown = parser.parse_known_args(words)
    if unknown:  # said with what the command takes, and not with the names of all commands
        its_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # Imported late: --help and a wrong option need none of it.
    from fleetlearn_device.settings.sources import SettingError
    from fleetlearn_device.storage.errors import StateError

    try:
        status: int = import_module(f"{PACKAGE}.{COMMANDS[options.command].module}").run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SettingError as error:
        return fail(2, str(error))
    except StateError as error:
        return fail(1, str(error))


def _parsers(used: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the whole, and that of the command that is used, if any."""
    parser = argparse.ArgumentParser(
        prog="fleetlearn-device", description="Train models where the data is.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and end")
    of_used = parser
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        its_parser = commands.add_parser(
            name,
            help=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == used:
            import_module(f"{PACKAGE}.{command.module}").add_arguments(its_parser)
            of_used = its_parser
    return parser, of_used


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for, since that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fleetlearn_protocol.command_line import version_of

        print(version_of(parser.prog))
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
