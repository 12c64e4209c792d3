"""What gateways serve to devices, as files."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_coordinator.gateways.published_files import PublishedFiles


def test_a_file_that_a_loss_of_power_cut_short_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    PublishedFiles(folder).publish({"a": b"all of it", "b": b"older"}, {})
    (folder / "a").write_bytes(b"all")
    (folder / "c.draft").write_bytes(b"half")
    PublishedFiles(folder).publish({"a": b"all of it"}, {})
    assert (folder / "a").read_bytes() == b"all of it"
    assert [file.name for file in folder.iterdir()] == ["a"]


def test_who_has_a_file_open_keeps_it(tmp_path: Path) -> None:
    PublishedFiles(tmp_path).publish({"a": b"all of it"}, {})
    with (tmp_path / "a").open("rb") as file:
        PublishedFiles(tmp_path).publish({"b": b"others"}, {})
        assert file.read() == b"all of it"
