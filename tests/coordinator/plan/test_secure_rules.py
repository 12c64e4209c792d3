"""Which plans with [secure] are refused, each with its reason, and what a round of them follows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.secure_rules import SECURE_RULES
from fleetlearn_coordinator.service.live_run import about_plan
from fleetlearn_protocol.manifest import Parameter
from plans import PAIRWISE, PRIVATE, SECURE, SMALL, manifest

SGD = manifest(proximal=False, hyper=(), metrics=("accuracy",))
STOPS = '[stop]\nmetric = "accuracy"\ntarget = 0.9\n'
UNCLIPPED = SECURE.replace("clip = 0.5\n", "")
EQUAL, BY_EXAMPLES = 'weighting = "uniform"\n', 'weighting = "examples"\n'
BROKEN = {
    **{
        name: (f'{SMALL}[aggregation]\naggregator = "{name}"\n{SECURE}', "compares each update")
        for name in ("median", "trimmed-mean", "geometric-median", "centred-clipping")
    },
    "fednova": (f'recipe = "fednova"\n{SMALL}{SECURE}', "aggregation.normalise = true with"),
    "own algorithm": (
        f'{SMALL}[local]\nalgorithm = "mine:train"\n{SECURE}',
        'local.algorithm = "mine:train" with [secure]: nobody has shown',
    ),
    "own weighing": (
        f'recipe = "fedavg"\n{SMALL}{SECURE}[aggregation]\nweighing = "mine:rule"\n',
        'aggregation.weighing = "mine:rule" with [secure]',
    ),
    "own staleness": (
        f'recipe = "fedbuff"\n{SMALL}{SECURE}[staleness]\nfunction = "mine:function"\n',
        'staleness.function = "mine:function" with [secure]',
    ),
    "q-fedavg": (f'recipe = "q-fedavg"\n{SMALL}{SECURE}', "aggregation.q = 1.0 with [secure]"),
    "max_norm": (f"{SMALL}[aggregation]\nmax_norm = 2.0\n{SECURE}", "aggregation.max_norm = 2"),
    **{
        name: (
            f'{SMALL}[local]\nalgorithm = "{name}"\n[server]\ndevices = 9\n{SECURE}',
            f'local.algorithm = "{name}" with [secure]',
        )
        for name in ("scaffold", "scaffold-gradient", "feddyn")
    },
    "a schedule": (
        f"{SMALL}[local.schedule]\nwarm_up = 3\n{SECURE}", "It takes a fixed local.lr, or"
    ),
    "a schedule by step that goes on over rounds": (
        f"{SMALL}[local.step_schedule]\nwarm_up = 3\nsteps_per_round = 4\n{SECURE}",
        "Leave it out: then each task begins at step 0",
    ),
    "fedprox-adaptive": (
        f'recipe = "fedprox-adaptive"\n{SMALL}{SECURE}', "mu follows the devices' losses"
    ),
    **{
        name: (f'{SMALL}[selection]\nstrategy = "{name}"\n{SECURE}', "it chooses devices by their")
        for name in ("oort", "power-of-choice")
    },
    "inverse-participation": (
        f'recipe = "fedbuff"\n{SMALL}weighting = "inverse-participation"\n{SECURE}',
        "a device masks its weight",
    ),
    "fedasync": (
        f'recipe = "fedasync"\nname = "a"\nbundle = "b"\n{SECURE}minimum = 2', "server.mix = true"
    ),
    "a share of a device": (
        f'recipe = "fedbuff"\n{SMALL}max_share = 0.5\n{SECURE}', "one update counts in a round"
    ),
    "int8": (f'{SMALL}[encoding]\nup = "int8"\n{SECURE}', 'encoding.up = "int8" with [secure]'),
    "topk": (f'{SMALL}[encoding]\nup = "topk-0.1"\n{SECURE}', 'encoding.up = "topk-0.1" with'),
    "a minimum of one": (
        f"{SMALL}minimum = 1\n{SECURE}", "round.minimum = 1 is less than secure.minimum = 2"
    ),
    "a larger minimum": (
        f"{SMALL}{SECURE}minimum = 3", "round.minimum = 2 is less than secure.minimum = 3"
    ),
    "too many bits": (
        f"{SMALL.replace('4', '4097')}{SECURE}bits = 20", "at most 4096 such updates can be added"
    ),
    "too many for 12 bits": (
        f"{SMALL.replace('4', '4098')}{SECURE}bits = 12",
        "at most 4097 such updates can be added modulo 2^24",
    ),
    "noise of devices in 12 bits": (
        f'{SMALL}{PRIVATE}mechanism = "distributed"\n{SECURE}bits = 12',
        "needs room that sums modulo 2^24 do not have",
    ),
    "too many updates": (f"{SMALL.replace('4', '65538')}{SECURE}", "at most 65537 such updates"),
    "measured": (f"{SMALL}[local]\nevaluate = true\n{SECURE}", "would measure for nothing"),
    "an evaluation": (f"{SMALL}[evaluation]\nevery = 5\n{SECURE}", "evaluation.every = 5 with"),
    "a stop by the round": (f"{SMALL}{STOPS}{SECURE}", 'stop.metric = "accuracy" with [secure] is'),
    "the best by the round": (
        f'{SMALL}[models]\nbest = 1\nmetric = "loss"\n{SECURE}', 'models.metric = "loss" with'
    ),
    "local noise": (
        f'{SMALL}{PRIVATE}mechanism = "local"\n{SECURE}', "noise has no largest element"
    ),
    "an adaptive clip norm": (
        f"{SMALL}{PRIVATE}clip_quantile = 0.5\n{SECURE}", "nobody counts how many updates"
    ),
    "noised metrics": (
        f'{SMALL}[local]\nevaluate = true\n{PRIVATE}metrics = "noised"\n'
        f"metrics_bounds = {{accuracy = [0, 1]}}\n{SECURE}",
        'privacy.metrics = "noised" with [secure]',
    ),
    "no clip norm": (f"{SMALL}{UNCLIPPED}", "secure.clip is missing"),
    "two clip norms": (
        f"{SMALL}{PRIVATE}{UNCLIPPED}clip = 0.7", "secure.clip = 0.7 is not privacy.clip = 0.5"
    ),
}  # fmt: skip


def parse(text: str) -> Plan:
    return Plan.parse(text, Path("/base"), file="my.toml")


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_needs_single_updates_is_refused_with_the_reason(name: str) -> None:
    text, said = BROKEN[name]
    with pytest.raises(PlanError) as refused:
        parse(text)
    assert said in refused.value.text


def test_each_rule_is_broken_by_a_plan_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no plan breaks could be wrong for ever."""
    monkeypatch.setattr("fleetlearn_coordinator.plan.plan.contradictions", lambda plan: ())
    plans = [parse(text) for text, _ in BROKEN.values()]
    for whole in (parse(f"{SMALL}{SECURE}"), parse(f"{SMALL}{PRIVATE}{UNCLIPPED}")):
        assert not any(rule.breaks(whole) for rule in SECURE_RULES)
    for rule in SECURE_RULES:
        assert any(rule.breaks(plan) for plan in plans)
        assert not rule.breaks(parse(SMALL)), "plans without [secure] are another matter"


