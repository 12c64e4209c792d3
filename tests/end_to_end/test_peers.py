"""Peers as real processes over TLS: they learn, and are killed at any moment and chosen points."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from bundle_cache import cached_export
from fleetlearn_device.commands.status import NOT_RUNNING
from fleetlearn_device.peers.peer_store import PeerStore, read_record
from fleetlearn_device.peers.record import PeerRecord
from fleetlearn_protocol import open_bundle
from line_bundle import write_line_bundle
from numpy.typing import NDArray
from peer_files import PeerFiles, peer_files
from processes import DIGITS, ROOT, Processes, processes, wait_for

CRASH = Path(__file__).with_name("crash_peer.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    POINTS = list(runpy.run_path(str(CRASH))["POINTS"])
pytestmark = pytest.mark.slow
RING = 'topology = { kind = "ring" }\n'
STILL = f"deadline = 4\n{RING}training = {{ hyper = {{ lr = 0.0 }} }}\n"
"""Nobody learns: all that changes the models is their mixing."""


def begin(run: Processes, files: PeerFiles, name: str, steps: int, *wrapper: str | Path) -> None:
    words = ["peer", "--book", files.book, "--bundle", files.bundle, "--steps", str(steps)]
    words += ["--data", files.folder / f"{name}.npz", "--state", files.folder / name]
    run.start(name, sys.executable, *(wrapper or ("-m", "fleetlearn_device")), *words)


def models(files: PeerFiles) -> NDArray[np.float32]:
    """Return all peers' models, as their disks have them: shape (n, P)."""
    bundle = open_bundle(files.bundle)
    size = bundle.manifest.size
    stores = [PeerStore(files.folder / name, bundle.sha256, size, 0) for name in files.names]
    return np.stack([store.own()[0] for store in stores])


def step_of(files: PeerFiles, name: str) -> int:
    stored = read_record(files.folder / name / "peer")
    return 0 if stored is None else stored.record.step


def still_peers(folder: Path, count: int, settings: str = STILL) -> PeerFiles:
    """Peers that do not learn, each with another model."""
    bundle = write_line_bundle(folder / "line.bundle", optimizer="sgd", buffer=False)
    numbers = np.random.default_rng(3)
    rows = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}
    files = peer_files(folder, bundle.path, [rows] * count, settings)
    for name in files.names:
        store = PeerStore(folder / name, bundle.sha256, 4, 0)
        model = numbers.normal(size=4).astype(np.float32)
        store.commit(PeerRecord(), model, model[:0])
    return files


def until_all_end(run: Processes, files: PeerFiles) -> None:
    for name in files.names:
        assert run.wait(name, 120) == 0, run.log(name)


def in_doubt(files: PeerFiles) -> bool:
    """Return whether a peer that has ended does not know what became of an exchange."""
    records = [read_record(files.folder / name / "peer") for name in files.names]
    edges = [edge for stored in records if stored for edge in stored.record.edges.values()]
    return any(edge.have and edge.counted is None for edge in edges)


@pytest.mark.parametrize("turn", [1, 4])
@pytest.mark.parametrize("point", POINTS)
def test_a_peer_that_dies_at_a_chosen_point_keeps_the_mean(
    tmp_path: Path, warm: Path, point: str, turn: int
) -> None:
    files = still_peers(tmp_path, 3)
    before = models(files)
    with processes(tmp_path, warm) as run:
        for name in "ac":
            begin(run, files, name, 5)
        begin(run, files, "b", 5, CRASH, point, str(turn))
        assert run.wait("b") == -9, run.log("b")
        begin(run, files, "b", 5)
        until_all_end(run, files)
    after = models(files)
    assert not in_doubt(files)
    np.testing.assert_allclose(after.mean(0), before.mean(0), atol=1e-6)
    assert np.ptp(after, axis=0).max() < 0.05 * np.ptp(before, axis=0).max()


def test_a_peer_that_comes_back_after_the_deadline_keeps_the_mean(
    tmp_path: Path, warm: Path
) -> None:
    """Neighbours went on in doubt, and add the difference when they learn that it counts."""
    said = ""
    for turn in range(3, 5):
        (tmp_path / str(turn)).mkdir()
        settings = "take_after = 1000\n" + STILL.replace("deadline = 4", "deadline = 1")
        files = still_peers(tmp_path / str(turn), 3, settings)
        before = models(files)
        with processes(files.folder, warm) as run:
            for name in "ac":
                begin(run, files, name, 80)
            begin(run, files, "b", 80, CRASH, "a vote is saved", str(turn))
            assert run.wait("b") == -9, run.log("b")
            wait_for(lambda run=run: "goes on without b" in run.log("a"), "a step without b")
            begin(run, files, "b", 80)
            until_all_end(run, files)
            said += "".join(run.log(name) for name in files.names)
        assert not in_doubt(files)
        np.testing.assert_allclose(models(files).mean(0), before.mean(0), atol=1e-6)
    assert "counts, as is known only now" in said


