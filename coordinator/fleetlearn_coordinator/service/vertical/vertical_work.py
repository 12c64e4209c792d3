"""What a vertical run does beside talking: its top, the common rows, and what it keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vertical.alignment import digest_of, read_membership
from fleetlearn_protocol.vertical.kept_part import PartKey
from fleetlearn_protocol.vertical.messages import VerticalTerms
from numpy.typing import NDArray

from fleetlearn_coordinator.service.vertical.engine import (
    FinishRun,
    KeepAlignment,
    KeepTop,
    KeptRun,
    LoadTop,
    RunCommand,
    StepTop,
    VerticalEngine,
)
from fleetlearn_coordinator.service.vertical.labels import OwnLabels, read_labels
from fleetlearn_coordinator.service.vertical.serve import (
    PartyServer,
    RunTraffic,
    ServedPlace,
    VerticalRunError,
    serve_run,
)
from fleetlearn_coordinator.service.vertical.settings import VerticalPlan
from fleetlearn_coordinator.service.vertical.top import TopProcess
from fleetlearn_coordinator.service.worker_process import check_installed
from fleetlearn_coordinator.storage.vertical_folder import VerticalFolder, VerticalStatus

logger = logging.getLogger("fleetlearn.vertical")


class VerticalWork:
    """One run."""

    def __init__(self, plan: VerticalPlan) -> None:
        """Raises FleetError: the plan, the bundle or the data directory cannot be used."""
        check_installed("a vertical run", "run the coordinator where it is installed")
        self._plan = plan
        self._bundle, split = plan.open_top()
        manifest = self._bundle.manifest
        targets = manifest.batch[len(split.cuts) :]
        self._labels: OwnLabels | None = None
        if plan.labels_file is not None:
            self._labels = read_labels(plan.labels_file, targets)
        self.folder = VerticalFolder(plan.data_dir, plan.digest(self._bundle))
        record = self.folder.record
        self._find_own_rows()
        checkpoints = () if record.alignment is None else self.folder.checkpoints(self._key())
        kept = KeptRun(record.alignment, record.rows, checkpoints, record.finished)
        terms = VerticalTerms(
            record.run,
            1,
            (),
            plan.seed,
            plan.batch_size,
            plan.steps,
            plan.checkpoint_every,
            plan.hyper,
            plan.encoding,
        )
        own = None if self._labels is None else self._labels.hashes
        self.engine = VerticalEngine(terms, split.cuts, targets, plan.labels, kept, own)
        self._top = TopProcess(plan.bundle, manifest, plan.threads)
        self.steps_done = 0
        """Steps of the top since the process began."""
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self.name = record.run

    @property
    def notable(self) -> Hashable:
        """What `status` shows at once when it changes."""
        engine = self.engine
        return engine.phase, tuple(engine.missing), engine.kept.checkpoints

    async def do(self, command: RunCommand) -> Sequence[RunCommand]:
        """Carry a command out. Returns those that follow. Raises TopLostError, FleetError,
        OSError."""
        match command:
            case LoadTop(step):
                part = None if step == 0 else self.folder.load(self._key(), step)
                if step and part is None:
                    raise VerticalRunError(
                        Code.UNKNOWN_CONTENT, f"the top after step {step} is lost"
                    )
                logger.info("everybody is there: going on from step %d", step)
                await self._top.load(part)
            case StepTop():
                return await self._step(command)
            case KeepTop(step):
                part = await self._top.part(step)
                await asyncio.to_thread(self.folder.keep, self._key(), part)
                self._say_progress(part.step)
            case KeepAlignment(digest, rows, own):
                record = self.folder.record
                record.alignment, record.rows, record.own = digest, rows, own
                self.folder.save_record()
                self._find_own_rows()
                logger.info("%d rows are common to all parties", rows)
            case FinishRun():
                self.folder.record.finished = True
                self.folder.save_record()
                logger.info("the training is finished after %d steps", self.engine.step)
        return []

    def _say_progress(self, step: int) -> None:
        """Write a line of the log at each checkpoint, from the first step on."""
        if self._loss is None:
            return
        metrics = "".join(f", {name} {value:.4g}" for name, value in self._metrics.items())
        logger.info("step %d of %d: loss %.4g%s", step, self._plan.steps, self._loss, metrics)

    async def _step(self, command: StepTop) -> Sequence[RunCommand]:
        arrays = [*command.arrays, *self._own_labels(command)]
        found = await self._top.step(command.step, command.seed, self._plan.hyper, arrays)
        self.steps_done += 1
        self._loss, self._metrics = found.loss, found.metrics
        return self.engine.top_done(command.step, found.gradients, found.loss)

    def _own_labels(self, command: StepTop) -> list[NDArray[Any]]:
        if self._labels is None:
            return []
        places = self._own_rows[command.rows]
        return [array[places] for array in self._labels.arrays]

    def _find_own_rows(self) -> None:
        """Find the common rows among the coordinator's labels. Raises VerticalRunError where they
        are not those of the alignment any more."""
        record = self.folder.record
        if self._labels is None or record.alignment is None:
            return
        hashes = self._labels.hashes
        with suppress(ProtocolError):
            self._own_rows = np.flatnonzero(read_membership(record.own, len(hashes)))
            if digest_of(hashes[self._own_rows]) == record.alignment:
                return
        raise VerticalRunError(
            Code.WRONG_HASH,
            f"the rows of {self._plan.labels_file} have changed since the run began: put the file "
            "back, or begin a run of its own with another data_dir",
        )

    def top_lost(self) -> Sequence[RunCommand]:
        """Return what is to be done when the top's process died."""
        return self.engine.top_lost(self.folder.checkpoints(self._key()))

    def _key(self) -> PartKey:
        record = self.folder.record
        return PartKey(record.run, self._bundle.sha256, record.alignment or "0" * 64)

    def tell_status(self, traffic: RunTraffic, *, serving: bool = True) -> None:
        """Write what `status` shows."""
        engine = self.engine
        self.folder.write_status(
            VerticalStatus(
                self.folder.record.run,
                engine.phase,
                engine.step,
                self._plan.steps,
                max(engine.kept.checkpoints, default=0),
                engine.kept.rows,
                engine.attempt,
                {party: serving and party in engine.seats for party in engine.parties},
                self._loss,
                self._metrics,
                engine.why,
                "vertical",
                *traffic,
            )
        )

    async def close(self) -> None:
        """End the top's process, and unlock the data directory."""
        await self._top.close()
        self.folder.close()


def serve_vertical(plan: VerticalPlan) -> None:
    """Serve until the training is over, or a signal comes. Raises FleetError (it cannot be served,
    or the run cannot go on), OSError."""
    tokens = {section.token_sha256: name for name, section in sorted(plan.parties.items())}
    place = ServedPlace(plan.host, plan.port, plan.tls, tokens, patience=0.0)
    serve_run(lambda: PartyServer(place, VerticalWork(plan)))
