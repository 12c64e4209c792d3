"""Fetches the newest shared model for a device that takes no part: on one connection, which ends
when the model is here."""

from __future__ import annotations

import asyncio
import time

from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.command_line import installed_version
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, clip
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, unpack_chunk
from fleetlearn_protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    CheckIn,
    ComeBack,
    Content,
    Fetch,
    FromCoordinator,
    Heartbeat,
    Question,
    Refused,
    SharedModel,
    Waiting,
    Welcome,
    decode_from_coordinator,
    encode,
)
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from fleetlearn_device.driver.address import Address, Enrolment
from fleetlearn_device.driver.connection import DirectConnect, printable
from fleetlearn_device.driver.dead_ends import refusal
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.driver.way import Way, explain, open_way
from fleetlearn_device.session.commands import Wanted
from fleetlearn_device.session.session import PATIENCE
from fleetlearn_device.storage.model_in_use import ModelInUse, ModelsInUse
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.trusted_keys import read_trusted_keys

TRIES = 3
"""How often the model is asked for: a newer one may take its place while it is fetched."""


class NoNewestModelError(Exception):
    """The newest model cannot be had. The text says why, and what to do."""


async def fetch_newest_model(
    address: Address, directory: StateDirectory, token: str | None, timing: Timing
) -> ModelInUse:
    """Fetch the newest model and take it into use. ``token``: enrols the device.

    Raises NoNewestModelError, StateError.
    """
    if read_trusted_keys(directory.path):
        raise NoNewestModelError(
            "this device does only what trusted keys signed, and nobody signs the model that a "
            "device without a task is given: use a state directory of its own for it"
        )
    enrolment = Enrolment(directory.path, directory.device, token)
    for left in reversed(range(TRIES)):
        try:
            return await _fetch_once(address, enrolment, directory, timing)
        except ProtocolError as error:
            if error.code is not Code.UNKNOWN_CONTENT or not left:
                raise NoNewestModelError(printable(error.text)) from None
    raise AssertionError


async def _fetch_once(
    address: Address, enrolment: Enrolment, directory: StateDirectory, timing: Timing
) -> ModelInUse:
    uri, way = parse_uri(address.url), Way()
    try:
        way = await open_way(uri, timing.open, 0)
        async with DirectConnect(
            address.url,
            ssl=address.tls,
            additional_headers=enrolment.headers(),
            subprotocols=[Subprotocol(PROTOCOL_NAME)],
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=timing.open,
            close_timeout=timing.close,
            **way.options(),
        ) as socket:
            enrolment.accepted()
            return await _converse(socket, directory)
    except InvalidStatus as error:
        text = f"{address.url} refuses the connection: {clip(refusal(error.response))}"
        raise NoNewestModelError(printable(text)) from None
    except (OSError, WebSocketException, EOFError) as error:  # TimeoutError is an OSError
        text = f"no connection to {address.url}: {explain(error, uri, way)}"
        raise NoNewestModelError(printable(text)) from None
    finally:
        way.close()


async def _converse(socket: ClientConnection, directory: StateDirectory) -> ModelInUse:
    check_in = CheckIn(
        OLDEST_PROTOCOL_VERSION,
        directory.device,
        examples=1,
        software=f"fleetlearn {installed_version()}",
        newest_protocol=PROTOCOL_VERSION,
        wants="model",
    )
    await socket.send(encode(check_in))
    welcome = await _hear(socket)
    if isinstance(welcome, ComeBack):
        raise NoNewestModelError(
            f"the coordinator has no time now ({welcome.reason}); try again in {welcome.after:g} s"
        )
    if isinstance(welcome, Refused):
        raise ProtocolError(welcome.code, welcome.text)
    if not isinstance(welcome, Welcome) or welcome.newest is None:
        raise NoNewestModelError(
            "the coordinator does not give its model to devices that take no part: its plan says "
            "so by [models] give = true; a coordinator with several runs, or of fleetlearn 0.1, "
            "gives none"
        )
    beats = asyncio.create_task(_beat(socket, 0.8 * welcome.heartbeat))
    try:
        return await _fetch_all(socket, directory, welcome.newest)
    finally:
        beats.cancel()


async def _fetch_all(
    socket: ClientConnection, directory: StateDirectory, newest: SharedModel
) -> ModelInUse:
    contents = directory.contents
    # A question that nobody asked: it says what is needed, as a task does.
    needs = Question("newest", "newest", 0.0, bundle=newest.bundle, vectors=(newest.model,))
    wrong = 0
    while lacking := await asyncio.to_thread(contents.lacking, needs, "infer"):
        await _fetch(socket, directory, lacking[0])
        if not await asyncio.to_thread(contents.finish, lacking[0]):
            wrong += 1
            if wrong == TRIES:
                raise NoNewestModelError(f"{lacking[0].name} came {TRIES} times with wrong bytes")
    bundle = open_bundle(contents.bundle_path(newest.bundle), files=())
    model = ModelInUse(
        newest.bundle,
        bundle.manifest.name,
        newest.model.sha256,
        newest.model.encoding,
        time.time(),
    )
    try:
        ModelsInUse(directory.path).take(model, contents.vector(newest.model.sha256), bundle)
    except FleetError as error:
        raise NoNewestModelError(error.text) from None
    return model


async def _fetch(socket: ClientConnection, directory: StateDirectory, wanted: Wanted) -> None:
    """Fetch one content. Raises ProtocolError: it is refused, or is not what was asked for."""
    await socket.send(encode(Fetch(wanted.sha256, wanted.have)))
    while not isinstance(content := await _hear(socket), Content):
        if isinstance(content, Refused):
            raise ProtocolError(content.code, content.text)
        if not isinstance(content, Waiting | ComeBack):  # the training may end meanwhile
            raise ProtocolError(Code.OUT_OF_TURN, "something else came than what was fetched")
    limit = wanted.limit if wanted.size is None else wanted.size
    if content.sha256 != wanted.sha256 or content.offset != wanted.have or content.size > limit:
        raise ProtocolError(Code.WRONG_LENGTH, f"{wanted.name} is not as it was announced")
    end = content.offset
    while end < content.size:
        frame = await _frame(socket)
        if isinstance(frame, str):
            message = decode_from_coordinator(frame)
            if isinstance(message, Refused):
                raise ProtocolError(message.code, message.text)
            continue
        chunk = unpack_chunk(frame)
        if chunk.transfer != content.transfer:
            continue
        if chunk.offset != end or end + len(chunk.payload) > content.size:
            raise ProtocolError(Code.WRONG_OFFSET, f"a chunk of {wanted.name} is out of its place")
        directory.contents.append(wanted, chunk.offset, chunk.payload)
        end += len(chunk.payload)


async def _hear(socket: ClientConnection) -> FromCoordinator:
    frame = await _frame(socket)
    if isinstance(frame, bytes):
        raise ProtocolError(Code.OUT_OF_TURN, "a chunk came that nobody asked for")
    return decode_from_coordinator(frame)


async def _frame(socket: ClientConnection) -> str | bytes:
    async with timeout(PATIENCE):
        return await socket.recv()


async def _beat(socket: ClientConnection, seconds: float) -> None:
    """Give signs of life while contents come."""
    while True:
        await asyncio.sleep(seconds)
        await socket.send(encode(Heartbeat()))
