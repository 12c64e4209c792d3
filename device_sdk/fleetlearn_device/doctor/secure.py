"""Secure aggregation on this device: the package, the device's key, the helper's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.secure.roster import RosterError, read_roster

from fleetlearn_device.doctor.finding import Finding, Findings
from fleetlearn_device.driver.signatures import public_key_of
from fleetlearn_device.session.secure_demands import (
    NO_SECURE_DEMANDS,
    SecureDemands,
    check_secure_demands,
)
from fleetlearn_device.storage.device_key import read_device_key
from fleetlearn_device.storage.errors import StateError

WHAT = "secure"


def check_secure(demands: SecureDemands, folder: Path) -> Findings:
    """Check what secure aggregation needs. Yields nothing for a device whose owner demands nothing
    of it, and that has no key for it."""
    try:
        key = read_device_key(folder)
    except StateError:  # check_state has said so
        return
    if demands == NO_SECURE_DEMANDS and key is None:
        return
    try:
        if demands.roster is not None:
            read_roster(in_home(demands.roster))
    except RosterError as error:
        yield Finding(WHAT, "bad", error.text, "change the file, or secure.roster in the settings")
        return
    try:
        check_secure_demands(demands)
        public = "" if key is None else public_key_of(key).hex()
        import_module("fleetlearn_device.training.masking")
    except ValueError as error:
        yield Finding(WHAT, "bad", str(error), "change the settings")
        return
    except (FleetError, ImportError):
        found = "updates cannot be masked: the package cryptography is missing"
        do = 'pip install "fleetlearn[device,secure]"'
        yield Finding(WHAT, "bad" if demands.require else "warning", found, do)
        return
    if demands.helper is not None and not _can_seal_for(demands.helper):
        found = f"{demands.helper} is no helper's key: anybody could open what is sealed for it"
        yield Finding(WHAT, "bad", found, "ask the helper's operator for it: `helper status`")
    elif key is None:
        found = "the device has no key of its own yet, and no helper knows it"
        do = "give the line of `fleetlearn-device public-key` to the helper's operator"
        yield Finding(WHAT, "unknown", found, do)
    else:
        yield Finding(WHAT, "good", f"updates can be masked; the device's public key is {public}")


def _can_seal_for(helper: str) -> bool:
    from fleetlearn_protocol.secure.sealed import can_seal_for  # needs cryptography

    return can_seal_for(bytes.fromhex(helper))
