"""Gateways add up the updates that they stored."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Protocol

from fleetlearn_coordinator.aggregation.partial_sum import PartialSum, SumsToMake, UpdateToAdd
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.network.peer_log import logger

SUMS = "partial_sums"
"""The folder with what gateways have added up, in the run's data directory."""
PATIENCE = 5.0
"""Seconds that a gateway may take until its partial sum is there, and one more for each
BYTES_PER_SECOND of its updates. Then the engine process adds them itself."""
BYTES_PER_SECOND = 2**25
MOST_STORED = 4096
"""Updates of which it is known who stored them. They are given away soon after."""


class CollectsSums(Protocol):
    """Who gave the updates away: the run."""

    most_apart: int | None
    """How many gateways on other machines add at most, where those add and no others. None: those
    on this machine add, and no others."""

    def collected(self, number: int, made: PartialSum | None) -> None:
        """A partial sum is there. None: it does not come."""

    def lost(self, adder: int) -> None:
        """This gateway is gone."""


class SpokenTo(Protocol):
    """A gateway: gateway_link.py."""

    def say(self, message: wire.ToGateway) -> None:
        """Say this, after what was said before."""


class GatewayAdders:
    """``Adders``: the gateways of a run. Within a running event loop."""

    def __init__(self, gateways: Mapping[int, SpokenTo], folder: Path, name: str = "") -> None:
        """``gateways``: by their numbers, those that have said hello. ``folder``: the run's data
        directory. ``name``: the run's, as ``run`` of its messages. What an earlier process left in
        it is removed. Raises OSError."""
        self._gateways, self.folder, self._name = gateways, folder.absolute() / SUMS, name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)
        self.run: CollectsSums | None = None
        """None: the engine process adds all updates."""
        self._loop = asyncio.get_running_loop()
        self._stored: dict[int, int] = {}
        """Number of a spool file -> the gateway that wrote the update in it."""
        self._late: dict[int, tuple[int, asyncio.TimerHandle]] = {}
        """Number of a partial sum that was asked for -> the gateway, and what gives it up."""
        self._given_up: dict[int, int] = {}
        """Number of a partial sum that is not needed any more -> the gateway that may write it."""

    @property
    def awaited(self) -> Container[int]:
        """The numbers of partial sums that are waited for, now and later. May be asked in any
        thread."""
        return self._late.keys()

    # What gateways say

    def stored(self, gateway: int, spool_file: int) -> None:
        """The gateway wrote the update in this spool file, which is complete."""
        if self.run is None:
            return
        self._stored[spool_file] = gateway
        if len(self._stored) > MOST_STORED:
            del self._stored[next(iter(self._stored))]

    def is_awaited(self, gateway: int, number: int) -> bool:
        """Whether this gateway was asked for this partial sum, and there is time."""
        return number in self._late and self._late[number][0] == gateway

    def made(self, gateway: int, message: wire.PartialSumMade) -> None:
        """A gateway has written a partial sum, or could not. What another one says of it does not
        count."""
        if self._given_up.get(message.number) == gateway:
            del self._given_up[message.number]
            Path(self.file_of(message.number)).unlink(missing_ok=True)
        if not self.is_awaited(gateway, message.number):
            return
        _, timer = self._late.pop(message.number)
        timer.cancel()
        if message.made is None:
            logger.warning(
                "a gateway could not add up its updates (%s): they are added here", message.text
            )
        if self.run is not None:
            self.run.collected(message.number, message.made)

    def lost(self, gateway: int) -> None:
        """The gateway is gone."""
        self._stored = {file: one for file, one in self._stored.items() if one != gateway}
        self._given_up = {number: one for number, one in self._given_up.items() if one != gateway}
        if self.run is not None:
            self.run.lost(gateway)

    def close(self) -> None:
        """Do nothing more."""
        for _, timer in self._late.values():
            timer.cancel()

    # What the run says

    def adder_of(self, spool_file: int) -> int | None:
        return self._stored.get(spool_file)

    def begin(self, adder: int, number: int, sums: SumsToMake) -> None:
        self._gateways[adder].say(wire.BeginSums(number, sums, self._name))

    def add(self, adder: int, number: int, update: UpdateToAdd) -> None:
        self._gateways[adder].say(wire.AddToSums(number, update, self._name))

    def collect(self, adder: int, number: int, size: int) -> None:
        self._gateways[adder].say(wire.CollectSums(number, self._name))
        patience = PATIENCE + size / BYTES_PER_SECOND
        timer = self._loop.call_later(patience, self._give_up, adder, number)
        self._late[number] = adder, timer

    def _give_up(self, adder: int, number: int) -> None:
        del self._late[number]
        self._need_no_more(adder, number)
        logger.warning("gateway %d adds up its updates too slowly: they are added here", adder)
        if self.run is not None:
            self.run.collected(number, None)

    def forget(self, adder: int, number: int) -> None:
        if number in self._late:
            _, timer = self._late.pop(number)
            timer.cancel()
            self._need_no_more(adder, number)
        if adder in self._gateways:
            self._gateways[adder].say(wire.ForgetSums(number, self._name))

    def _need_no_more(self, adder: int, number: int) -> None:
        """Remove the file if the gateway still writes it."""
        self._given_up[number] = adder
        if len(self._given_up) > MOST_STORED:
            del self._given_up[next(iter(self._given_up))]

    def file_of(self, number: int) -> str:
        return str(self.folder / str(number))
