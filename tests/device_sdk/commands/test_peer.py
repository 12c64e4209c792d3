"""``fleetlearn-device peer`` and ``peer-card``; what ``status`` and ``doctor`` say of a peer."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.peers.run_peer import Peer
from fleetlearn_device.storage.status import read_status
from line_bundle import write_line_bundle
from peer_files import PeerFiles, peer_files

BOOK = "training = { hyper = { lr = 0.1 } }\ndeadline = 30"


@pytest.fixture
def files(tmp_path: Path) -> PeerFiles:
    bundle = write_line_bundle(tmp_path / "line.bundle", optimizer="sgd", buffer=False)
    rows = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}
    return peer_files(tmp_path, bundle.path, [rows, rows], BOOK)


def words(files: PeerFiles, peer: str, **changed: str) -> list[str]:
    given = {
        "book": str(files.book),
        "bundle": str(files.bundle),
        "data": str(files.folder / f"{peer}.npz"),
        "state": str(files.folder / peer),
        "steps": "2",
        **changed,
    }
    return ["peer", *(word for flag, text in given.items() for word in (f"--{flag}", text))]


def test_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["peer-card", "--state", str(tmp_path / "s"), "--name", "roof-1"]
    assert main([*command, "--address", "192.0.2.1:8766"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["[[peer]]", 'name = "roof-1"', 'address = "192.0.2.1:8766"']
    assert lines[3].startswith('certificate = "MII')
    assert main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert [*again[:2], again[2]] == [*lines[:2], lines[3]]
    assert main([*command, "--address", "here"]) == 2
    assert "expected HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "status", "expected"),
    [
        ({"book": "none.toml"}, 2, "the address book none.toml cannot be read"),
        ({"bundle": "none.bundle"}, 1, "none.bundle"),
        ({"data": "none.npz"}, 2, "none.npz"),
        ({"listen": "x"}, 2, "expected HOST:PORT"),
        ({"name": "other"}, 1, "this device is a, not other"),
        ({"discover": "eth0"}, 2, "expected the IPv4 address of one of this device's interfaces"),
        ({"steps": "0"}, 2, "expected a whole number from 1"),
    ],
)
def test_what_cannot_be(
    files: PeerFiles,
    changed: dict[str, str],
    status: int,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words(files, "a", **changed)) == status
    assert expected in capsys.readouterr().err


def test_a_hyper_parameter_that_the_bundle_does_not_have(
    files: PeerFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write_book("training = { hyper = { momentum = 0.9 } }")
    assert main(words(files, "a")) == 2
    assert "momentum" in capsys.readouterr().err


def test_a_settings_file(files: PeerFiles, capsys: pytest.CaptureFixture[str]) -> None:
    settings = files.folder / "device.toml"
    settings.write_text(
        'state = "a"\n[data]\nsource = "a.npz"\n'
        '[peers]\nbook = "none.toml"\nbundle = "line.bundle"\nsteps = 3\n'
    )
    assert main(["peer", "--config", str(settings)]) == 2
    assert f"{files.folder / 'none.toml'} cannot be read" in capsys.readouterr().err
    assert main(["config", "--config", str(settings)]) == 0
    assert "peers.steps" in capsys.readouterr().out


def test_run_has_no_flags_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "--book" not in capsys.readouterr().out


def test_status_and_doctor(files: PeerFiles, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(files.folder / "a")
    doctor = ["doctor", "--state", folder, "--book", str(files.book)]
    doctor += ["--data", str(files.folder / "a.npz"), "--bundle", str(files.bundle)]
    assert main(doctor) == 0
    out = capsys.readouterr().out
    assert "good     card         a is in the book with this device's key" in out
    assert "warning  neighbour    b: 127.0.0.1 port" in out

    async def serve() -> None:
        peers = [Peer(files.options(name, steps=10**6)) for name in files.names]
        running = asyncio.gather(*(peer.serve() for peer in peers))
        while min(peer.store.record.step for peer in peers) < 2:
            await asyncio.sleep(0.02)
        assert await asyncio.to_thread(main, doctor) == 0
        assert "good     neighbour    b answers at 127.0.0.1" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["status", "--state", folder, "--json"]) == 0
        for peer in peers:
            peer.node.stop()
        await running
        for peer in peers:
            peer.close()

    asyncio.run(asyncio.wait_for(serve(), 60))
    found = json.loads(capsys.readouterr().out)
    assert (found["peer"], found["running"]) == ("a", True)
    assert found["neighbours"]["b"]["connected"]
    assert main(["status", "--state", folder]) == 3
    assert "peer     a is not running" in capsys.readouterr().out
    assert read_status(files.folder / "a") is None
    assert found["started"] < time.time()


def test_doctor_finds_a_card_that_is_not_in_the_book(
    files: PeerFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    (files.folder / "a" / "device_key.json").unlink()
    doctor = ["doctor", "--state", str(files.folder / "a"), "--book", str(files.book)]
    assert main([*doctor, "--data", str(files.folder / "a.npz")]) == 6
    assert "has no key of a peer" in capsys.readouterr().out
    assert main(["peer-card", "--state", str(files.folder / "a")]) == 0
    assert main([*doctor, "--data", str(files.folder / "a.npz")]) == 6
    assert "a has another card in the book" in capsys.readouterr().out
