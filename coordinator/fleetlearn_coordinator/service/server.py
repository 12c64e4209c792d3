"""The coordinator's websocket server: a thin driver of the run and its engine.

What decides its memory and its stalls: no compression (32 KiB a connection), uploads granted a few at a time, model
frames made once and written with a yield after each, a bound on everything that waits for a peer, and ``abort()`` for
one that stalls (a close handshake waits for ever behind a full write buffer).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import (
    MODEL,
    SILENT_HEARTBEATS,
    ComeBack,
    FromCoordinator,
    Refused,
    Task,
    VectorReference,
    Waiting,
)
from fleetlearn_protocol.messages import Cancel as CancelMessage

from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.conversation.limits import STOP_TIMEOUT
from fleetlearn_coordinator.conversation.places import Places, Proven
from fleetlearn_coordinator.conversation.transfer import ASKED_PARTS, Contents, Download, Downloads, Uploads
from fleetlearn_coordinator.network.connection import Connection
from fleetlearn_coordinator.rounds.engine import Assign, Cancel, Command, Finish, Phase
from fleetlearn_coordinator.service.run import Clocks, Run

logger = logging.getLogger("fleetlearn.coordinator")


class Coordinator:
    """The server of one run, within a running event loop. ``service.running`` makes one that listens."""

    def __init__(self, run: Run, places: int | None = None) -> None:
        """``places``: devices that may be connected, where that is fewer than the plan's."""
        self.run, self.store, self.engine, self.service = run, run.store, run.engine, run.plan.service
        self.contents = Contents(run.bundle)
        proven = Proven(self.service.max_connections)
        self.uploads = Uploads(run.store, Places(self.service.uploads, self.service.least_rate, proven))
        self.downloads = Downloads(Places(self.service.downloads, self.service.least_rate, proven))
        self.devices: dict[str, Conversation] = {}
        """Device -> its connection, of those that checked in."""
        self.connections: set[Conversation] = set()
        self.places = self.service.max_connections if places is None else places
        files = run.bundle.manifest.files.values()
        self.bundle_bytes = len(run.bundle.read(MANIFEST)) + sum(entry.size for entry in files)
        self.changed: Callable[[], None] = lambda: None
        """Called when a device has checked in: its connection is no newcomer any more."""
        self.loop = asyncio.get_running_loop()
        self.address = ""
        self.done: asyncio.Future[str] = self.loop.create_future()
        """Set when the run is finished or was told to stop."""
        self.ended = False
        """Nothing more may be done: the run is being closed, or memory may be ahead of the disk after an error."""
        self._alarm: asyncio.TimerHandle | None = None
        self._round = 0
        self._spoilt: set[str] = set()
        """Tasks of the round whose upload arrived wrong once."""
        self._background: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Take up what an earlier process left open."""
        self._publish()
        self._tell_all(self.run.resume(self._now()))
        if self.run.finished is not None:  # before, or by the round that was just resumed
            self._finish(self.run.finished)

    async def converse(self, connection: Connection) -> None:
        """Serve one connection to its end."""
        conversation = Conversation(self, connection)
        self.connections.add(conversation)
        try:
            await conversation.serve()
        except Exception as error:
            self.fail(error)
        finally:
            self.connections.discard(conversation)
            try:
                self._part(conversation)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Something that no device is to blame for: end the process rather than go on half-done. Disk has the truth."""
        self.ended = True
        if not self.done.done():
            self.done.set_exception(error)
        else:
            logger.error("after the end: %s", error, exc_info=error)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that nobody waits for."""
        task = self.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Devices

    def turn_away(self, device: str) -> ComeBack | None:
        """What to answer a device that cannot be welcome now; None if it can."""
        if self.run.finished is not None:
            return ComeBack(_spread(3600.0), "finished")
        if self.done.done():
            return ComeBack(_spread(10.0), "stopping")
        if device not in self.devices and len(self.devices) >= self.places:
            return ComeBack(_spread(30.0), "busy")
        return None

    def join(self, conversation: Conversation, device: str, held: str | None) -> None:
        """The device has checked in. An earlier connection of its is over."""
        earlier = self.devices.get(device)
        if earlier is not None:
            earlier.send(Refused(Code.REPLACED, f"device {device} has connected again"))
            earlier.leave()
            earlier.close(1008, "replaced")
        self.devices[device] = conversation
        self.changed()
        self._carry_out(self.engine.check_in(device, held, self.loop.time()))
        self.grant()  # the place of an upload that the earlier connection left

    def _part(self, conversation: Conversation) -> None:
        device = conversation.device
        if device is None or self.devices.get(device) is not conversation:
            return
        del self.devices[device]
        conversation.leave()
        if not self.done.done() and not self.ended:  # else the leases stay as they are on disk, for the next process
            self._carry_out(self.engine.disconnect(device, self.loop.time()))
            self.grant()

    def tell(self, device: str, message: FromCoordinator) -> None:
        """Send to a device, if it is connected."""
        conversation = self.devices.get(device)
        if conversation is not None:
            conversation.send(message)

    # Downloads and uploads

    def ask_download(self, download: Download) -> None:
        """A device wants to be sent something."""
        self.downloads.ask(download, idle=download.device not in self.engine.leases)
        self.downloads.go_on(self.loop.time())

    def end_download(self, download: Download) -> None:
        """It was sent, or nobody wants it now."""
        self.downloads.leave(download)
        self.downloads.go_on(self.loop.time())

    def _publish(self) -> None:
        """Serve the newest model. Each download of an older one would keep that one's bytes in memory."""
        old = self.contents.publish(self.run.model_digest, self.run.model)
        if old is not None:
            for conversation in self.devices.values():
                conversation.stop_download(old)

    def grant(self) -> None:
        """Let uploads begin, as many as there is room for."""
        for upload in self.uploads.grants(self.loop.time()):
            if upload not in self.uploads.places.held:
                self.tell(upload.device, Waiting(task=upload.report.task))
            elif upload.device in self.devices:
                self.engine.proceed(upload.device, self.loop.time())
                self.devices[upload.device].grant(upload)

    def first_spoilt(self, task: str) -> bool:
        """Whether this is the first time that the task's upload arrived wrong. Remembers that it did."""
        first = task not in self._spoilt
        self._spoilt.add(task)
        return first

    def accept(self, device: str, task: str) -> None:
        """The device's update was made safe."""
        self._carry_out(self.engine.accept(device, task, self.loop.time()))
        self.grant()

    def end_task(self, device: str, task: str, cause: str) -> None:
        """The device failed its task, or its update was rejected."""
        self._carry_out(self.engine.end(device, task, cause, self.loop.time()))
        self.grant()

    # The engine

    def _now(self) -> Clocks:
        return Clocks(self.loop.time(), time.time())

    def _carry_out(self, commands: Iterable[Command]) -> None:
        self._tell_all(self.run.carry_out(commands, self._now()))

    def _tell_all(self, commands: Iterable[Command]) -> None:
        """Tell the devices what was decided and recorded; then set the engine's alarm."""
        for command in commands:
            match command:
                case Assign():
                    self._assign(command)
                case Cancel(device, task, code, text):
                    if device in self.devices:
                        self.devices[device].stop_upload()
                    self.tell(device, CancelMessage(task, code, text))
                case Finish(reason):
                    self._finish(reason)
        if self.engine.round != self._round or self.engine.phase is not Phase.OPEN:
            self.uploads.forget_all()
            self._spoilt.clear()
            self._round = self.engine.round
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
            self._carry_out(self.engine.tick(self.loop.time()))
            self.grant()
        except Exception as error:
            self.fail(error)

    def _assign(self, lease: Assign) -> None:
        run, local = self.run, self.run.plan.local
        if lease.device in self.devices:
            self.devices[lease.device].connection.allow_task(run.model.nbytes, 2 * run.model.nbytes)
        self._publish()
        self.tell(
            lease.device,
            Task(
                task=lease.task,
                round=lease.round,
                bundle=run.bundle.sha256,
                vectors=(VectorReference(MODEL, run.model_digest, FLOAT32.size(run.model.size), FLOAT32.name),),
                parts=ASKED_PARTS,
                hyper=run.hyper,
                epochs=local.epochs,
                batch_size=local.batch_size,
                seed=lease.seed,
                deadline=max(0.0, lease.deadline - self.loop.time()),
                time_budget=local.time_budget,
                evaluate=local.evaluate,
            ),
        )

    def _finish(self, reason: str) -> None:
        for conversation in self.devices.values():
            conversation.send(ComeBack(_spread(3600.0), "finished"))
        if not self.done.done():
            self.done.set_result(reason)

    # Time and people

    def sweep(self) -> None:
        """End the connections that are overdue, and take places from those that hardly move while others wait."""
        now, silence = self.loop.time(), SILENT_HEARTBEATS * self.service.heartbeat
        self.uploads.places.measure(now)
        self.downloads.places.measure(now)
        self.grant()
        self.downloads.go_on(now)
        for conversation in self.connections:
            why = conversation.overdue(now, silence)
            if why is not None:
                conversation.log(logging.INFO, "connection ended: %s", why)
                conversation.connection.transport.abort()

    def live(self) -> dict[str, Any]:
        """What ``status`` shows of a running coordinator."""
        return {
            "time": time.time(),
            "phase": self.engine.phase.value,
            "round": self.engine.round,
            "version": self.engine.version,
            "connected": len(self.devices),
            "idle": len(self.engine.idle) + sum(map(len, self.engine.doubted.values())),
            "leases": len(self.engine.leases),
            "accepted": len(self.engine.accepted),
            "dropped": self.engine.causes(),
            "uploading": len(self.uploads.active),
            "queued": len(self.uploads.waiting),
        }

    async def stop(self, reason: str) -> None:
        """Tell every device to come back later, and wait STOP_TIMEOUT seconds at most for them to leave."""
        if not self.done.done():
            self.done.set_result(reason)
        if self.run.finished is None:
            for conversation in self.devices.values():
                conversation.send(ComeBack(_spread(10.0), "stopping"))
        until = self.loop.time() + STOP_TIMEOUT
        while self.connections and self.loop.time() < until:
            await asyncio.sleep(0.05)


def _spread(longest: float) -> float:
    """A random wait, so that those who are told to come back do not come all at once (full jitter)."""
    return round(random.uniform(0.0, longest), 3)
