"""What each message of a gateway leads to in the engine process, once the gateway has said hello.

Each function takes the gateway and its message.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.messages import ComeBack

from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.gateway_link import GatewayLink, RemoteDevice
from fleetlearn_coordinator.gateways.gateway_tasks import (
    announce,
    end_task,
    find_factor,
    keep_upload,
    save_reply,
    save_update,
    say_if_counted,
)
from fleetlearn_coordinator.network.gate import Offered, RefusalError
from fleetlearn_coordinator.storage.identities import SecretHash


def ask_admission(link: GatewayLink, message: wire.AskAdmission) -> None:
    check_in = message.check_in
    device = RemoteDevice(link, message.connection, check_in.device, message.address)
    answer = link.admit(device, check_in)
    if isinstance(answer, ComeBack):
        link.say(wire.Dismissal(message.question, answer))
        return
    link.say(wire.Admission(message.question, answer.welcome, answer.download, answer.upload))
    link.host.joined(device, check_in)


def device_gone(link: GatewayLink, message: wire.DeviceGone) -> None:
    device = link.devices.get(message.connection)
    if device is not None:
        link.host.gone(device)


def message_refused(link: GatewayLink, message: wire.DeviceRefused) -> None:
    device = link.devices.get(message.connection)
    if device is not None:
        device.port.refused(device.name, FleetError(message.code, message.text))


def steps_done(link: GatewayLink, message: wire.StepsOf) -> None:
    device = link.devices.get(message.connection)
    if device is not None:
        now = link.loop.time()
        device.port.steps_done(device.name, message.task, message.steps, now)


def bytes_in(link: GatewayLink, message: wire.BytesIn) -> None:
    device = link.devices.get(message.connection)
    link.bytes_up += message.size
    if device is not None:
        now = link.loop.time()
        device.port.received(device.name, message.task, message.end, message.size, now)


def bytes_out(link: GatewayLink, message: wire.BytesOut) -> None:
    device = link.devices.get(message.connection)
    link.bytes_down += message.size
    if device is not None:
        now = link.loop.time()
        device.port.sent(device.name, message.sha256, message.end, message.size, now)


def take_turn(link: GatewayLink, message: wire.TurnOfEngine) -> None:
    device = link.devices.get(message.connection)
    if device is not None:
        act = device.port.wait if message.waits else device.port.proceed
        act(device.name, link.loop.time())


def note_figures(link: GatewayLink, message: wire.GatewayFigures) -> None:
    link.figures = message


def partial_sum(link: GatewayLink, message: wire.PartialSumMade) -> None:
    run = link.host.runs.get(message.run)
    if run is not None:
        run.sum_made(link, message)


def gateway_failed(link: GatewayLink, message: wire.GatewayFailed) -> None:
    if link.known is not None:  # its disk, its network: the others go on
        link.refuse_gateway(f"it has failed: {message.text}")
        return
    error = FleetError(Code.BUSY, f"gateway {link.number}: {message.text}")
    several = link.host.turns is not None
    link.host.failed(error, None if several and not message.run else message.run)


# Who may connect to a gateway on another machine


def ask_known(link: GatewayLink, message: wire.AskKnown) -> None:
    gate = link.host.gate
    offered = Offered(
        SecretHash(message.credential),
        message.device,
        SecretHash(message.token),
        SecretHash(message.next),
    )
    try:
        if gate is None:
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, "nobody has to be known here")
        known = gate.check_offered(offered, message.certified, link.host.count_check_in)
    except RefusalError as refusal:
        link.say(wire.DeviceUnknown(message.question, refusal.status, refusal.text, refusal.cause))
    else:
        link.say(wire.DeviceKnown(message.question, known.device, known.tags, known.enrolled))


def ask_enrolled(link: GatewayLink, message: wire.AskEnrolled) -> None:
    gate = link.host.gate
    enrolled = {} if gate is None else gate.identities.enrolled()
    found = {each: enrolled[each] for each in message.devices if each in enrolled}
    link.say(wire.EnrolledNow(message.devices, found))


HANDLERS: dict[type, Callable[[GatewayLink, Any], None]] = {
    wire.AskAdmission: ask_admission,
    wire.AskAnnounce: announce,
    wire.AskFactor: find_factor,
    wire.AskSave: save_update,
    wire.AskCounted: say_if_counted,
    wire.AskAnswered: save_reply,
    wire.AskEnd: end_task,
    wire.AskKeep: keep_upload,
    wire.DeviceGone: device_gone,
    wire.DeviceRefused: message_refused,
    wire.StepsOf: steps_done,
    wire.BytesIn: bytes_in,
    wire.BytesOut: bytes_out,
    wire.TurnOfEngine: take_turn,
    wire.GatewayFigures: note_figures,
    wire.GatewayFailed: gateway_failed,
    wire.PartialSumMade: partial_sum,
    wire.AskKnown: ask_known,
    wire.AskEnrolled: ask_enrolled,
}
"""Type of a message -> what it leads to."""