def test_the_example_is_a_plan() -> None:
    plan = Plan.load(Path(__file__).parents[3] / "examples" / "secure.toml")
    assert plan.secure is not None
    assert (plan.secure.minimum, plan.secure.bits) == (plan.round.minimum, 20)
    assert plan.privacy is not None


def test_a_bundle_with_buffers_is_refused() -> None:
    plan, whole = parse(f"{SMALL}{SECURE}"), SGD
    plan.check_bundle(whole)
    kept = Parameter("mean", (2,), whole.size, buffer=True)
    with_buffers = msgspec.structs.replace(whole, parameters=(*whole.parameters, kept))
    parse(SMALL).check_bundle(with_buffers)
    with pytest.raises(PlanError, match="travel beside the update, without a mask"):
        plan.check_bundle(with_buffers)


@pytest.mark.parametrize(("elements", "fits"), [(4095**2, True), (4095**2 + 1, False)])
def test_a_bundle_whose_rounded_zeros_are_longer_than_the_clip_norm_is_refused(
    elements: int, fits: bool
) -> None:
    """Each of P words means C / 4095 at least, so that the norm is C * sqrt(P) / 4095 or more."""
    short = parse(f"{SMALL}{SECURE}bits = 12\n")
    large = msgspec.structs.replace(SGD, parameters=(Parameter("w", (elements,), 0),))
    if fits:
        short.check_bundle(large)
    else:
        with pytest.raises(PlanError, match="at most 16769025 fit"):
            short.check_bundle(large)
    parse(f"{SMALL}{SECURE}").check_bundle(large)  # of 20 bits


