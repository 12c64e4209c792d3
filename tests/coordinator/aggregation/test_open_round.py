"""A round by hand: what it refuses, what it adds up to, its summary and the next model. The
server's way (one report, read where it is) and the simulator's (blocks in arrays) give the same
bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import aggregators, optimizers, round_sums
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.tied_sum import TiedSum
from fleetlearn_coordinator.aggregation.weighing.fair import fair
from fleetlearn_coordinator.aggregation.weighing.norm_bound import NormBound
from fleetlearn_coordinator.aggregation.weighing.normalised import normalised
from fleetlearn_coordinator.aggregation.weighing.weighing import REFUSED, Weighing
from fleetlearn_coordinator.rounds.commands import REJECTED
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.messages import BUFFERS, CONTROL, UPDATE, Evaluation
from round_reports import reports_of_rows, rules_of, state_of

INF, NAN = float("inf"), float("nan")
CLIP = Weighing(bound=NormBound(5.0, "clip"))
SCAFFOLD = {UPDATE: aggregators.make("mean"), CONTROL: aggregators.make("mean")}


def take(round: OpenRound, reports: ReportColumns) -> None:
    """Receive, accept and add reports, none of which is refused."""
    received = round.receive(reports)
    assert received.refusal is None
    round.accept(received.accepted)
    round.add(received.accepted)


def test_a_round_by_hand() -> None:
    """The mean of (4, 8) with weight 1 and (0, 0) with weight 3 is (1, 2)."""
    rules = rules_of()
    state = state_of(rules, [10.0, 20.0])
    round = OpenRound(rules, state)
    take(round, reports_of_rows([[4.0, 8.0], [0.0, 0.0]], [1, 3], loss=np.array([2.0, 4.0])))
    summary = round.summary({"lost": 1})
    assert summary["metrics"] == {"loss": (1 * 2.0 + 3 * 4.0) / 4}
    assert (summary["reports"], summary["partial"], summary["dropped"]) == (2, 0, {"lost": 1})
    assert summary["change"] == 0.0
    for _ in range(2):  # a commit changes nothing of the round
        made = round.commit(7, summary)
        assert made.state.model.tolist() == [11.0, 22.0]
        assert made.summary == summary | {"change": pytest.approx(5**0.5)}
        assert (state.version, made.state.version) == (0, 1)
    assert state.model.tolist() == [10.0, 20.0]


def test_the_state_s_digests_are_of_its_own_model() -> None:
    rules = rules_of()
    state = state_of(rules, [1.0], vectors={CONTROL: np.zeros(1, np.float32)})
    round = OpenRound(rules, state)
    take(round, reports_of_rows([[1.0]], [1]))
    after = round.commit(1, round.summary({})).state
    assert len({state.digest, after.digest, state.vector_digests[CONTROL]}) == 3
    assert state.digest == state_of(rules, [1.0]).digest


def blocks(count: int, sizes: list[int], one_by_one: bool, **more: Any) -> list[ReportColumns]:
    """Return the same reports in blocks of these sizes."""
    random = np.random.default_rng(0)
    updates = random.standard_normal((count, 5)).astype(np.float32).tolist()
    control, values = random.standard_normal((2, count, 5)).tolist()
    losses, found, done = random.random(count), [], 0
    for size in sizes:
        rows = slice(done, done + size)
        done += size
        found.append(
            reports_of_rows(
                updates[rows],
                [*range(3, 3 + count)][rows],
                parts={CONTROL: control[rows], BUFFERS: [row[:2] for row in values[rows]]},
                one_by_one=one_by_one,
                loss=losses[rows],
                complete=np.arange(count)[rows] % 3 > 0,
                staleness=[number % 3 for number in range(count)][rows],
                evaluations=[Evaluation(4, 8.0 + number, {}) for number in range(count)][rows],
                **more,
            )
        )
    return found


@pytest.mark.parametrize("weighing", [Weighing(), CLIP])
def test_one_report_at_a_time_and_many_give_the_same_bits(
    weighing: Weighing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays wait, up to a number of bytes, and are added together."""
    places = [slice(1, 3)]
    optimizer = optimizers.make("adam")._replace(buffers=places)
    sums = {UPDATE: aggregators.make("mean", buffers=places), CONTROL: aggregators.make("mean")}
    rules = rules_of(
        aggregators=sums, weighing=weighing, optimizer=optimizer, outlive=True, devices=9
    )
    state = state_of(rules, [1.0, 2.0, 3.0, 4.0, 5.0], vectors={CONTROL: np.ones(5, np.float32)})
    found = []
    for most_bytes, sizes, one_by_one, waiting in (
        (2**28, [1] * 7, True, [0] * 7),
        (2**28, [1] * 7, False, [1, 2, 3, 4, 5, 6, 7]),
        (2 * 2 * 5 * 4, [1] * 7, False, [1, 2, 0, 1, 2, 0, 1]),
        (2**28, [7], False, [1]),
        (2**28, [3, 1, 3], True, [0] * 3),
    ):
        monkeypatch.setattr(round_sums, "MAX_BYTES_WAITING", most_bytes)
        round, held = OpenRound(rules, state), []
        for reports in blocks(7, sizes, one_by_one):
            take(round, reports)
            held.append(len(round.sums.waiting[UPDATE]))
        assert held == waiting
        made = round.commit(1, round.summary({}))
        arrays = made.state.model, *made.state.optimizer_state.values(), made.state.vectors[CONTROL]
        found.append(
            ([array.tobytes() for array in arrays], made.summary, round.sums.bytes_waiting)
        )
    assert all(each == found[0] for each in found)
    assert found[0][1]["partial"] == 3
    assert found[0][1]["staleness"] == {"mean": 6 / 7, "max": 2, "stale": 4}
    assert found[0][1]["evaluation"] == {"loss": (7 * 8.0 + 21) / 28}
    assert found[0][2] == 0


