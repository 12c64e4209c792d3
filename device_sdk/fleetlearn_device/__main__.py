"""The command ``fleetlearn-device``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

EXIT = """exit status:
  0    stopped by SIGTERM or SIGHUP, or the training is finished (--until-finished)
  1    the state directory or the runtime cannot be used, or the coordinator refuses what the
       device states
  2    wrong usage, or data that do not fit
  3    another process speaks for the same device
  4    the coordinator does not let the device in: a used or expired token, or none; a revoked
       credential (*)
  5    TLS: a certificate that is not accepted, or ws:// and wss:// mixed up (*)
  6    the coordinator speaks another version of the protocol (*)
  7    no connection for 15 minutes (*)
  130  stopped by SIGINT (Ctrl-C)

(*) with --until-finished. Without it the device says each time what is wrong and goes on trying,
    slowly; with status 4 it ends also where no coordinator ever let it in.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    options = _parser().parse_args(arguments)
    # Imported late: --help and a wrong option need none of it.
    from fleetlearn_device.storage.errors import StateError

    try:
        return {"info": _info, "rotate": _rotate, "run": _run, "trust": _trust}[options.command](
            options
        )
    except StateError as error:
        return _fail(1, str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleetlearn-device", description="Train models where the data is.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="serve a coordinator",
        description=(
            "Serve a coordinator: train its tasks on this device's data. The data do not leave the "
            "device."
        ),
        epilog=EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument(
        "--coordinator", required=True, metavar="URL", help="ws://HOST:PORT or wss://HOST:PORT"
    )
    run.add_argument(
        "--ca",
        metavar="FILE",
        help="PEM of the only CA that TLS trusts; default: the system's CAs",
    )
    run.add_argument(
        "--certificate",
        metavar="FILE",
        help="PEM by which the coordinator knows this device; with --key",
    )
    run.add_argument(
        "--key", metavar="FILE", help="PEM of the certificate's key, without a password"
    )
    run.add_argument(
        "--insecure",
        action="store_true",
        help="let another machine's address be ws://, without TLS",
    )
    run.add_argument(
        "--token", metavar="TOKEN", help="enrols the device, once; default: $FLEETLEARN_TOKEN"
    )
    run.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="KEY",
        help=(
            "do only tasks that this public key signed, at later starts too; may be given again; "
            "default: $FLEETLEARN_TRUST, or what the token brings"
        ),
    )
    run.add_argument(
        "--data", required=True, metavar="FILE", help=".npz with the bundle's batch arrays, by name"
    )
    run.add_argument(
        "--state", required=True, metavar="DIR", help="directory for what outlives the process"
    )
    run.add_argument(
        "--runtime",
        default="auto",
        choices=("auto", "onnx", "ort-training"),
        help="default: auto (onnx)",
    )
    run.add_argument(
        "--threads",
        default=1,
        type=_threads,
        metavar="N",
        help="threads inside an operator; default: 1",
    )
    run.add_argument(
        "--provider",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where onnx computes; default: cpu",
    )
    run.add_argument(
        "--feature-cache",
        type=_mebibytes,
        metavar="MIB",
        help="memory for a frozen model's features; default: 128",
    )
    run.add_argument(
        "--own-model",
        metavar="FILE",
        help="ONNX file of this device's own model, written after each task",
    )
    run.add_argument(
        "--name", metavar="ID", help="the device's name at its first start; default: random"
    )
    run.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="TAG",
        help="to be chosen by; may be given again",
    )
    run.add_argument("--tier", metavar="TIER", help="the kind of device that this is")
    run.add_argument(
        "--charging", choices=("yes", "no"), help="default: as Linux says at each check-in"
    )
    run.add_argument("--network", choices=("metered", "unmetered"), help="default: not stated")
    run.add_argument(
        "--until-finished", action="store_true", help="end when the training is finished"
    )
    run.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="default: info",
    )

    rotate = commands.add_parser(
        "rotate", help="change the device's credential at its next connection", allow_abbrev=False
    )
    rotate.add_argument("--state", required=True, metavar="DIR")

    trust = commands.add_parser(
        "trust",
        help="change the public keys that the device trusts, from its next start on",
        allow_abbrev=False,
    )
    trust.add_argument("--state", required=True, metavar="DIR")
    trust.add_argument(
        "keys", nargs="+", metavar="KEY", help="trusted from then on, and no others are"
    )

    info = commands.add_parser(
        "info", help="show how a device is, and what its state directory holds", allow_abbrev=False
    )
    info.add_argument("--state", required=True, metavar="DIR")
    return parser


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for, since that takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fleetlearn_protocol.command_line import version_of

        print(version_of(parser.prog))
        parser.exit()


