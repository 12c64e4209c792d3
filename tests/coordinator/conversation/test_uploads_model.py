"""Uploads in any order (tests/support/uploads_in_any_order.py): what is accepted is what the device
sent, no spool file is lost or used twice, and a death costs a checkpoint at most."""

from __future__ import annotations

from typing import Any

import pytest
from fleetlearn_coordinator.conversation import uploads as uploads_module
from fleetlearn_coordinator.conversation.begun import BegunUpload, BegunUploads
from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.conversation.pending import Pending, ask
from fleetlearn_coordinator.conversation.uploads import Upload, Uploads
from fleetlearn_protocol.messages import Part
from hypothesis import HealthCheck, seed, settings
from hypothesis import Phase as Generate
from hypothesis.stateful import run_state_machine_as_test
from uploads_in_any_order import CHECKPOINT, AnyOrder

USUAL = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[*HealthCheck],
)
LONG = settings(USUAL, max_examples=300, stateful_step_count=80)
SEARCH = settings(
    USUAL,
    max_examples=500,
    stateful_step_count=60,
    derandomize=False,
    phases=[Generate.generate],
    print_blob=False,
)
"""With a seed. The most that a planted mistake took was 172 examples, of five seeds for each."""


@pytest.fixture(autouse=True)
def small_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "CHECKPOINT_BYTES", CHECKPOINT)


def test_any_order() -> None:
    run_state_machine_as_test(AnyOrder, settings=USUAL)


@pytest.mark.slow
def test_any_order_for_long() -> None:
    run_state_machine_as_test(AnyOrder, settings=LONG)


# Mistakes that each must be found


def _no_checkpoint(upload: Upload, now: float) -> bool:
    return False


def _forgets_checksums(upload: Upload, begun: BegunUpload) -> None:
    upload.went_on, upload.spool_file, upload.offset = True, begun.spool_file, begun.offset


def _goes_on_at_the_beginning(upload: Upload, begun: BegunUpload) -> None:
    upload.spool_file, upload.crc32 = begun.spool_file, {**begun.crc32}


def _keeps_its_file(uploads: Uploads, upload: Upload, now: float) -> BegunUpload | None:
    begun = upload.write_checkpoint(now) if upload.offset else None
    uploads.drop(upload)
    return begun


def _hands_out_other_bytes(
    kept: BegunUploads, task: str, parts: tuple[Part, ...]
) -> BegunUpload | None:
    return kept._kept.pop(task, None)


def _drops_without_freeing(kept: BegunUploads, task: str) -> None:
    kept._kept.pop(task, None)


def _lets_go(conversation: Conversation, answer: Pending[Any]) -> Any:
    return ask(answer)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "no checkpoint is written": (Upload, "needs_checkpoint", _no_checkpoint),
    "checksums are forgotten": (Upload, "go_on", _forgets_checksums),
    "the offset is forgotten": (Upload, "go_on", _goes_on_at_the_beginning),
    "a kept file is freed": (Uploads, "part", _keeps_its_file),
    "other bytes are handed out": (BegunUploads, "take", _hands_out_other_bytes),
    "a dropped file is not freed": (BegunUploads, "_drop", _drops_without_freeing),
    "what must end is dropped": (Conversation, "_to_its_end", _lets_go),
}


def search(mistake: str, first_number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    searching: type[AnyOrder] = seed(first_number)(type("Searching", (AnyOrder,), {}))
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(searching, settings=SEARCH)


def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast one: found in 4 to 6 examples while the search is as strong as it was."""
    search("a dropped file is not freed", 0, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first_number", [1, 2, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(
    mistake: str, first_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(mistake, first_number, monkeypatch)
