"""One run, as the connections of its host see it: the engine's and the run's decisions behind the port."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from fleetlearn_protocol.encodings import FLOAT16, FLOAT32, family
from fleetlearn_protocol.errors import MAX_TEXT, Code, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import (
    MODEL,
    PLAIN,
    Cancel,
    CheckIn,
    ComeBack,
    Evaluate,
    Evaluated,
    Report,
    Task,
    VectorReference,
    Welcome,
)
from fleetlearn_protocol.vector import digest

from fleetlearn_coordinator.aggregation.sent_models import half_of
from fleetlearn_coordinator.conversation.port import Admitted
from fleetlearn_coordinator.conversation.uploads import check_parts
from fleetlearn_coordinator.network.contents import Older
from fleetlearn_coordinator.network.host import Host, spread
from fleetlearn_coordinator.rounds.commands import (
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    EvaluationClosed,
    Finish,
    Measure,
    SendAway,
)
from fleetlearn_coordinator.rounds.selection_rules import stated_in
from fleetlearn_coordinator.service.run import Clocks, Run
from fleetlearn_coordinator.storage.blobs import PARAMETERS
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.store import OPTIMIZER_STATE

logger = logging.getLogger("fleetlearn.coordinator")

LARGE_MODEL = 8 * 2**20
"""Bytes from which on a model's updates are added, saved and committed in another thread. Measured on a busy machine
with FedAdam, a commit of 4 MB takes 50 ms, of 16 MB 200 to 400 ms, of 40 MB about a second."""
SOFTWARE = f"fleetlearn {version('fleetlearn')}"
"""What a `welcome` says. Looked up once: reading the installed metadata takes 0.1 ms."""


class RunServer:
    """A run on a host, within a running event loop. ``serve.running`` makes one whose host listens."""

    def __init__(self, run: Run, host: Host) -> None:
        self.run, self.engine, self.host = run, run.engine, host
        self.spool, self.elements = run.store.blobs, run.model.size
        self._knows_encoding: set[str] = set()
        """Connected devices that know the plan's encoding of updates. The others are asked for float32."""
        self._knows_half: set[str] = set()
        """Connected devices that know float16, if models travel so. The others are sent float32."""
        self._last_model: dict[str, str] = {}
        """Connected device -> SHA-256 of the model that it has, if models travel as differences."""
        self._half_digests: dict[int, str | None] = {}
        """Version -> SHA-256 of its model as float16, for the newest and for those that tasks began from."""
        self._served = host.serve_run(self, run.bundle, self.fail)
        files = run.bundle.manifest.files.values()
        self._bundle_bytes = len(run.bundle.read(MANIFEST)) + sum(entry.size for entry in files)
        self.loop = asyncio.get_running_loop()
        self._published: set[str] = set()
        """The SHA-256 of the newest model and of what belongs to it, which are served."""
        self.done: asyncio.Future[str] = self.loop.create_future()
        """Set when the run is finished or was told to stop."""
        self._idle: set[str] = set()
        """Connected devices that lack what this run's tasks need. The engine does not know them."""
        self._alarm: asyncio.TimerHandle | None = None
        self._working: asyncio.Task[None] | None = None
        """The run's steps that are done in another thread."""

    def start(self) -> None:
        """Take up what an earlier process left open."""
        self._publish()
        self._tell_all(self.run.resume(self.now()))
        if self.run.finished is not None:  # before, or by the round that was just resumed
            self._finish(self.run.finished)

    @property
    def ended(self) -> bool:
        """Whether nothing more may be done: the run is being closed, or memory may be ahead of the disk."""
        return self.host.shared.ended

    def end(self) -> None:
        """Do nothing more, whatever devices say and however late it is."""
        self.host.shared.ended = True

    def fail(self, error: Exception) -> None:
        """Something that no device is to blame for: end the process rather than go on half-done. Disk has the truth."""
        self.end()
        if not self.done.done():
            self.done.set_exception(error)
        else:
            logger.error("after the end: %s", error, exc_info=error)

    # The port of the conversations: what devices do

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        if self.run.finished is not None:
            return ComeBack(spread(3600.0), "finished")
        if self.done.done():
            return ComeBack(spread(10.0), "stopping")
        model, ineligible = self.run.model.nbytes, ""
        if self.run.selection is not None:
            ineligible = self.run.selection.why_not(check_in)
        ineligible = self._lacks(check_in) or ineligible
        welcome = Welcome(SOFTWARE, self.host.heartbeat, CHUNK_BYTES, ineligible)
        return Admitted(self, welcome, self._bundle_bytes + model, 2 * model)

    def _lacks(self, check_in: CheckIn) -> str:
        """Return why the device cannot do any task of this run; empty if it can."""
        algorithm, knows = self.run.plan.local.algorithm, (PLAIN, *check_in.algorithms)
        if algorithm in knows:
            return ""
        text = f"this run trains with the algorithm {algorithm}, and the device knows {', '.join(knows)}"
        return f"{text[: MAX_TEXT - 40]}. Update its fleetlearn"

    def join(self, check_in: CheckIn, now: float) -> None:
        device, held = check_in.device, check_in.held
        if self._lacks(check_in):  # it stays connected, for another plan
            self._idle.add(device)
            return
        self._idle.discard(device)
        self._learn_encodings(check_in)
        if self.run.selection is not None:
            self.run.selection.selection.stated[device] = stated_in(check_in)
        if check_in.evaluates:
            self.run.evaluations.join(check_in)
            self.engine.evaluations.join(device)
        self._carry_out(self.engine.check_in(device, None if held is None else held.task, now), now)

    def leave(self, device: str, now: float) -> None:
        self.run.evaluations.tiers.pop(device, None)
        self._forget_encodings(device)
        if device in self._idle:
            self._idle.remove(device)
            return
        if not self.done.done():  # else the leases stay as they are on disk, for the next process
            self._carry_out(self.engine.disconnect(device, now), now)
            if self.run.selection is not None:
                self.run.selection.selection.stated.pop(device, None)

    def _learn_encodings(self, check_in: CheckIn) -> None:
        device, encoding = check_in.device, self.run.plan.encoding
        self._forget_encodings(device)
        if family(encoding.up) in check_in.encodings:
            self._knows_encoding.add(device)
        if encoding.down == FLOAT16.name and FLOAT16.name in check_in.encodings:
            self._knows_half.add(device)
        for base in check_in.models:
            if base in self.run.forms.deltas:
                self._last_model[device] = self.run.forms.deltas[base].base
            elif base == self.run.model_digest and encoding.down == "delta":
                self._last_model[device] = self.run.model_digest

    def _forget_encodings(self, device: str) -> None:
        self._knows_encoding.discard(device)
        self._knows_half.discard(device)
        self._last_model.pop(device, None)

    def announce(self, device: str, report: Report, now: float) -> bool:
        if self.has_counted(device, report.task):
            return False
        self._carry_out(self.engine.announce(device, report.task, report.round, now), now)
        exact = all(part.encoding == FLOAT32.name for part in report.parts)
        check_parts(report, self.run.plan.exact_parts if exact else self.run.plan.parts, self.elements)
        return True

    def save_update(self, device: str, report: Report, spool: int, largest: Mapping[str, float]) -> None:
        if not self.engine.wanted(device, report.task):
            raise ProtocolError(Code.STALE_ROUND, f"round {report.round} ended before the update was here")
        self.run.save_update(device, report, spool, largest, self.loop.time())
        self._do_steps()

    def count_report(self, device: str, task: str, now: float) -> None:
        self._carry_out(self.engine.count_report(device, task, now), now)

    def has_counted(self, device: str, task: str) -> bool:
        return self.engine.has_counted(device, task)

    def save_measurement(self, device: str, message: Evaluated) -> bool:
        evaluations = self.engine.evaluations
        if evaluations.book.accepted.get(message.task) == device:
            return False
        if not evaluations.wanted(device, message.task):
            raise ProtocolError(Code.UNKNOWN_TASK, f"task {message.task} is not device {device}'s, or not any more")
        self.run.save_measurement(message)
        return True

    def count_measurement(self, device: str, task: str, now: float) -> None:
        self._carry_out(self.engine.count_measurement(device, task, now), now)

    def end_task(self, device: str, task: str, cause: str, now: float) -> None:
        self._carry_out(self.engine.end(device, task, cause, now), now)

    def progress(
        self, device: str, task: str | None, what: str, amount: int, now: float, *, received: int = 0, sent: int = 0
    ) -> None:
        if sent:
            task = self.engine.leases.get(device)
        self.engine.progress(device, task, what, amount, now)
        self.run.bytes_up += received
        self.run.bytes_down += sent

    def wait(self, device: str, now: float) -> bool:
        self.engine.wait(device, now)
        return self.engine.has_task(device)

    def proceed(self, device: str, now: float) -> None:
        self.engine.proceed(device, now)

    def find(self, sha256: str, offset: int) -> int:
        return self._served.contents.find(sha256, offset).size

    # The engine

    def now(self) -> Clocks:
        """Return this moment."""
        return Clocks(self.loop.time(), time.time())

    def _carry_out(self, commands: Iterable[Command], now: float) -> None:
        self._tell_all(self.run.record(commands, Clocks(now, time.time())))

    def _tell_all(self, commands: Iterable[Command]) -> None:
        """Tell the devices what was decided and recorded; then set the engine's alarm."""
        closed: EvaluationClosed | None = None
        for command in commands:
            match command:
                case Assign():
                    self._assign(command)
                case CancelTask(device, task, code, text):
                    self.host.tell(device, Cancel(task, code, text))
                case SendAway(device, after):
                    self.host.tell(device, ComeBack(after, "no-task"))
                case Commit():
                    self._forget_uploads()
                    self.run.begin_commit(command, self.now())
                    self._do_steps()
                case Abandon():
                    self._forget_uploads()
                case Measure():
                    self._measure(command)
                case EvaluationClosed():
                    closed = command
                case Finish(reason):
                    self._finish(reason)
        if closed is not None:  # after all else is told: it may end tasks that were just given
            self._tell_all(self.run.end_evaluation(closed, self.now()))
        wake = self.engine.wake_at()
        if self._alarm is not None:
            if self._alarm.when() == wake:
                return
            self._alarm.cancel()
        self._alarm = None if wake is None else self.loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        if self.ended:
            return
        try:
            now = self.loop.time()
            self._carry_out(self.engine.tick(now), now)
            self.host.grant()
        except Exception as error:
            self.fail(error)

    def _do_steps(self) -> None:
        """Do what is to be done with accepted updates: those of a large model in another thread, while this one answers
        the devices."""
        if self.run.model.nbytes < LARGE_MODEL:
            if commands := self.run.do_steps(self.now()):
                self._tell_all(commands)
        elif self._working is None or self._working.done():
            self._working = self.loop.create_task(self._do_steps_in_thread())

    async def _do_steps_in_thread(self) -> None:
        """Do one step after the other. What a stop leaves undone, the next start does."""
        try:
            while not self.done.done() and (step := self.run.next_step()) is not None:
                result = await asyncio.to_thread(step.work)
                if self.ended:
                    break
                self._tell_all(step.end(result, self.now()))
                self.host.grant()
        except Exception as error:
            self.fail(error)

    async def wait_for_thread(self) -> None:
        """Wait until no step is under way: its thread cannot be stopped."""
        while self._working is not None and not self._working.done():
            await asyncio.wait({self._working})

    def _forget_uploads(self) -> None:
        """A round is over: forget the uploads of its tasks, except those that go on."""
        self.host.uploads.forget_tasks(self.spool, unless={*self.engine.leases.values()})

    def _assign(self, lease: Assign) -> None:
        run, local = self.run, self.run.plan.local
        self.host.tell(
            lease.device,
            Task(
                task=lease.task,
                round=lease.round,
                bundle=run.bundle.sha256,
                vectors=self._serve_model(lease.device, lease.version, run.plan.vectors),
                parts=run.plan.parts if lease.device in self._knows_encoding else run.plan.exact_parts,
                hyper=run.hyper_of(lease.version),
                epochs=local.epochs,
                batch_size=local.batch_size,
                seed=lease.seed,
                deadline=max(0.0, lease.deadline - self.loop.time()),
                time_budget=local.time_budget,
                evaluate=local.evaluate,
                algorithm=local.algorithm,
                personal_epochs=local.personal_epochs,
                kept=run.tied_to(lease.device),
            ),
        )

    def _measure(self, lease: Measure) -> None:
        vectors, left = self._serve_model(lease.device, lease.version), max(0.0, lease.deadline - self.loop.time())
        self.host.tell(lease.device, Evaluate(lease.task, self.run.bundle.sha256, vectors, left))

    def _serve_model(self, device: str, version: int, beside: Iterable[str] = ()) -> tuple[VectorReference, ...]:
        """Let the device fetch this version's model and the vectors beside it. Returns what a task says of them."""
        run = self.run
        self._publish()
        digests = run.digests_of(version, beside)
        if version != run.engine.version:  # the device came back without its work, and goes on with it
            for sha256, where in self._find_older([version], beside).items():
                self._served.contents.serve_older(sha256, where)
        size = FLOAT32.size(run.model.size)
        references = {name: VectorReference(name, digest, size, FLOAT32.name) for name, digest in digests.items()}
        half = self._half_digest(version) if device in self._knows_half else None
        if half is not None:
            references[MODEL] = VectorReference(MODEL, half, FLOAT16.size(run.model.size), FLOAT16.name)
        elif run.plan.encoding.down == "delta":
            if version == run.engine.version and (base := self._last_model.get(device)) is not None:
                delta = run.forms.deltas.get(base)
                references[MODEL] = msgspec.structs.replace(references[MODEL], delta=delta)
            self._last_model[device] = digests[MODEL]
        return tuple(references.values())

    def held_out_measured(self, metrics: dict[str, float]) -> None:
        """A model was measured on held-out data: its metrics may stop the run."""
        if self.run.plan.stop.measured_by == "held-out" and self.run.finished is None and not self.done.done():
            now = self.loop.time()
            self._carry_out(self.engine.measured(metrics, now), now)

    def look_for_request(self) -> None:
        """Open an evaluation if somebody asked for one. A finished run is evaluated at its next start."""
        if self.run.finished is None and not self.done.done() and self.run.evaluations.look_for_request():
            now = self.loop.time()
            self._carry_out(self.engine.request_evaluation(now), now)

    def _publish(self) -> None:
        run = self.run
        # A vector may change where the model stays as it is, bit for bit.
        vectors = {run.model_digest: run.model} | {run.vector_digests[name]: each for name, each in run.vectors.items()}
        if vectors.keys() == self._published:
            return
        self._published = {*vectors}
        versions = {terms.version for terms in self.engine.book.terms.values()}
        if self.engine.evaluations.is_open:
            versions.add(self.engine.evaluations.version)
        versions.discard(self.engine.version)
        newest = {sha256: FLOAT32.encode(vector) for sha256, vector in vectors.items()} | dict(run.forms.contents)
        self._half_digests = {number: self._half_digest(number) for number in (*versions, run.engine.version)}
        self.host.publish(self._served, newest, self._find_older(sorted(versions), run.plan.vectors))

    def _find_older(self, versions: Iterable[int], beside: Iterable[str]) -> dict[str, Older]:
        """Return SHA-256 -> where it is, for each of these models whose file is there and for the vectors ``beside``
        them. It is not there only where a lost device came back with its work done: that one does not need it."""
        found, size = {}, self.run.model.nbytes
        for number in versions:
            with suppress(StoreError):
                for name, sha256 in self.run.digests_of(number, beside).items():
                    if sha256 in self.run.vector_digests.values():  # served as the newest
                        continue
                    tensor = PARAMETERS if name == MODEL else OPTIMIZER_STATE + name
                    where = self.run.store.blobs.find_tensor(number, tensor)
                    found[sha256] = Older(*where, size)
                    if name == MODEL and (half := self._half_digest(number)) is not None:
                        found[half] = Older(*where, FLOAT16.size(self.run.model.size), FLOAT16)
        return found

    def _half_digest(self, version: int) -> str | None:
        """Return the SHA-256 of a model as float16; None if it does not travel so."""
        run = self.run
        if run.plan.encoding.down != FLOAT16.name:
            return None
        if version == run.engine.version:
            return run.forms.half
        if version not in self._half_digests:  # its tasks were given by an earlier process
            self._half_digests[version] = None
            with suppress(StoreError):
                model = run.store.load_parameters(version, run.digest_of(version))
                half = half_of(model)
                self._half_digests[version] = None if half is None else digest(half)
        return self._half_digests[version]

    def _finish(self, reason: str) -> None:
        self._send_away(3600.0, "finished")
        if not self.done.done():
            self.done.set_result(reason)

    # People

    def live(self) -> dict[str, Any]:
        """What ``status`` shows of a running coordinator."""
        return {
            "time": time.time(),
            "phase": self.engine.phase.value,
            "round": self.engine.round,
            "version": self.engine.version,
            "connected": len(self.host.devices),
            "idle": self.engine.waiting(),
            "leases": len(self.engine.leases),
            "accepted": len(self.engine.accepted),
            "dropped": self.engine.causes(),
            "uploading": len(self.host.uploads.active),
            "queued": len(self.host.uploads.waiting),
            **({} if self.run.selection is None else self.run.selection.selection.live()),
            **({} if self.engine.pace is None else self.engine.pace.status(self.loop.time())),
            **self._open_evaluation(),
        }

    def _open_evaluation(self) -> dict[str, Any]:
        found = self.engine.evaluations
        if not found.is_open:
            return {}
        measured, wanted = len(found.book.accepted), found.settings.devices
        return {"evaluation": {"number": found.number, "version": found.version, "devices": measured, "of": wanted}}

    async def stop(self, reason: str) -> None:
        """Tell every device to come back later, and wait STOP_TIMEOUT seconds at most for them to leave."""
        if not self.done.done():
            self.done.set_result(reason)
        if self.run.finished is None:
            self._send_away(10.0, "stopping")
        await self.host.empty()

    def _send_away(self, longest: float, reason: Literal["finished", "stopping"]) -> None:
        for device in self.host.devices_of(self._served):
            self.host.tell(device, ComeBack(spread(longest), reason))
