"""credential.json: made once, for its owner's eyes, and changed without a moment at which neither
credential counts."""

from __future__ import annotations

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleetlearn_device.driver.address import Enrolment
from fleetlearn_device.storage.credential import (
    Credential,
    begin_change,
    end_change,
    make_credential,
    read_credential,
)
from fleetlearn_device.storage.errors import StateError


def credential(folder: Path) -> Credential:
    found = read_credential(folder)
    assert found is not None
    return found


def test_a_credential_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    assert read_credential(tmp_path) is None
    make_credential(tmp_path)
    found = credential(tmp_path)
    assert len(found.secret) == 43
    make_credential(tmp_path)
    assert credential(tmp_path) == found
    assert stat.S_IMODE((tmp_path / "credential.json").stat().st_mode) == 0o600


def test_it_is_changed_in_two_steps(tmp_path: Path) -> None:
    make_credential(tmp_path)
    before = credential(tmp_path)
    begin_change(tmp_path)
    between = credential(tmp_path)
    assert between.secret == before.secret != between.next
    begin_change(tmp_path)
    assert credential(tmp_path) == between, "the coordinator may have heard of it already"
    end_change(tmp_path)
    assert credential(tmp_path) == Credential(between.next or "")
    assert stat.S_IMODE((tmp_path / "credential.json").stat().st_mode) == 0o600


def test_the_command_may_change_it_while_the_device_does(tmp_path: Path) -> None:
    make_credential(tmp_path)

    def often(change: Callable[[Path], None]) -> None:
        for _ in range(100):
            change(tmp_path)
            assert stat.S_IMODE((tmp_path / "credential.json").stat().st_mode) == 0o600

    with ThreadPoolExecutor(3) as pool:
        for done in [
            pool.submit(often, change) for change in (begin_change, begin_change, end_change)
        ]:
            done.result()
    assert len(credential(tmp_path).secret) == 43
    assert [path.name for path in tmp_path.iterdir()] == ["credential.json"]


def test_without_one_there_is_nothing_to_change(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not enrolled"):
        begin_change(tmp_path)
    end_change(tmp_path)
    assert read_credential(tmp_path) is None


@pytest.mark.parametrize("content", [b"{", b'{"secret":"\xff"}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "credential.json").write_bytes(content)
    with pytest.raises(StateError, match=r"credential\.json is damaged.*enrol the device again"):
        read_credential(tmp_path)


def test_the_headers_say_who_the_device_is(tmp_path: Path) -> None:
    assert Enrolment(tmp_path, "a", None).headers() == {}
    enrolment = Enrolment(tmp_path, "a", "t" * 43)
    plain = {"Authorization": f"Bearer {credential(tmp_path).secret}", "Fleetlearn-Device": "a"}
    assert enrolment.headers() == plain | {"Fleetlearn-Enrolment": "t" * 43}
    assert enrolment.headers() == plain | {"Fleetlearn-Enrolment": "t" * 43}, (
        "until the coordinator accepts it"
    )
    enrolment.accepted()
    assert enrolment.headers() == plain
    begin_change(tmp_path)
    changed = credential(tmp_path).next
    assert enrolment.headers() == plain | {"Fleetlearn-Next-Credential": changed}
    enrolment.accepted()
    assert enrolment.headers() == {"Authorization": f"Bearer {changed}", "Fleetlearn-Device": "a"}


def test_a_secret_with_another_character_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "credential.json").write_text('{"secret":"' + "a" * 42 + '!"}')
    with pytest.raises(StateError, match=r"credential\.json is damaged"):
        read_credential(tmp_path)
