from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import borrow
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime
from fleetlearn_device.runtimes.sessions import StepError
from fleetlearn_protocol import Bundle, BundleError, open_bundle, write_manifest
from fleetlearn_protocol.manifest import EVAL, Reference
from fleetlearn_protocol.vector import views
from line_bundle import INITIAL, INITIAL_STATE, flat, line_data, line_step, write_line_bundle

Cases = Callable[[str], Any]


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def opened(case: Any) -> OnnxRuntime:
    runtime = open_runtime(case.path)
    assert isinstance(runtime, OnnxRuntime)
    return runtime


def test_an_ort_value_borrows_the_arrays_memory() -> None:
    vector = np.arange(6, dtype=np.float32)
    value = borrow(vector[2:].reshape(2, 2))
    assert value.data_ptr() == address(vector) + 8
    vector[2] = 9
    assert value.numpy()[0, 0] == 9


def test_steps_write_into_the_flat_buffers_themselves(cases: Cases) -> None:
    case = cases("cnn")
    runtime = opened(case)
    buffers = {address(runtime.parameters)}
    for step in range(4):
        binding, target = runtime._binding, runtime._next.vector
        expected = {
            f"next.param.{name}": address(a)
            for name, a in views(target, runtime.manifest.parameters).items()
        }
        runtime.step((case.x[:20], case.y[:20]), lr=0.1)
        written = dict(zip(_bound(runtime), binding.get_outputs(), strict=True))
        assert {name: written[name].data_ptr() for name in expected} == expected
        assert address(runtime.parameters) == address(target)
        buffers.add(address(runtime.parameters))
        assert len(buffers) == 2, step


def _bound(runtime: OnnxRuntime) -> list[str]:
    """The outputs in the order in which they were bound."""
    names = [row.name for row in runtime.manifest.parameters]
    return [
        "loss",
        *(f"metric.{name}" for name in runtime.manifest.metrics),
        *(f"next.param.{name}" for name in names),
    ]


