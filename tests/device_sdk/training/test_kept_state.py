"""What stays on the device from task to task, against the layout written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.kept_state import collect_kept_state, kept_state_size, load_model
from fleetlearn_protocol import Bundle
from line_bundle import INITIAL, INITIAL_STATE, line_data, write_line_bundle

MODEL = np.array([10, 11, 12, 13], np.float32)
W, T, H = INITIAL["w"], INITIAL_STATE["t"], INITIAL["h"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("line") / "line.bundle"
    return write_line_bundle(folder, personal=True, state=True, references=("anchor", "previous"))


def test_its_parts_one_after_the_other(full: Bundle) -> None:
    assert kept_state_size(full.manifest) == 1 + 1 + 4
    runtime = open_runtime(full)
    runtime.step(line_data(20), lr=0.1)
    kept = collect_kept_state(runtime)
    assert kept.tolist() == [runtime.local[4], T + 1, *runtime.parameters]
    copied = kept.copy()
    runtime.step(line_data(20), lr=0.1)
    runtime.step(line_data(20), lr=0.1)
    np.testing.assert_array_equal(kept, copied)


def test_a_first_task_begins_with_the_bundle_s_own(full: Bundle) -> None:
    runtime = open_runtime(full)
    runtime.step(line_data(20), lr=0.1)  # of a task that came to nothing
    load_model(runtime, full, MODEL, None)
    assert runtime.local.tolist() == [*MODEL, H]
    assert runtime.state.tolist() == [*INITIAL_STATE["m.w"], T]
    np.testing.assert_array_equal(runtime.anchor, MODEL)
    again = open_runtime(full, model=MODEL)
    assert runtime.step(line_data(20), lr=0.1, mu=0.5) == again.step(line_data(20), lr=0.1, mu=0.5)
    np.testing.assert_array_equal(runtime.local, again.local)


def test_a_later_task_begins_with_what_was_kept(full: Bundle) -> None:
    kept = np.array([0.75, 42, 1, 2, 3, 4], np.float32)
    runtime = open_runtime(full)
    runtime.step(line_data(20), lr=0.1)
    load_model(runtime, full, MODEL, kept)
    assert runtime.local.tolist() == [*MODEL, 0.75]
    assert runtime.state.tolist() == [*INITIAL_STATE["m.w"], 42]
    # The previous model reached the step: the same as loading it by hand.
    by_hand = open_runtime(full)
    by_hand.load(
        np.array([*MODEL, 0.75], np.float32), previous=kept[2:], state=runtime.state.copy()
    )
    for each in (runtime, by_hand):
        each.step(line_data(20), lr=0.1)
    np.testing.assert_array_equal(runtime.local, by_hand.local)
    other = open_runtime(full)
    other.load(
        np.array([*MODEL, 0.75], np.float32),
        state=np.array([*INITIAL_STATE["m.w"], 42], np.float32),
    )
    other.step(line_data(20), lr=0.1)
    assert np.abs(other.local - by_hand.local).max() > 0.1


@pytest.mark.parametrize(
    ("personal", "state", "previous", "size"),
    [
        (False, False, False, 0),
        (True, False, False, 1),
        (False, True, False, 1),
        (False, False, True, 5),
    ],
)
def test_each_part_alone(
    tmp_path: Path, personal: bool, state: bool, previous: bool, size: int
) -> None:
    references = ("anchor", "previous") if previous else ()
    bundle = write_line_bundle(
        tmp_path / "line.bundle", personal=personal, state=state, references=references
    )
    runtime = open_runtime(bundle)
    model = np.arange(bundle.manifest.size, dtype=np.float32)
    load_model(runtime, bundle, model, None)
    np.testing.assert_array_equal(runtime.parameters, model)
    runtime.step(line_data(20), lr=0.1)
    kept = collect_kept_state(runtime)
    assert kept.shape == (kept_state_size(bundle.manifest),) == (size,)
    whole, steps = runtime.local.copy(), runtime.state.copy()
    load_model(runtime, bundle, model, kept)
    np.testing.assert_array_equal(runtime.local[len(model) :], whole[len(model) :])
    np.testing.assert_array_equal(runtime.state[3:], steps[3:])


def test_another_bundle_s_is_refused(full: Bundle) -> None:
    with pytest.raises(
        ValueError,
        match=r"the kept state is float32 of shape \(5,\); expected float32 of shape \(6,\)",
    ):
        load_model(open_runtime(full), full, MODEL, np.zeros(5, np.float32))


@pytest.mark.parametrize("size", [3, 5])
def test_a_model_of_another_size_is_refused(full: Bundle, size: int) -> None:
    """It is not taken for a model without, or with, the personal part."""
    runtime = open_runtime(full)
    with pytest.raises(
        ValueError, match=rf"the round's model is float32 of shape \({size},\); expected .* \(4,\)"
    ):
        load_model(runtime, full, np.zeros(size, np.float32), None)
    assert runtime.local[4] == H
