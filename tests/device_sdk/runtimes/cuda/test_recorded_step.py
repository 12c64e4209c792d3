"""Recorded steps on a stand-in: sessions of the CPU for one number of examples, with memory of
their own.

The stand-in records nothing, so each step runs; where this machine has a GPU, test_providers.py
records. All results must be those of the CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from changed_bundle import changed
from fleetlearn_device.runtimes import runtime_onnx
from fleetlearn_device.runtimes.cuda import recorded_step
from fleetlearn_device.runtimes.cuda.recorded_step import RecordedStep, check_read_in
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime
from fleetlearn_device.runtimes.sessions import StepError
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import TRAIN
from line_bundle import line_data, write_line_bundle

Cases = Callable[[str], Any]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu", recording={}))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sizes that sessions are made for. None: any size."""
    made, make = [], runtime_onnx.make_session

    def counted(*arguments: Any) -> Any:
        made.append(arguments[6] if len(arguments) > 6 else None)
        return make(*arguments)

    monkeypatch.setattr(runtime_onnx, "make_session", counted)
    return made


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of examples of the steps that were replayed."""
    counts, replay = [], RecordedStep.run

    def counted(self: RecordedStep, read: Any, arrays: Any) -> None:
        counts.append(len(arrays[0]))
        replay(self, read, arrays)

    monkeypatch.setattr(RecordedStep, "run", counted)
    return counts


def pair(path: Path) -> tuple[OnnxRuntime, OnnxRuntime]:
    expected, found = (open_runtime(path, provider=provider) for provider in ("cpu", "cuda"))
    assert isinstance(expected, OnnxRuntime)
    assert isinstance(found, OnnxRuntime)
    return expected, found


def test_a_size_that_comes_twice_in_a_row_is_recorded(
    cases: Cases, sessions: list[Any], replayed: list[int]
) -> None:
    case = cases("cnn")
    expected, found = pair(case.path)
    sizes = 7, 20, 20, 7, 7, 20, 7, 20
    for step, size in enumerate(sizes):
        batch = case.x[step * 20 :][:size], case.y[step * 20 :][:size]
        lr = 0.1 if step < 3 else 0.05
        assert found.step(batch, lr=lr) == expected.step(batch, lr=lr)
        assert found.metrics == expected.metrics
    np.testing.assert_array_equal(found.local, expected.local)
    assert found.evaluate((case.x[:9], case.y[:9])) == expected.evaluate((case.x[:9], case.y[:9]))
    assert [row for row in sessions if row is not None] == [{"n": 20}]
    assert replayed == [20, 20, 20]


def test_each_direction_is_recorded_by_itself(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the provider's options for it, which only the session that records has."""
    provider = Provider(
        CPU, {"arena_extend_strategy": "kNextPowerOfTwo"}, "cpu", recording={"recording": "1"}
    )
    monkeypatch.setitem(PROVIDERS, "cuda", provider)
    case = cases("softmax")
    options, recordings = [], []
    make, run = onnxruntime.InferenceSession, recorded_step.run

    def session(source: Any, sessions_options: Any, **chosen: Any) -> Any:
        options.append("recording" in chosen["provider_options"][0])
        return make(source, sessions_options, providers=[CPU])

    def noted(*arguments: Any, options: Any, **others: Any) -> None:
        recordings.append(options.get_run_config_entry("gpu_graph_id"))
        run(*arguments, options=options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(recorded_step, "run", noted)
    runtime = open_runtime(case.path, provider="cuda")
    for _ in range(5):
        runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    assert options == [False, True]
    assert recordings == ["1", "2", "1", "2"]  # the first step was launched


def test_a_recorded_step_reads_all_that_changes(tmp_path: Path) -> None:
    """Scalars, the seed, references and the state, and a model that is loaded between."""
    bundle = write_line_bundle(
        tmp_path / "line.bundle",
        personal=True,
        state=True,
        references=("anchor", "correction", "previous"),
        random=True,
    )
    x, y = line_data(20)
    model = np.arange(4, dtype=np.float32)
    results = []
    for runtime in pair(bundle.path):
        losses = [
            runtime.step((x, y), seed=step // 2, lr=0.1 / (1 + step // 3), mu=0.2 * step)
            for step in range(5)
        ]
        runtime.load(model, anchor=model + 1, correction=model / 8, previous=model - 1)
        losses += [runtime.step((x, y), seed=step, lr=0.1, mu=0.1) for step in range(3)]
        results.append([losses, runtime.local.tolist(), runtime.state.tolist()])
    assert results[0] == results[1]


def refusing(make: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        if len(arguments) > 6:
            raise error
        return make(*arguments)

    return refuse


@pytest.mark.parametrize(
    "error",
    [
        BundleError(Code.BAD_MESSAGE, "not all nodes are the GPU's"),
        MemoryError("none left"),
        RuntimeError("CUDA failure"),
    ],
)
def test_what_cannot_be_recorded_is_launched(
    cases: Cases, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_onnx, "make_session", refusing(runtime_onnx.make_session, error))
    case = cases("cnn")
    expected, found = pair(case.path)
    for _ in range(4):
        assert found.step((case.x[:20], case.y[:20]), lr=0.1) == expected.step(
            (case.x[:20], case.y[:20]), lr=0.1
        )
    assert found._recorded is None
    np.testing.assert_array_equal(found.parameters, expected.parameters)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_recording_that_fails_later_is_launched_from_then_on(
    cases: Cases, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other direction is recorded one step later than the first, and then may have no
    memory."""
    case, left, replay = cases("cnn"), [good], RecordedStep.run

    def failing(self: RecordedStep, read: Any, arrays: Any) -> None:
        replay(self, read, arrays)
        left[0] -= 1
        if left[0] < 0:
            raise StepError("capture failed")

    monkeypatch.setattr(RecordedStep, "run", failing)
    expected, found = pair(case.path)
    for step in range(6):
        batch = case.x[20 * step :][:20], case.y[20 * step :][:20]
        assert found.step(batch, lr=0.1) == expected.step(batch, lr=0.1)
    assert left == [-1]
    np.testing.assert_array_equal(found.parameters, expected.parameters)


def test_a_batch_that_fails_raises_its_error_and_changes_nothing(cases: Cases) -> None:
    """As the first, when it would be recorded, and when it would be replayed."""
    case = cases("softmax")
    for before in (0, 1, 3):
        expected, found = pair(case.path)
        batch = case.x[:20], case.y[:20]
        for _ in range(before):
            assert found.step(batch, lr=0.1) == expected.step(batch, lr=0.1)
        with pytest.raises(
            StepError, match=r"could not run graphs/train.onnx on a batch of shapes \[\(20, 64\), "
        ):
            found.step((case.x[:20], np.full(20, 10)), lr=0.1)
        assert found.step(batch, lr=0.1) == expected.step(batch, lr=0.1)
        np.testing.assert_array_equal(found.parameters, expected.parameters)


def test_inputs_that_are_read_on_the_host_are_not_recorded(cases: Cases) -> None:
    session = onnxruntime.InferenceSession(cases("softmax").path / TRAIN, providers=[CPU])
    check_read_in(session, "cpu", ["hyper.lr", "batch.x"])
    with pytest.raises(
        ValueError, match=r"inputs \['hyper.lr', 'batch.x'\] are not read in cuda's memory"
    ):
        check_read_in(session, "cuda", ["hyper.lr", "batch.x"])


@pytest.mark.parametrize(
    ("version", "records"), [("1.17.3", False), ("1.18.0", True), ("1.31.1", True), ("2.0", True)]
)
def test_versions_that_keep_one_recording_do_not_record(
    version: str, records: bool, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    case = cases("softmax")
    runtime = open_runtime(case.path, provider="cuda")
    assert isinstance(runtime, OnnxRuntime)
    for _ in range(2):
        runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    assert (runtime._recorded is not None) == records


def test_a_number_of_examples_without_a_name(cases: Cases, tmp_path: Path) -> None:
    """The session is for any number then, and the step for one."""
    case = cases("softmax")
    model = onnx.load(case.path / TRAIN)
    for value in model.graph.input:
        if value.name.startswith("batch."):
            value.type.tensor_type.shape.dim[0].ClearField("dim_param")
    path = changed(case, tmp_path / "unnamed.bundle", model.SerializeToString())
    expected, found = pair(path)
    for size in (20, 20, 7, 20):
        batch = case.x[:size], case.y[:size]
        assert found.step(batch, lr=0.1) == expected.step(batch, lr=0.1)
    assert found._recorded is not None
