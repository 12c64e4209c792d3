"""A folder that is there whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.draft_folder import ENDING, draft_folder
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_protocol import Code


def test_a_folder_gets_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "new" / "target"
    with draft_folder(target) as draft:
        (draft / "a").write_text("a")
        assert not target.exists()
        assert draft.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert (target / "a").read_text() == "a"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write_half(draft: Path) -> None:
        (draft / "a").write_text("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), draft_folder(tmp_path / "target") as draft:
        write_half(draft)
    assert not [*tmp_path.iterdir()]


def test_an_empty_folder_is_taken_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with draft_folder(target) as draft:
        (draft / "a").write_text("a")
    with pytest.raises(StoreError, match="is not empty"), draft_folder(target):
        pass
    with pytest.raises(StoreError, match="is a file"), draft_folder(target / "a"):
        pass
    assert [path.name for path in target.iterdir()] == ["a"]


def test_a_folder_that_is_served_is_said_to_be_in_use(tmp_path: Path) -> None:
    with (
        find_storage(tmp_path / "host" / "run").lock(),
        pytest.raises(StoreError, match=r"in use: a coordinator holds .*run") as caught,
        draft_folder(tmp_path / "host"),
    ):
        pass
    assert caught.value.code is Code.BUSY


def test_what_the_dead_left_is_removed_and_what_others_make_stays(tmp_path: Path) -> None:
    left = tmp_path / f".old.1234{ENDING}"
    left.mkdir()
    (left / "half").write_text("")
    with draft_folder(tmp_path / "one") as one, draft_folder(tmp_path / "two"):
        assert one.is_dir()
        assert not left.exists()
