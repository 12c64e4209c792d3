"""The demo for a phone in the same network: its address, a certificate for it, and what is to be
done on the phone."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from fleetlearn_coordinator.service.private_ca import CA, CA_KEY, CERTIFICATE, make_certificate

from examples.demo.processes import DemoError

DAYS = 30
"""How long the certificate is valid."""


def find_address() -> str:
    """Return this machine's address in its network. Raises DemoError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # nothing is sent: the system says from which address it would be
            probe.connect(("192.0.2.1", 9))
        except OSError:
            raise DemoError(
                "this machine is in no network; say which address it is: --lan ADDRESS"
            ) from None
        return str(probe.getsockname()[0])


def certificate_for(folder: Path, address: str) -> Path:
    """Return the folder of a certificate for the address, made with a new CA, whose key is
    deleted: a phone that trusts the CA trusts this certificate, and no other can ever be made. It
    is used again while it is valid."""
    folder = folder / address.replace(":", "-")
    certificate = folder / CERTIFICATE
    if not certificate.exists() or time.time() - certificate.stat().st_mtime > (DAYS - 5) * 86400:
        for old in (CA, CA_KEY):
            (folder / old).unlink(missing_ok=True)
        make_certificate(folder, [address], DAYS)
        (folder / CA_KEY).unlink()
    return folder


def words(tls: Path) -> str:
    """Return what is to be done on the phone."""
    return f"""\
A browser trains only on a page that it trusts. On the phone, once (the certificate is valid for
{DAYS} days):
  1. Send yourself the file {tls / CA}: by mail, by cable, or as your system shares files.
  2. Android: Settings, Security, Encryption & credentials, Install a certificate, CA certificate.
     iPhone: open the file; Settings, General, VPN & Device Management, install it; then Settings,
     General, About, Certificate Trust Settings, and trust "fleetlearn private CA".
  3. Scan the code with the phone's camera, in the same network. A firewall here must let both ports
     through.
Afterwards you may remove the certificate there. The CA's key is deleted already: it can certify
nothing else."""
