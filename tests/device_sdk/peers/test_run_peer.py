"""Peers in one process, over real sockets and TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.peers.book import BookError
from fleetlearn_device.peers.certificate import tls_contexts
from fleetlearn_device.peers.run_peer import Peer
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.frames import MAX_FRAME_BYTES, pack_chunk
from fleetlearn_protocol.peer_messages import (
    PEER_PROTOCOL_NAME,
    FromPeer,
    PeerHello,
    PeerModel,
    PeerRefusal,
    PeerVote,
    decode_from_peer,
    encode_for_peer,
)
from fleetlearn_protocol.vector import checksum
from line_bundle import write_line_bundle
from numpy.typing import NDArray
from peer_files import Arrays, PeerFiles, peer_files
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

PATIENCE = 60.0
SGD = "training = { hyper = { lr = 0.1 } }"
COMPLETE = f'topology = {{ kind = "complete" }}\n{SGD}\ndeadline = 30\n'


def shares(count: int, rows: int = 8) -> list[Arrays]:
    random = np.random.default_rng(5)
    return [
        {
            "x": random.normal(size=(rows, 3)).astype(np.float32),
            "y": random.normal(size=rows).astype(np.float32),
        }
        for _ in range(count)
    ]


def line_peers(folder: Path, count: int, settings: str = COMPLETE) -> PeerFiles:
    bundle = write_line_bundle(folder / "line.bundle", optimizer="sgd", buffer=False)
    return peer_files(folder, bundle.path, shares(count), settings)


def until_done(peers: Iterable[Peer]) -> None:
    """Serve peers in one event loop until all have ended."""

    async def serve() -> None:
        await asyncio.wait_for(asyncio.gather(*(peer.serve() for peer in peers)), PATIENCE)

    try:
        asyncio.run(serve())
    finally:
        for peer in peers:
            peer.close()


def until(peers: Iterable[Peer], reached: Callable[[], bool]) -> None:
    """Serve peers until something is reached; then stop them."""

    async def serve() -> None:
        running = asyncio.gather(*(peer.serve() for peer in peers))
        while not reached():
            await asyncio.sleep(0.02)
        for peer in peers:
            peer.node.stop()
        await running

    try:
        asyncio.run(asyncio.wait_for(serve(), PATIENCE))
    finally:
        for peer in peers:
            peer.close()


def own(peer: Peer) -> NDArray[np.float32]:
    return peer.store.own()[0]


def test_a_complete_matrix_is_mini_batch_sgd(tmp_path: Path) -> None:
    """With W = 11^T/n and one full-batch step each, the peers do SGD on all examples together."""
    files = line_peers(tmp_path, 3)
    peers = [Peer(files.options(name, steps=4)) for name in files.names]
    until_done(peers)

    pooled = open_runtime(files.bundle)
    parts = shares(3)
    x, y = (np.concatenate([part[name] for part in parts]) for name in ("x", "y"))
    for _ in range(4):
        pooled.step((x, y), lr=0.1)
    for peer in peers:
        np.testing.assert_allclose(own(peer), pooled.parameters, rtol=2e-6, atol=2e-7)
    assert (tmp_path / "a" / "model.onnx").exists()


def test_what_rounding_does_to_models_on_their_way_keeps_the_mean(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 3, COMPLETE + 'encoding = "int4"\n')
    peers = [Peer(files.options(name, steps=1)) for name in files.names]
    alone = [peer.training.train(*peer.training.first(), 0).model for peer in peers]
    until_done(peers)
    models = [own(peer) for peer in peers]
    decoded = find_encoding("int4").decode(find_encoding("int4").encode(alone[0], 1), 4)
    assert np.abs(decoded - alone[0]).max() > 1e-3, "this encoding is to round"
    np.testing.assert_allclose(np.mean(models, axis=0), np.mean(alone, axis=0), rtol=1e-6)


def test_who_is_started_again_goes_on(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 2)
    peers = [Peer(files.options(name, steps=50)) for name in files.names]
    until(peers, lambda: min(peer.store.record.step for peer in peers) >= 3)
    again = [Peer(files.options(name, steps=6)) for name in files.names]
    assert min(peer.store.record.step for peer in again) >= 3
    until_done(again)
    np.testing.assert_allclose(own(again[0]), own(again[1]), rtol=1e-6)


def test_a_training_that_diverges_ends_the_peer(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 2)
    huge = {name: array * np.float32(1e30) for name, array in shares(1)[0].items()}
    np.savez(tmp_path / "a.npz", **huge)
    peer = Peer(files.options("a", steps=4))
    with pytest.raises(DivergedError, match="step 1's loss is inf: a smaller lr may help"):
        until_done([peer])


@pytest.mark.parametrize("kind", [{"personal": True, "state": True}, {"random": True}])
def test_what_stays_on_a_device_stays_there(tmp_path: Path, kind: dict[str, bool]) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle", buffer=True, **kind)
    files = peer_files(tmp_path, bundle.path, shares(2), COMPLETE)
    peers = [Peer(files.options(name, steps=3)) for name in files.names]
    until_done(peers)
    again = [Peer(files.options(name, steps=4)) for name in files.names]
    for one, other in zip(peers, again, strict=True):
        np.testing.assert_array_equal(one.store.own()[1], other.store.own()[1])
    until_done(again)
    np.testing.assert_allclose(own(again[0]), own(again[1]), rtol=1e-5)
    kept = [peer.store.own()[1] for peer in again]
    if "personal" in kind:
        assert kept[0].size > 0
        assert kept[0][0] != kept[1][0], "each has its own"


def test_gossip(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 3, f'mode = "gossip"\n{COMPLETE}')
    peers = [Peer(files.options(name, steps=20)) for name in files.names]
    until_done(peers)
    assert any(edge.have for peer in peers for edge in peer.store.record.edges.values())


def test_peers_find_each_other_on_the_local_network(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 2)
    text = "\n".join(
        line for line in files.book.read_text().splitlines() if not line.startswith("address")
    )
    files.book.write_text(text)
    options = {"discover": "127.0.0.1", "listen": "127.0.0.1:0"}
    peers = [Peer(files.options(name, steps=2, **options)) for name in files.names]
    until_done(peers)
    np.testing.assert_allclose(own(peers[0]), own(peers[1]), rtol=1e-6)


# Who does not go together


def refusals(peer: Peer) -> list[str]:
    return [each for each in peer.node.status.refusals.values() if each]


def refused(peers: list[Peer], *expected: str) -> None:
    until(peers, lambda: all(refusals(peer) for peer in peers))
    for peer in peers:
        assert any(text in refusals(peer)[0] for text in expected), refusals(peer)


def test_another_bundle_is_refused(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 2)
    other = write_line_bundle(tmp_path / "other.bundle", optimizer="sgd", buffer=True)
    peers = [
        Peer(files.options("a", steps=3)),
        Peer(files.options("b", steps=3, bundle=str(other.path))),
    ]
    refused(peers, "give all peers one bundle")


def test_the_state_of_an_earlier_training_is_refused(tmp_path: Path) -> None:
    """Its step is ahead: the others would go on from there, and have no steps left."""
    files = line_peers(tmp_path, 2, f"run = 'spring'\n{COMPLETE}")
    until_done([Peer(files.options("a", steps=3)), Peer(files.options("b", steps=3))])
    book = str(files.write_book(f"run = 'summer'\n{COMPLETE}", tmp_path / "summer.toml"))
    with pytest.raises(StateError, match=r"is of the training spring, .* of the training summer"):
        Peer(files.options("a", steps=3, book=book))
    Peer(files.options("a", steps=3)).close()  # the same training goes on


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (COMPLETE.replace("0.1", "0.2"), "has hyper.lr = 0."),
        (f"mode = 'gossip'\n{COMPLETE}", "has mode = "),
        (f"run = 'spring'\n{COMPLETE}", "has run = "),
        (
            COMPLETE.replace('kind = "complete"', 'kind = "file", file = "w.csv"'),
            "other weights between them",
        ),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, settings: str, expected: str) -> None:
    files = line_peers(tmp_path, 2)
    (tmp_path / "w.csv").write_text("0.75,0.25\n0.25,0.75\n")
    other = files.write_book(settings, tmp_path / "other.toml")
    peers = [
        Peer(files.options("a", steps=3)),
        Peer(files.options("b", steps=3, book=str(other))),
    ]
    refused(peers, expected)


def test_a_wrong_key_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else listens at b's address, with a key of their own."""
    files = line_peers(tmp_path, 2)
    (tmp_path / "elsewhere").mkdir()
    stranger = line_peers(tmp_path / "elsewhere", 2)
    a = Peer(files.options("a", steps=3))
    b = Peer(stranger.options("b", steps=3, listen=f"127.0.0.1:{files.ports['b']}"))
    with caplog.at_level(logging.WARNING):
        until([a, b], lambda: "has another certificate than b" in caplog.text)
    assert not a.node.machine.exchanges.edges["b"].record.have


