"""The commands of ``fleetlearn-coordinator`` that make certificates and signing keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_protocol.command_line import needs
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors

app = typer.Typer()
Folder = Annotated[Path, typer.Option(help="The folder of the CA, where the files are written.")]
Days = Annotated[int, typer.Option(help="How long the certificate is valid.", min=1, max=3650)]


@app.command()
def certificate(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Host names and IP addresses that devices connect to."
        ),
    ],
    folder: Folder = Path("tls"),
    days: Days = 365,
) -> None:
    """Make a certificate for the coordinator with a private CA, which is made too if the folder has
    none. Run it again to renew the certificate: a running coordinator reads it by itself."""
    with needs("fleetlearn-coordinator certificate", "coordinator"):
        from fleetlearn_coordinator.service.private_ca import CERTIFICATE, KEY, make_certificate
    with expected_errors():
        new = make_certificate(folder, names, days)
    say(f"wrote {folder / CERTIFICATE} and {folder / KEY}, for [tls] of the service file")
    _say_if_new(new, folder)


@app.command("device-certificate")
def device_certificate(
    device: Annotated[str, typer.Argument(metavar="NAME", help="The device's name.")],
    folder: Folder = Path("tls"),
    days: Days = 365,
) -> None:
    """Make a certificate by which a coordinator with `clients` in [tls] knows a device. Run it
    again to renew it."""
    with needs("fleetlearn-coordinator device-certificate", "coordinator"):
        from fleetlearn_coordinator.service.private_ca import CA, DEVICES, make_device_certificate
    with expected_errors():
        new = make_device_certificate(folder, device, days)
    place = folder / DEVICES / device
    say(f"wrote {place}.pem and {place}.key, for that device:")
    say(f"--name {device} --certificate {device}.pem --key {device}.key")
    say(f'a coordinator lets it in with clients = "{folder / CA}" in [tls]')
    _say_if_new(new, folder)


@app.command("signing-key")
def signing_key(
    file: Annotated[Path, typer.Argument(help="Where the private key is, or is written.")] = Path(
        "signing-key.pem"
    ),
) -> None:
    """Make a key that signs tasks, if the file is not there, and print its public key, for devices:
    --trust KEY."""
    with needs("fleetlearn-coordinator signing-key", "coordinator"):
        from fleetlearn_coordinator.network.signing import (
            make_signing_key,
            public_key,
            read_signing_key,
        )
    with expected_errors():
        new = make_signing_key(file)
        key = public_key(read_signing_key(file))
    print(key)
    if new:
        say(f'wrote {file}, for the service file: signing_keys = ["{file}"]')
        say("whoever has it can have devices train anything; nobody else needs it")


def _say_if_new(new: bool, folder: Path) -> None:
    from fleetlearn_coordinator.service.private_ca import CA, CA_KEY

    if new:
        say(f"wrote {folder / CA}, for devices: --ca ca.pem")
        say(
            f"wrote {folder / CA_KEY}: whoever has it can pass for the coordinator; keep it "
            "elsewhere"
        )
