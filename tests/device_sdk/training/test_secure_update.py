"""A masked task's training: what it leaves on the disk and in its report, what it needs, and that a
training that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.limits.memory import MemoryCeiling
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training import masking
from fleetlearn_device.training import progress as progress_module
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.secure_update import (
    check_helper,
    mask_pending,
    masked_memory,
    room_for,
)
from fleetlearn_device.training.train import OutOfTimeError
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer, task_fingerprint
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import SecureTask, Task
from fleetlearn_protocol.secure.fixed_point import excess_of
from interrupted import DATA, bring, task_of
from line_bundle import write_line_bundle

CLIP = 0.5
SECURE = SecureTask("helper", 2, 20, most_weight=24, helper="09" + "00" * 31)
LATE = msgspec.structs.replace(SECURE, least_factor=0.1)


class Died(BaseException):
    """The process dies here."""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_line_bundle(tmp_path_factory.mktemp("line") / "line", buffer=False, state=True)


def task(bundle: Bundle, secure: SecureTask | None, number: int = 1) -> Task:
    parts = {"update": "float32" if secure is None else "masked"}
    given = task_of(bundle, "plain", number)
    return msgspec.structs.replace(given, parts=parts, clip=CLIP, secure=secure)


def do(
    state: StateDirectory, bundle: Bundle, given: Task, die: int | None = None
) -> FinishedUpdate:
    """Train with a new trainer. ``die``: the step before which the process dies."""
    bring(state, bundle, given)
    trainer = Trainer(state, DATA, "onnx", 1, checkpoint_every=1e-9)
    if die is not None:
        count = trainer._count

        def count_or_die(steps: int, loss: float) -> None:
            if steps > die:
                raise Died
            count(steps, loss)

        trainer._count = count_or_die  # type: ignore[method-assign]
    return trainer.train(given, 100.0)


def test_nothing_of_the_update_but_the_masked_one_is_on_the_disk(
    state: StateDirectory, bundle: Bundle
) -> None:
    free = do(state, bundle, task(bundle, None))
    plain = bytes(free.contents[0])
    first, second = (do(state, bundle, task(bundle, SECURE)) for _ in range(2))
    assert first.later is None
    assert bytes(first.contents[0]) != bytes(second.contents[0]), "masked, and by another mask"
    assert first.report.sealed != second.report.sealed
    assert len(first.contents[0]) == len(plain) + 4
    assert first.kept_state.tobytes() == free.kept_state.tobytes()
    state.outbox.save(*second)
    files = [path.read_bytes() for path in state.path.rglob("*") if path.is_file()]
    assert any(bytes(second.contents[0]) in content for content in files)
    assert not any(plain in content for content in files)


@pytest.mark.parametrize("secure", [SECURE, LATE], ids=["at once", "late"])
def test_an_update_of_a_training_that_was_cut_short_is_not_masked(
    state: StateDirectory, bundle: Bundle, secure: SecureTask
) -> None:
    """The time is not signed: a coordinator that leaves all other devices the time for one step
    would have a sum that is nearly one device's update."""
    given = task(bundle, secure)
    free = msgspec.structs.replace(given, secure=None, parts={"update": "float32"})
    bring(state, bundle, given)
    trainer = Trainer(state, DATA, "onnx", 1)
    count = trainer._count

    def count_one(steps: int, loss: float) -> None:
        count(steps, loss)
        trainer.enough.set()  # as a pause does, and like the end of the task's time

    trainer._count = count_one  # type: ignore[method-assign]
    assert not trainer.train(free, 100.0).report.complete, "without a mask a part is welcome"
    trainer.enough.clear()
    with pytest.raises(OutOfTimeError, match="cut short"):
        trainer.train(given, 100.0)
    trainer._count = count  # type: ignore[method-assign]
    trainer.enough.clear()
    assert trainer.train(given, 100.0).report.complete


