"""Each attack of benchmarks/attacks.py beside honest devices of the same address: rounds go on, and
nothing is lost.

Nothing here depends on how fast the machine is. An honest device that is refused something,
cancelled, sent away or cut off fails the test, and so does an attack that holds rounds up for ever.
tests/coordinator/service/test_server_ghosts.py has the ghosts.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pytest
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.storage.identities import Identities
from peers import SIZE, PlanMaker, serving

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
sys.path.append(BENCHMARKS)  # its files import each other by their names
attacks: Any = importlib.import_module("attacks")
device: Any = importlib.import_module("_websocket_device")
connection_attacks: Any = importlib.import_module("_connection_attacks")
MODULES: dict[str, Any] = {
    attack.module: importlib.import_module(attack.module) for attack in attacks.ATTACKS.values()
}
sys.path.remove(BENCHMARKS)  # its names are other packages' too: float16

NAMES = ["honest-0", "honest-1"]
ROUNDS = 5
PEERS = 40
"""Of the attacks that need thousands."""


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_rounds_go_on(
    name: str, make_plan: PlanMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_attacks, "PEERS", PEERS)
    attack = attacks.ATTACKS[name]
    attackers = getattr(MODULES[attack.module], name)
    opened = 0
    connection_made = DeviceConnection.connection_made

    def count(self: DeviceConnection, transport: asyncio.BaseTransport) -> None:
        nonlocal opened
        opened += 1
        connection_made(self, transport)

    monkeypatch.setattr(DeviceConnection, "connection_made", count)
    service: dict[str, Any] = {"limits": {"exempt": []}}
    headers: dict[str, dict[str, str]] = {name: {} for name in NAMES}
    if attack.identities:
        service["identities"] = str(tmp_path / "identities")
        with closing(Identities(tmp_path / "identities")) as operator:
            token = operator.make_token(len(NAMES), 1e12, (), 0.0)
        headers = {
            name: {
                "Authorization": f"Bearer {token_urlsafe(32)}",
                "Fleetlearn-Device": name,
                "Fleetlearn-Enrolment": token,
            }
            for name in NAMES
        }

    async def test() -> None:
        plan = make_plan(
            round__goal=len(NAMES), round__minimum=len(NAMES), round__over_selection=100
        )
        update, log, stop = device.make_update(SIZE), device.Log(), asyncio.Event()
        async with asyncio.timeout(100), serving(plan, **service) as coordinator:
            url = coordinator.host.address
            honest = [
                asyncio.create_task(device.take_part(url, name, update, log, **headers[name]))
                for name in NAMES
            ]

            async def until_round(number: int) -> None:
                while coordinator.engine.version < number:
                    await asyncio.wait(honest, timeout=0.01)
                    for one in honest:
                        assert not one.done(), one.exception() or "it was sent away"

            await until_round(2)
            begun = asyncio.create_task(attackers(url, stop))
            while opened < len(NAMES) + 3:
                await asyncio.sleep(0.005)
                assert not begun.done(), begun.exception()
            last = coordinator.engine.version + ROUNDS
            await until_round(last)
            assert all(log[number].accepted == len(NAMES) for number in range(1, last))
            stop.set()
            await begun
            for one in honest:
                one.cancel()
            await asyncio.gather(*honest, return_exceptions=True)

    asyncio.run(test())
