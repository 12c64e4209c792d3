"""A private round whose devices report sums: what its noise is, and that no device can do more
than its clip norm; checked by mistakes that are planted."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from computing import masked_sums, reports_of_sums
from fleetlearn_coordinator.aggregation import exact_sums, open_round
from fleetlearn_coordinator.aggregation.model_state import ModelState, make_state
from fleetlearn_coordinator.aggregation.modular_sum import UnmaskError
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy import mechanisms
from fleetlearn_coordinator.aggregation.privacy.release import begin
from fleetlearn_coordinator.aggregation.privacy.state import Drawn
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.private_sums import LENGTH, clip_sums
from fleetlearn_protocol.computations.settings import NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import private_groups, state_layout
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.vector import Vector
from plans import SECURE
from statistics_bundle import PLAN, statistics_bundle

ASKED = Statistics(numbers=(NumberColumn("age", range=(0.0, 8.0)),), rounds=1)
NOISE, CLIP, GROUPS = 2.0, 100.0, 4
DEVIATION = NOISE * CLIP * sqrt(GROUPS)
"""Of the noise in the number of rows, by definition."""
RUNS = 300
PRIVACY = f"[privacy]\nnoise = {NOISE}\ndelta = 1e-6\npopulation = 9\nclip = {CLIP}\n"


@pytest.fixture(scope="module")
def rules_and_first(tmp_path_factory: pytest.TempPathFactory) -> tuple[RoundRules, Vector]:
    folder = tmp_path_factory.mktemp("bundle")
    bundle = statistics_bundle(folder, ASKED)
    return Plan.parse(PLAN + PRIVACY, folder).round_rules(bundle.manifest), bundle.parameters()


def begun(rules: RoundRules, first: Vector, secret: int) -> OpenRound:
    assert rules.privacy is not None
    privacy = begin(rules.privacy, secret.to_bytes(32, "little"), first.size)
    state: ModelState = make_state(
        rules, None, version=0, model=first, optimizer_state={}, vectors={}, privacy=privacy
    )
    return OpenRound(rules, state)


def rows_of(rules: RoundRules, first: Vector, secret: int, sums: np.ndarray) -> int:
    """Return the rows that a round of these devices' sums says there are."""
    round_ = begun(rules, first, secret)
    received = round_.receive(reports_of_sums(sums))
    assert received.refusal is None
    round_.accept(received.accepted)
    round_.add(received.accepted)
    made = round_.commit(1, round_.summary({}))
    return int(state_layout(ASKED).unpack(made.state.model)["rows"])


def sent_by(first: Vector, ages: list[float]) -> np.ndarray:
    sums = sum_up(first, [{"age": np.array(ages)}], ASKED)
    return clip_sums(sums, private_groups(ASKED, first), CLIP).sums


def check_noise(rules: RoundRules, first: Vector) -> None:
    """Mean and variance over many secrets; each bound is broken by chance once in 10,000 times."""
    sums = np.stack([sent_by(first, [1.0, 2.0, 3.0]), sent_by(first, [4.0] * 5)])
    found = np.array([rows_of(rules, first, secret, sums) for secret in range(RUNS)])
    assert abs(found.mean() - 8) < 4 * DEVIATION / sqrt(RUNS)
    assert abs(found.var() / DEVIATION**2 - 1) < 4 * sqrt(2 / RUNS)


def test_the_noise_is_that_of_the_closed_form(rules_and_first: Any) -> None:
    check_noise(*rules_and_first)


def test_a_round_of_few_devices_has_as_much_noise(rules_and_first: Any) -> None:
    """One of four that were wanted came: its rows have the noise of any round."""
    rules, first = rules_and_first
    sums = sent_by(first, [1.0])[None]
    found = np.array([rows_of(rules, first, secret, sums) for secret in range(RUNS)])
    assert abs(found.var() / DEVIATION**2 - 1) < 4 * sqrt(2 / RUNS)


