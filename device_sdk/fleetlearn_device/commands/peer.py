"""``fleetlearn-device peer``: train with neighbours, without a coordinator."""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import Values, add_flags, read_settings, required

if TYPE_CHECKING:
    from fleetlearn_device.peers.run_peer import PeerOptions

KEYS = (
    "state",
    "name",
    "peers.book",
    "peers.bundle",
    "peers.steps",
    "peers.listen",
    "peers.discover",
    "peers.output",
    "data.source",
    "data.hold_out",
    "training.runtime",
    "training.provider",
    "limits.threads",
    "log.level",
    "log.format",
    "log.file",
    "log.size",
    "log.files",
)
EXIT = """exit status:
  0    all steps are done, or stopped by SIGTERM or SIGHUP
  1    the state directory, the address or the runtime cannot be used, or the training fails
  2    wrong usage, settings or address book, or data that do not fit
  130  stopped by SIGINT (Ctrl-C)

A peer that was stopped or killed goes on from its last step when it is started again.
`fleetlearn-device status --state DIR` says how it is.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Train with the neighbours that an address book names, without a coordinator: each peer "
        "trains on its\nown data, sends its model to its neighbours and averages with theirs. The "
        "data do not leave the device.\nAll peers have one address book and one bundle: "
        "docs/start/peers.md."
    )
    parser.epilog = EXIT
    add_flags(parser, only=KEYS)


def run(options: argparse.Namespace) -> int:
    """Train until all steps are done. Returns the exit status."""
    values = read_settings(options)
    for key in ("peers.book", "peers.bundle", "data.source", "state", "peers.steps"):
        required(values, key)

    from fleetlearn_protocol.command_line import needs
    from fleetlearn_protocol.errors import FleetError, in_words

    from fleetlearn_device.commands.logs import begin_log

    with needs("fleetlearn-device", "device"):
        from fleetlearn_device.peers.run_peer import Peer
    from fleetlearn_device.runtimes.checks import DataError
    from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
    from fleetlearn_device.runtimes.sessions import StepError
    from fleetlearn_device.training.train import TrainingError

    begin_log(values)
    try:
        peer = Peer(options_of(values))
        peer.run()
    except (DataError, ValueError) as error:  # BookError, too
        return fail(2, str(error))
    except FleetError as error:
        return fail(1, error.text)
    except (TrainingError, StepError, RuntimeUnavailableError) as error:
        return fail(1, str(error))
    except OSError as error:
        return fail(1, f"the peer cannot listen: {in_words(error)}")
    except KeyboardInterrupt:
        return 130
    return 130 if peer.stopped_by is signal.SIGINT else 0


def options_of(values: Values) -> PeerOptions:
    """Return the peer's options that the settings make."""
    from fleetlearn_device.peers.run_peer import PeerOptions

    value = {key: each.value for key, each in values.items()}
    return PeerOptions(
        book=value["peers.book"],
        bundle=value["peers.bundle"],
        data=value["data.source"],
        state=value["state"],
        steps=value["peers.steps"],
        name=value["name"],
        listen=value["peers.listen"],
        discover=value["peers.discover"],
        output=value["peers.output"],
        hold_out=value["data.hold_out"],
        threads=value["limits.threads"],
        runtime=value["training.runtime"],
        provider=value["training.provider"],
    )
