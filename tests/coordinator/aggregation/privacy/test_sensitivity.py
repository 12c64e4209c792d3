"""What one device can add to the exact sum of a private round: never more than W * C, in L2 norm,
whatever it sends. Computed with fractions, so that no rounding of the test's own hides anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS, StalenessConstants
from fleetlearn_coordinator.aggregation.updates import ArrayUpdate
from fleetlearn_coordinator.aggregation.weighing import norm_bound
from fleetlearn_coordinator.aggregation.weighing.norm_bound import (
    Enforced,
    clip_factor,
    enforced_clip,
)
from fleetlearn_coordinator.aggregation.weighing.norms import Norms
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector
from hypothesis import given, settings
from hypothesis import strategies as st
from round_reports import private_rules_of, state_of

ENCODINGS = ("float32", "float16", "bfloat16", "int8", "int4", "topk-0.01", "topk-0.1-int8")


class Sent(NamedTuple):
    """What a device sends, as the coordinator decodes it."""

    update: Vector
    weight: int = 1
    staleness: int = 0
    clipped: bool | None = None
    """None: an SDK that does not clip."""
    complete: bool = True


def private_rules(clip: float, most: int, size: int, staleness: str = "constant") -> RoundRules:
    function = FUNCTIONS[staleness]
    constants = StalenessConstants(**{"a": 0.0, "b": 0.0, **function.defaults})
    rules = private_rules_of(size, most, clip)
    return replace(rules, staleness_factor=lambda tau: function.of(tau, constants))


def columns_of_sent(devices: Sequence[Sent], *, in_arrays: bool) -> ReportColumns:
    """Return the reports: in arrays, as the simulator's, or to be read one by one, as the
    server's. All lie about examples, steps and what they measured."""
    count, updates = len(devices), [each.update for each in devices]
    part: Any = np.stack(updates) if in_arrays else list(map(ArrayUpdate, updates))
    return ReportColumns(
        weights=np.array([each.weight for each in devices], np.int64),
        examples=np.full(count, 2**62, np.int64),
        steps=np.full(count, 2**31, np.int64),
        complete=np.array([each.complete for each in devices]),
        loss=np.full(count, -1e30),
        metrics={"accuracy": np.full(count, 1e30)},
        largest={UPDATE: np.array([float(np.abs(each).max()) for each in updates])},
        parts={UPDATE: part},
        staleness=[each.staleness for each in devices],
        clipped=[each.clipped for each in devices],
    )


def sum_of(rules: RoundRules, devices: Sequence[Sent], *, in_arrays: bool) -> list[Fraction]:
    """Return the exact sum of a round to which these devices report, element by element. Those that
    must be refused are not in it."""
    size = len(devices[0].update)
    round = OpenRound(rules, state_of(rules, [0.0] * size))
    for each in devices:
        received = round.receive(columns_of_sent([each], in_arrays=in_arrays))
        if received.refusal is None:
            round.accept(received.accepted)
            round.add(received.accepted)
    round.sums.add_waiting()
    found = [Fraction(0)] * size
    for held in round.sums.states[UPDATE].bins.values():
        found = [one + Fraction(float(other)) for one, other in zip(found, held, strict=True)]
    return found


def check_bound(
    rules: RoundRules, devices: Sequence[Sent], clip: float, most: int, *, in_arrays: bool
) -> None:
    """Assert that none of the devices adds more than W * C to the sum of all."""
    whole = sum_of(rules, devices, in_arrays=in_arrays)
    for row, device in enumerate(devices):
        others = [each for number, each in enumerate(devices) if number != row]
        rest = sum_of(rules, others, in_arrays=in_arrays) if others else [Fraction(0)] * len(whole)
        square = sum((one - other) ** 2 for one, other in zip(whole, rest, strict=True))
        assert square <= (Fraction(clip) * most) ** 2, (device, float(square) ** 0.5, clip * most)


@st.composite
def sent(draw: st.DrawFn, size: int) -> Sent:
    """A device that is honest, or sends any bytes that its encoding has, or any numbers."""
    kind = draw(st.sampled_from(("drawn", "bytes", "numbers")))
    encoding = find_encoding(draw(st.sampled_from(ENCODINGS)))
    if kind == "numbers":
        element = st.sampled_from((0.0, 1e-45, -1e-20, 1.0, -3.4e38, 2.0**35, nan, inf))
        update = np.array(draw(st.lists(element, min_size=size, max_size=size)), np.float32)
    elif kind == "bytes":
        length = encoding.size(size)
        content = draw(st.binary(min_size=length, max_size=length))
        try:
            encoding.check(content, size)
        except ProtocolError:
            return Sent(np.full(size, nan, np.float32))
        update = encoding.decode(content, size)
    else:
        random = np.random.default_rng(draw(st.integers(0, 2**32)))
        scale = np.float32(2.0) ** draw(st.integers(-20, 12))
        drawn = random.standard_normal(size).astype(np.float32) * scale
        update = encoding.decode(encoding.encode(drawn), size)
    return Sent(
        update,
        draw(st.integers(1, 2**29 - 1) | st.just(1)),
        draw(st.integers(0, 40)),
        draw(st.sampled_from((None, True, False))),
        draw(st.booleans()),
    )


