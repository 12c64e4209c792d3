"""Whether the network is paid for by the byte: as the owner states, as NetworkManager says, or as
the kind of the interface tells."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Literal

from fleetlearn_protocol.user_errors import ANY_FAILURE, in_one_line

from fleetlearn_device.conditions.condition import (
    SystemFiles,
    UnreadableError,
    read_number,
    read_text,
)

ETHERNET = 1
"""ARPHRD_ETHER, the kernel's type of Ethernet and Wi-Fi."""
MOBILE = ("wwan", "ppp", "rmnet", "wwp")
"""How the names of interfaces of mobile networks begin."""


def find_interface(files: SystemFiles) -> str:
    """Return the interface of the default route, by IPv4 or else IPv6. Raises UnreadableError."""
    for line in read_text(files.proc / "net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[1] == words[7] == "00000000":
            return words[0]
    for line in read_text(files.proc / "net/ipv6_route").splitlines():
        words = line.split()
        # prefix length 0, through a gateway; the kernel's own such row is of lo
        if len(words) > 9 and words[1] == "00" and words[9] != "lo":
            return words[9]
    raise UnreadableError("there is no default route")


def read_network(
    files: SystemFiles, ask: Callable[[str], str | None] | None = None
) -> Literal["metered", "unmetered"]:
    """Return what the network of the default route is. Raises UnreadableError.

    ``ask``: returns what NetworkManager says of an interface (``yes``, ``no (guessed)``), or None.
    """
    name = find_interface(files)
    said = (ask or _network_manager)(name) or ""
    if said.startswith(("yes", "no")):
        return "metered" if said.startswith("yes") else "unmetered"
    folder = files.sys / "class/net" / name
    if name.startswith(MOBILE) or "DEVTYPE=wwan" in read_text(folder / "uevent"):
        return "metered"
    if read_number(folder / "type") == ETHERNET:
        return "unmetered"
    raise UnreadableError(
        f"the default route is by {name}, which is neither Ethernet, Wi-Fi nor a mobile network; "
        "say what it is (--network)"
    )


def ask_owner(network: str | Callable[[], str | None] | None) -> Callable[[], str | None]:
    """Return what reads the network as the device's owner states it, by a value or a function. What
    it returns raises UnreadableError."""

    def read() -> str | None:
        if not callable(network):
            return network
        try:
            return network()
        except UnreadableError:
            raise
        except ANY_FAILURE as error:  # the owner's code may raise anything
            raise UnreadableError(in_one_line(error)) from None

    return read


def needs_unmetered(read: Callable[[], str | None]) -> Callable[[bool], str | None]:
    """Return the condition that ``read`` says ``unmetered``."""

    def why_not(held: bool) -> str | None:
        said = read()
        if said is None:
            raise UnreadableError("nobody says whether the network is metered")
        return None if said == "unmetered" else "on a metered network"

    return why_not


def _network_manager(interface: str) -> str | None:
    command = ["nmcli", "-g", "GENERAL.METERED", "device", "show", interface]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=5.0, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("ascii", "replace").strip()