def test_the_book_must_have_this_devices_certificate(tmp_path: Path) -> None:
    files = line_peers(tmp_path, 2)
    (tmp_path / "b" / "device_key.json").unlink()
    with pytest.raises(BookError, match="has another certificate for b than this device"):
        Peer(files.options("b", steps=1))
    with pytest.raises(BookError, match=r"this device is c, and .* has a, b: add what `fleetlearn"):
        Peer(files.options("b", steps=1, state=str(tmp_path / "c"), name="c"))


# A neighbour that misbehaves: the test plays a, and b is real


class PlayedPeer:
    """The test's side of a connection to b."""

    def __init__(self, socket: ClientConnection, real: Peer) -> None:
        self.socket, self.terms = socket, real.terms

    async def hello(self, **changed: Any) -> None:
        votes = {"step": 1, "have": 0, "voted": 0, "finished": False}
        await self.say(self.terms.hello("a", {**votes, **changed}))

    async def say(self, message: FromPeer) -> None:
        await self.socket.send(encode_for_peer(message))

    async def model(self, number: int, content: bytes, crc32: int | None = None) -> None:
        crc32 = checksum(content) if crc32 is None else crc32
        await self.say(PeerModel(number, number, "float32", len(content), crc32))
        await self.socket.send(pack_chunk(number, 0, content))

    async def heard(self, kind: type[Any]) -> Any:
        """Return the next message of a kind."""
        async for frame in self.socket:
            if isinstance(frame, str) and isinstance(message := decode_from_peer(frame), kind):
                return message
        raise AssertionError(f"b closed before a {kind.__name__}")

    async def closed(self) -> int | None:
        try:
            while True:
                await self.socket.recv()
        except ConnectionClosed:
            return self.socket.close_code


