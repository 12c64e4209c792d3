"""What gateways ask about devices' tasks, for the run in this process to answer.

Each function takes the gateway and its message. A question may come twice: a gateway that lost its
bus says hello again, and asks again what was not answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import ROWS
from fleetlearn_protocol.sparse_rows import with_row_elements

from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.gateway_link import GatewayLink, RemoteDevice, here
from fleetlearn_coordinator.gateways.run_behind import RunBehind
from fleetlearn_coordinator.rounds.participation_limits import PrivacyLimitError
from fleetlearn_coordinator.storage.arrived import arrived_key
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_coordinator.storage.lent_spool import ArrivedSpool

LOOK_AGAIN = 1.0
"""Seconds until an object is looked for again, where the object store cannot be reached."""


def announce(link: GatewayLink, message: wire.AskAnnounce) -> None:
    report, elements = message.report, {}
    try:
        port = device_at(link, message.connection).port
        announced = here(port.announce(message.device, report, link.loop.time()))
        run = run_serving(link, report.task)
        if announced.wanted:
            names = [part.name for part in report.parts]
            of = run.port.elements_of
            elements = {name: of(report.task, name) for name in with_row_elements(names)}
    except ProtocolError as error:
        refuse(link, message.question, error)
        return
    mark = 0
    begun = announced.begun
    if begun is not None and link.apart:  # those bytes are here: the device may come back
        port.keep_upload(message.device, begun)
        begun = None
    if begun is not None:
        mark = run.files.hand_over(link.number, begun.spool_file).mark
    link.say(wire.Announcement(message.question, announced.wanted, elements, begun, mark))


def find_factor(link: GatewayLink, message: wire.AskFactor) -> None:
    def weigh() -> Any:
        port = device_at(link, message.connection).port
        return port.weigh(message.device, message.task, link.loop.time())

    answer(link, message, weigh)


def save_update(link: GatewayLink, message: wire.AskSave) -> None:
    """Save an update. First see to it that it is there, where it did not come to this machine:
    the run could not go on without an update that it has accepted."""
    run = link.host.run_of(message.report.task)
    if not link.apart or run is None or not run.files.has(link.number, message.file):
        save_here(link, message)
        return
    assert isinstance(run.spool, ArrivedSpool)
    report = message.report
    fetch = any(part.name == ROWS for part in report.parts)  # they are read before it counts
    look = partial(run.spool.has_arrived, message.file, report.size, fetch=fetch)
    job = link.loop.run_in_executor(None, look)
    job.add_done_callback(partial(looked_for, link, message))


def looked_for(link: GatewayLink, message: wire.AskSave, job: asyncio.Future[bool]) -> None:
    if job.cancelled() or link.is_gone:
        return  # a gateway that says hello again puts it again
    if isinstance(job.exception(), StoreUnavailableError):
        link.loop.call_later(LOOK_AGAIN, look_again, link, message)
        return

    def save_it() -> None:
        if job.result():
            save_here(link, message)
            return
        link.refuse_gateway(
            f"it says that it put an update of {message.report.size} bytes into the object "
            f"store, and the run's has no such object {arrived_key(message.file)}. If its "
            "service file has blobs, they must be the place of the engine process's blobs"
        )

    if link.do(message, save_it):
        link.host.grant()


def look_again(link: GatewayLink, message: wire.AskSave) -> None:
    if not link.is_gone:
        link.do(message, partial(save_update, link, message))


def save_here(link: GatewayLink, message: wire.AskSave) -> None:
    """Save an update and count its report, in one go: nothing comes between. Asked twice, the
    first answer got lost."""
    device, task, file = message.device, message.report.task, message.file
    run = link.host.run_of(task)
    if run is not None and here(run.port.has_counted(device, task)):
        link.say(wire.Answered(message.question, None))
        if run.files.has(link.number, file):  # a second copy of the same update
            run.files.take_back(file)
            run.drop_checkpoint(file)
            run.spool.free_spool_file(file)
        return

    def save_it() -> None:
        run = run_serving(link, task)
        if not run.files.has(link.number, file):
            raise ProtocolError(
                Code.STALE_ROUND, "the coordinator was started again, and lost these bytes"
            )
        run.stored(link, file)
        here(run.port.save_update(device, message.report, file, message.largest))

    if answer(link, message, save_it) and run is not None:
        run.files.take_back(file)
        run.drop_checkpoint(file)
        run.port.count_report(device, task, link.loop.time())


def say_if_counted(link: GatewayLink, message: wire.AskCounted) -> None:
    run = link.host.run_of(message.task)
    if run is None:
        link.say(wire.Answered(message.question, False))
        return
    answer(link, message, lambda: run.port.has_counted(message.device, message.task))


def save_reply(link: GatewayLink, message: wire.AskAnswered) -> None:
    device, reply = message.device, message.reply
    counts = False

    def save_it() -> None:
        nonlocal counts
        counts = here(run_serving(link, reply.task).port.save_answer(device, reply))

    if answer(link, message, save_it) and counts:
        run_serving(link, reply.task).port.count_answer(device, reply.task, link.loop.time())


def end_task(link: GatewayLink, message: wire.AskEnd) -> None:
    now, run = link.loop.time(), link.host.run_of(message.task)
    link.say(wire.Answered(message.question, None))
    if run is not None:
        run.port.end_task(message.device, message.task, message.cause, now, message.text)


def keep_upload(link: GatewayLink, message: wire.AskKeep) -> None:
    link.say(wire.Answered(message.question, None))
    number, run = message.begun.spool_file, link.host.run_of(message.begun.task)
    if link.apart:
        raise ProtocolError(
            Code.BAD_MESSAGE, "a gateway on another machine may not keep an upload here"
        )
    if run is not None and run.files.has(link.number, number):
        run.files.take_back(number)
        run.keep(number, message.begun)


def answer(link: GatewayLink, message: Any, ask: Callable[[], Any]) -> bool:
    """Answer a question. Returns whether it was not refused. An error of one of several runs,
    which no device caused, ends the run, and for the device its task."""
    try:
        value = here(ask())
    except ProtocolError as error:
        refuse(link, message.question, error)
        return False
    except Exception as error:
        if link.host.turns is None:
            raise
        link.host.failed(error, link.run_of(message))
        text = "the task's run was stopped by an error of its coordinator"
        refuse(link, message.question, ProtocolError(Code.STALE_ROUND, text))
        return False
    link.say(wire.Answered(message.question, value))
    return True


def refuse(link: GatewayLink, question: int, error: ProtocolError) -> None:
    is_limit = isinstance(error, PrivacyLimitError)
    link.say(wire.QuestionRefused(question, error.code, error.text, is_limit))


def device_at(link: GatewayLink, connection: int) -> RemoteDevice:
    """Return the device of this connection. Raises ProtocolError where it has left
    meanwhile."""
    device = link.devices.get(connection)
    if device is None:
        raise ProtocolError(Code.NOT_WANTED, "the device has connected again")
    return device


def run_serving(link: GatewayLink, task: str) -> RunBehind:
    """Return the run of a task. Raises ProtocolError where it is not served here."""
    run = link.host.run_of(task)
    if run is None:
        raise ProtocolError(Code.STALE_ROUND, f"the run of task {task} is not served here now")
    return run
