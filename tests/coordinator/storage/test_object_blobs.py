"""A run whose blobs are in an object store: its machine may be lost, or another goes on for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.storage import object_blobs
from fleetlearn_coordinator.storage.arrived import (
    arrived_key,
    first_number,
    is_arrived,
    partial_key,
)
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.file_blobs import FileBlobs, load_model, model_path, spool_path
from fleetlearn_coordinator.storage.find_blobs import complete_copy
from fleetlearn_coordinator.storage.object_blobs import ObjectBlobs, ObjectModels
from fleetlearn_coordinator.storage.object_store import Objects
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.vector import Vector, digest

obstore = pytest.importorskip("obstore")
URL = "s3://bucket/fleet/run"
SUM = {"high": np.arange(5.0)}


@pytest.fixture(autouse=True)
def _stores(object_stores: None) -> None:
    pass


@contextmanager
def opened(machine: Path, **settings: Any) -> Iterator[ObjectBlobs]:
    with closing(ObjectBlobs(machine, Objects(URL), **settings)) as blobs:
        yield blobs


def model(value: float) -> dict[str, Vector]:
    return {"parameters": np.full(4, value, np.float32)}


def sha256(value: float) -> str:
    return digest(model(value)["parameters"])


def read(blobs: ObjectBlobs, number: int, size: int) -> bytes:
    return b"".join(bytes(part) for part in blobs.read_spool_file(number, size))


def test_another_machine_goes_on_with_all_that_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with opened(first) as blobs:
        assert blobs.is_slow
        assert not blobs.has_aggregator()
        blobs.open_aggregator()
        crc32 = blobs.save_aggregator(1, SUM)
        blobs.save_model(3, model(3))
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, b"longer than what comes next")
        blobs.free_spool_file(number)
        assert blobs.take_spool_file() == number
        blobs.write_spool_file(number, 0, b"update")
        blobs.settle_spool_files({number: 6})
    with opened(second) as blobs:
        assert blobs.model_versions() == [3]
        assert blobs.has_aggregator()
        blobs.open_aggregator()
        np.testing.assert_array_equal(blobs.load_aggregator(1, SUM, crc32)["high"], SUM["high"])
        np.testing.assert_array_equal(blobs.load_model(3, sha256(3))["parameters"], [3, 3, 3, 3])
        blobs.reserve_spool_file(number)
        assert read(blobs, number, 6) == b"update"
        with pytest.raises(StoreError, match="ends before its update's 7 bytes"):
            read(blobs, number, 7)


def test_a_machine_that_comes_back_uses_nothing_of_its_old_copy(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with opened(first) as blobs:
        blobs.open_aggregator()
        blobs.save_model(1, model(1))
        blobs.save_aggregator(0, {"high": np.zeros(5)})
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, b"older!")
        blobs.write_checkpoint(number, b"begun")
    with opened(second) as blobs:
        blobs.open_aggregator()
        crc32 = blobs.save_aggregator(0, SUM)
        blobs.save_model(1, model(7))
        blobs.drop_models([1])
        blobs.save_model(1, model(8))
        assert blobs.take_spool_file() == number
        blobs.write_spool_file(number, 0, b"newer.")
        blobs.settle_spool_files({number: 6})
    with opened(first) as blobs:
        assert blobs.checkpoints() == {}
        assert blobs.load_model(1, sha256(8))["parameters"].tolist() == [8, 8, 8, 8]
        assert blobs.load_aggregator(0, SUM, crc32)["high"].tolist() == SUM["high"].tolist()
        blobs.reserve_spool_file(number)
        assert read(blobs, number, 6) == b"newer."


def test_an_upload_that_an_earlier_process_began_goes_on(tmp_path: Path) -> None:
    """Its bytes are on the machine alone, until it is accepted."""
    with opened(tmp_path) as blobs:
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, b"begun")
        blobs.write_checkpoint(number, b"checkpoint")
    for complete in (False, True):
        with opened(tmp_path) as blobs:
            blobs.reserve_spool_file(number)
            if not complete:
                assert blobs.checkpoints() == {number: b"checkpoint"}
                blobs.write_spool_file(number, 5, b" and done")
            blobs.settle_spool_files({number: 14})
            assert read(blobs, number, 14) == b"begun and done"
    with opened(tmp_path / "another") as blobs:
        blobs.reserve_spool_file(number)
        assert read(blobs, number, 14) == b"begun and done"


def test_a_copy_that_was_damaged_is_fetched_again(tmp_path: Path) -> None:
    with opened(tmp_path) as blobs:
        blobs.save_model(2, model(2))
        path = model_path(tmp_path, 2)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert blobs.load_model(2, sha256(2))["parameters"].tolist() == [2, 2, 2, 2]
        with pytest.raises(StoreError, match="was changed after it was committed"):
            blobs.load_model(2, sha256(3))


@pytest.mark.parametrize(
    "harm", [lambda content: content[:-8], lambda content: bytes(len(content))]
)
def test_a_sum_that_was_damaged_is_fetched_again(
    tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    with opened(tmp_path) as blobs:
        blobs.open_aggregator()
        crc32 = blobs.save_aggregator(1, SUM)
        path = tmp_path / "sums" / "b"
        path.write_bytes(harm(path.read_bytes()))
        assert blobs.load_aggregator(1, SUM, crc32)["high"].tolist() == SUM["high"].tolist()


def test_who_lost_the_run_writes_nothing(tmp_path: Path) -> None:
    lost = False

    def check() -> None:
        if lost:
            raise StoreUnavailableError(Code.BUSY, "lost")

    with opened(tmp_path, check=check) as blobs:
        blobs.open_aggregator()
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, b"update")
        before = sorted(Objects(URL).keys(""))
        lost = True
        for write in (
            lambda: blobs.settle_spool_files({number: 6}),
            lambda: blobs.save_model(1, model(1)),
            lambda: blobs.save_aggregator(0, SUM),
        ):
            with pytest.raises(StoreUnavailableError, match="lost"):
                write()
        assert sorted(Objects(URL).keys("")) == before


def test_who_only_reads_uses_the_data_directory_or_a_copy_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "first") as blobs:
        blobs.save_model(1, model(1))
    here = ObjectModels(tmp_path / "first", Objects(URL))
    assert here.folder == tmp_path / "first"
    with opened(tmp_path / "second") as blobs:
        blobs.save_model(1, model(5))
        blobs.save_model(2, model(2))
    for machine in ("first", "third"):
        elsewhere = ObjectModels(tmp_path / machine, Objects(URL))
        assert elsewhere.model_versions() == [1, 2]
        assert elsewhere.load_model(1, sha256(5))["parameters"].tolist() == [5, 5, 5, 5]
        tensor = elsewhere.open_tensor(2)
        assert np.frombuffer(tensor.read(4, 8), np.float32).tolist() == [2, 2]
        assert elsewhere.model_size(2) == elsewhere.objects.size(elsewhere_key(2))
        assert elsewhere.where_model(2) == f"{URL}/{elsewhere_key(2)}.2"
        with pytest.raises(StoreError, match="is missing"):
            elsewhere.load_model(9, sha256(9))
        copy = elsewhere.folder
        assert copy != tmp_path / machine
        del elsewhere, tensor
        assert not copy.exists()


def test_a_copy_of_a_run_that_was_taken_over_has_all_its_models(tmp_path: Path) -> None:
    """Whoever took it over has fetched the newest alone."""
    first, second = tmp_path / "first", tmp_path / "second"
    with opened(first) as blobs:
        blobs.save_model(1, model(1))
        blobs.save_model(2, model(2))
    with opened(second) as blobs:
        blobs.load_model(2, sha256(2))
        assert not model_path(second, 1).exists()
        complete_copy(second, URL)
        for version in (1, 2):
            assert load_model(model_path(second, version), sha256(version))
    with pytest.raises(StoreError, match="another coordinator, with another data directory"):
        complete_copy(first, URL)
    complete_copy(first, None)  # a run that is all there


def elsewhere_key(version: int) -> str:
    return f"models/{model_path(Path(), version).name}"


def test_models_that_are_dropped_are_gone_everywhere(tmp_path: Path) -> None:
    with opened(tmp_path) as blobs:
        for version in (1, 2):
            blobs.save_model(version, model(version))
        model_path(tmp_path, 1).unlink()
        assert blobs.model_size(1) == blobs.model_size(2)
        blobs.drop_models([1, 7])
        assert blobs.model_versions() == [2]
        assert Objects(URL).keys("models") == [f"{model_path(Path(), 2).name}.1"]
        assert blobs.model_size(1) is None


def test_the_open_round_is_given_up_by_removing_an_object(tmp_path: Path) -> None:
    with opened(tmp_path) as blobs:
        blobs.open_aggregator()
        assert blobs.where_aggregator() == f"{URL}/sums/begun"
        Objects(URL).remove(["sums/begun", "sums/nothing"])
        assert not blobs.has_aggregator()


def test_what_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise obstore.exceptions.GenericError("no route to host\n\nDebug source: ...")

    objects = Objects(f"{URL}/")
    for name in ("put", "get", "head", "list", "delete"):
        monkeypatch.setattr(obstore, name, fail)
    for ask in (
        lambda: objects.put("a", b""),
        lambda: objects.read("a"),
        lambda: objects.fetch("a", tmp_path / "a"),
        lambda: objects.size("a"),
        lambda: objects.keys("a"),
        lambda: objects.remove(["a"]),
    ):
        with pytest.raises(StoreUnavailableError, match=r"run/a cannot be \w+ now: no route to h"):
            ask()
    assert not [*tmp_path.iterdir()]


def test_a_bucket_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise FileNotFoundError("NoSuchBucket")

    monkeypatch.setattr(obstore, "put", fail)
    with pytest.raises(StoreError, match=r"s3://bucket/fleet/run: there is no such bucket; make"):
        ObjectBlobs(tmp_path, Objects(URL))


def test_a_url_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(StoreError, match="oracle://x cannot be used as an object store"):
        Objects("oracle://x")


def test_spool_files_are_written_at_the_same_time(tmp_path: Path) -> None:
    contents = {number: bytes([number]) * (100 + number) for number in range(20)}
    with opened(tmp_path) as blobs:
        for content in contents.values():
            blobs.write_spool_file(blobs.take_spool_file(), 0, content)
        blobs.settle_spool_files({number: len(found) for number, found in contents.items()})
        for number, content in contents.items():
            key = f"uploads/{spool_path(Path(), number).name}.1"
            assert Objects(URL).read(key) == content


def test_bytes_that_come_late_from_who_lost_the_run_replace_nothing(tmp_path: Path) -> None:
    """A put is tried again for a minute: another coordinator may have the run by then."""
    with opened(tmp_path / "first") as first, opened(tmp_path / "second") as second:
        number = first.take_spool_file()
        assert second.take_spool_file() == number
        crc32 = 0
        for blobs, content in ((second, b"counts"), (first, b"late!!")):
            blobs.write_spool_file(number, 0, content)
            blobs.open_aggregator()
            saved = blobs.save_aggregator(0, SUM if blobs is second else {"high": np.zeros(5)})
            crc32 = saved if blobs is second else crc32
            blobs.save_model(1, model(7 if blobs is second else 8))
            blobs.settle_spool_files({number: 6})
    for machine in ("second", "third"):
        with opened(tmp_path / machine) as blobs:
            blobs.open_aggregator()
            blobs.reserve_spool_file(number)
            assert read(blobs, number, 6) == b"counts"
            assert blobs.load_model(1, sha256(7))["parameters"].tolist() == [7, 7, 7, 7]
            found = blobs.load_aggregator(0, SUM, crc32)["high"]
            assert found.tolist() == SUM["high"].tolist()
    left = [key for key in Objects(URL).keys("") if key not in ("owner", "sums/begun")]
    assert {key.rpartition(".")[2] for key in left} == {"2"}, "what was replaced is removed"
    reader = ObjectModels(tmp_path / "fourth", Objects(URL))
    assert reader.load_model(1, sha256(7))["parameters"].tolist() == [7, 7, 7, 7]


def test_the_bytes_of_a_begun_upload_are_not_replaced_by_those_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    """The object of its spool file is of an update that was accepted before."""
    with opened(tmp_path) as blobs:
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, b"earlier update")
        blobs.settle_spool_files({number: 14})
        blobs.free_spool_file(number)
        assert blobs.take_spool_file() == number
        blobs.write_spool_file(number, 0, b"begun")
        blobs.write_checkpoint(number, b"checkpoint")
    with opened(tmp_path) as blobs:
        assert blobs.checkpoints() == {number: b"checkpoint"}
        blobs.reserve_spool_file(number)
        assert read(blobs, number, 5) == b"begun"


def test_a_long_update_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_blobs, "WHOLE", 2**17)
    content = np.random.default_rng(1).bytes(2**19 + 5)
    with opened(tmp_path) as blobs:
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, content + b"older bytes")
        blobs.settle_spool_files({number: len(content)})
        assert Objects(URL).read(f"uploads/{spool_path(Path(), number).name}.1") == content


def test_what_a_killed_process_was_fetching_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as blobs:
        number = first_number(blobs.generation, 0)
        Objects(URL).put(arrived_key(number), b"update")
    draft = spool_path(tmp_path, number).with_name(f"{spool_path(tmp_path, number).name}.ab.draft")
    draft.write_bytes(b"upd")
    with opened(tmp_path) as blobs:
        assert not draft.exists()
        blobs.reserve_spool_file(number)
        assert read(blobs, number, 6) == b"update"
        assert not [*draft.parent.glob("*.draft")]


def test_partial_sums_that_nobody_waits_for_are_removed(tmp_path: Path) -> None:
    """Such as of a gateway that was lost before it could say that they are there."""
    objects = Objects(URL)
    with opened(tmp_path) as blobs:
        for _ in range(2):
            for number in (5, 6):
                objects.put(partial_key(number), b"sum")
            blobs.drop_orphans((), {5})
            assert objects.keys("partial") == ["5"]
        blobs.drop_orphans(())
    assert not objects.keys("partial")


def test_what_devices_may_fetch_is_published_by_the_run_s_blobs(tmp_path: Path) -> None:
    with opened(tmp_path) as blobs:
        assert blobs.served is not None
        blobs.served.publish({digest(np.zeros(4, np.float32)): bytes(16)})
        assert Objects(URL).keys("served") == [digest(np.zeros(4, np.float32))]


def test_an_update_that_a_gateway_put_counts_until_it_is_freed(tmp_path: Path) -> None:
    """On another machine too, and in a copy of the run, which needs no object store."""
    first, second, copy = tmp_path / "first", tmp_path / "second", tmp_path / "copy"
    objects = Objects(URL)
    with opened(first) as blobs:
        number = first_number(blobs.generation, 3) + 5
        assert is_arrived(number)
        assert not is_arrived(blobs.take_spool_file())
        objects.put(arrived_key(number), b"update")
        blobs.take_arrived(number)
        blobs.settle_spool_files({number: 6})  # it is there
        assert read(blobs, number, 6) == b"update"
        assert read(blobs, number, 3) == b"upd"
        assert arrived_key(number) in blobs.where_spool_file(number)
        assert blobs.find_checkpoint(number) is None
    with opened(second) as blobs:
        blobs.reserve_spool_file(number)
        blobs.drop_orphans(())
        assert b"".join(map(bytes, blobs.read_spool_file(number, 4, 2))) == b"date"
    with opened(second) as blobs:
        blobs.reserve_spool_file(number)
        spool_path(second, number).unlink()
        complete_copy(second, URL)
        (copy / "uploads").mkdir(parents=True)
        spool_path(copy, number).write_bytes(spool_path(second, number).read_bytes())
        with closing(FileBlobs(copy)) as copied:
            copied.reserve_spool_file(number)
            assert b"".join(map(bytes, copied.read_spool_file(number, 6))) == b"update"
            copied.free_spool_file(number)
            assert not spool_path(copy, number).exists()
        blobs.free_spool_file(number)
        assert not spool_path(second, number).exists()
    assert not objects.keys("arrived")


def test_what_arrived_and_does_not_count_is_removed(tmp_path: Path) -> None:
    objects = Objects(URL)
    with opened(tmp_path) as blobs:
        before = first_number(blobs.generation, 0)
    with opened(tmp_path) as blobs:
        own, after = (first_number(blobs.generation + each, 0) for each in (0, 1))
        assert before < own < after
        for number in (before, before + 1, own, own + 1, own + 2, after):
            objects.put(arrived_key(number), b"update")
        blobs.reserve_spool_file(before)
        blobs.take_arrived(own)
        assert read(blobs, own + 2, 6) == b"update"
        blobs.drop_orphans(range(own + 1, own + 2))
        assert sorted(map(int, objects.keys("arrived"))) == [before, own, own + 1, after]
        assert not spool_path(tmp_path, own + 2).exists()
        lost = StoreError(Code.BUSY, "another coordinator has the run")

        def check() -> None:
            raise lost

        blobs._check = check
        with pytest.raises(StoreError, match="another coordinator"):
            blobs.drop_orphans(())
        with pytest.raises(StoreError, match="another coordinator"):
            blobs.check_owner()
    assert sorted(map(int, objects.keys("arrived"))) == [before, own, own + 1, after]