@given(st.data())
@settings(max_examples=80)
def test_no_device_adds_more_than_its_weight_times_the_clip_norm(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    clip = data.draw(st.sampled_from((0.5, 1.0, 1 / 3, 1e-7, 1e-20, 3e4, 1e30)))
    most = data.draw(st.sampled_from((1, 7, 1000, 2**29 - 1)))
    rules = private_rules(clip, most, size, data.draw(st.sampled_from(sorted(FUNCTIONS))))
    devices = data.draw(st.lists(sent(size), min_size=1, max_size=3))
    check_bound(rules, devices, clip, most, in_arrays=data.draw(st.booleans()))


def hard_cases() -> tuple[list[Sent], int]:
    """Return devices whose norms round in every way, with and without too much weight; and W."""
    random, most = np.random.default_rng(5), 3
    updates = random.standard_normal((60, 5)).astype(np.float32) * 10
    return [Sent(update, 1 + row % 7) for row, update in enumerate(updates)], most


def check_hard_cases(clip: float = 0.1) -> None:
    devices, most = hard_cases()
    rules = private_rules(clip, most, 5)
    for device in devices:
        check_bound(rules, [device], clip, most, in_arrays=False)


def test_the_bound_holds_to_the_last_bit() -> None:
    check_hard_cases()


def square_of_equal_elements() -> tuple[Fraction, Fraction]:
    """Return the square of what an update of 2^16 equal elements adds, each three quarters of a
    grid above a multiple, and the square of W * C."""
    size, clip = 2**16, 2.0**8 * 2.0**-20 * (1 + 0.75 * 2.0**-24)
    rules = private_rules(clip, 1, size)
    round = OpenRound(rules, state_of(rules, np.zeros(size)))
    received = round.receive(columns_of_sent([Sent(np.ones(size, np.float32))], in_arrays=False))
    round.accept(received.accepted)
    round.add(received.accepted)
    (held,) = round.sums.states[UPDATE].bins.values()
    (value,) = np.unique(held)
    return Fraction(float(value)) ** 2 * size, Fraction(clip) ** 2


def test_rounding_to_the_grid_is_within_the_bound() -> None:
    added, most = square_of_equal_elements()
    assert 0.999 * most < added <= most


def test_the_grid_alone_can_break_a_bound_that_is_not_enforced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        norm_bound, "enforced_clip", lambda bound, enforced: bound * norm_bound.FOR_ROUNDING
    )
    added, most = square_of_equal_elements()
    assert added > most


@pytest.mark.parametrize("mistake", ["after averaging", "weight", "norm alone"])
def test_planted_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping the mean instead of the updates; a weight that is not capped; and the factor C /
    norm, which is right until it is rounded."""

    def factor(norm: float, weight: int, bound: float, enforced: Enforced) -> float:
        capped = min(1.0, enforced.largest_weight / weight)
        return {
            "after averaging": 1.0,
            "weight": clip_factor(norm, enforced_clip(bound, enforced)),
            "norm alone": capped * clip_factor(norm, bound),
        }[mistake]

    monkeypatch.setattr(norm_bound, "enforced_factor", factor)
    with pytest.raises(AssertionError):
        check_hard_cases()


def test_what_was_not_measured_counts_nothing() -> None:
    """A report that was accepted before the plan was private has no norm."""
    weighing = private_rules(1.0, 1, 4).weighing
    state = weighing.state_after(None)
    unknown = Reported(1, 1, 0.0, Norms(inf, inf))
    assert weighing.factor(unknown, state) == 0.0


def test_the_clip_norm_costs_next_to_nothing() -> None:
    """What an enforced bound takes off is far below the precision of float32."""
    for clip, most, size in ((0.5, 1, 10**6), (1e-3, 1, 10**8), (3.0, 1000, 10)):
        assert 1 - 1e-6 < enforced_clip(clip, Enforced(most, size)) / clip < 1


def test_the_summary_of_a_private_round_says_nothing_of_norms() -> None:
    weighing = private_rules(1.0, 1, 4).weighing
    reports = [Reported(1, 1, 0.0, Norms(norm, norm)) for norm in (0.5, 2.0)]
    state = weighing.state_after(None)
    assert weighing.summary(reports, {}, state) == {}
    assert [weighing.clips(each, state) for each in reports] == [False, True]
    assert weighing.clips(reports[0]._replace(clipped=True), state), "its device clipped it"