def _threads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given; expected a whole number from 1 to 1024"
        )
    return int(text)


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or int(text) > 2**20:
        raise argparse.ArgumentTypeError(
            f"{text!r} was given; expected a whole number of MiB, or 0 to keep none"
        )
    return int(text)


def _run(options: argparse.Namespace) -> int:
    from fleetlearn_protocol.command_line import log_on_stderr, needs
    from fleetlearn_protocol.errors import Code, FleetError, ProtocolError

    with needs("fleetlearn-device", "device"):
        from fleetlearn_device.device import FEATURE_CACHE, Device
    from fleetlearn_device.driver.dead_ends import NoConnectionError
    from fleetlearn_device.runtimes.checks import DataError
    from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError

    logging.basicConfig(handlers=[log_on_stderr()])
    logging.getLogger("fleetlearn").setLevel(options.log_level.upper())
    try:
        device = Device(
            options.coordinator,
            data=options.data,
            state_dir=options.state,
            runtime=options.runtime,
            threads=options.threads,
            provider=options.provider,
            name=options.name,
            ca=options.ca,
            certificate=options.certificate,
            key=options.key,
            insecure=options.insecure,
            token=options.token or os.environ.get("FLEETLEARN_TOKEN") or None,
            trust=options.trust or os.environ.get("FLEETLEARN_TRUST", "").split(),
            own_model=options.own_model,
            feature_cache=FEATURE_CACHE if options.feature_cache is None else options.feature_cache,
            tags=options.tag,
            tier=options.tier,
            charging=None if options.charging is None else options.charging == "yes",
            network=options.network,
            until_finished=options.until_finished,
        )
    except (DataError, ValueError) as error:
        return _fail(2, str(error))
    try:
        device.run()
    except DataError as error:
        return _fail(2, f"{options.data}: {error}")
    except ProtocolError as error:
        return _fail({Code.REPLACED: 3, Code.BAD_VERSION: 6}.get(error.code, 1), error.text)
    except FleetError as error:
        return _fail(1, error.text)
    except NoConnectionError as error:
        return _fail({"not-admitted": 4, "tls": 5, "unreachable": 7}[error.kind], str(error))
    except RuntimeUnavailableError as error:
        return _fail(1, str(error))
    except KeyboardInterrupt:
        return 130
    return 130 if device.stopped_by is signal.SIGINT else 0


def _info(options: argparse.Namespace) -> int:
    from fleetlearn_device.storage.state_directory import describe
    from fleetlearn_device.storage.status import in_lines

    summary = describe(options.state)
    print(f"device   {summary.device or '(not named yet)'}")
    if summary.status is not None:
        for about, text in in_lines(summary.status, summary.running):
            print(f"{about:<8} {text}")
    for key in summary.trusted:
        print(f"trusts   {key}")
    for sha256, name in summary.bundles:
        print(f"bundle   {sha256[:12]}  {name}")
    for name, size in summary.kept_states:
        bundle, _, kind = name.partition(".")
        print(
            f"own      {bundle[:12]}  {size} bytes that never leave the "
            f"device{kind and f' ({kind})'}"
        )
    for tied in summary.tied_sets:
        print(
            f"tied     {tied.bundle[:12]}  {tied.size} bytes that never leave the device, of task "
            f"{tied.task}"
        )
    if summary.pending is None:
        print("update   none waits for its acknowledgement")
    else:
        held = summary.pending
        print(
            f"update   task {held.task} of round {held.round}, {held.size} bytes, waits for its "
            "acknowledgement"
        )
    return 0


def _rotate(options: argparse.Namespace) -> int:
    from fleetlearn_device.storage.credential import begin_change
    from fleetlearn_device.storage.state_directory import state_folder

    begin_change(state_folder(options.state))
    print(
        "the device has a new credential, and shows it at its next connection; the old one is "
        "valid until then"
    )
    return 0


def _trust(options: argparse.Namespace) -> int:
    from fleetlearn_device.storage.state_directory import state_folder
    from fleetlearn_device.storage.trusted_keys import checked_keys, write_trusted_keys

    folder = state_folder(options.state)
    if not (folder / "identity.json").exists():
        return _fail(1, f"{folder} is not a device's state directory")
    try:
        write_trusted_keys(folder, checked_keys(options.keys))
    except ValueError as error:
        return _fail(2, str(error))
    print("from its next start on the device does only tasks that these keys signed")
    return 0


def _fail(status: int, text: str) -> int:
    print(f"fleetlearn-device: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