def played(tmp_path: Path, play: Callable[[PlayedPeer, Peer], Awaitable[None]]) -> Peer:
    files = line_peers(tmp_path, 2)
    real = Peer(files.options("b", steps=3))
    dialling, _ = tls_contexts(tmp_path / "a", [real.book.entry("b").der])

    async def serve() -> None:
        running = asyncio.create_task(real.serve())
        await asyncio.sleep(0)
        while True:
            try:
                socket = await connect(
                    f"wss://127.0.0.1:{files.ports['b']}",
                    ssl=dialling,
                    server_hostname="b",
                    proxy=None,
                    max_size=None,
                    subprotocols=[Subprotocol(PEER_PROTOCOL_NAME)],
                )
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
        async with socket:
            await play(PlayedPeer(socket, real), real)
        real.node.stop()
        await running

    try:
        asyncio.run(asyncio.wait_for(serve(), PATIENCE))
    finally:
        real.close()
    return real


GOOD = np.arange(4, dtype=np.float32).tobytes()
BAD = np.array([1, np.nan, 2, 3], np.float32).tobytes()


@pytest.mark.parametrize(
    ("content", "crc32", "why"),
    [
        (BAD, None, "element 1 of the vector is nan; it must be finite"),
        (GOOD, 1, "its checksum is wrong"),
    ],
)
def test_a_model_that_cannot_be_used_is_left_out(
    tmp_path: Path, content: bytes, crc32: int | None, why: str
) -> None:
    async def play(a: PlayedPeer, real: Peer) -> None:
        await a.heard(PeerHello)
        await a.hello()
        await a.model(1, content, crc32)
        assert await a.heard(PeerVote) == PeerVote(1, False, why)

    real = played(tmp_path, play)
    assert real.store.record.edges["a"].have == 0


def test_a_model_counts_once(tmp_path: Path) -> None:
    """The same model again, on the same connection and on a new one."""

    async def play(a: PlayedPeer, real: Peer) -> None:
        await a.heard(PeerHello)
        await a.hello()
        await a.model(1, GOOD)
        assert await a.heard(PeerVote) == PeerVote(1, True)
        await a.model(1, GOOD)
        assert "announced after 1 on one connection" in (await a.heard(PeerRefusal)).text
        assert await a.closed() == 1002

    real = played(tmp_path, play)
    before = real.store.record.edges["a"].have
    assert before == 1


@pytest.mark.parametrize(
    ("frames", "code", "text"),
    [
        ([b"\x01" + bytes(MAX_FRAME_BYTES)], 1009, ""),
        (["{"], 1002, "the message is not JSON"),
        (['{"type":"heartbeat"}'], 1002, "a message of type 'heartbeat' was sent"),
        ([pack_chunk(1, 0, b"1")], 1002, "which was not announced"),
        ([encode_for_peer(PeerModel(1, 1, "float32", 2**30, 0))], 1002, "of 1073741824 bytes"),
        ([encode_for_peer(PeerModel(1, 1, "int8", 16, 0))], 1002, "expected float32"),
        (
            [encode_for_peer(PeerModel(1, 1, "float32", 16, 0)), pack_chunk(1, 4, b"1")],
            1002,
            "begins at 4",
        ),
        (
            [encode_for_peer(PeerModel(1, 1, "float32", 16, 0)), pack_chunk(1, 0, bytes(17))],
            1002,
            "ends behind 16 bytes",
        ),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(
    tmp_path: Path, frames: list[str | bytes], code: int, text: str
) -> None:
    async def play(a: PlayedPeer, real: Peer) -> None:
        await a.heard(PeerHello)
        await a.hello()
        for frame in frames:
            await a.socket.send(frame)
        if text:
            assert text in (await a.heard(PeerRefusal)).text
        assert await a.closed() == code

    played(tmp_path, play)


def test_a_hello_comes_first(tmp_path: Path) -> None:
    async def play(a: PlayedPeer, real: Peer) -> None:
        await a.say(PeerVote(1, True))
        assert await a.closed() == 1002

    played(tmp_path, play)


def test_another_version_is_refused(tmp_path: Path) -> None:
    async def play(a: PlayedPeer, real: Peer) -> None:
        hello = a.terms.hello("a", {"step": 0, "have": 0, "voted": 0, "finished": False})
        text = encode_for_peer(hello).replace('"version":1', '"version":2')
        await a.socket.send(text)
        refusal = await a.heard(PeerRefusal)
        assert refusal.reason == "version"
        assert "install one version of fleetlearn on both" in refusal.text

    played(tmp_path, play)
