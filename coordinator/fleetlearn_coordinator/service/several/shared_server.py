"""One of several runs of a host: ``RunServer`` with what lets devices serve the other runs
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetlearn_protocol.messages import CheckIn, ComeBack

from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.network.several.guarded_spool import GuardedSpool
from fleetlearn_coordinator.network.several.turns import Turns
from fleetlearn_coordinator.rounds.commands import Ask, Assign, Command
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several.population import why_not
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.canaries import Split
from fleetlearn_coordinator.storage.runs import Population


class SharedRunServer(RunServer):
    """A ``RunPort``. Devices that serve another run are for this one as if they were not
    connected."""

    def __init__(
        self,
        run: Run,
        host: RunHost,
        turns: Turns,
        name: str,
        population: Population,
        split: Split | None = None,
    ) -> None:
        """``turns``: the host's. ``population``, ``split``: which devices the run is for."""
        self.name, self._turns = name, turns
        self._population, self.split = population, split
        self.task_prefix = run.store.run
        super().__init__(run, host)
        self.spool = GuardedSpool(run.store.blobs, self.fail)
        rule = self.engine.settings
        self.patience = rule.deadline * (2 if rule.carry else 1)
        self._started = False
        self._telling = 0
        """How many calls of ``_tell_all`` are under way, one within the other."""
        self.engine.selection.freed = []
        self._turn = turns.add(self._served, self)
        """Its place among the host's runs."""

    # What people want of it

    def start(self, pending: Sequence[Command]) -> None:
        if self.engine.paused:
            self.clock.stop()
        self._started = True
        super().start(pending)
        if not self.engine.paused:
            self._turns.reopen(self._turn)

    def pause(self) -> None:
        """Give no task and open no round from now on. What is out may still be reported, and no
        deadline passes. Harmless where it is paused."""
        if not self.engine.paused:
            self.engine.paused = True
            self.clock.stop()
            self._set_alarm()
            self._turns.close(self._turn)
            self.live_state(())  # no event says that

    def go_on(self, *, draining: bool = False) -> None:
        """Go on after a pause, or to the end of the open round alone (``draining``), or beyond it
        again. Harmless where it does."""
        if (self.engine.paused, self.engine.draining) == (False, draining):
            return
        self.engine.paused, self.engine.draining = False, draining
        self.clock.go_on()
        now = self.now()
        self._tell_all(self.run.record(self.engine.begin(now.engine), now))
        self._turns.reopen(self._turn)
        self.live_state(())

    def split_devices(self, split: Split | None) -> None:
        """From now on this part of the devices serve the run; None: all. Devices that have its
        tasks go on with them. Harmless where it is so."""
        if self.split != split:
            self.split = split
            self._turns.refit(self._turn)

    @property
    def is_drained(self) -> bool:
        """Whether the run has come to an end where it may be stopped: no round and no exchange is
        open."""
        is_between = self.engine.phase in (Phase.GATHERING, Phase.FINISHED)
        return is_between and not any(each.is_open for each in self.engine.exchanges.values())

    def end(self, why: str = "the run was stopped") -> None:
        """Do nothing more for this run. The devices serve the others; ``why`` is for the people of
        those with tasks."""
        if self.ended:
            return
        self.ended = True
        self._ask_no_more()
        if self._alarm is not None:
            self._alarm.cancel()
        # else the devices have been told to come back, and keep their tasks
        if not self.host.ended:
            self._turns.drop(self._turn, why)
            self.host.forget_uploads(self.spool, unless=())
            self.host.drop_run(self._served)
            self.host.grant()

    # What the host asks

    @property
    def open_to_devices(self) -> bool:
        return self._started and not (self.engine.paused or self.ended or self.done.done())

    @property
    def gathers(self) -> int:
        engine, rule = self.engine, self.engine.settings
        gathering = (
            engine.phase is Phase.GATHERING and not engine.draining and not rule.asynchronous
        )
        return rule.minimum if gathering and self.open_to_devices else 0

    def unfit(self, check_in: CheckIn) -> str:
        why = why_not(self._population, self.name, check_in, self.split)
        return why or super().unfit(check_in)

    def may_serve(self, device: str) -> bool:
        return self.engine.selection.may_serve(device)

    def task_of(self, device: str) -> str | None:
        return next(
            (book.tasks[device] for book in self.engine.books if device in book.tasks), None
        )

    def take_freed(self) -> list[str]:
        freed, self.engine.selection.freed = self.engine.selection.freed, []
        return freed or []

    def withdraw(self, device: str, now: float) -> None:
        if device not in self._idle:
            self.engine.withdraw(device, self.clock.read(now))
        self._forget(device)

    # What differs from a run that has its host for itself

    def _tell_all(self, commands: Sequence[Command]) -> None:
        self._turns.claim(
            self._turn, [each.device for each in commands if isinstance(each, Assign | Ask)]
        )
        self._telling += 1
        super()._tell_all(commands)
        self._telling -= 1
        if not self._telling and not self.ended:
            self._turns.offer_freed_devices(self._turn)

    def _send_away(self, device: str, after: float) -> None:
        self._forget(device)
        self._turns.decline(self._turn, device, after)

    def _say_to_all(self, answer: Callable[[], ComeBack]) -> None:
        """Say nothing: the devices serve other runs."""

    @property
    def connected(self) -> int:
        return self._turn.fitting