@pytest.mark.parametrize(
    ("update", "code"),
    [
        ([NAN, 0.0], Code.NOT_FINITE),
        ([0.0, -INF], Code.NOT_FINITE),
        ([4e10, 0.0], Code.OUT_OF_RANGE),
        ([0.0, -(2.0**35) * 1.001], Code.OUT_OF_RANGE),
        ([0.0, -(2.0**35)], None),
    ],
)
def test_the_first_report_that_cannot_be_added_is_refused(
    update: list[float], code: Code | None
) -> None:
    """Wherever it is, alone or with others; those before it are accepted."""
    round = OpenRound(rules_of(), state_of(rules_of(), [0.0, 0.0]))
    for place in range(3):
        rows = [[1.0, 2.0]] * 3 + [[INF, 0.0]]
        rows[place] = update
        for count in (1, 3, 4):
            received = round.receive(reports_of_rows(rows[:count], [10] * count))
            expected = (place, code)
            if code is None or place >= count:
                expected = (3, Code.NOT_FINITE) if count == 4 else (count, None)
            found = None if received.refusal is None else received.refusal.error.code
            assert (len(received.accepted), found) == expected
    assert len(round) == 0
    assert round.sums.states[UPDATE].count == 0


def test_a_part_beside_the_update_is_refused_as_the_update_is() -> None:
    rules = rules_of(aggregators=SCAFFOLD, devices=4)
    round = OpenRound(rules, state_of(rules, [0.0]))
    values = [[1.0], [4e10], [1.0]]
    received = round.receive(reports_of_rows([[1.0]] * 3, [1] * 3, parts={CONTROL: values}))
    assert received.refusal is not None
    assert (received.refusal.row, received.refusal.error.code) == (1, Code.OUT_OF_RANGE)
    not_finite = reports_of_rows(
        [[1.0]] * 2, [1] * 2, parts={CONTROL: [[1.0]] * 2, BUFFERS: [[0.0], [NAN]]}
    )
    refusal = round.receive(not_finite).refusal
    assert refusal is not None
    assert (refusal.row, refusal.error.code) == (1, Code.NOT_FINITE)


def test_the_weight_that_counts_is_the_coordinator_s() -> None:
    """A weight of 2^29 is beyond what the sum takes, whatever the update."""
    round = OpenRound(rules_of(), state_of(rules_of(), [0.0, 0.0]))
    for weight, refused in ((2**29, True), (20_000, False)):
        reports = reports_of_rows([[1e4, 0.0]], [weight])
        assert (round.receive(reports).refusal is not None) == refused


