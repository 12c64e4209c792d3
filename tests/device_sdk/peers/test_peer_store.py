"""What a peer keeps on its disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.peers.peer_store import PeerStore
from fleetlearn_device.peers.record import EdgeRecord, PeerRecord
from fleetlearn_device.storage.errors import StateError

BUNDLE = "a" * 64
MODEL, KEPT = np.arange(4, dtype=np.float32), np.array([7, 8], np.float32)


def opened(folder: Path, bundle: str = BUNDLE) -> PeerStore:
    return PeerStore(folder, bundle, 4, 2)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "peer").iterdir()}


def test_what_is_committed_is_there_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.is_new
    record = PeerRecord(3, 2, edges={"b": EdgeRecord(3, 3, None, False)})
    store.save_difference("b", 3, MODEL + 1)
    store.commit(record, MODEL, KEPT)
    again = opened(tmp_path)
    assert again.record == record
    model, kept = again.own()
    np.testing.assert_array_equal(model, MODEL)
    np.testing.assert_array_equal(kept, KEPT)
    np.testing.assert_array_equal(again.difference("b", 3), MODEL + 1)


def test_what_nothing_names_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.save_difference("b", 3, MODEL)
    store.commit(PeerRecord(3, 2, edges={"b": EdgeRecord(3, 3, True, True)}), MODEL, KEPT)
    store.commit(PeerRecord(4, 3), MODEL, KEPT)
    assert names(tmp_path) == {"own.2", "record.json"}


def test_a_commit_that_is_cut_off_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.commit(PeerRecord(1, 1), MODEL, KEPT)
    monkeypatch.setattr(PeerStore, "save", lambda *arguments: (_ for _ in ()).throw(OSError(5)))
    with pytest.raises(StateError):
        store.commit(PeerRecord(2, 2), MODEL + 1, KEPT)
    monkeypatch.undo()
    again = opened(tmp_path)
    assert again.record.step == 1
    np.testing.assert_array_equal(again.own()[0], MODEL)
    assert names(tmp_path) == {"own.1", "record.json"}


def test_another_bundle_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).commit(PeerRecord(1, 1), MODEL, KEPT)
    with pytest.raises(StateError, match="is of the bundle aaaaaaaaaaaa, and bbbbbbbbbbbb was"):
        opened(tmp_path, "b" * 64)


@pytest.mark.parametrize("file", ["own.1", "record.json"])
def test_damage_is_found(tmp_path: Path, file: str) -> None:
    opened(tmp_path).commit(PeerRecord(1, 1), MODEL, KEPT)
    path = tmp_path / "peer" / file
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    with pytest.raises(StateError, match=f"{file} is damaged.*Delete the folder"):
        opened(tmp_path).own()


@pytest.mark.parametrize("runs", [("spring", "summer"), (None, "summer"), ("spring", None)])
def test_the_folder_of_another_training_is_refused(
    tmp_path: Path, runs: tuple[str | None, str | None]
) -> None:
    """With its old step it would end the training of all others."""
    store = PeerStore(tmp_path, BUNDLE, 4, 2, runs[0])
    store.commit(PeerRecord(20, 20), MODEL, KEPT)
    assert PeerStore(tmp_path, BUNDLE, 4, 2, runs[0]).record.step == 20
    with pytest.raises(StateError, match="would end the others' training") as caught:
        PeerStore(tmp_path, BUNDLE, 4, 2, runs[1])
    for run in runs:
        assert (f"the training {run}" if run else "a training without a name") in str(caught.value)