def test_no_device_is_asked_for_an_update_without_a_mask() -> None:
    """Other plans let a device that does not know the encoding send float32."""
    plan = parse(f"{SMALL}{SECURE}")
    assert plan.parts(SGD) == plan.exact_parts(SGD) == {"update": "masked"}
    assert parse(SMALL).exact_parts(SGD) == {"update": "float32"}


@pytest.mark.parametrize("name", ["masked", "masked24"])
def test_masked_is_no_encoding_that_a_plan_names(name: str) -> None:
    with pytest.raises(PlanError, match="updates are masked where the plan has"):
        parse(f'{SMALL}[encoding]\nup = "{name}"\n')


def test_12_bits_travel_in_three_bytes_and_the_plan_says_what_they_cost() -> None:
    """clip 0.5: a step is 1 / 4095, and half of it, 0.000122, is the most deviation of one update;
    of the mean of 4 half of that."""
    plan = parse(f"{SMALL}{SECURE}bits = 12")
    plan.check_against(SGD)
    assert plan.parts(SGD) == plan.exact_parts(SGD) == {"update": "masked24"}
    assert plan.round_rules(SGD).secure == FixedPoint(0.5, 12, True)
    (said,) = [text for text in plan.remarks(SGD) if "secure.bits" in text]
    for figure in ("multiple of 0.000244", "at most 0.000122 to it", "at most 6.11e-05 to"):
        assert figure in said
    assert not any("secure.bits" in text for text in parse(f"{SMALL}{SECURE}").remarks(SGD))


@pytest.mark.parametrize(
    ("weighting", "equal"), [("", True), (EQUAL, True), (f"{BY_EXAMPLES}max_weight = 60\n", False)]
)
def test_the_rounds_follow_the_plan(weighting: str, equal: bool) -> None:
    rules = parse(f"{SMALL}{weighting}{SECURE}").round_rules(SGD)
    assert rules.secure == FixedPoint(0.5, 20, equal)
    assert rules.aggregators["update"].name == "modular sum"


def test_a_device_counts_once_in_a_round() -> None:
    """A set of the helper has as many devices as updates: else rounds with enough updates would be
    refused, for a lack of devices."""
    buffered = f'recipe = "fedbuff"\n{SMALL}'
    assert parse(buffered).engine_settings(1.0).max_updates is None
    assert parse(f"{buffered}{SECURE}").engine_settings(1.0).max_updates == 1


def test_weights_by_examples_need_a_bound_that_they_are_shares_of() -> None:
    """A device with 10 examples of at most 1,000,000 has a share of 1e-5, and of its update's 20
    bits 3 are left."""
    with pytest.raises(PlanError, match=r"with \[secure\] needs round.max_weight"):
        parse(f"{SMALL}{BY_EXAMPLES}{SECURE}")
    parse(f"{SMALL}{BY_EXAMPLES}")


def test_with_privacy_the_noise_is_for_the_norm_that_devices_clip_to() -> None:
    plan = parse(f"{SMALL}{PRIVATE}{UNCLIPPED}")
    rules = plan.round_rules(SGD)
    assert rules.secure is not None
    assert rules.privacy is not None
    assert rules.secure.bound == rules.privacy.clip == 0.5
    assert rules.weighing.bound is None, "the coordinator has no norms to look at"
    assert any("devices clip their updates" in text for text in plan.remarks(SGD))
    assert not any("devices clip" in text for text in parse(f"{SMALL}{SECURE}").remarks(SGD))


def test_plans_of_both_modes_are_served() -> None:
    parse(f"{SMALL}{SECURE}").check_against(SGD)
    parse(f"{SMALL}minimum = 4\n{PAIRWISE}").check_against(SGD)


def test_people_see_nothing_of_what_devices_of_a_masked_run_measure() -> None:
    """The page of the devices' owners and the live page say so, and offer no evaluation."""
    assert parse(SMALL).hidden_metrics is None
    assert parse(f"{SMALL}{SECURE}").hidden_metrics == "none"
    assert about_plan(parse(f"{SMALL}{SECURE}"))["private"] == "none"
    assert "private" not in about_plan(parse(SMALL))
