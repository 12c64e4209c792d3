"""Own local algorithms on a device: the page's own, the kit's planted mistakes, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.session.abilities import unsupported
from fleetlearn_device.testing import check_algorithm
from fleetlearn_device.training.algorithms import UnsupportedError, known_algorithms
from fleetlearn_device.training.own_algorithm import allowed_algorithm
from fleetlearn_device.training.work import TaskOutcome, TaskWork
from fleetlearn_protocol.messages import Task, VectorReference
from line_bundle import line_data, write_line_bundle

PAGE = Path(__file__).parents[3] / "docs" / "start" / "your-own-algorithm.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
TASK = Task(
    task="t-1",
    round=1,
    bundle="a" * 64,
    vectors=(VectorReference("model", "b" * 64, 8, "float32"),),
    parts={"update": "float32"},
    hyper={"lr": 0.1},
    epochs=1,
    batch_size=10,
    seed=1,
    deadline=10.0,
    algorithm="own",
    function="local_rules:noisy",
)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_line_bundle(
        tmp_path_factory.mktemp("line") / "line.bundle", references=["anchor"]
    ).path


def of_the_page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "local_rules"}
    exec(compile(BLOCKS["local_rules"], "local_rules", "exec"), names)
    return names


@pytest.mark.parametrize("name", ["noisy", "short"])
def test_the_pages_own_pass(line: Path, name: str) -> None:
    check_algorithm(of_the_page()[name], line, line_data(30), lr=0.05)


def test_parameters_reach_the_function(line: Path) -> None:
    seen = []

    def told(work: TaskWork, *, scale: float) -> TaskOutcome:
        seen.append(scale)
        return plain(work)

    check_algorithm(told, line, line_data(30), parameters={"scale": 0.25}, lr=0.05)
    assert {*seen} == {0.25}
    with pytest.raises(AssertionError, match="told has no parameter other; it takes scale"):
        check_algorithm(told, line, line_data(30), parameters={"other": 1.0}, lr=0.05)
    with pytest.raises(AssertionError, match="needs the parameters scale too"):
        check_algorithm(told, line, line_data(30), lr=0.05)


def plain(work: TaskWork) -> TaskOutcome:
    work.load()
    result = work.train()
    return TaskOutcome(result, {"update": result.update})


def other_update(change: Callable[[Any], Any]) -> Callable[[TaskWork], TaskOutcome]:
    def algorithm(work: TaskWork) -> TaskOutcome:
        outcome = plain(work)
        return outcome._replace(parts={"update": change(outcome.parts["update"])})

    return algorithm


def in_place(work: TaskWork) -> TaskOutcome:
    outcome = plain(work)
    work.inputs.model.setflags(write=True)
    work.inputs.model[0] += 1
    return outcome


def unloaded(work: TaskWork) -> TaskOutcome:
    result = work.train()
    return TaskOutcome(result, {"update": result.update})


def deaf(work: TaskWork) -> TaskOutcome:
    work.load()
    result = work.train(should_stop=lambda: False)
    return TaskOutcome(result, {"update": result.update})


numbers = count()
MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "not finite": (other_update(lambda update: update * np.float32(np.nan)), "not finite"),
    "another shape": (other_update(lambda update: update[1:]), "shape"),
    "another type": (other_update(lambda update: update.astype(np.float64)), "update of float64"),
    "random": (other_update(lambda update: update + np.float32(next(numbers))), "another update"),
    "no load": (unloaded, "work.load\\(\\) comes before work.train"),
    "nothing": (other_update(np.zeros_like), "the update is 0"),
    "no outcome": (lambda work: plain(work).parts["update"], "returned a ndarray"),
    "no arguments": (lambda: None, "takes the arguments none; expected work first"),
    "in place": (in_place, "changed work.inputs.model in place"),
    "more parts": (
        lambda work: plain(work)._replace(parts={**plain(work).parts, "more": np.zeros(3)}),
        "returned the parts update, more",
    ),
    "keeps something": (
        lambda work: plain(work)._replace(personal=work.inputs.model),
        "keeps personal",
    ),
    "fails": (lambda work: 1 // 0, "failed: ZeroDivisionError"),
    "does not stop": (deaf, "went on after it was told to stop"),
    "counts wrongly": (
        lambda work: plain(work)._replace(result=plain(work).result._replace(examples=7)),
        "result.examples is 7",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(line: Path, mistake: str) -> None:
    function, text = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=text):
        check_algorithm(function, line, line_data(30), lr=0.05)


def test_only_what_the_owner_allows_is_called() -> None:
    with pytest.raises(
        UnsupportedError, match="local_rules:noisy, and the device's owner allows a"
    ):
        allowed_algorithm(TASK, {"a": plain})
    assert "own" in known_algorithms("onnx", functions=True)
    assert "own" not in known_algorithms("onnx")
    assert "own" not in known_algorithms("ort-training", functions=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"clip": 1.0}, "with a mask, a bound, noise, or rows"),
        (
            {"parts": {"rows": "uint32", "update": "float32"}},
            "with a mask, a bound, noise, or rows",
        ),
        ({"function": None}, "asks for the algorithm own and names no function"),
        ({"algorithm": "plain"}, "algorithm plain and names the function local_rules:noisy"),
    ],
)
def test_what_no_own_algorithm_does(changes: dict[str, Any], text: str) -> None:
    assert unsupported(TASK, ("own",), ()) is None
    task = msgspec.structs.replace(TASK, **changes)
    assert text in (unsupported(task, ("own",), ()) or "")
