"""For tests: a fleet with secure aggregation whose updates follow from the devices' names
(``marked_update.py``), so that each model can be worked out without any mask."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.secure.fixed_point import weighted_sum
from fleetlearn_protocol.vector import Vector
from marked_update import BITS, CLIP, marked_words
from peers import plan_text
from processes import SCRIPTS, Processes, service_file, status_of, wait_for
from secure_fleet import SecureFleet

MARKED = SCRIPTS / "marked_device.py"


class MarkedFleet(SecureFleet):
    """Its devices are called d0, d1, ..."""

    def __init__(
        self,
        run: Processes,
        bundle: Path,
        shards: Sequence[Path],
        *,
        devices: int = 6,
        enrolled: int | None = None,
        minimum: int = 3,
        recipe: str = "fedavg",
        **settings: Any,
    ) -> None:
        """enrolled: how many of the devices the helper knows; None: all. minimum: of the helper and
        of the plan. settings: of the plan (``plan_text``)."""
        names = [f"d{number}" for number in range(devices)]
        super().__init__(run, minimum, names[:enrolled])
        self.names, self.shards = names, shards
        self.initial = open_bundle(bundle).parameters()
        """The first model."""
        usual: dict[str, Any] = {
            "secure__minimum": minimum,
            "secure__clip": CLIP,
            "round__minimum": minimum,
            "round__goal": devices,
            "round__weighting": "uniform",
        }
        self.write_plan(bundle, recipe, **(usual | settings))

    def write_plain_plan(self, bundle: Path, **settings: Any) -> None:
        """The same plan without [secure]."""
        usual: dict[str, Any] = {
            "local__lr": 0.2,
            "local__evaluate": False,
            "round__goal": len(self.names),
            "round__minimum": 3,
            "round__gather": 30.0,
            "round__weighting": "uniform",
        }
        self.plan.write_text(plan_text(bundle, self.data, "fedavg", **(usual | settings)))
        service_file(self.plan, self.port)

    def start_coordinator(self) -> None:
        """(Re)start the coordinator."""
        self.run.coordinator(self.plan)

    def start_device(self, name: str, *options: str) -> None:
        """(Re)start a device, which goes on until the run has finished."""
        shard = self.shards[int(name[1:]) % len(self.shards)]
        self.run.device(name, f"ws://127.0.0.1:{self.port}", shard, MARKED, options=options)

    def start(self, name: str) -> None:
        """(Re)start one of all."""
        if name == "helper":
            self.start_helper()
        elif name == "coordinator":
            self.start_coordinator()
        else:
            self.start_device(name)

    def start_all(self) -> None:
        """Start everybody."""
        self.start_helper()
        self.start_coordinator()
        for name in self.names:
            self.start_device(name)

    # What came of it

    def finished(self, seconds: float) -> None:
        """Wait until the coordinator ends by itself."""
        status = self.run.wait("coordinator", seconds)
        assert status == 0, f"{self.run.log('coordinator')}\n{self.run.log('helper')}"

    def wait_for_version(self, version: int) -> None:
        """Wait for this model, or a later one."""

        def there() -> bool:
            found = status_of(self.data)
            return found is not None and found.version >= version

        wait_for(there, f"version {version}")

    def accepted(self) -> list[tuple[str, int, int]]:
        """Return the device, the round and the staleness of each update that counts."""
        if status_of(self.data) is None:
            return []
        statement = "SELECT device, round, staleness FROM tasks WHERE state='accepted'"
        with closing(sqlite3.connect(self.data / DATABASE)) as ledger:
            return ledger.execute(statement).fetchall()

    def wait_for_reports(self, count: int) -> None:
        """Wait until so many updates are accepted."""
        wait_for(lambda: len(self.accepted()) >= count, f"{count} reports")

    def reports_of_rounds(self) -> list[int]:
        """Return how many updates each model was made of."""
        return [row.summary["reports"] for row in read_status(self.data).rounds if row.summary]

    def expected(self, rounds: Sequence[Sequence[str]]) -> Vector:
        """Return the model after rounds of these devices' updates, each counting alike: the sum of
        the words, as whole numbers, without any mask."""
        model = self.initial.copy()
        for names in rounds:
            total = np.zeros(len(model) + 1, np.uint32)
            for name in names:
                total[:-1] += marked_words(name, len(model))
            total[-1] = len(names) * (2**BITS - 1)
            found = weighted_sum(total, len(names), CLIP, BITS, equal=True)
            model = (model + found.total / found.weight).astype(np.float32)
        return model