def test_a_step_allocates_nothing_of_the_models_size_in_python(cases: Cases) -> None:
    case = cases("cnn")
    runtime = opened(case)
    batch = case.x[:20], case.y[:20]
    runtime.step(batch, lr=0.1)
    tracemalloc.start()
    try:
        for _ in range(5):
            runtime.step(batch, lr=0.1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < runtime.manifest.size * 4 / 4, (
        f"{peak} bytes at peak; the model has {runtime.manifest.size * 4}"
    )


def test_an_anchor_that_the_step_does_not_read_is_not_copied(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle", references=())
    runtime = open_runtime(bundle)
    model = runtime.parameters + np.float32(1)
    runtime.load(model)
    assert np.shares_memory(runtime.anchor, model)
    # The runtime's own vectors change with its steps: such an anchor must be a copy.
    for _ in range(2):
        runtime.load(runtime.parameters)
        start = runtime.parameters.copy()
        for _ in range(2):
            runtime.step(line_data(4), lr=0.1)
        np.testing.assert_array_equal(runtime.anchor, start)
        assert not np.array_equal(runtime.parameters, start)


def test_what_training_read_before_is_still_there_after_one_step(cases: Cases) -> None:
    case = cases("softmax")
    runtime = opened(case)
    before = runtime.parameters
    kept = before.copy()
    runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    np.testing.assert_array_equal(before, kept)
    assert not np.array_equal(runtime.parameters, kept)


def test_a_step_that_fails_inside_onnx_runtime_changes_nothing(
    cases: Cases, capfd: pytest.CaptureFixture[str]
) -> None:
    case = cases("softmax")
    runtime = opened(case)
    batch = case.x[:20], case.y[:20]
    runtime.step(batch, lr=0.1)
    before, metrics = runtime.parameters.copy(), runtime.metrics
    with pytest.raises(
        StepError,
        match=r"could not run graphs/train.onnx on a batch of shapes \[\(20, 64\), \(20,\)\]: ",
    ):
        runtime.step((case.x[:20], np.full(20, 10)), lr=0.1)
    np.testing.assert_array_equal(runtime.parameters, before)
    assert runtime.metrics == metrics
    # And it trains on as if nothing had been.
    loss = runtime.step(batch, lr=0.1)
    again = opened(case)
    again.step(batch, lr=0.1)
    assert again.step(batch, lr=0.1) == loss
    np.testing.assert_array_equal(runtime.parameters, again.parameters)
    assert capfd.readouterr().err == ""


def test_arrays_that_the_caller_drops_are_kept_for_the_step(cases: Cases) -> None:
    case = cases("softmax")
    runtime, other = opened(case), opened(case)
    for start in range(0, 200, 20):
        x, y = case.x[start : start + 20], case.y[start : start + 20]
        assert runtime.step((x.astype(np.float64), y.astype(np.uint8)), lr=0.1) == other.step(
            (x, y), lr=0.1
        )


def test_the_eval_graph_is_loaded_when_it_is_first_needed(cases: Cases, tmp_path: Path) -> None:
    case = cases("softmax")
    path = tmp_path / "copy.bundle"
    shutil.copytree(case.path, path)
    runtime = open_runtime(open_bundle(path))
    (path / EVAL).unlink()
    runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    with pytest.raises(BundleError, match=r"cannot load graphs/eval.onnx"):
        runtime.evaluate((case.x[:20], case.y[:20]))


# What the step carries and reads beside the model: a bundle written out in ONNX, against its step
# in numpy

REFERENCES: tuple[Reference, ...] = ("anchor", "correction", "previous")
OTHERS = {
    name: {key: value + np.float32(shift) for key, value in INITIAL.items()}
    for name, shift in zip(REFERENCES, (0.5, -0.25, 0.75), strict=True)
}
"""For each reference another vector."""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("line") / "line.bundle"
    return write_line_bundle(folder, personal=True, state=True, references=REFERENCES, random=True)


def line_runtime(bundle: Bundle) -> OnnxRuntime:
    runtime = open_runtime(bundle)
    assert isinstance(runtime, OnnxRuntime)
    return runtime


def by_hand(
    batches: list[Any], seeds: list[int], references: dict[str, Any], state: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    now: dict[str, Any] = dict(INITIAL)
    losses = []
    for batch, seed in zip(batches, seeds, strict=True):
        now, state, loss = line_step(now, state, batch, 0.1, 0.3, seed, **references)
        losses.append(loss)
    return now, state, losses


@pytest.fixture
def line_batches() -> list[Any]:
    x, y = line_data(50)
    return [
        (x[start : start + size], y[start : start + size])
        for start, size in [(0, 20), (20, 1), (21, 29)]
    ]


def test_state_references_and_seeds_reach_the_step(full: Bundle, line_batches: list[Any]) -> None:
    manifest = full.manifest
    runtime = line_runtime(full)
    given = {name: flat(tensors, manifest.travelling) for name, tensors in OTHERS.items()}
    runtime.load(flat(INITIAL, manifest.travelling), **given)
    losses = [
        runtime.step(batch, seed=seed, lr=0.1, mu=0.3)
        for batch, seed in zip(line_batches, (3, 900, 5), strict=True)
    ]
    now, state, expected = by_hand(line_batches, [3, 900, 5], OTHERS, INITIAL_STATE)
    np.testing.assert_allclose(runtime.local, flat(now, manifest.parameters), atol=1e-5)
    np.testing.assert_allclose(runtime.state, flat(state, manifest.state), atol=1e-5)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    np.testing.assert_array_equal(runtime.parameters, runtime.local[:4])
    np.testing.assert_array_equal(runtime.anchor, given["anchor"])
    assert (manifest.size, runtime.parameters.shape, runtime.local.shape, runtime.state.shape) == (
        4,
        (4,),
        (5,),
        (4,),
    )


def test_evaluation_is_of_the_whole_model(full: Bundle) -> None:
    x, y = line_data(40)
    runtime = line_runtime(full)
    runtime.load(np.array([1, 2, -1, 0, 0.5], np.float32))
    found = runtime.evaluate((x, y))
    e = x @ np.array([1.0, 2.0, -1.0]) + 0.5 - y
    assert found.examples == 40
    assert found.loss_sum == pytest.approx((e**2).sum(), rel=1e-4)
    assert found.metric_sums == pytest.approx({"error": np.abs(e).sum()}, rel=1e-4)


def test_without_references_correction_is_zero_and_previous_is_the_anchor(
    full: Bundle, line_batches: list[Any]
) -> None:
    model = flat(OTHERS["anchor"], full.manifest.travelling)
    results = []
    for given in (
        {},
        {"anchor": model},
        {"anchor": model, "correction": np.zeros(4, np.float32), "previous": model},
    ):
        runtime = line_runtime(full)
        # What stood there before must not show through.
        runtime.load(model, anchor=model + 1, correction=model + 2, previous=model + 3)
        runtime.load(model, **given)
        runtime.step(line_batches[0], lr=0.1, mu=0.3)
        results.append(runtime.local.tobytes())
    assert results.count(results[0]) == 3


def test_what_travels_can_be_loaded_without_what_is_personal(
    full: Bundle, line_batches: list[Any]
) -> None:
    runtime = line_runtime(full)
    runtime.step(line_batches[0], lr=0.1)
    h = runtime.local[4]
    assert h != INITIAL["h"]
    runtime.load(np.arange(4, dtype=np.float32))
    assert runtime.local.tolist() == [0, 1, 2, 3, h]
    assert runtime.anchor.tolist() == [0, 1, 2, 3]
    runtime.load(np.arange(5, dtype=np.float32))
    assert runtime.local.tolist() == [0, 1, 2, 3, 4]
    assert runtime.anchor.tolist() == [0, 1, 2, 3]


def test_a_new_model_begins_with_the_initial_state_save_what_is_kept(
    full: Bundle, line_batches: list[Any]
) -> None:
    runtime = line_runtime(full)
    np.testing.assert_array_equal(runtime.state, flat(INITIAL_STATE, full.manifest.state))
    for batch in line_batches:
        runtime.step(batch, lr=0.1)
    assert runtime.state[3] == INITIAL_STATE["t"] + 3
    runtime.load(runtime.parameters)
    np.testing.assert_array_equal(runtime.state, [*INITIAL_STATE["m.w"], INITIAL_STATE["t"] + 3])
    runtime.load(runtime.parameters, state=np.array([1, 2, 3, 4], np.float32))
    assert runtime.state.tolist() == [1, 2, 3, 4]


def test_a_state_without_file_begins_with_zeros(
    full: Bundle, tmp_path: Path, line_batches: list[Any]
) -> None:
    path = tmp_path / "zeros.bundle"
    shutil.copytree(full.path, path)
    (path / "state.safetensors").unlink()
    files = {
        name: file for name, file in full.manifest.files.items() if name != "state.safetensors"
    }
    (path / "manifest.json").write_bytes(
        write_manifest(msgspec.structs.replace(full.manifest, files=files))
    )
    runtime = line_runtime(open_bundle(path))
    assert runtime.state.tolist() == [0, 0, 0, 0]
    runtime.step(line_batches[0], lr=0.1)
    assert runtime.state.all()
    runtime.load(runtime.parameters)
    assert runtime.state.tolist() == [0, 0, 0, 1]


def test_parameters_and_state_are_written_into_the_flat_buffers(
    full: Bundle, line_batches: list[Any]
) -> None:
    runtime = line_runtime(full)
    buffers = set()
    for batch in (line_batches * 2)[:4]:
        target = runtime._next.vector
        runtime.step(batch, lr=0.1)
        assert address(runtime.parameters) == address(runtime.local) == address(target)
        assert address(runtime.state) == address(target) + 5 * 4
        buffers.add(address(target))
    assert len(buffers) == 2


def test_the_same_seed_draws_the_same_and_another_another(
    full: Bundle, line_batches: list[Any]
) -> None:
    results = []
    for seed in (0, 17, 17):
        runtime = line_runtime(full)
        runtime.step(line_batches[0], seed=seed, lr=0.1)
        results.append(runtime.local.tobytes())
    assert results[0] != results[1] == results[2]


def test_ditto_is_the_proximal_step_around_another_anchor(
    tmp_path: Path, line_batches: list[Any]
) -> None:
    """Li, Hu, Beirami, Smith 2021, "Ditto: Fair and Robust Federated Learning Through
    Personalization", arXiv 2012.04221, Algorithm 1: v_k <- v_k - eta * (grad F_k(v_k) + lambda *
    (v_k - w^t)), beside the round's own steps."""
    runtime = line_runtime(write_line_bundle(tmp_path / "prox.bundle", references=("anchor",)))
    table = runtime.manifest.parameters
    shared, own = flat(INITIAL, table), flat(OTHERS["previous"], table)
    runtime.load(own, anchor=shared)
    for batch in line_batches:
        runtime.step(batch, lr=0.05, mu=0.7)
    v = {name: value.astype(np.float64) for name, value in views(own, table).items()}
    w = INITIAL["w"].astype(np.float64)
    for x, y in line_batches:
        e = x @ v["w"] + v["h"] - y
        v["w"] = v["w"] - 0.05 * (2 * (e[:, None] * x).mean(0) + 0.7 * (v["w"] - w))
        v["h"] = v["h"] - 0.05 * 2 * e.mean()
    np.testing.assert_allclose(runtime.parameters[:3], v["w"], atol=1e-6)
    np.testing.assert_allclose(runtime.parameters[4], v["h"], atol=1e-6)
    np.testing.assert_array_equal(runtime.anchor, shared)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vector": np.zeros(3, np.float32)}, r"expected float32 of shape \(4,\) or \(5,\)"),
        (
            {"anchor": np.zeros(5, np.float32)},
            r"the anchor is float32 of shape \(5,\); expected float32 of shape \(4,\)$",
        ),
        ({"correction": np.zeros(4)}, "the correction is float64"),
        ({"previous": np.zeros((4, 1), np.float32)}, r"the previous is float32 of shape \(4, 1\)"),
        (
            {"state": np.zeros(5, np.float32)},
            r"the state is float32 of shape \(5,\); expected float32 of shape \(4,\)",
        ),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(
    full: Bundle, given: dict[str, Any], words: str
) -> None:
    runtime = line_runtime(full)
    before = runtime.local.tobytes(), runtime.state.tobytes(), runtime.anchor.tobytes()
    with pytest.raises(ValueError, match=words):
        runtime.load(
            **({"vector": np.ones(5, np.float32), "state": np.ones(4, np.float32)} | given)
        )
    assert (runtime.local.tobytes(), runtime.state.tobytes(), runtime.anchor.tobytes()) == before


def test_a_reference_that_the_step_does_not_read_is_refused(
    tmp_path: Path, line_batches: list[Any]
) -> None:
    runtime = line_runtime(write_line_bundle(tmp_path / "plain.bundle"))
    vector = np.ones(5, np.float32)
    for name in ("correction", "previous"):
        with pytest.raises(
            ValueError, match=f"a vector '{name}' was given, which the bundle's step does not read"
        ):
            runtime.load(vector, **{name: vector})
    runtime.load(vector, anchor=vector * 2)  # what updates are made against, of whatever bundle
    np.testing.assert_array_equal(runtime.anchor, vector * 2)
    loss = runtime.step(line_batches[0], seed=5, lr=0.1)  # not read
    runtime.load(vector)
    assert runtime.step(line_batches[0], seed=6, lr=0.1) == loss


def test_a_bad_seed_is_refused(full: Bundle, line_batches: list[Any]) -> None:
    runtime = line_runtime(full)
    with pytest.raises(ValueError, match=r"seed is -1; expected an integer from 0 to 2\^53 - 1"):
        runtime.step(line_batches[0], seed=-1, lr=0.1)
    runtime.step(line_batches[0], seed=2**53 - 1, lr=0.1)


def test_a_round_s_model_leaves_the_personal_part_as_exported(full: Bundle) -> None:
    runtime = open_runtime(full, model=np.arange(4, dtype=np.float32))
    assert runtime.local.tolist() == [0, 1, 2, 3, INITIAL["h"]]
    whole = open_runtime(full, model=np.arange(5, dtype=np.float32))
    assert whole.local.tolist() == [0, 1, 2, 3, 4]


def test_the_graph_must_read_what_the_manifest_says(full: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "unread.bundle"
    shutil.copytree(full.path, path)
    (path / "manifest.json").write_bytes(
        write_manifest(msgspec.structs.replace(full.manifest, random=False))
    )
    with pytest.raises(BundleError, match=r"differ in these inputs: \['seed'\]"):
        open_runtime(path)