def test_a_norm_bound_clips_or_refuses() -> None:
    """(3, 4) has the norm 5; (6, 8) counts half."""
    rules = rules_of(weighing=CLIP)
    round = OpenRound(rules, state_of(rules, [0.0, 0.0]))
    take(round, reports_of_rows([[3.0, 4.0], [6.0, 8.0]], [1, 1]))
    made = round.commit(1, round.summary({}))
    assert made.state.model.tolist() == [3.0, 4.0]
    assert made.summary["norm"]["clipped"] == 1

    rules = rules_of(weighing=Weighing(bound=NormBound(5.0, "refuse", quantile=0.5, rate=1.0)))
    round = OpenRound(rules, state_of(rules, [0.0, 0.0]))
    received = round.receive(reports_of_rows([[3.0, 4.0], [6.0, 8.0]], [1, 1]))
    assert received.refusal is not None
    assert f"{REJECTED}{received.refusal.error.code.value}" == REFUSED
    round.accept(received.accepted)
    round.add(received.accepted)
    made = round.commit(1, round.summary({REFUSED: 1}))
    assert made.summary["norm"] == {"bound": 5.0, "clipped": 0, "refused": 1, "next": 5.0}
    assert made.state.weighing.bound == 5.0, "one of two was within: the quantile is met"


def test_buffers_that_are_far_from_the_model_s_count_less() -> None:
    """A value 10 away from the model's, with a bound of 5, counts half: 2 + 10 / 2."""
    places = [slice(1, 2)]
    optimizer = optimizers.make("sgd")._replace(buffers=places)
    sums = {UPDATE: aggregators.make("mean", buffers=places)}
    rules = rules_of(aggregators=sums, weighing=CLIP, optimizer=optimizer)
    round = OpenRound(rules, state_of(rules, [1.0, 2.0]))
    take(round, reports_of_rows([[3.0, 0.0]], [1], parts={BUFFERS: [[12.0]]}))
    assert round.commit(1, round.summary({})).state.model.tolist() == [4.0, 7.0]


def test_a_rule_weighs_by_steps_and_scales_the_mean() -> None:
    """FedNova with SGD: 2 by one step and 4 by two are 2 for each step; 1.5 steps on average."""
    rules = rules_of(weighing=Weighing(normalised("sgd", 0.0, 0.0)))
    round = OpenRound(rules, state_of(rules, [0.0]))
    take(round, reports_of_rows([[2.0], [4.0]], [1, 1], steps=np.array([1, 2])))
    made = round.commit(1, round.summary({}))
    assert made.state.model.tolist() == [3.0]
    assert made.summary["weighing"]["scale"] == 1.5


def test_the_loss_before_training_is_what_weighing_knows() -> None:
    """And training's own where a device has not evaluated."""
    rules = rules_of(weighing=Weighing(fair(1.0, 0.1)))
    round = OpenRound(rules, state_of(rules, [0.0]))
    evaluations = [Evaluation(4, 8.0, {}), None]
    received = round.receive(reports_of_rows([[2.0], [4.0]], [1, 1], evaluations=evaluations))
    assert [each.loss for each in received.accepted.weighed] == [2.0, 0.5]


def test_personal_models_have_metrics_of_their_own() -> None:
    round = OpenRound(rules_of(), state_of(rules_of(), [0.0]))
    evaluations, personal = [Evaluation(4, 8.0, {})], [Evaluation(4, 2.0, {})]
    reports = reports_of_rows([[2.0]], [4], evaluations=evaluations, personal=personal)
    take(round, reports)
    assert round.summary({})["evaluation"] == {"loss": 2.0, "personal.loss": 0.5}


def test_the_optimizer_knows_which_share_of_the_devices_took_part() -> None:
    """FedDyn's h follows the share: here a quarter."""
    rules = rules_of(devices=4, optimizer=optimizers.make("feddyn"))
    state = state_of(rules, [1.0])
    round = OpenRound(rules, state)
    take(round, reports_of_rows([[2.0]], [1]))
    slots, model = rules.optimizer.apply(state.optimizer_state, np.array([2.0]), state.model, 1 / 4)
    after = round.commit(1, round.summary({})).state
    assert after.model.tolist() == model.tolist() != [3.0]
    assert after.optimizer_state["h"].tolist() == slots["h"].tolist()


def test_staleness_takes_from_an_update_and_a_mixing_server_moves_from_the_task_s_model() -> None:
    """s(1) is 1/2. The mean is 1/2 * 4. Mixed: from 10 by 1/2 * 1/2 * (6 + 4 - 10)."""
    rules = rules_of(outlive=True)
    round = OpenRound(rules, state_of(rules, [10.0]))
    take(round, reports_of_rows([[4.0]], [1], staleness=[1]))
    assert round.commit(1, round.summary({})).state.model.tolist() == [12.0]
    assert round.staleness() == [1]

    rules = rules_of(outlive=True, mixing_rate=0.5, optimizer=optimizers.make("sgd", lr=0.5))
    round = OpenRound(rules, state_of(rules, [10.0]))
    take(round, reports_of_rows([[4.0]], [1], staleness=[1]))
    base = np.array([8.0], np.float32)  # the device's model is 12
    assert round.commit(1, round.summary({}), base).state.model.tolist() == [10.5]


