"""Every command of fleetlearn-device. Its module is imported when it is used.

A module has ``add_arguments(parser)`` and ``run(options)``, which returns the exit status.
"""

from __future__ import annotations

from typing import NamedTuple

PACKAGE = "fleetlearn_device.commands"


class DeviceCommand(NamedTuple):
    """A command."""

    module: str
    """Below ``PACKAGE``."""
    help: str
    """What it does, short enough for one line of 80 columns."""


COMMANDS: dict[str, DeviceCommand] = {
    "run": DeviceCommand("run", "serve a coordinator"),
    "config": DeviceCommand("config", "show what each setting is, and who said so"),
    "status": DeviceCommand("status", "show how a device is, and why nothing happens"),
    "doctor": DeviceCommand("doctor", "check what a device needs, and say what to do"),
    "check": DeviceCommand("check", "check whether data fit a bundle"),
    "install-service": DeviceCommand(
        "install_service", "write a systemd service that serves from boot on"
    ),
    "predict": DeviceCommand("predict", "predict with the model that a device keeps"),
    "fetch-model": DeviceCommand("fetch_model", "fetch the newest model without taking part"),
    "export-model": DeviceCommand(
        "export_model", "write the model that a device keeps as an ONNX file"
    ),
    "rotate": DeviceCommand("rotate", "change the device's credential at its next connection"),
    "trust": DeviceCommand(
        "trust", "change the public keys that the device trusts, from its next start on"
    ),
    "peer": DeviceCommand("peer", "train with neighbours, without a coordinator"),
    "peer-card": DeviceCommand("peer_card", "print a device's entry in the peers' address book"),
    "vertical": DeviceCommand("vertical", "train a bottom with parties that have other features"),
    "split": DeviceCommand("split", "train a bottom with devices that have other rows"),
    "export-bottom": DeviceCommand("export_bottom", "write a trained bottom as an ONNX file"),
    "hash-rows": DeviceCommand("hash_rows", "write labels with hashes of their rows' ids"),
    "public-key": DeviceCommand(
        "public_key", "print the device's line in a helper's roster (secure aggregation)"
    ),
}
"""In the order of the help."""

FORMERLY = {"info": "status"}
"""Names that commands had -> what they are called now. They are still understood."""
