"""What several processes added up of a round is what one would have added up, to the last bit."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, exact_sums, modular_sum
from fleetlearn_coordinator.aggregation.aggregators import Aggregator
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_sums import RoundSums
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Values
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import CONTROL, UPDATE

SIZE, COUNT = 6, 9
PRESENT = np.array([0.5, 2.0], np.float32)


def reports(parts: dict[str, Any], rows: Sequence[int]) -> ReportColumns:
    chosen = {part: elements[rows] for part, elements in parts.items()}
    count = len(rows)
    ones = np.ones(count, np.int64)
    return ReportColumns(
        weights=np.array(rows, np.int64) + 1,
        examples=ones,
        steps=ones,
        complete=ones > 0,
        loss=np.zeros(count),
        metrics={},
        largest={
            part: np.abs(elements.astype(np.float64)).max(axis=1)
            for part, elements in chosen.items()
        },
        parts=chosen,
    )


def floats(size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.uniform(-12, 6, (COUNT, 1))
    return (random.standard_normal((COUNT, size)) * scales).astype(np.float32)


def values(rows: Sequence[int]) -> Values:
    return Values(floats(2, 3)[rows], np.linspace(0.3, 1, COUNT)[rows], PRESENT)


def masked(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (COUNT, size + 1), np.uint32)


def whole(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**57), 2**57, (COUNT, size), np.int64)


MEAN = aggregators.make("mean")
KINDS = {
    "mean": ({UPDATE: MEAN}, floats, False),
    "mean and control": ({UPDATE: MEAN, CONTROL: MEAN}, floats, False),
    "mean and buffers": ({UPDATE: aggregators.make("mean", buffers=[slice(4, 6)])}, floats, True),
    "masked": ({UPDATE: modular_sum.modular_sum(FixedPoint(1.0, 16, False))}, masked, False),
    "sums": ({UPDATE: exact_sums.exact_sums(SIZE, COUNT)}, whole, False),
}


def outcome(sums: RoundSums) -> list[object]:
    sums.add_waiting()
    found: list[object] = []
    for part, aggregator in sums.aggregators.items():
        state = sums.states[part]
        if aggregator.name == "mean":
            result = aggregator.result(state, PRESENT)
            found += [result.delta.tobytes(), result.buffers.tobytes()]
        else:
            tensors = aggregator.to_tensors(state)
            found += [(name, tensor.tobytes()) for name, tensor in tensors.items()]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_partial_sums_are_the_whole_one(kind: str, cuts: int) -> None:
    aggregator_of, elements, buffers = KINDS[kind]
    parts = {part: elements(SIZE, seed) for seed, part in enumerate(aggregator_of)}

    def added(rows: Sequence[int]) -> RoundSums:
        sums = RoundSums(aggregator_of, SIZE)
        for start in range(0, len(rows), 2):
            some = rows[start : start + 2]
            sums.add(reports(parts, some), values=values(some) if buffers else NO_VALUES)
        return sums

    expected = outcome(added(range(COUNT)))
    total = RoundSums(aggregator_of, SIZE)
    for start in reversed(range(cuts)):
        partial = added(range(start, COUNT, cuts))
        partial.add_waiting()
        sent = RoundSums(aggregator_of, SIZE)  # as another process hands it over
        sent.load_tensors(partial.to_tensors())
        total.merge(sent)
    assert outcome(total) == expected


REFUSED: dict[str, tuple[Aggregator[Any], Callable[[Any], None], str]] = {
    "another length": (
        modular_sum.modular_sum(FixedPoint(1.0, 16, False)),
        lambda state: setattr(state, "words", np.zeros(3, np.uint32)),
        "sums of 7 and of 3 words cannot be merged",
    ),
    "too many": (
        modular_sum.modular_sum(FixedPoint(1.0, 16, False)),
        lambda state: setattr(state, "updates", 2**17),
        "131072 updates of 16 bits were given",
    ),
    "another total": (
        exact_sums.exact_sums(SIZE, COUNT),
        lambda state: setattr(state, "total", np.zeros(3, np.int64)),
        r"sums of shape \(3,\) were given; the total has \(6,\)",
    ),
    "too many devices": (
        exact_sums.exact_sums(SIZE, COUNT),
        lambda state: setattr(state, "devices", COUNT + 1),
        "10 devices' sums were given; a round has 9",
    ),
    "kept updates": (
        aggregators.make("median"),
        lambda state: None,
        "updates that are kept have no sum",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    aggregator, spoil, text = REFUSED[kind]
    state, other = aggregator.init(SIZE), aggregator.init(SIZE)
    spoil(other)
    with pytest.raises((ValueError, ProtocolError), match=text):
        aggregator.merge(state, other)
