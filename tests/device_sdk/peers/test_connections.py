"""Who may connect to a peer: TLS with the certificates of the address book."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_device.peers.certificate import FILE, own_certificate, tls_contexts
from fleetlearn_device.peers.connections import Listening, PeerConnections, listening_at


def certified(folder: Path, name: str) -> bytes:
    folder.mkdir()
    return own_certificate(folder, name, os.urandom(32))


@pytest.fixture
def names(tmp_path: Path) -> dict[str, bytes]:
    return {name: certified(tmp_path / name, name) for name in "abc"}


def knock(tmp_path: Path, names: dict[str, bytes], who: ssl.SSLContext) -> bool:
    """Return whether somebody gets past b's TLS, where b knows a alone."""

    async def seen() -> bool:
        _, listening = tls_contexts(tmp_path / "b", [names["a"]])
        opened = PeerConnections(who, listening, {names["a"]: "a"}, never)
        server = await opened.listen(Listening("127.0.0.1", 0))
        port = next(iter(server.sockets)).getsockname()[1]
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=who, server_hostname="b"
            )
            # In TLS 1.3 the listening side's refusal comes after the handshake.
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            try:
                return bool(await reader.read(1))
            except OSError:
                return False
            finally:
                writer.close()
        except OSError:  # an SSLError, too
            return False
        finally:
            server.close()
            await server.wait_closed()

    return asyncio.run(asyncio.wait_for(seen(), 30))


async def never(*arguments: object) -> None:
    raise AssertionError("there was no WebSocket")


def test_a_neighbour_gets_in(tmp_path: Path, names: dict[str, bytes]) -> None:
    dialling, _ = tls_contexts(tmp_path / "a", [names["b"]])
    assert knock(tmp_path, names, dialling)


def test_a_device_that_is_not_in_the_book_does_not(tmp_path: Path, names: dict[str, bytes]) -> None:
    dialling, _ = tls_contexts(tmp_path / "c", [names["b"]])
    assert not knock(tmp_path, names, dialling)


def test_nobody_gets_in_without_a_certificate(tmp_path: Path, names: dict[str, bytes]) -> None:
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    assert not knock(tmp_path, names, nobody)


def test_a_peer_refuses_whom_it_did_not_mean(tmp_path: Path, names: dict[str, bytes]) -> None:
    dialling, _ = tls_contexts(tmp_path / "a", [names["c"]])
    assert not knock(tmp_path, names, dialling)


def test_an_older_tls_is_refused(tmp_path: Path, names: dict[str, bytes]) -> None:
    old, _ = tls_contexts(tmp_path / "a", [names["b"]])
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert not knock(tmp_path, names, old)


def test_one_key_and_name_make_one_certificate(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    private = Ed25519PrivateKey.generate().private_bytes_raw()
    first = own_certificate(tmp_path / "a", "a", private)
    assert own_certificate(tmp_path / "a", "a", private) == first
    assert own_certificate(tmp_path / "a", "b", private) != first
    assert (tmp_path / "a" / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        (None, ("192.0.2.1", 8766), ("192.0.2.1", 8766)),
        (None, ("board.local", 8766), (None, 8766)),
        (":8766", None, (None, 8766)),
        ("[::1]:8766", None, ("::1", 8766)),
    ],
)
def test_where_a_peer_listens(
    text: str | None, place: tuple[str, int] | None, expected: tuple[str | None, int]
) -> None:
    assert listening_at(text, place) == expected


@pytest.mark.parametrize("text", ["8766", "x", "x:y", "x:70000", None])
def test_where_no_peer_can_listen(text: str | None) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT|say where it listens"):
        listening_at(text, None)


def test_a_port_that_is_taken(tmp_path: Path, names: dict[str, bytes]) -> None:
    dialling, listening = tls_contexts(tmp_path / "a", [names["b"]])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = Listening("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            asyncio.run(PeerConnections(dialling, listening, {}, never).listen(at))