def test_noise_that_is_switched_off_is_found(
    rules_and_first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(rules: Any, sigma: float, secret: bytes, buffers: Any, size: int) -> Drawn:
        return Drawn(np.zeros(size, np.int64), {})

    silent = mechanisms.MECHANISMS["gaussian"]._replace(draw=none)
    monkeypatch.setitem(mechanisms.MECHANISMS, "gaussian", silent)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        check_noise(*rules_and_first)


def check_clip(rules: RoundRules, first: Vector) -> None:
    """Sums that are one step too long are refused, alone and among others, and never added."""
    size = sent_by(first, [1.0]).size
    sums = np.zeros((2, size), np.int64)
    sums[1, :2] = LENGTH, 1
    for rows, refused in ((sums, 1), (sums[1:], 0)):
        round_ = begun(rules, first, 1)
        received = round_.receive(reports_of_sums(rows))
        assert len(received.accepted) == refused
        alone = begun(rules, first, 1).receive(reports_of_sums(rows[refused:]))
        assert alone.refusal is not None
        assert alone.refusal.error.code == Code.NORM_TOO_LARGE
    round_ = begun(rules, first, 1)
    round_.accept(reports_of_sums(sums))
    round_.add(reports_of_sums(sums))
    with pytest.raises(ProtocolError, match="does not clip sums"):
        round_.commit(1, round_.summary({}))


def test_sums_that_are_too_long_are_refused(rules_and_first: Any) -> None:
    check_clip(*rules_and_first)


@pytest.mark.parametrize("name", ["check_short", "short_ones"])
def test_a_clip_that_is_switched_off_is_found(
    rules_and_first: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead = {
        "check_short": lambda sums: None,
        "short_ones": lambda rows: np.ones(len(rows), bool),
    }
    for module in (open_round, exact_sums):
        monkeypatch.setattr(module, name, instead[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_clip(*rules_and_first)


def test_masked_sums_have_the_noise_of_plain_ones(rules_and_first: Any, tmp_path: Path) -> None:
    """To the last bit: the coordinator adds it to the total, once the masks are off."""
    rules, first = rules_and_first
    sums = np.stack([sent_by(first, [1.0, 2.0]), sent_by(first, [4.0] * 5)])
    secure = f"minimum = 2\n{SECURE.replace('clip = 0.5', '')}"
    bundle = statistics_bundle(tmp_path, ASKED)
    masked = Plan.parse(PLAN + secure + PRIVACY, tmp_path).round_rules(bundle.manifest)
    columns, masks = masked_sums(sums)
    round_ = begun(masked, first, 7)
    received = round_.receive(columns)
    assert received.refusal is None
    round_.accept(received.accepted)
    round_.add(received.accepted)
    made = round_.commit(1, round_.summary({}), masks=masks)
    rows = int(state_layout(ASKED).unpack(made.state.model)["rows"])
    assert rows == rows_of(rules, first, 7, sums)
    assert made.summary["privacy"]["release"] == 1


def test_a_masked_total_that_clipped_sums_cannot_have_is_refused(tmp_path: Path) -> None:
    """Nobody sees that a device did not clip, but the total shows it where it is far beyond."""
    secure = f"minimum = 2\n{SECURE.replace('clip = 0.5', '')}"
    bundle = statistics_bundle(tmp_path, ASKED)
    rules = Plan.parse(PLAN + secure + PRIVACY, tmp_path).round_rules(bundle.manifest)
    sums = np.zeros((2, bundle.manifest.elements_of("sums")), np.int64)
    for value, fits in ((LENGTH, True), (2 * LENGTH + 1, False)):
        sums[0, 0] = value
        columns, masks = masked_sums(sums)
        round_ = begun(rules, bundle.parameters(), 7)
        round_.accept(columns)
        round_.add(columns)
        if fits:
            round_.commit(1, round_.summary({}), masks=masks)
        else:
            with pytest.raises(UnmaskError, match="a device added up what it may not"):
                round_.commit(1, round_.summary({}), masks=masks)


def test_a_round_that_would_add_unclipped_sums_cannot_be_made(rules_and_first: Any) -> None:
    rules, _ = rules_and_first
    plain = exact_sums.exact_sums(8, 4)
    for changes, said in (
        ({"aggregators": {"sums": plain}}, "exact sums"),
        ({"privacy": replace(rules.privacy, mechanism="dp-ftrl")}, "dp-ftrl"),
        ({"privacy": replace(rules.privacy, largest_weight=2)}, "count once"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(rules, **changes)
