"""``fleetlearn-device doctor``: what a device needs, and what to do."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlearn_device.settings.sources import Values, add_flags, read_settings, required

if TYPE_CHECKING:
    from fleetlearn_device.doctor.finding import Finding, Findings

UNSOUND = 6
EXIT = f"""exit status:
  0    nothing has to be mended
  2    wrong usage or settings
  {UNSOUND}    something has to be mended

It may be used while the device runs: it does not check in, and uses no token.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting's flag: they count here as they do in ``run``."""
    parser.description = (
        "Check what a device needs, and say what to do: Python and ONNX Runtime, the state\n"
        "directory and the credential, disk, memory, clock, the way to the coordinator (name,\n"
        "proxy, network, TLS), and the data. With --book: the address book of peers, and whether\n"
        "the neighbours answer, in place of a coordinator."
    )
    parser.epilog = EXIT
    parser.add_argument(
        "--bundle",
        metavar="PATH",
        help="bundle to hold the data against; default: the one that the device used last",
    )
    parser.add_argument(
        "--book",
        dest="peers.book",
        metavar="FILE",
        help="address book of peers: check what `peer` needs, in place of a coordinator",
    )
    add_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Print what was found. Returns the exit status."""
    values = read_settings(options)
    of_peer = values["peers.book"].value is not None and values["coordinator"].value is None
    for key in ("peers.book" if of_peer else "coordinator", "state"):
        required(values, key)
    findings = []
    for finding in _findings(values, options.bundle):
        show(finding)
        findings.append(finding)
    return UNSOUND if any(each.state == "bad" for each in findings) else 0


def show(finding: Finding) -> None:
    """Print a finding, and below it what to do."""
    state = finding.state.upper() if finding.state == "bad" else finding.state
    print(f"{state:<8} {finding.what:<12} {finding.found}", flush=True)
    if finding.do:
        print(f"{'':<8} {'':<12} -> {finding.do}", flush=True)


def _findings(values: Values, bundle: str | None) -> Findings:
    from fleetlearn_device.doctor.machine import (
        check_disk,
        check_memory,
        check_software,
        check_state,
    )
    from fleetlearn_device.doctor.secure import check_secure
    from fleetlearn_device.session.secure_demands import SecureDemands
    from fleetlearn_device.storage.state_directory import state_folder

    value = {key: each.value for key, each in values.items()}
    folder = state_folder(value["state"])
    token = bool(value["connection.token"] or value["connection.token_file"])
    trusts = bool(value["connection.trust"])
    yield from check_software(value["training.runtime"], value["training.provider"], trusts)
    yield from check_state(folder, token=token)
    demands = {name: value[f"secure.{name}"] for name in SecureDemands._fields}
    yield from check_secure(SecureDemands(**demands), folder)
    yield from check_disk(folder)
    yield check_memory()
    if value["coordinator"] is None:
        from fleetlearn_device.doctor.peers import check_peers

        yield from check_peers(value["peers.book"], folder)
    else:
        yield from _network(values, folder)
    allowed = value["functions.allow"]
    yield from _data(value["data.source"], bundle or value["peers.bundle"], folder, allowed)


def _network(values: Values, folder: Path) -> Findings:
    from fleetlearn_device.doctor.finding import Finding
    from fleetlearn_device.doctor.machine import check_clock
    from fleetlearn_device.doctor.network import check_network
    from fleetlearn_device.driver.address import checked_address
    from fleetlearn_device.storage.credential import read_credential
    from fleetlearn_device.storage.errors import StateError
    from fleetlearn_device.storage.identity import read_name

    value = {key: each.value for key, each in values.items()}
    names = ("ca", "certificate", "key", "insecure")
    try:
        address = checked_address(
            value["coordinator"], **{name: value[f"connection.{name}"] for name in names}
        )
    except ValueError as error:
        do = "change the settings: `fleetlearn-device config` shows where they come from"
        yield Finding("address", "bad", str(error), do)
        yield check_clock(None, time.time())
        return
    try:
        credential = read_credential(folder)
        identity = folder / "identity.json"
        device = read_name(identity) if identity.exists() else ""
    except (StateError, OSError):  # check_state has said so
        credential, device = None, ""
    findings, date = asyncio.run(check_network(address, device, credential))
    yield from findings
    yield check_clock(date, time.time())


def _data(source: str | None, bundle: str | None, folder: Path, allowed: Iterable[str]) -> Findings:
    from fleetlearn_protocol.errors import FleetError

    from fleetlearn_device.doctor.data import check_data, read_bundle
    from fleetlearn_device.doctor.finding import Finding
    from fleetlearn_device.doctor.functions import check_functions
    from fleetlearn_device.storage.content_cache import cached_manifest

    if source is None:
        yield Finding("data", "bad", "no data are set", "name them with --data")
        return
    try:
        manifest = cached_manifest(folder) if bundle is None else read_bundle(bundle)
    except FleetError as error:
        yield Finding("bundle", "bad", error.text, "name a bundle that `fleetlearn-export` wrote")
        return
    yield from check_data(source, manifest)
    yield from check_functions(allowed, manifest, source)