def test_scaffold_s_c_moves_by_the_sum_of_changes_over_all_devices() -> None:
    """c = 1 + (2 + 4) / 8, whatever the updates weigh; a report without the part does not change
    it."""
    rules = rules_of(aggregators=SCAFFOLD, devices=8)
    state = state_of(rules, [0.0], vectors={CONTROL: np.ones(1, np.float32)})
    round = OpenRound(rules, state)
    take(round, reports_of_rows([[1.0], [1.0]], [3, 5], parts={CONTROL: [[2.0], [4.0]]}))
    late = round.receive(reports_of_rows([[1.0]], [1], parts={CONTROL: [[8.0]]})).accepted
    round.accept(late)
    round.add(reports_of_rows([[1.0]], [1]))
    after = round.commit(1, round.summary({})).state
    assert after.vectors[CONTROL].tolist() == [1.75]
    assert after.tied_sum == TiedSum(3, 0, 0)


def test_c_and_h_begin_again_when_a_device_lost_its_part() -> None:
    """After N = 2 reports, one of which says so; the model stays where the updates take it."""
    rules = rules_of(aggregators=SCAFFOLD, devices=2, optimizer=optimizers.make("feddyn"))
    state = state_of(
        rules,
        [0.0],
        vectors={CONTROL: np.ones(1, np.float32)},
        optimizer_state={"h": np.ones(1, np.float32)},
    )
    round = OpenRound(rules, state)
    take(
        round,
        reports_of_rows(
            [[1.0], [1.0]], [1, 1], parts={CONTROL: [[2.0], [4.0]]}, lost_tied=[True, False]
        ),
    )
    after = round.commit(5, round.summary({})).state
    assert after.vectors[CONTROL].tolist() == after.optimizer_state["h"].tolist() == [0.0]
    assert after.tied_sum == TiedSum(since=5)
    assert after.model.tolist() != [0.0]


def test_mu_follows_the_loss_from_state_to_state() -> None:
    """It rises by 0.1 in the second round, whose loss is larger, and not beyond 0.6 in the
    third."""
    rules = rules_of(adaptive_mu=True, first_mu=0.5, most_mu=0.6)
    state, used = state_of(rules, [0.0]), []
    for loss in (1.0, 2.0, 3.0, 3.0):
        used.append(state.mu.mu)
        round = OpenRound(rules, state)
        take(round, reports_of_rows([[0.0]], [1], loss=np.array([loss])))
        state = round.commit(1, round.summary({})).state
    assert used == [0.5, 0.5, 0.6, 0.6]


def test_sums_that_were_saved_go_on_with_the_same_bits() -> None:
    rules = rules_of(aggregators=SCAFFOLD, devices=4)
    state = state_of(rules, [0.0] * 5, vectors={CONTROL: np.zeros(5, np.float32)})
    whole, first, again = (OpenRound(rules, state) for _ in range(3))
    (reports,) = blocks(7, [7], True)
    rows = blocks(7, [3, 4], True)
    for each in (whole, first):
        each.accept(reports)
    whole.add(reports)
    first.add(rows[0])
    again.sums.load_tensors(
        {name: tensor.copy() for name, tensor in first.sums.to_tensors().items()}
    )
    again.accept(reports)
    again.add(rows[1])
    models = [each.commit(1, {"metrics": {}}).state for each in (whole, again)]
    assert models[0].digest == models[1].digest
    assert models[0].vector_digests == models[1].vector_digests


def test_a_round_without_reports_has_a_summary_and_no_model() -> None:
    round = OpenRound(rules_of(outlive=True), state_of(rules_of(), [0.0]))
    summary = round.summary({})
    assert (summary["reports"], summary["metrics"]) == (0, {})
    with pytest.raises(ValueError, match="no updates"):
        round.commit(1, summary)


def test_training_that_has_diverged_makes_no_model() -> None:
    far = optimizers.make("sgd")._replace(step=lambda delta, state, share: delta * 1e38)
    rules = rules_of(optimizer=far)
    round = OpenRound(rules, state_of(rules, [0.0]))
    take(round, reports_of_rows([[2e8]], [1]))
    with pytest.raises(FleetError, match="Training has diverged"):
        round.commit(1, round.summary({}))
