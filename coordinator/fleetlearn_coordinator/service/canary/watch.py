"""The canaries of a host that runs: counts both arms, and lets what is decided happen.

What is decided is written into the database of runs alone; the host then brings both runs into the
state that follows (several_runs.py). So a process that is killed anywhere goes on from what is
written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from fleetlearn_protocol.messages import CheckIn
from msgspec.structs import replace

from fleetlearn_coordinator.service.canary.about import about_of, encoded, state_of
from fleetlearn_coordinator.service.canary.acts import act
from fleetlearn_coordinator.service.canary.arm_counter import ArmCounter
from fleetlearn_coordinator.service.canary.arms import Arm
from fleetlearn_coordinator.service.canary.canary_views import canary_view
from fleetlearn_coordinator.service.canary.decision import CanaryState, decide, is_last
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several.operations import Operations
from fleetlearn_coordinator.service.several.population import has_canary, place, why_not
from fleetlearn_coordinator.service.views.records import CanaryView
from fleetlearn_coordinator.storage.canaries import CanaryRow
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.runs import Runs, WantedRun

logger = logging.getLogger("fleetlearn.coordinator")

NOTED = 10.0
"""Seconds between two records of a step in which no task ends."""
LONGEST_LOOK = 10.0
"""Seconds that count at most from one look to the next: a process that stood still has served
nobody meanwhile."""


class CanaryWatch:
    """Called by the host at each of its looks."""

    def __init__(
        self, runs: Runs, operations: Operations, connected: Callable[[], Iterable[CheckIn]]
    ) -> None:
        """``operations``: writes what is decided. ``connected``: returns what the connected devices
        say of themselves."""
        self._runs, self._operations, self._connected = runs, operations, connected
        self._counters: dict[int, ArmCounter] = {}
        """Number of a run that is served -> what counts its tasks."""
        self._states: dict[int, tuple[int, CanaryState]] = {}
        """Canary -> ``CanaryRow.changes``, and its state with what is not written yet."""
        self._noted: dict[int, float] = {}
        """Canary -> when its state was written last."""
        self._looked: float | None = None
        self.views: list[CanaryView] = []
        """All canaries as of the last look, the oldest first."""
        self._told: dict[int, tuple[str, float]] = {}
        """Canary -> the phase and the share that the log has told last."""

    def add(self, number: int, server: RunServer) -> None:
        """The run of this number is served from now on."""
        self._counters[number] = counter = ArmCounter()
        server.run.observers.add(counter)

    def look(
        self,
        runs: Sequence[WantedRun],
        served: Mapping[int, RunServer],
        now: float,
        over: Container[int] = (),
    ) -> bool:
        """Look at all canaries. Returns whether one goes on otherwise from now on: the runs are to
        be read again. ``now``: seconds of a clock that only rises. ``over``: runs whose training is
        finished."""
        passed = min(LONGEST_LOOK, now - (now if self._looked is None else self._looked))
        self._looked = now
        wanted = {run.number: run for run in runs}
        names = {run.number: run.name for run in runs}
        changed, views = False, []
        for row in self._runs.canaries.rows():
            if row.run not in names or row.of not in names:
                continue  # it was removed in this moment
            self._tell(row, names)
            if row.phase == "running":
                is_over = row.run in over and row.run not in served
                changed |= self._look_at(row, wanted, served, passed, now, is_over)
            views.append(canary_view(row, names, self.state(row)))
        self.views = views
        return changed

    def _tell(self, row: CanaryRow, names: Mapping[int, str]) -> None:
        """Say in the log what a canary does now, if it did something else before."""
        is_now = row.phase, row.share
        before, self._told[row.run] = self._told.get(row.run), is_now
        # What had come to its end before this process began was told by an earlier one.
        if before == is_now or (before is None and row.phase != "running"):
            return
        run, of, why = names[row.run], names[row.of], state_of(row).why
        match row.phase:
            case "running":
                known = said("canary-step", run=run, of=of, share=row.share)
                text = "run %s is a canary: %.3g %% of the devices of %s have it"
                logger.info(text, run, 100 * row.share, of, extra=known)
            case "back":
                known = said("canary-back", run=run, of=of, why=why)
                logger.warning("run %s, a canary of %s, went back: %s", run, of, why, extra=known)
            case "finished":
                known = said("canary-finished", run=run, of=of, why=why)
                text = "run %s is what was its canary, and the run before is %s: %s"
                logger.info(text, run, of, why, extra=known)

    def state(self, row: CanaryRow) -> CanaryState:
        """Return where a canary is, with what is not written yet."""
        changes, state = self._states.get(row.run, (None, None))
        return state if state is not None and changes == row.changes else state_of(row)

    def _look_at(
        self,
        row: CanaryRow,
        wanted: Mapping[int, WantedRun],
        served: Mapping[int, RunServer],
        passed: float,
        now: float,
        is_over: bool,
    ) -> bool:
        state, canary = self.state(row), wanted[row.run]
        if row.run not in self._noted:
            self._begin_step(row)  # what the old run's devices did before is not compared with
            self._noted[row.run] = now
        elif self._states.get(row.run, (row.changes,))[0] != row.changes:
            # somebody began another step
            self._begin_step(row)
        before = state
        server = served.get(row.run)
        if is_over or (server is not None and server.engine.paused is False):
            state = replace(state, seconds=state.seconds + passed)
        state = replace(
            state,
            canary=self._add(row.run, state.canary),
            control=self._add(row.of, state.control),
        )
        self._states[row.run] = row.changes, state
        trouble = f"the canary's run failed: {canary.failed}" if canary.failed else ""
        settings = about_of(row).settings
        if is_over and not is_last(state, settings):
            trouble = (
                "its training is finished, before all devices had it: a plan whose [stop] comes "
                "later, or shorter steps, are needed"
            )
        decision = decide(state, settings, trouble)
        try:
            if decision.action != "hold":
                act(self._operations, row, state, decision.action, decision.why)
                self._begin_step(row)
                return True
            # The run counts the devices that it has, of any number; only where these are too few
            # are the connected ones looked through.
            too_few = server is not None and server.connected < settings.devices
            if too_few and self._reach_some(row, state, wanted[row.of], canary):
                return True
        except StoreError as error:  # somebody else has just changed it, or the disk is full
            logger.warning("the canary %s stays as it is for now: %s", canary.name, error.text)
            return False
        counted = (state.canary, state.control) != (before.canary, before.control)
        if counted or now - self._noted.get(row.run, now) >= NOTED:
            self._runs.canaries.note(row, encoded(state))
            self._noted[row.run] = now
        return False

    def _begin_step(self, row: CanaryRow) -> None:
        """Count from now on what is done in another step."""
        self._states.pop(row.run, None)
        for number in (row.run, row.of):
            if number in self._counters:
                self._counters[number].begin()

    def _add(self, number: int, arm: Arm) -> Arm:
        counter = self._counters.get(number)
        return arm if counter is None else counter.add_to(arm)

    def _reach_some(
        self, row: CanaryRow, state: CanaryState, old: WantedRun, canary: WantedRun
    ) -> bool:
        """Let the canary reach ``devices`` of the devices that are connected, where its share of
        them is fewer. Not after the first task of a step: if the canary kills its devices, it would
        be given new ones again and again. Returns whether it reaches more than before."""
        split, fewest = canary.split, about_of(row).settings.devices
        if split is None or state.canary.given or split.share >= 1:
            return False
        fit = [
            each
            for each in self._connected()
            if {*split.tags} <= {*each.tags} and not why_not(old.population, old.name, each)
        ]
        lacks = fewest - sum(has_canary(split, each) for each in fit)
        others = [each.device for each in fit if not has_canary(split, each)]
        if lacks <= 0 or not others:
            return False
        # By name, not by a larger share: of the devices that come later, few have it too.
        others = sorted(others, key=lambda device: place(split.key, device))[:lacks]
        devices = (*row.devices, *others)
        self._runs.canaries.change(row._replace(devices=devices, state=encoded(state)))
        self._states[row.run] = row.changes + 1, state  # the same step: what is counted stays
        logger.info("the canary %s has %d more devices", canary.name, len(others))
        return True
