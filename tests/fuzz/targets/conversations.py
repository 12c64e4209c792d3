"""Target: what devices say to a coordinator, in any order and with time moving, before
conversations and an engine.

Besides the steps of scripts.py: a first line ``%3`` chooses how the rounds are (ROUNDS), and ``.``
says that the content that is fetched was sent.
"""

from __future__ import annotations

from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_protocol.frames import pack_chunk

from tests.fuzz.targets.memory_run import PLACES, ROUNDS, Room
from tests.fuzz.targets.scripts import (
    LONGEST_WAIT,
    Step,
    binary,
    count,
    filled,
    integers,
    number,
    steps,
)


def play(data: bytes) -> Room:
    """Play a script. Raises AssertionError where something is wrong with the state."""
    kind = count(data[1:].split(b"\n")[0], 1000) if data[:1] == b"%" else 0
    room = Room(*ROUNDS[kind % len(ROUNDS)])
    for step in steps(data):
        _do(room, step)
        room.check()
    return room


def _do(room: Room, step: Step) -> None:
    if step.sign == "~":
        room.pass_time(number(step.text, LONGEST_WAIT))
        return
    peer = room.connections.get(step.actor)
    if step.sign == "-":
        room.disconnect(step.actor)
    elif step.sign == "+" or peer is None:
        room.connect(step.actor)
    elif step.sign == "%":
        return
    elif step.sign == "!":
        peer.say(peer.good.lie(step.text))
    elif step.sign == ".":  # the content was sent
        if peer.downloading:
            peer.downloading = False
            peer.conversation.fetched()
    elif step.sign == ">":
        for _ in range(count(step.text, 30)):
            peer.say(peer.good.next())
            room.check()
    elif step.sign == "^":
        transfer, offset, size, fill = integers(step.text, 4)
        good = peer.good
        place, name = (good.offset + offset) % 2**64, (good.transfer + transfer) % 2**32
        payload = bytes([fill % 256]) * (1 + abs(size) % 300)
        peer.say(pack_chunk(name, place, payload))
        good.offset = (good.offset + len(payload)) % 2**32
    elif step.sign == "#":
        peer.say(binary(step.text))
    else:
        peer.say(filled(step.text, peer.good.told()).decode("utf-8", "replace"))


def conversations(data: bytes) -> None:
    """Devices talk to a coordinator. In the end all leave, and nothing is left of them."""
    room = play(data)
    for actor in list(room.connections):
        room.disconnect(actor)
        room.check()
    for _ in range(4):
        room.pass_time(LONGEST_WAIT)
        room.check()
    assert not room.devices
    assert not room.engine.leases, "a lease was never ended"
    assert not room.engine.exchanges[EVALUATION].book.tasks
    assert not room.uploads.places.held
    assert not list(room.uploads.places.waiting)
    # these are forgotten when the next round ends
    left = PLACES if room.engine.settings.outlive else 0
    assert len(room.begun._kept) <= left, "an upload is kept for nobody"
    assert len(room.spool.files) <= left
    if not room.saved:
        assert room.commits == 0, "a model was made without an update"
