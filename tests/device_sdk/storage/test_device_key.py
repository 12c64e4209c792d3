"""device_key.json: made once, when it is needed, for its owner's eyes alone."""

from __future__ import annotations

import errno
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleetlearn_device.storage import device_key as module
from fleetlearn_device.storage.device_key import device_key, read_device_key
from fleetlearn_device.storage.errors import StateError


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    assert read_device_key(tmp_path) is None
    found = device_key(tmp_path)
    assert len(found) == 32
    assert device_key(tmp_path) == read_device_key(tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == ["device_key.json"]
    assert stat.S_IMODE((tmp_path / "device_key.json").stat().st_mode) == 0o600


def test_two_devices_have_different_keys(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    assert device_key(tmp_path / "a") != device_key(tmp_path / "b")


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_all_who_need_it_at_once_get_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:  # as on a camera's card, where who comes second overwrites nothing either

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted", str(source))

        monkeypatch.setattr(module.os, "link", refuse)
        assert device_key(tmp_path) == device_key(tmp_path)
        return
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert len({*pool.map(device_key, [folder] * 8)}) == 1
            assert [path.name for path in folder.iterdir()] == ["device_key.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"private":"ab"}', b'{"private":"\xff"}'])
def test_a_damaged_file_is_named_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "device_key.json").write_bytes(content)
    for read in (read_device_key, device_key):
        with pytest.raises(StateError, match=r"device_key\.json is damaged.*public-key"):
            read(tmp_path)
    assert (tmp_path / "device_key.json").read_bytes() == content


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="nowhere"):
        device_key(tmp_path / "nowhere")