def test_short_words_leave_in_three_bytes_each_and_need_memory_for_both(
    state: StateDirectory, bundle: Bundle
) -> None:
    short = msgspec.structs.replace(SECURE, bits=12)
    given = msgspec.structs.replace(task(bundle, short), parts={"update": "masked24"})
    done, long = do(state, bundle, given), do(state, bundle, task(bundle, SECURE))
    (part,) = done.report.parts
    elements = len(long.contents[0]) // 4
    assert (part.encoding, part.size) == ("masked24", 3 * elements)
    assert len(done.contents[0]) == 3 * elements
    assert room_for(given, elements - 1) == (3 * elements, 0)
    assert masked_memory(given, elements - 1) == 7 * elements
    assert masked_memory(task(bundle, SECURE), elements - 1) == 4 * elements
    state.outbox.save(*done)
    sent = b"".join(bytes(chunk)[16:] for chunk in state.outbox.chunks(1, 0, 8))
    assert sent == bytes(done.contents[0])


def test_the_rounding_does_not_follow_from_what_the_coordinator_knows(
    state: StateDirectory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the task, with its seed. Whoever knew how an update was rounded would know more of
    it than its words say."""
    seen: list[list[int]] = []
    mask_words = masking.mask_words

    def noted(words: Any, *given: Any) -> Any:
        seen.append(words.tolist())
        return mask_words(words, *given)

    monkeypatch.setattr(masking, "mask_words", noted)
    for _ in range(12):
        do(state, bundle, task(bundle, SECURE))
    assert len({tuple(words) for words in seen}) > 1
    assert np.ptp(np.array(seen), axis=0).max() == 1, "one update, rounded up or down"


def test_an_update_that_waits_is_the_clipped_one_and_is_masked_from_the_disk(
    tmp_path: Path, bundle: Bundle
) -> None:
    state = StateDirectory(tmp_path)
    free = do(state, bundle, task(bundle, None))
    done = do(state, bundle, task(bundle, LATE))
    assert bytes(done.contents[0]) == bytes(free.contents[0])
    assert done.later is not None
    assert (done.later.share, done.later.task) == (12 / 24, task(bundle, LATE))
    assert done.report == done.later.report
    assert (done.report.examples, done.report.loss, done.report.sealed) == (1, 0.0, None)
    state.outbox.save(*done)
    state.close()
    again = StateDirectory(tmp_path)
    report = mask_pending(again, "t1", 0.5)
    assert again.outbox.load() == report
    assert report.sealed is not None
    told = msgspec.structs.replace(report, parts=done.report.parts, sealed=None, signature=None)
    assert told == done.report
    again.close()


def test_the_owner_s_log_has_what_the_coordinator_is_not_told(
    state: StateDirectory, bundle: Bundle
) -> None:
    given = msgspec.structs.replace(task(bundle, SECURE), evaluate=True)
    bring(state, bundle, given)
    trainer = Trainer(state, DATA, "onnx", 1)
    sent = trainer.train(given, 100.0).report
    own = trainer.own_report
    assert own is not None
    assert (sent.examples, sent.steps, sent.loss, sent.clipped) == (1, 1, 0.0, None)
    assert own.examples == 12
    assert own.loss > 0
    assert own.clipped is True
    assert own.evaluation is None, "what is not sent need not be measured"


@pytest.mark.parametrize("secure", [SECURE, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("die", [1, 4])
def test_a_training_that_was_interrupted_goes_on(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, secure: SecureTask, die: int
) -> None:
    monkeypatch.setattr(progress_module, "WRITE_SHARE", np.inf)
    monkeypatch.setattr(progress_module, "FLASH_RATE", np.inf)
    free = StateDirectory(tmp_path / "free")
    expected = do(free, bundle, task(bundle, None))
    free.close()
    state = StateDirectory(tmp_path / "state")
    with pytest.raises(Died):
        do(state, bundle, task(bundle, secure), die)
    state.close()
    state = StateDirectory(tmp_path / "state")
    begun = state.checkpoint.load(task_fingerprint(task(bundle, secure)))
    assert begun is not None, "it goes on from there"
    done = do(state, bundle, task(bundle, secure))
    assert done.kept_state.tobytes() == expected.kept_state.tobytes()
    if secure is LATE:
        assert bytes(done.contents[0]) == bytes(expected.contents[0])
    state.close()


def test_how_an_update_is_masked_does_not_begin_the_training_again(bundle: Bundle) -> None:
    names = {task_fingerprint(task(bundle, secure)) for secure in (None, SECURE, LATE)}
    assert len(names) == 1
    assert task_fingerprint(task(bundle, SECURE, 2)) not in names


@pytest.mark.parametrize(("secure", "late"), [(SECURE, 0), (LATE, 4)], ids=["at once", "late"])
def test_room_is_held_for_all_that_is_written(
    state: StateDirectory,
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    secure: SecureTask,
    late: int,
) -> None:
    """4 bytes for each element and 4 for the weight; as many for the unmasked one while it
    waits."""
    asked: list[tuple[int, ...]] = []
    reserve = Outbox.reserve

    def noted(self: Outbox, *sizes: int) -> None:
        asked.append(sizes)
        reserve(self, *sizes)

    monkeypatch.setattr(Outbox, "reserve", noted)
    done = do(state, bundle, task(bundle, secure))
    elements = bundle.manifest.elements_of("update")
    ((update, _, _, _, unmasked),) = asked
    assert (update, unmasked) == (4 * elements + 4, late * elements)
    sizes = {path.name: path.stat().st_size for path in (state.path / "pending").iterdir()}
    assert sizes["update.reserved"] == 4 * elements + 4
    assert sizes.get("unmasked.bin.reserved", 0) == late * elements
    state.outbox.save(*done)
    if late:
        mask_pending(state, "t1", 1.0)
    assert not list((state.path / "pending").glob("*.reserved"))
    assert state.outbox.load() is not None


def test_the_masked_update_counts_against_the_memory_that_may_be_used(
    state: StateDirectory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceiling, beside = MemoryCeiling(2**20), list[int]()
    check = ceiling.check_task

    def noted(bundle: str, batch_size: int, elements: int, bytes_: int) -> None:
        beside.append(bytes_)
        check(bundle, batch_size, elements, bytes_)

    monkeypatch.setattr(ceiling, "check_task", noted)
    for secure in (None, SECURE):
        given = task(bundle, secure)
        bring(state, bundle, given)
        trainer = Trainer(state, DATA, "onnx", 1, ceiling=ceiling)
        trainer.check_fits(given)
        trainer.train(given, 100.0)
    masked = 4 * bundle.manifest.elements_of("update") + 4
    assert [after - before for before, after in zip(beside[:2], beside[2:], strict=True)] == [
        4 * bundle.manifest.size + 4,
        masked,
    ]


def test_a_key_of_small_order_is_found_before_anything_is_fetched(bundle: Bundle) -> None:
    check_helper(task(bundle, SECURE))
    check_helper(task(bundle, None))
    small = msgspec.structs.replace(SECURE, helper="00" * 32)
    with pytest.raises(UnsupportedError, match="is of small order"):
        check_helper(task(bundle, small))


def test_words_that_cannot_hold_the_update_give_the_task_back(
    state: StateDirectory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise ValueError("more bits are needed")

    monkeypatch.setattr(masking, "counted_words", refuse)
    with pytest.raises(UnsupportedError, match="cannot be masked: more bits are needed"):
        do(state, bundle, task(bundle, SECURE))


def test_with_noise_the_words_are_others(
    state: StateDirectory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    counted, noised = masking.counted_words, masking.counted_words_with_noise

    def plainly(*given: Any) -> Any:
        seen.append("plain")
        return counted(*given)

    def noisily(*given: Any) -> Any:
        seen.append(given[-1])
        return noised(*given)

    monkeypatch.setattr(masking, "counted_words", plainly)
    monkeypatch.setattr(masking, "counted_words_with_noise", noisily)
    do(state, bundle, task(bundle, SECURE))
    noise = msgspec.structs.replace(SECURE, most_weight=None, noise=64.0)
    done = do(state, bundle, task(bundle, noise))
    assert seen == ["plain", 64.0]
    assert done.report.sealed is not None


def test_what_waits_is_no_longer_than_the_norm(state: StateDirectory, bundle: Bundle) -> None:
    done = do(state, bundle, task(bundle, LATE))
    update = FLOAT32.decode(done.contents[0]).astype(np.float64)
    assert np.linalg.norm(update) <= CLIP
    words = masking.counted_words(update.astype(np.float32), 1.0, 1.0, CLIP, 20)
    assert excess_of(words[:-1], 20) <= 0
