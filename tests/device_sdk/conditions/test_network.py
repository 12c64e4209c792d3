"""Whether the network is metered, against folders as Linux has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fleetlearn_device.conditions.condition import UnreadableError
from fleetlearn_device.conditions.network import (
    ask_owner,
    find_interface,
    needs_unmetered,
    read_network,
)
from system_trees import plant, program

HEADER = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
NET = "sys/class/net"


def route(interface: str) -> dict[str, object]:
    local = f"{interface} 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0"
    return {
        "proc/net/route":
        f"{HEADER}\nbr0 000300C0 00000000 1 0 0 0 00FFFFFF 0 0 0\n{local}\n"
        f"{interface} 00000000 010200C0 0003 0 0 0 00000000 0 0 0"
    }  # fmt: skip


def nobody(interface: str) -> None:
    """There is no NetworkManager."""


@pytest.mark.parametrize(
    ("interface", "files", "network"),
    [
        ("eth0", {f"{NET}/eth0/type": 1}, "unmetered"),
        ("wlan0", {f"{NET}/wlan0/type": 1, f"{NET}/wlan0/uevent": "DEVTYPE=wlan"}, "unmetered"),
        ("usb9", {f"{NET}/usb9/type": 1, f"{NET}/usb9/uevent": "DEVTYPE=wwan"}, "metered"),
        ("ppp0", {f"{NET}/ppp0/type": 512}, "metered"),
    ],
)
def test_the_kind_of_the_default_route_s_interface(
    tmp_path: Path, interface: str, files: dict[str, object], network: str
) -> None:
    assert read_network(plant(tmp_path, route(interface) | files), nobody) == network


@pytest.mark.parametrize(
    ("said", "network"),
    [
        ("yes", "metered"),
        ("yes (guessed)", "metered"),  # a telephone's hotspot
        ("no (guessed)", "unmetered"),
        ("unknown", "unmetered"),
    ],
)
def test_what_networkmanager_says_comes_first(tmp_path: Path, said: str, network: str) -> None:
    files = plant(tmp_path, route("wlan0") | {f"{NET}/wlan0/type": 1})
    assert read_network(files, lambda interface: said) == network


def test_ipv6_alone(tmp_path: Path) -> None:
    zero, gateway = "0" * 32, "fe80" + "0" * 27 + "1"
    rows = [f"{zero} 00 {zero} 00 {zero} ffffffff 1 0 200200 lo",
            f"{zero} 00 {zero} 00 {gateway} 400 5 0 450003 eth1"]  # fmt: skip
    files = plant(tmp_path, {"proc/net/route": HEADER, "proc/net/ipv6_route": "\n".join(rows)})
    assert find_interface(files) == "eth1"


def test_what_nobody_can_tell_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="there is no default route"):
        read_network(plant(tmp_path), nobody)
    files = plant(tmp_path, route("tun0") | {f"{NET}/tun0/type": 65534})
    with pytest.raises(UnreadableError, match="by tun0, which is neither Ethernet"):
        read_network(files, nobody)


def test_the_condition() -> None:
    assert needs_unmetered(lambda: "unmetered")(True) is None
    assert needs_unmetered(lambda: "metered")(True) == "on a metered network"
    with pytest.raises(UnreadableError, match="nobody says"):
        needs_unmetered(lambda: None)(True)


@pytest.mark.skipif(sys.platform == "win32", reason="programs are scripts of sh")
@pytest.mark.parametrize(
    ("script", "network"),
    [
        ('test "$*" = "-g GENERAL.METERED device show wlan0" && echo "yes (guessed)"', "metered"),
        ("exit 8", "unmetered"),  # NetworkManager does not run: the interface's kind counts
    ],
)
def test_networkmanager_s_own_program_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, network: str
) -> None:
    program(tmp_path / "bin", "nmcli", script, monkeypatch)
    files = plant(tmp_path, route("wlan0") | {f"{NET}/wlan0/type": 1})
    assert read_network(files) == network


def test_the_owner_is_asked() -> None:
    def broken() -> str:
        raise OSError("no modem")

    assert ask_owner("metered")() == "metered"
    assert ask_owner(lambda: "unmetered")() == "unmetered"
    with pytest.raises(UnreadableError, match="no modem"):
        ask_owner(broken)()
    with pytest.raises(UnreadableError, match="SystemExit: 1"):
        ask_owner(lambda: sys.exit(1))()
