"""A run on a host, with its data directory: opened, served, and closed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.distil_files import check_distillation
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.service import worker_process
from fleetlearn_coordinator.service.held_out import HeldOut, HeldOutMember, check_installed
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several.population import EVERYBODY
from fleetlearn_coordinator.service.several.shared_server import SharedRunServer
from fleetlearn_coordinator.service.training_run.members import identity_of, open_bundles
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.service.waiting_log import WaitingLog
from fleetlearn_coordinator.storage.canaries import Split
from fleetlearn_coordinator.storage.find_storage import begin_elsewhere
from fleetlearn_coordinator.storage.ledger import Metadata
from fleetlearn_coordinator.storage.runs import Population
from fleetlearn_coordinator.storage.store import Store, open_store
from fleetlearn_coordinator.storage.stored_elsewhere import StoredElsewhere


def open_run(
    plan: Plan,
    service: ServiceSettings,
    now: Clocks,
    *,
    name: str = "",
    bundle: Bundle | None = None,
    any_thread: bool = False,
    prepare: Callable[[Bundle, Store], None] | None = None,
) -> Run:
    """Open a plan's data directory, and read the model. ``name``: of one of several runs.
    ``bundle``: the plan's, if it is open already. ``any_thread``: the run may then be used in other
    threads than this one, one at a time. ``prepare`` is called with the store before anything is
    read there. Raises PlanError, BundleError, StoreError."""
    bundles = open_bundles(plan, bundle)
    bundle = next(iter(bundles.values()))
    if plan.distil is not None:
        worker_process.check_installed("distillation", "leave [distil] out")
        check_distillation(plan, {name: each.manifest for name, each in bundles.items()})
    elsewhere = StoredElsewhere(name or plan.name, service.ledger, service.blobs)
    begin_elsewhere(plan.data_dir, elsewhere)
    store = open_store(
        plan.data_dir,
        identity_of(bundles),
        durable=plan.durable,
        uploads=service.upload_places,
        kept=plan.updates_kept,
        any_thread=any_thread,
        what="family of models, or in another order" if plan.is_family else "bundle",
    )
    try:
        if prepare is not None:
            prepare(bundle, store)
        run = Run(plan, bundle, store, now, service.heartbeat, RunLog(name), bundles)
        run.work.held_out = _measurer(run)
    except BaseException:
        store.close()
        raise
    return run


def _measurer(run: Run) -> HeldOut | None:
    """Return what measures the run's models on held-out data, if the plan names some. Raises
    PlanError."""
    plan, rule = run.plan, run.plan.evaluation
    if rule.data is None:
        return None
    if not rule.data.is_file():
        raise PlanError(
            Code.UNKNOWN_CONTENT, f"{plan.file}: evaluation.data = {rule.data} is not a file"
        )
    check_installed()

    def is_due(version: int) -> bool:
        # the file of a newer one may be there, which does not count yet
        newest = run.engine.version
        last = run.finished is not None and version == newest
        return 0 < version <= newest and (version % rule.data_every == 0 or last)

    members = [
        HeldOutMember(
            member.name,
            member.bundle,
            member.place.start,
            partial(run.models.member_digest, member=member),
        )
        for member in run.members.all
    ]
    results = run.store.storage.held_out
    return HeldOut(members, results, rule.data, run.store.blobs, is_due, run.log)


class HostedRun:
    """A run within a running event loop. ``begin`` follows; then ``end``, and ``close``."""

    def __init__(
        self,
        run: Run,
        host: RunHost,
        *,
        name: str = "",
        population: Population = EVERYBODY,
        split: Split | None = None,
    ) -> None:
        """``run``: from ``open_run``; if this fails it is closed. ``name``, ``population``,
        ``split``: of one of a host's several runs. Raises BundleError."""
        self.plan, self._store, self._held_out = run.plan, run.store, run.work.held_out
        try:
            self.server = (
                RunServer(run, host)
                if host.turns is None
                else SharedRunServer(run, host, host.turns, name, population, split)
            )
        except BaseException:
            self._store.close()
            raise
        if self._held_out is not None:
            self._held_out.measured = self.server.held_out_measured
        self._measuring: asyncio.Task[None] | None = None
        self._waiting = WaitingLog()

    @property
    def id(self) -> str:
        """The run's own name, which is random."""
        return self._store.run

    def begin(self, pending: Sequence[Command]) -> None:
        """Serve the run. ``pending``: what ``Run.resume`` returned."""
        self.server.run.roll_backs.log_last()
        self.server.run.budget.log_changes()
        call = self.server.loop.call_soon_threadsafe
        self._store.write_beside(call, self.server.gate.begin, self._cannot_write)
        self.server.start(pending)
        if self._held_out is not None:
            self._measuring = self.server.loop.create_task(self._measure(self._held_out))

    def _cannot_write(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        self.server.fail(error)
        self.server.gate.give_up()

    def listens_at(self, address: str) -> None:
        """Devices connect to this URL."""
        self._store.write([Metadata("address", address)])

    async def end(self) -> None:
        """Let what is being computed come to its end, and record that the run is not served any
        more."""
        await self.server.wait_for_thread()
        if self.server.round_asker is not None:
            await self.server.round_asker.close()
        if self._held_out is not None and self._measuring is not None:
            self._measuring.cancel()
            await self._held_out.close()
        failed = self.server.done.done() and self.server.done.exception() is not None
        # the first error says why: such as a full disk
        with suppress(FleetError) if failed else nullcontext():
            self.server.add_second()
            self.record(ended=True)
            if not self._store.is_safe:
                await asyncio.to_thread(self._store.wait_until_safe)
        self.server.end()  # an alarm may still be set, and devices still talk

    @property
    def is_slow(self) -> bool:
        """Whether the run's store is slow."""
        return self._store.is_slow

    def close(self) -> None:
        """Close the data directory. Nothing may be asked of the run any more."""
        self._store.close()

    def look(self) -> None:
        """Look for requests, say what the run waits for, and record what is new. Called each
        second."""
        self.server.look_for_request()
        self._waiting.look(self.server, self.server.loop.time())
        self.server.add_second()
        self.record()

    def record(self, *, ended: bool = False) -> None:
        """Record what the observers have to record: the run's state of this moment and what
        devices did, for ``status`` and the next process."""
        server = self.server
        if rows := server.live_state.take_rows(ended=ended):
            rows += server.history.take_rows() + server.minutes.take_rows(ended=ended)
            self._store.write(rows + server.run.pace_rows(server.now()))

    @property
    def measures(self) -> bool:
        """Whether models are still to be measured on held-out data."""
        return self._held_out is not None and bool(self._held_out.waiting())

    async def _measure(self, held_out: HeldOut) -> None:
        try:
            await held_out.run()
        except Exception as error:
            self.server.fail(error)
