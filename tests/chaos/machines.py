"""The machines of a fleet: their networks, disks and clocks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from faults import Clocks, Fault, Power
from warm_processes import NETWORK

from tests.chaos.fault_kinds import Abilities
from tests.chaos.packets import GOOD, Link
from tests.chaos.scenario import Scenario

ADDRESSES = {
    name: f"10.7.0.{number}"
    for number, name in enumerate(("hub", "store", "fleet", "east", "west"), 1)
}
"""Machine of a scenario -> address."""
PROGRAM = Path(__file__).with_name("packets.py")
DISK_MIB = {"hub": 192, "device": 24}


class Machines:
    """Networks, disks and clocks, until it is left. Where namespaces are not allowed, all is on
    127.0.0.1."""

    def __init__(
        self, folder: Path, abilities: Abilities, scenario: Scenario, shim: Path | None
    ) -> None:
        """``shim``: the library of faults.py, compiled."""
        self.folder, self.abilities, self.shim = folder, abilities, shim
        self.counts: Mapping[str, int] = {}
        """What was done to how many packets, once the machines are left."""
        self._machines = scenario.machines
        self._own = ["hub", *scenario.names, *scenario.gateways_elsewhere]
        """Who has a disk and a clock: each device is a machine in so far."""
        self._held = ExitStack()
        self._packets: subprocess.Popen[str] | None = None
        self._links: dict[str, list[Mapping[str, Any]]] = {}
        self._ballast: Counter[str] = Counter()
        self._clocks = {name: Clocks(folder / f"{name}.clock") for name in self._own}
        self._ahead = {name: [0.0, 0.0] for name in self._clocks}
        self._drifts: list[tuple[str, Mapping[str, float]]] = []
        self._power: dict[str, Power] = {}

    def __enter__(self) -> Machines:
        with ExitStack() as stack:
            if self.abilities.machines:
                words = [f"{name}={ADDRESSES[name]}" for name in self._machines]
                self._packets = subprocess.Popen(
                    [sys.executable, str(PROGRAM), str(self.folder), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                stack.callback(self._end_packets)
                assert self._packets.stdout is not None
                assert self._packets.stdout.readline() == "\n", "no packets are carried"
            for name in self._own:
                self.disk(name).mkdir(parents=True)
                if self.abilities.disks:
                    mount(self.disk(name), DISK_MIB.get(name, DISK_MIB["device"]))
                    stack.callback(unmount, self.disk(name))
                if self.abilities.power:
                    self._power[name] = Power(self.disk(name), self.folder / f"{name}.power")
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def address(self, machine: str) -> str:
        return ADDRESSES[machine] if self.abilities.machines else "127.0.0.1"

    def around(self, machine: str) -> list[str]:
        """Return the words with which a command is run on a machine."""
        if not self.abilities.machines or machine == "hub":
            return []
        return ["nsenter", f"--net={self.folder / machine}.net"]

    def env(self, machine: str, name: str | None = None) -> dict[str, str]:
        """Return the environment of a warm process on a machine. ``name``: whose clock and disk it
        has."""
        found: dict[str, str] = {}
        if self.abilities.machines and machine != "hub":
            found[NETWORK] = str(self.folder / f"{machine}.net")
        if self.shim is not None and name is not None:
            fault = Fault(self.folder / "none", clocks=self._clocks[name].path)
            if name in self._power:
                power = self._power[name]
                fault = fault._replace(watched=power.disk, kept=power.kept)
            # for the processes that it starts itself
            found |= {"LD_PRELOAD": str(self.shim), **fault.env()}
        return found

    # Disks

    def disk(self, name: str) -> Path:
        """Return the folder of the disk of the hub, or of a device."""
        return self.folder / "disks" / name

    def fill(self, name: str) -> None:
        """Fill a disk to its last byte."""
        self._ballast[name] += 1
        with suppress(OSError), (self.disk(name) / "ballast").open("ab", buffering=0) as ballast:
            for size in (2**20, 2**12, 1):
                with suppress(OSError):
                    while ballast.write(bytes(size)) == size:
                        pass

    def free(self, name: str) -> None:
        """Take away what ``fill`` wrote, at the last of its ends."""
        self._ballast[name] -= 1
        if not self._ballast[name]:
            (self.disk(name) / "ballast").unlink(missing_ok=True)

    def sync(self) -> None:
        """Everything that is on the disks now is synced."""
        for power in self._power.values():
            power.keep_all()

    def lose_power(self, name: str) -> None:
        """Lose what was not synced on a disk. Its processes are dead."""
        (self.disk(name) / "ballast").unlink(missing_ok=True)
        self._power[name].lose()
        if self._ballast[name]:
            self._ballast[name] -= 1
            self.fill(name)

    # Clocks

    def step(self, name: str, wall: float, monotonic: float) -> None:
        """Move the clocks of a machine by seconds."""
        self._ahead[name][0] += wall
        self._ahead[name][1] += max(0.0, monotonic)
        self._clocks[name].set(*self._ahead[name])

    def let_drift(self, name: str, rates: Mapping[str, float]) -> None:
        self._drifts.append((name, rates))

    def end_drift(self, name: str, rates: Mapping[str, float]) -> None:
        with suppress(ValueError):
            self._drifts.remove((name, rates))

    def tick(self, seconds: float) -> None:
        """So many seconds have passed: clocks that drift go on."""
        for name, rates in self._drifts:
            self.step(name, rates["wall"] * seconds, rates["monotonic"] * seconds)

    # Links

    def disturb(self, link: str, what: Mapping[str, Any]) -> None:
        """Let something happen to the packets between two machines. ``what``: fields of ``Link``,
        and ``back``: 1, if to the packets from the second to the first alone; 0, the others."""
        self._links.setdefault(link, []).append(what)
        self._set(link)

    def mend(self, link: str, what: Mapping[str, Any]) -> None:
        with suppress(ValueError, KeyError):
            self._links[link].remove(what)
        self._set(link)

    def mend_all(self) -> None:
        """End what happens to packets, disks and the pace of clocks."""
        for link, rows in self._links.items():
            rows.clear()
            self._set(link)
        for name in [*self._ballast]:
            self._ballast[name] = 1
            self.free(name)
        self._drifts.clear()

    def _set(self, link: str) -> None:
        first, _, second = link.partition("-")
        for back, (source, target) in enumerate(((first, second), (second, first))):
            wish = GOOD._asdict()
            for row in self._links[link]:
                if row.get("back", back) == back:
                    wish = {name: max(value, row.get(name, value)) for name, value in wish.items()}
            self._say(source, target, Link(**wish))

    def _say(self, source: str, target: str, link: Link) -> None:
        if self._packets is not None:
            assert self._packets.stdin is not None
            wish = {"from": source, "to": target, **link._asdict()}
            self._packets.stdin.write(json.dumps(wish) + "\n")
            self._packets.stdin.flush()

    def _end_packets(self) -> None:
        assert self._packets is not None
        said, _ = self._packets.communicate(timeout=30)
        self.counts = json.loads((said.splitlines() or ["{}"])[-1] or "{}")
        for file in self.folder.glob("*.net"):
            unmount(file)
            file.unlink()


def mount(folder: Path, mebibytes: int) -> None:
    """Mount a file system in memory there."""
    options = f"size={mebibytes}m,mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", folder], check=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", folder], check=True)


def in_own_namespaces() -> bool:
    """Return whether this process is the first one of its own namespaces, as ``words_around`` has
    it started."""
    return os.getpid() == 1


def words_around() -> Sequence[str]:
    """Return the words that give a command namespaces of its own: what it starts ends with it, and
    its networks and disks are gone then. Empty: that is not allowed here."""
    words = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return []
    probe = ["sh", "-c", "ip tuntap add dev probe mode tun && mount -t tmpfs none /mnt"]
    done = subprocess.run([*words, *probe], capture_output=True, check=False)
    return [] if done.returncode else words
