"""Recorded steps on a stand-in: sessions of the CPU for one number of examples, with memory of their own.

The stand-in records nothing, so each step runs; where this machine has a GPU, test_providers.py records. All results
must be those of the CPU, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.runtimes import runtime_onnx
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider
from fleetlearn_device.runtimes.runtime import open_runtime
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime
from fleetlearn_device.runtimes.sessions import StepError
from fleetlearn_protocol.errors import BundleError, Code
from line_bundle import line_data, write_line_bundle

Cases = Callable[[str], Any]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu", recording={}))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What sessions are made for: a number of examples, or None."""
    made, make = [], runtime_onnx.make_session

    def counted(*arguments: Any) -> Any:
        made.append(arguments[6] if len(arguments) > 6 else None)
        return make(*arguments)

    monkeypatch.setattr(runtime_onnx, "make_session", counted)
    return made


def pair(path: Path) -> tuple[OnnxRuntime, OnnxRuntime]:
    expected, found = (open_runtime(path, provider=provider) for provider in ("cpu", "cuda"))
    assert isinstance(expected, OnnxRuntime)
    assert isinstance(found, OnnxRuntime)
    return expected, found


def test_batches_of_the_first_size_are_recorded_and_others_are_not(cases: Cases, sessions: list[Any]) -> None:
    case = cases("cnn")
    expected, found = pair(case.path)
    for step, size in enumerate((20, 20, 7, 20, 7, 20)):
        batch = case.x[step * 20 :][:size], case.y[step * 20 :][:size]
        lr = 0.1 if step < 3 else 0.05
        assert found.step(batch, lr=lr) == expected.step(batch, lr=lr)
        assert found.metrics == expected.metrics
    np.testing.assert_array_equal(found.local, expected.local)
    assert found.evaluate((case.x[:9], case.y[:9])) == expected.evaluate((case.x[:9], case.y[:9]))
    assert [row for row in sessions if row is not None] == [("n", 20)]
    assert found._recorded is not None
    assert found._recorded.examples == 20
    assert expected._recorded is None


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
        losses = [runtime.step((x, y), seed=step // 2, lr=0.1 / (1 + step // 3), mu=0.2 * step) for step in range(5)]
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
    [BundleError(Code.BAD_MESSAGE, "not all nodes are the GPU's"), MemoryError("no memory for a second session")],
)
def test_what_cannot_be_recorded_runs_as_before(
    cases: Cases, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_onnx, "make_session", refusing(runtime_onnx.make_session, error))
    case = cases("cnn")
    expected, found = pair(case.path)
    for _ in range(3):
        assert found.step((case.x[:20], case.y[:20]), lr=0.1) == expected.step((case.x[:20], case.y[:20]), lr=0.1)
    assert found._recorded is None
    np.testing.assert_array_equal(found.parameters, expected.parameters)


def test_a_first_batch_that_fails_raises_its_error_and_changes_nothing(cases: Cases) -> None:
    case = cases("softmax")
    expected, found = pair(case.path)
    batch = case.x[:20], case.y[:20]
    with pytest.raises(
        StepError, match=r"could not run graphs/train.onnx on a batch of shapes \[\(20, 64\), \(20,\)\]"
    ):
        found.step((case.x[:20], np.full(20, 10)), lr=0.1)
    assert found.step(batch, lr=0.1) == expected.step(batch, lr=0.1)
    np.testing.assert_array_equal(found.parameters, expected.parameters)


def test_a_later_batch_that_fails_changes_nothing(cases: Cases) -> None:
    case = cases("softmax")
    expected, found = pair(case.path)
    batch = case.x[:20], case.y[:20]
    found.step(batch, lr=0.1)
    expected.step(batch, lr=0.1)
    assert found._recorded is not None
    with pytest.raises(StepError, match=r"on a batch of shapes \[\(20, 64\), \(20,\)\]"):
        found.step((case.x[:20], np.full(20, 10)), lr=0.1)
    assert found.step(batch, lr=0.1) == expected.step(batch, lr=0.1)
    np.testing.assert_array_equal(found.parameters, expected.parameters)
