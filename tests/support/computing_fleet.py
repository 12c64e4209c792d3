"""For tests: a run without a network, whose devices answer with the sums of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from answering import NOW, Fleet, leases
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.rounds.commands import Assign, Command
from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.private_sums import clip_sums
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.encodings import INT64
from fleetlearn_protocol.formats.whole import sums_to_bytes
from fleetlearn_protocol.messages import SUMS
from peers import report_of


class ComputingFleet(Fleet):
    """A fleet whose devices answer with their sums."""

    def __init__(self, plan: Plan, tables: Mapping[str, Columns]) -> None:
        super().__init__(plan)
        self.tables = tables

    def sums_of(self, device: str) -> np.ndarray:
        settings = self.run.bundle.manifest.computation
        state, privacy = self.run.models.newest.model, self.run.models.newest.privacy
        sums = sum_up(state, [self.tables[device]], settings)
        if privacy is None:
            return sums
        groups = KINDS[kind_of(settings)].groups
        assert groups is not None
        return clip_sums(sums, groups(settings, state), privacy.clip).sums

    def answer(self, lease: Assign, sums: np.ndarray) -> list[Command]:
        content = sums_to_bytes(sums)
        spool_file = self.store.blobs.take_spool_file()
        self.store.blobs.write_spool_file(spool_file, 0, bytes(content))
        report = report_of(lease, np.zeros(1, np.float32), parts=(INT64.part(SUMS, content),))
        largest = {SUMS: INT64.check(content)}
        self.run.save_update(lease.device, report, spool_file, largest)
        assert self.run.work.do_work(NOW) == []
        return self.carry_out(self.run.engine.count_report(lease.device, lease.task, 0.0))

    def lease_of(self, device: str) -> Assign:
        found = leases(self.check_in(device))
        return next(each for each in found if each.device == device)

    def answers(self, *devices: str) -> None:
        """Let these devices take a task each and answer it."""
        for device in devices:
            self.answer(self.lease_of(device), self.sums_of(device))


def result_of(plan: Plan, running: ComputingFleet) -> dict[str, Any]:
    computation = plan.computation(running.run.bundle.manifest)
    return computation.result(read_model(plan.data_dir)[1])
