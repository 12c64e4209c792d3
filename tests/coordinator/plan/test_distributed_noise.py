"""Plans whose devices add the noise under their masks: which are refused, how much each device
adds, and what people are told."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.plan.distributed_noise import DISTRIBUTED_RULES
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.privacy_statement import PrivacyStatement, privacy_statement
from fleetlearn_coordinator.privacy.accounting import PrivacyError, gaussian_epsilon
from fleetlearn_protocol.secure.distributed_noise import largest_step, multiplier_of
from plans import PAIRWISE, PRIVATE, SECURE, SMALL, manifest

SGD = manifest(proximal=False, hyper=(), metrics=("accuracy",))
UNCLIPPED = SECURE.replace("clip = 0.5\n", "")
NOISY = f'{PRIVATE}mechanism = "distributed"\n'
WHOLE = f"{SMALL}{NOISY}{UNCLIPPED}"
BROKEN = {
    "no [secure]": (f"{SMALL}{NOISY}", "which hides an update only where the coordinator sees"),
    "dp-ftrl": (f'recipe = "dp-ftrl"\n{WHOLE}', "No device knows the others' noise"),
    "weights": (
        f'{SMALL}weighting = "examples"\nmax_weight = 9\n{NOISY}{UNCLIPPED}',
        "the sum of the weights would be seen",
    ),
    "colluding": (
        f"{SMALL}{PRIVATE}colluding = 0.1\n{UNCLIPPED}",
        "privacy.colluding = 0.1 is for",
    ),
}
OF_OTHERS = {
    "an adaptive clip norm": (f"{SMALL}{NOISY}clip_quantile = 0.5\n{UNCLIPPED}", "clip_quantile"),
    "noised metrics": (
        f'{SMALL}[local]\nevaluate = true\n{NOISY}metrics = "noised"\n'
        f"metrics_bounds = {{accuracy = [0, 1]}}\n{UNCLIPPED}",
        'privacy.metrics = "noised" with [secure]',
    ),
    "coins": (f'{SMALL}{NOISY}sampling = "poisson"\n{UNCLIPPED}', 'sampling = "poisson" with'),
}


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/base"), file="my.toml")


def statement(plan: Plan) -> PrivacyStatement:
    return privacy_statement(plan, None)


@pytest.mark.parametrize("name", [*BROKEN, *OF_OTHERS])
def test_what_has_no_distributed_noise_is_refused_with_the_reason(name: str) -> None:
    text, said = {**BROKEN, **OF_OTHERS}[name]
    with pytest.raises(PlanError) as refused:
        parse(text)
    assert said in refused.value.text


def test_each_rule_is_broken_by_a_plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlearn_coordinator.plan.plan.contradictions", lambda plan: ())
    plans = [parse(text) for text, _ in BROKEN.values()]
    for rule in DISTRIBUTED_RULES:
        assert any(rule.breaks(plan) for plan in plans)
        assert not rule.breaks(parse(WHOLE))
        assert not rule.breaks(parse(f"{SMALL}{PRIVATE}"))


@pytest.mark.parametrize(("more", "honest"), [("", 2), ("colluding = 0.5\n", 1)])
def test_the_fewest_devices_have_the_plans_noise_and_not_the_goal(more: str, honest: int) -> None:
    """Goal 4, minimum 2, C = 0.5, z = 1."""
    plan = parse(f"{SMALL}{NOISY}{more}{UNCLIPPED}")
    numbers = plan.round_rules(SGD).secure
    assert numbers is not None
    steps = largest_step(numbers.bits)
    assert sqrt(honest) * numbers.noise / steps == pytest.approx(1.0)
    assert multiplier_of(numbers.noise, numbers.bits, honest) >= 1.0
    found = statement(plan).noise
    assert found.of_device == pytest.approx(0.5 / sqrt(honest))
    assert found.of_device_words == numbers.noise
    assert found.on_sum == 0.5
    assert found.on_mean == pytest.approx(0.5 / sqrt(honest) * sqrt(4) / 4)  # of a full round


def test_a_budget_gives_the_noise_and_a_noise_the_budget() -> None:
    """As with noise that the coordinator adds: the same z, and the same epsilon."""
    budget = NOISY.replace("noise = 1.0", "epsilon = 2.0")
    plan, central = parse(f"{SMALL}{budget}{UNCLIPPED}"), budget.replace("distributed", "gaussian")
    rules = plan.round_rules(SGD)
    assert rules.privacy is not None
    assert rules.secure is not None
    other = parse(f"{SMALL}{central}").round_rules(SGD).privacy
    assert other is not None
    assert rules.privacy.noise == other.noise
    multiplier = multiplier_of(rules.secure.noise, rules.secure.bits, 2)
    spent = gaussian_epsilon(sqrt(plan.stop.rounds) / multiplier, 1e-6)
    assert 1.9999 < spent <= 2.0


@pytest.mark.parametrize(("goal", "bits"), [(2048, 20), (2049, 18), (8193, 16), (40_000, 16)])
def test_half_of_the_room_is_for_noise_by_default(goal: int, bits: int) -> None:
    plan = parse(WHOLE.replace("goal = 4", f"goal = {goal}").replace("1000", "100000"))
    assert plan.secure is not None
    assert plan.secure.bits == bits


def test_noise_for_which_there_is_no_room_is_refused_with_what_to_do() -> None:
    plan = parse(f"{WHOLE}bits = 20\nminimum = 2".replace("goal = 4", "goal = 1000"))
    plan.round_rules(SGD)
    noisier = parse(plan_text := f"{WHOLE}bits = 20\nminimum = 2".replace("goal = 4", "goal = 1000")
                    .replace("noise = 1.0", "noise = 50.0"))  # fmt: skip
    with pytest.raises(PrivacyError, match="leave no room for the noise: 1000 updates") as refused:
        noisier.round_rules(SGD)
    assert "It takes fewer secure.bits, or a larger secure.minimum" in refused.value.text
    with pytest.raises(PlanError, match="leave no room for the noise"):
        noisier.check_privacy()
    parse(plan_text.replace("bits = 20", "bits = 16")).check_privacy()


def test_noise_below_what_is_proved_is_refused() -> None:
    plan = parse(f"{WHOLE}bits = 16\nminimum = 2".replace("noise = 1.0", "noise = 0.001"))
    # A multiplier of 0.001 is 32 words; 100 devices that share it have 3.3 each.
    plan.check_privacy()
    many = f"{WHOLE}bits = 16\nminimum = 100".replace("goal = 4", "goal = 100\nminimum = 100")
    with pytest.raises(PlanError, match=r"standard deviation of 3\.28 words"):
        parse(many.replace("noise = 1.0", "noise = 0.001")).check_privacy()


def test_people_are_told_who_adds_the_noise_and_who_is_trusted() -> None:
    found = statement(parse(f"{SMALL}{NOISY}{UNCLIPPED}"))
    told = "\n".join(found.assumed)
    assert "sees neither an update nor a sum without noise" in told
    assert "so much that 2 of them (secure.minimum)" in told
    assert "No device tells its noise to anybody" in told
    assert "Noise is never less where devices drop out: each device adds as much" in told
    assert "The coordinator is trusted: it sees" not in told
    assert "goal = 40 and secure.minimum = 20" in found.what_if[1].change
    assert found.what_if[2].on_mean == pytest.approx(found.noise.on_mean / 10)
    some = statement(parse(f"{SMALL}{NOISY}colluding = 0.25\n{UNCLIPPED}"))
    assert any("At most 0.25 of the devices in any sum" in line for line in some.assumed)
    assert msgspec.json.decode(msgspec.json.encode(found))["noise"]["of_device"] > 0


def test_who_works_with_the_coordinator_against_masks_does_so_against_noise() -> None:
    """Pairwise, a goal of 40 with a cohort of 52, 5 % of which are 2.6 of the fewest, 26."""
    text = f"{SMALL.replace('4', '40')}minimum = 26\n{NOISY}{PAIRWISE}"
    plan = parse(text)
    assert plan.privacy is not None
    assert plan.privacy.colluding == pytest.approx(0.1)
    assert plan.secure is not None
    numbers = plan.round_rules(SGD).secure
    assert numbers is not None
    # 26 less a tenth of them are 23.4: 24 keep their noise to themselves
    assert sqrt(24) * numbers.noise / largest_step(numbers.bits) == pytest.approx(1.0)
    assert any(
        "off sums of at least 26 updates is trusted" in line for line in statement(plan).assumed
    )
    own = parse(text.replace(NOISY, f"{NOISY}colluding = 0.3\n"))
    assert own.privacy is not None
    assert own.privacy.colluding == 0.3
