"""For tests: a run without a network, whose devices answer at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.rounds.commands import Assign, Command, Commit
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.training_run.members import identity_of, open_bundles
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import BUFFERS, UPDATE, CheckIn, Report
from fleetlearn_protocol.vector import Vector, gather, scatter
from peers import report_of

NOW = Clocks(0.0, 1000.0)


class Fleet:
    """A run whose devices answer at once."""

    def __init__(self, plan: Plan, memory: Mapping[str, int] | None = None) -> None:
        """``memory``: device -> its bytes of RAM, where that decides which model it trains."""
        bundle = open_bundle(plan.bundle)
        self.memory = memory or {}
        self.store = open_store(plan.data_dir, identity_of(open_bundles(plan, bundle)))
        self.run = Run(plan, bundle, self.store, NOW, 15.0)

    def check_in(self, *devices: str) -> list[Command]:
        for device in devices:
            memory = self.memory.get(device)
            self.run.members.policy.join(CheckIn(1, device, 10, memory=memory))
        return [
            command
            for device in devices
            for command in self.carry_out(self.run.engine.check_in(device, None, 0.0))
        ]

    def carry_out(self, commands: Iterable[Command], now: Clocks = NOW) -> list[Command]:
        """Do what the server does with commands."""
        heard: list[Command] = []
        for command in self.run.record(commands, now):
            heard += self.run.commit(command, now) if isinstance(command, Commit) else [command]
        return heard

    def save_update(
        self, lease: Assign, update: Vector, *, add: bool = True, **fields: Any
    ) -> None:
        """Spool the update and make it durable; ``add``: then add it. In the buffers' places the
        update says how far they moved from the model's values now."""
        parts = {UPDATE: update}
        if places := self.run.bundle.manifest.buffers:
            parts = {
                UPDATE: update.copy(),
                BUFFERS: gather(self.run.models.newest.model + update, places),
            }
            scatter(parts[UPDATE], places, 0.0)
        self.save_parts(lease, parts, **fields)
        if add:
            assert self.run.work.do_work(NOW) == []

    def save_parts(self, lease: Assign, parts: Mapping[str, Vector], **fields: Any) -> Report:
        """Spool all parts of a report and make them durable. Returns the report."""
        blobs = self.store.blobs
        spool_file = blobs.take_spool_file()
        blobs.write_spool_file(
            spool_file, 0, b"".join(vector.tobytes() for vector in parts.values())
        )
        described = tuple(FLOAT32.part(name, vector.tobytes()) for name, vector in parts.items())
        report = report_of(lease, parts[UPDATE], **({"parts": described} | fields))  # type: ignore[arg-type]
        largest = {name: float(np.abs(vector).max()) for name, vector in parts.items()}
        self.run.save_update(lease.device, report, spool_file, largest)
        return report

    def report(self, lease: Assign, update: Vector, **fields: Any) -> list[Command]:
        """The same; what the engine then wants, carried out."""
        self.save_update(lease, update, **fields)
        return self.carry_out(self.run.engine.count_report(lease.device, lease.task, 0.0))


def leases(commands: list[Command]) -> list[Assign]:
    return [command for command in commands if isinstance(command, Assign)]


def hyper_of(fleet: Fleet, version: int) -> dict[str, float]:
    """Return the hyper-parameters of the tasks that begin from this version of the one model."""
    (member,) = fleet.run.members.all
    return fleet.run.models.hyper_of(version, member)
