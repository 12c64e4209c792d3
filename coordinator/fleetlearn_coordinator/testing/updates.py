"""Checks of own aggregators, server optimizers, staleness functions and weighing rules, for the
tests of the package that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.optimizers import Optimizer, State, own_optimizer
from fleetlearn_coordinator.aggregation.own_aggregators import Combine, own_aggregator
from fleetlearn_coordinator.aggregation.staleness import own_factor
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing.norms import Norms
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, WeighingRule, own_rule

SIZE = 40
"""Elements of the model."""
MOST_UPDATES = 9
Updates = NDArray[np.float32]
Numbers = Sequence[int]


def check_aggregator(made: Combine | Aggregator[Any]) -> None:
    """Check what an aggregator's function returns: a function of ``RoundUpdates``, or a whole
    ``Aggregator``. Raises AssertionError with what was asked and what came.

    The result is a finite number for each element, the same bits whatever the order in which
    updates come, and the same when it is asked again; no update is changed; a round of one update
    works, and one of very small, large or unequal updates. A whole ``Aggregator`` also has the same
    bits when its state is saved and loaded in the middle of a round, and when two partial sums are
    merged.
    """
    aggregator = own_aggregator("the aggregator", made, ())
    for case, (updates, weights) in update_cases().items():
        before, count = updates.copy(), len(updates)
        first = _result(aggregator, updates, weights, range(count), case)
        again = _result(aggregator, updates, weights, range(count), case)
        assert _bits(again) == _bits(first), (
            f"{case}: the same updates in the same order gave another result: it keeps a state, or "
            "draws random numbers"
        )
        for order in (range(count)[::-1], [*range(1, count), 0]):
            other = _result(aggregator, updates, weights, order, case)
            assert _bits(other) == _bits(first), (
                f"{case}: the updates in the order {[*order]} gave another result, by up to "
                f"{np.abs(other - first).max():.3g}. A crash and a restart change the order: add "
                "exactly, or let the function take RoundUpdates, which are in an order of their own"
            )
        assert (updates == before).all(), f"{case}: it changed an update that it was given"
        if not aggregator.keeps_updates:
            _check_saved(aggregator, updates, weights, first, case)


def check_optimizer(optimizer: Optimizer) -> None:
    """Check a server optimizer. Raises AssertionError with what was asked and what came.

    It moves the trained parameters by finite numbers and leaves buffers alone; its state has the
    slots that it began with; the same inputs give the same bits, also where the state was saved and
    loaded in between, and where the model is longer than a block; each element moves the same
    whatever its neighbours are; nothing that it was given is changed; a mean update of zeros moves
    a new model nowhere.
    """
    assert isinstance(optimizer, Optimizer), (
        f"a {type(optimizer).__name__} was given; expected Optimizer(name, initial, step), which "
        "the plan's function returns"
    )
    for size in (7, 100_000):
        optimizer_here = own_optimizer("the optimizer", optimizer)._replace(buffers=[slice(2, 4)])
        random = np.random.default_rng(size)
        model = random.standard_normal(size).astype(np.float32)
        deltas = [random.standard_normal(size) * scale for scale in (1e-3, 1.0, 0.0, 1e-12)]
        one, state = _moved(optimizer_here, optimizer_here.init(model), model, deltas)
        half, saved = _moved(optimizer_here, optimizer_here.init(model), model, deltas[:2])
        loaded = {slot: np.frombuffer(v.tobytes(), np.float32) for slot, v in saved.items()}
        two, other = _moved(optimizer_here, loaded, half, deltas[2:])
        assert _bits(one) == _bits(two), (
            f"a model of {size} elements: after its state was saved and loaded it moved the model "
            f"otherwise, by up to {np.abs(one - two).max():.3g}: what it remembers must be in the "
            "slots of its state"
        )
        for slot in state:
            assert _bits(state[slot]) == _bits(other[slot]), f"its state {slot} differs too"
        assert (one[2:4] == model[2:4]).all(), "it moved the buffers"
        few = 5  # the first elements alone: block by block it sees other neighbours
        part = _moved(
            optimizer_here,
            optimizer_here.init(model[:few]),
            model[:few],
            [delta[:few] for delta in deltas],
        )[0]
        assert np.allclose(part, one[:few], rtol=1e-5, atol=1e-6), (
            f"it moves {few} elements otherwise where they are part of {size}: a step is asked for "
            "one block of the model at a time, and must work element by element"
        )
    still = optimizer_here.apply(optimizer_here.init(model), np.zeros(size), model)[1]
    assert (still == model).all(), "a mean update of zeros moved a new model"


def check_staleness(function: Callable[[int], float], most: int = 1000) -> None:
    """Check a staleness function up to this staleness. Raises AssertionError with what was asked
    and what came.

    A fresh update counts 1; others count above 0 and at most 1, older ones no more than newer
    ones; the same staleness counts the same when it is asked again.
    """
    factors = []
    for tau in range(most + 1):
        try:
            factors.append(own_factor(function, tau))
        except Exception as error:
            raise AssertionError(str(error)) from error
    for tau in range(1, most + 1):
        assert factors[tau] <= factors[tau - 1], (
            f"a staleness of {tau} counts {factors[tau]}, more than one of {tau - 1}, which counts "
            f"{factors[tau - 1]}"
        )
    again = [own_factor(function, tau) for tau in range(most, -1, -1)][::-1]
    assert again == factors, "the same staleness counted otherwise when it was asked again"


def check_weighing(rule: WeighingRule, rounds: int = 3) -> None:
    """Check a weighing rule over this many rounds. Raises AssertionError with what was asked and
    what came.

    Factors are above 0 and at most 1, and depend on their report and the level alone; the scale is
    above 0, the same in every order of the reports; the level of the next round is a finite number
    or None, which JSON can hold.
    """
    made, level = own_rule("the rule", rule), None
    for number in range(rounds):
        reports = reports_for_tests(number)
        try:
            factors = [made.factor(each, level) for each in reports]
            again = [made.factor(each, level) for each in reversed(reports)][::-1]
            scale, other = made.scale(reports, level), made.scale(reports[::-1], level)
            following = made.next_level(reports, level)
            back = made.next_level(reports[::-1], level)
        except Exception as error:
            raise AssertionError(f"round {number + 1}, level {level}: {error}") from error
        assert again == factors, "a report's factor was another one when it was asked again"
        assert other == scale, (
            f"the scale is {scale!r}, and {other!r} with the reports in another order: add with "
            "math.fsum"
        )
        assert following == back, (
            f"the next level is {following!r}, and {back!r} with the reports in another order"
        )
        level = following


def update_cases() -> dict[str, tuple[Updates, Numbers]]:
    """Return rounds for tests by what they are: the updates, float32 (n, P), and their weights."""
    random = np.random.default_rng(6)
    usual = random.standard_normal((MOST_UPDATES, SIZE)).astype(np.float32)
    weights = [*map(int, random.integers(1, 500, MOST_UPDATES))]
    powers = 10.0 ** random.integers(-6, 5, (MOST_UPDATES, 1))
    return {
        "nine usual updates": (usual, weights),
        "one update": (usual[:1], [3]),
        "two updates": (usual[:2], [1, 10**6]),
        "updates of zeros": (np.zeros((4, SIZE), np.float32), [1, 2, 3, 4]),
        "updates of very unequal lengths": ((usual * powers).astype(np.float32), weights),
        "nearly the largest updates": ((usual * 1e9).astype(np.float32), weights),
        "the smallest updates": ((usual * 1e-42).astype(np.float32), weights),
    }


def reports_for_tests(number: int) -> list[Reported]:
    """Return different reports of a round for tests."""
    random = np.random.default_rng(number)
    return [
        Reported(
            weight=int(random.integers(1, 500)),
            steps=int(random.integers(1, 200)),
            loss=float(10.0 ** random.uniform(-4, 4)),
            norms=Norms(float(length := 10.0 ** random.uniform(-6, 6)), float(length)),
        )
        for _ in range(MOST_UPDATES)
    ] + [Reported(1, 1, 0.0, Norms(0.0, 0.0))]


def _state(
    aggregator: Aggregator[Any], updates: Updates, weights: Numbers, rows: Sequence[int], state: Any
) -> Any:
    for row in rows:
        largest = float(np.abs(updates[row]).max())
        aggregator.add(state, ArrayUpdate(updates[row]), weights[row], largest, 1.0, NO_VALUES)
    return state


def _result(
    aggregator: Aggregator[Any], updates: Updates, weights: Numbers, rows: Sequence[int], case: str
) -> NDArray[np.float64]:
    try:
        state = _state(aggregator, updates, weights, rows, aggregator.init(SIZE))
        delta = aggregator.result(state, NO_VALUES.present).delta
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error
    assert delta.shape == (SIZE,), f"{case}: a result of shape {delta.shape}; expected ({SIZE},)"
    assert np.isfinite(delta).all(), f"{case}: the result has elements that are not finite"
    return delta


def _check_saved(
    aggregator: Aggregator[Any],
    updates: Updates,
    weights: Numbers,
    expected: NDArray[np.float64],
    case: str,
) -> None:
    half = len(updates) // 2
    first = _state(aggregator, updates, weights, range(half), aggregator.init(SIZE))
    tensors = {name: array.copy() for name, array in aggregator.to_tensors(first).items()}
    loaded = aggregator.from_tensors(tensors)
    rest = range(half, len(updates))
    state = _state(aggregator, updates, weights, rest, loaded)
    found = aggregator.result(state, NO_VALUES.present).delta
    assert _bits(found) == _bits(expected), (
        f"{case}: after its state was saved and loaded in the middle of the round the result was "
        "another one"
    )
    second = _state(aggregator, updates, weights, rest, aggregator.init(SIZE))
    aggregator.merge(first, second)
    merged = aggregator.result(first, NO_VALUES.present).delta
    assert _bits(merged) == _bits(expected), (
        f"{case}: the merge of two partial sums has another result than one sum"
    )


def _moved(
    optimizer: Optimizer, state: State, model: Vector, deltas: Sequence[NDArray[np.float64]]
) -> tuple[Vector, State]:
    for delta in deltas:
        given, before = delta.copy(), {slot: v.copy() for slot, v in state.items()}
        try:
            following, moved = optimizer.apply(state, delta, model)
        except Exception as error:
            raise AssertionError(str(error)) from error
        assert (delta == given).all(), "it changed the mean update that it was given"
        for slot, values in before.items():
            assert (state[slot] == values).all(), f"it changed the state {slot} before the round"
        state, model = following, moved
    return model, state


def _bits(array: NDArray[Any]) -> bytes:
    return array.tobytes()
