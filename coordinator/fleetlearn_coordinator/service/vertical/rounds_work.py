"""What a split run does beside talking: copies of the top, the rounds' models, and what it
keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.vector import checksum
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey
from fleetlearn_protocol.vertical.messages import SplitBegin, SplitTerms

from fleetlearn_coordinator.service.vertical.engine import FinishRun, TellParty
from fleetlearn_coordinator.service.vertical.round_model import RoundSum, WholeModel
from fleetlearn_coordinator.service.vertical.rounds_engine import (
    AddDevice,
    BeginDevice,
    CloseRound,
    RoundsCommand,
    RoundsEngine,
    SkipTurn,
    StepCopy,
)
from fleetlearn_coordinator.service.vertical.rounds_settings import SplitPlan
from fleetlearn_coordinator.service.vertical.serve import (
    PartyServer,
    RunTraffic,
    ServedPlace,
    VerticalRunError,
    serve_run,
)
from fleetlearn_coordinator.service.vertical.top import TopError, TopProcess
from fleetlearn_coordinator.service.worker_process import check_installed
from fleetlearn_coordinator.storage.vertical_folder import VerticalFolder, VerticalStatus

logger = logging.getLogger("fleetlearn.vertical")

NO_ALIGNMENT = "0" * 64
"""Of checkpoints: devices have rows of their own, which nobody aligns."""


class _Measured(NamedTuple):
    """Sums over the rows of a round."""

    rows: int = 0
    loss: float = 0.0
    metrics: Mapping[str, float] = {}

    def plus(self, other: _Measured) -> _Measured:
        sums = {name: self.metrics.get(name, 0.0) + each for name, each in other.metrics.items()}
        return _Measured(self.rows + other.rows, self.loss + other.loss, sums)


class RoundsWork:
    """One run."""

    def __init__(self, plan: SplitPlan) -> None:
        """Raises FleetError: the plan, the bundles or the data directory cannot be used."""
        check_installed("a split run", "run the coordinator where it is installed")
        self._plan = plan
        self._parts = parts = plan.open_parts()
        self.folder = VerticalFolder(plan.data_dir, plan.digest(parts))
        record = self.folder.record
        self.name = record.run
        self._key = PartKey(record.run, parts.top.sha256, NO_ALIGNMENT)
        initial = WholeModel.initial(parts.bottom, parts.top)
        self._model, done = self._newest(initial)
        if record.finished and not done:
            raise VerticalRunError(
                Code.UNKNOWN_CONTENT, f"{plan.data_dir} has lost the model of a finished run"
            )
        terms = SplitTerms(
            record.run,
            1,
            parts.top.manifest.batch[1:],
            plan.seed,
            plan.batch_size,
            plan.hyper,
            plan.encoding,
            plan.turns,
        )
        state = initial.bottom_state.size if plan.turns else 0
        self.engine = RoundsEngine(
            terms,
            parts.cut,
            tuple(plan.devices),
            plan.turns,
            plan.rounds,
            plan.round_steps,
            initial.bottom.size + state,
            plan.checkpoint_every,
            plan.least_devices,
            done,
            "finished" if record.finished else "waiting",
            checkpoint=done,
        )
        self._top = TopProcess(plan.top, parts.top.manifest, plan.threads)
        self._sum = self._new_sum()
        self.steps_done = 0
        """Steps of the top since the process began."""
        self._measured = _Measured()
        """Of the parts that are in the open round."""
        self._measured_of: dict[str, _Measured] = {}
        """Of the parts that devices are at."""
        self._last: _Measured | None = None
        """Of the round before it."""

    def _newest(self, initial: WholeModel) -> tuple[WholeModel, int]:
        """Return the model that is kept, and after how many rounds it is that."""
        for step in reversed(self.folder.checkpoints(self._key)):
            part = self.folder.load(self._key, step)
            if part is not None:
                return initial.of_part(part), step
        return initial, 0

    def _new_sum(self) -> RoundSum:
        return RoundSum(self._model, carries_state=self._plan.turns)

    @property
    def notable(self) -> Hashable:
        """What `status` shows at once when it changes."""
        engine = self.engine
        return engine.phase, tuple(engine.missing), engine.checkpoint

    async def do(self, command: RoundsCommand) -> Sequence[RoundsCommand]:
        """Carry a command out. Returns those that follow. Raises TopLostError, FleetError,
        OSError."""
        match command:
            case BeginDevice():
                return await self._begin(command)
            case StepCopy():
                return await self._step(command)
            case AddDevice():
                return await self._add(command)
            case CloseRound(number, keep):
                self._model = self._sum.mean()
                self._sum = self._new_sum()
                self._last, self._measured = self._measured, _Measured()
                if keep:
                    await self._keep(number)
                    self._say_progress(number)
            case SkipTurn(device, number, keep):
                logger.warning("%s is gone: its turn goes to the next device", device)
                if keep:
                    await self._keep(number)
            case FinishRun():
                self.folder.record.finished = True
                self.folder.save_record()
                logger.info(
                    "the training is finished after %d %s", self.engine.step, self._plan.unit
                )
        return []

    async def _begin(self, command: BeginDevice) -> Sequence[RoundsCommand]:
        model, turns = self._model, self._plan.turns
        self._measured_of[command.device] = _Measured()
        await self._top.load(KeptPart(0, model.top, model.top_state), command.device)
        vectors = [model.bottom, model.bottom_state] if turns else [model.bottom]
        content = np.concatenate(vectors).astype("<f4").tobytes()
        message = SplitBegin(
            command.attempt,
            command.round,
            command.step,
            command.steps,
            len(content),
            checksum(content),
        )
        return [TellParty(command.device, message, content)]

    async def _step(self, command: StepCopy) -> Sequence[RoundsCommand]:
        try:
            found = await self._top.step(
                command.done, command.seed, self._plan.hyper, command.arrays, command.device
            )
        except TopError as error:
            return self._cannot_go_on(command.device, error)
        self.steps_done += 1
        rows = len(command.arrays[0])
        metrics = {name: rows * value for name, value in found.metrics.items()}
        before = self._measured_of[command.device]
        here = before.plus(_Measured(rows, rows * found.loss, metrics))
        self._measured_of[command.device] = here
        try:
            return self.engine.copy_done(
                command.device, command.attempt, found.gradients[0], found.loss
            )
        except ProtocolError as error:  # a gradient that is not finite
            return self._cannot_go_on(command.device, error)

    def _cannot_go_on(self, device: str, error: FleetError) -> Sequence[RoundsCommand]:
        logger.warning("%s cannot go on: %s", device, error.text)
        return self.engine.copy_failed(device, error.text)

    async def _add(self, command: AddDevice) -> Sequence[RoundsCommand]:
        top = await self._top.part(command.done, command.device)
        size = self._model.bottom.size
        state = command.bottom[size:] if self._plan.turns else self._model.bottom_state
        made = WholeModel(command.bottom[:size], state, top.local, top.state)
        try:
            self._sum.add(made, command.rows)
        except ProtocolError as error:  # weights that no mean can hold
            return self._cannot_go_on(command.device, error)
        self._measured = self._measured.plus(self._measured_of.pop(command.device))
        return self.engine.added(command.device)

    async def _keep(self, number: int) -> None:
        await asyncio.to_thread(self.folder.keep, self._key, self._model.as_part(number))

    def _say_progress(self, number: int) -> None:
        """Write a line of the log at each checkpoint."""
        loss, metrics = self._means()
        if loss is None or self._last is None:
            return
        more = "".join(f", {name} {value:.4g}" for name, value in metrics.items())
        logger.info(
            "%s %d of %d: loss %.4g%s, over %d rows",
            self._plan.unit[:-1],
            number,
            self.engine.steps,
            loss,
            more,
            self._last.rows,
        )

    def _means(self) -> tuple[float | None, dict[str, float]]:
        last = self._last
        if last is None or not last.rows:
            return None, {}
        return last.loss / last.rows, {
            name: value / last.rows for name, value in last.metrics.items()
        }

    def top_lost(self) -> Sequence[RoundsCommand]:
        """Return what is to be done when the top's process died."""
        return self.engine.top_lost()

    def tell_status(self, traffic: RunTraffic, *, serving: bool = True) -> None:
        """Write what `status` shows."""
        engine = self.engine
        loss, metrics = self._means()
        self.folder.write_status(
            VerticalStatus(
                self.name,
                engine.phase,
                engine.step,
                engine.steps,
                engine.checkpoint,
                0,
                engine.attempt,
                {device: serving and device in engine.seats for device in engine.devices},
                loss,
                metrics,
                engine.why,
                self._plan.kind,
                *traffic,
            )
        )

    async def close(self) -> None:
        """End the top's process, and unlock the data directory."""
        await self._top.close()
        self.folder.close()


def serve_split(plan: SplitPlan) -> None:
    """Serve until the training is over, or a signal comes. Raises FleetError (it cannot be served,
    or the run cannot go on), OSError."""
    tokens = {section.token_sha256: name for name, section in sorted(plan.devices.items())}
    place = ServedPlace(plan.host, plan.port, plan.tls, tokens, plan.wait)
    serve_run(lambda: PartyServer(place, RoundsWork(plan)))
