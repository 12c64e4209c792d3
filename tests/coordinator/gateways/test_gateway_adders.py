"""Who may say that a partial sum is there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fleetlearn_coordinator.aggregation.partial_sum import PartialSum
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.gateway_adders import GatewayAdders

SUM = PartialSum(("task",), (), 0)
FIRST, SECOND = 1, 2


class Gateway:
    def __init__(self) -> None:
        self.told: list[wire.ToGateway] = []

    def say(self, message: wire.ToGateway) -> None:
        self.told.append(message)


class Run:
    most_apart = None

    def __init__(self) -> None:
        self.found: list[tuple[int, PartialSum | None]] = []

    def collected(self, number: int, made: PartialSum | None) -> None:
        self.found.append((number, made))

    def lost(self, adder: int) -> None: ...


def adders_of(folder: Path) -> tuple[GatewayAdders, Run]:
    adders, run = GatewayAdders({FIRST: Gateway(), SECOND: Gateway()}, folder), Run()
    adders.run = run
    return adders, run


def in_a_loop(what: Any) -> None:
    asyncio.run(what())


def test_a_gateway_cannot_answer_for_another_one(tmp_path: Path) -> None:
    async def steps() -> None:
        adders, run = adders_of(tmp_path)
        adders.collect(FIRST, 7, 0)
        written = Path(adders.file_of(7))
        written.write_bytes(b"sum")
        lie = wire.PartialSumMade(7, SUM._replace(crc32=1), "")
        adders.made(SECOND, lie)
        assert run.found == []
        assert written.exists()  # of the gateway that was asked, which is about to say so
        adders.made(FIRST, wire.PartialSumMade(7, SUM, ""))
        assert run.found == [(7, SUM)]
        adders.made(FIRST, lie)
        assert run.found == [(7, SUM)]
        assert written.exists()  # the run may still read the file
        adders.close()

    in_a_loop(steps)


def test_what_comes_too_late_is_removed(tmp_path: Path) -> None:
    async def steps() -> None:
        adders, run = adders_of(tmp_path)
        adders.collect(FIRST, 7, 0)
        adders.forget(FIRST, 7)
        written = Path(adders.file_of(7))
        written.write_bytes(b"sum")
        adders.made(SECOND, wire.PartialSumMade(7, SUM, ""))
        assert written.exists()
        adders.made(FIRST, wire.PartialSumMade(7, SUM, ""))
        assert not written.exists()
        assert run.found == []
        adders.close()

    in_a_loop(steps)