@pytest.mark.parametrize("mode", ["steps", "gossip"])
def test_peers_that_die_at_any_moment_keep_the_mean(tmp_path: Path, warm: Path, mode: str) -> None:
    files = still_peers(tmp_path, 5, f'mode = "{mode}"\ntake_after = 1000\n{STILL}')
    before = models(files)
    dice = random.Random(8)
    steps = 60
    with processes(tmp_path, warm) as run:
        for name in files.names:
            begin(run, files, name, steps)
        for _ in range(10):
            victim = dice.choice(files.names)
            wait_for(
                lambda victim=victim: (tmp_path / victim / "peer" / "record.json").exists(),
                f"{victim}'s first record",
            )
            time.sleep(dice.uniform(0.0, 0.4))  # any moment will do
            if run.running[victim].poll() is None:
                run.kill(victim)
            begin(run, files, victim, steps)
        until_all_end(run, files)
        if in_doubt(files):  # who ended before a neighbour's death finds out when both are there
            for name in files.names:
                begin(run, files, name, steps)
            until_all_end(run, files)
    after = models(files)
    assert not in_doubt(files)
    np.testing.assert_allclose(after.mean(0), before.mean(0), atol=2e-6)
    assert np.ptp(after, axis=0).max() < 0.3 * np.ptp(before, axis=0).max()


@pytest.fixture(scope="module")
def digits_peers(tmp_path_factory: pytest.TempPathFactory) -> PeerFiles:
    """Five peers with few digits each."""
    folder = tmp_path_factory.mktemp("digits")
    bundle = folder / "digits.bundle"
    exported = {**DIGITS["export"]()}
    cached_export(
        exported.pop("model"), exported.pop("loss"), exported.pop("example"), bundle, **exported
    )
    scans = DIGITS["data"]()
    shards = DIGITS["dirichlet_shards"](scans.y_train, 5, alpha=0.5, seed=3)
    parts = [{"x": scans.x_train[rows], "y": scans.y_train[rows]} for rows in shards]
    how = "training = { epochs = 2, batch_size = 20, seed = 1, hyper = { lr = 0.1 } }\n"
    return peer_files(folder, bundle, parts, f"deadline = 20\n{RING}{how}")


def accuracy(files: PeerFiles, name: str) -> float:
    scans: Any = DIGITS["data"]()
    session = onnxruntime.InferenceSession(files.folder / name / "model.onnx")
    (scores,) = session.run(None, {session.get_inputs()[0].name: scans.x_test})
    return float((scores.argmax(1) == scans.y_test).mean())


def test_five_peers_learn_digits_while_one_after_the_other_is_killed(
    digits_peers: PeerFiles, warm: Path
) -> None:
    files, steps = digits_peers, 25
    with processes(files.folder, warm) as run:
        for name in files.names:
            begin(run, files, name, steps)
        for step, victim in zip((3, 6, 9, 12, 15), files.names, strict=True):
            wait_for(
                lambda step=step, victim=victim: step_of(files, victim) >= step, f"step {step}"
            )
            run.kill(victim)
            begin(run, files, victim, steps)
        until_all_end(run, files)
        status = subprocess.run(
            [sys.executable, "-m", "fleetlearn_device", "status", "--state", files.folder / "a"],
            capture_output=True,
            text=True,
            check=False,
        )
    accuracies = [accuracy(files, name) for name in files.names]
    assert min(accuracies) > 0.85, accuracies
    found = models(files)
    distance = np.linalg.norm(found - found.mean(0), axis=1).max() / np.linalg.norm(found.mean(0))
    assert distance < 0.1
    assert status.returncode == NOT_RUNNING
    assert "peer     a is not running" in status.stdout
    assert "progress step 25 of 25" in status.stdout
    assert "with     b: has done all steps; last model: 25" in status.stdout


def test_the_example_runs(tmp_path: Path) -> None:
    words = ["-m", "examples.peers", "--peers", "3", "--steps", "4", tmp_path]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "was killed at step" in done.stdout
    assert done.stdout.count("of 359 scans that no device has") == 3
