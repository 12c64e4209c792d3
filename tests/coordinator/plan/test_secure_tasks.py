"""What tasks of a plan with [secure] say, and who can have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.secure_tasks import secure_of_tasks, why_not_secure
from fleetlearn_protocol.messages import CheckIn, SecureTask
from plans import PRIVATE, SECURE, SMALL, manifest
from statistics_bundle import PLAN, statistics_bundle

SGD = manifest(proximal=False, hyper=(), metrics=("accuracy",))
KEY = "a" * 64


def secure_of(text: str) -> SecureTask | None:
    plan = Plan.parse(text, Path("/base"))
    return secure_of_tasks(plan, plan.round_rules(SGD))


def test_a_task_has_what_its_device_must_know_to_mask() -> None:
    assert secure_of(f"{SMALL}{SECURE}minimum = 2") == SecureTask("helper", 2, 20, helper=KEY)
    assert secure_of(SMALL) is None


def test_weights_by_examples_are_shares_of_the_most_that_count() -> None:
    found = secure_of(f'{SMALL}weighting = "examples"\nmax_weight = 300\n{SECURE}')
    assert found is not None
    assert found.most_weight == 300


@pytest.mark.parametrize(
    ("text", "least"),
    [
        (f'{SMALL}late = "carry"\n', 2**-0.5),  # one version
        (f'{SMALL}late = "carry"\n[staleness]\nmax = 3\na = 1.0\n', 0.25),
        (f'{SMALL}late = "carry"\n[staleness]\nfunction = "constant"\n', 1.0),
        (f'{SMALL}late = "carry"\n[staleness]\nfunction = "hinge"\nmax = 6\n', 1 / 21),
        (f'{SMALL}late = "carry"\n[staleness]\nmax = 0\n', 1.0),
        (f'{SMALL}late = "carry"\n[staleness]\na = 1e6\n', 1e-30),
        (f'recipe = "fedbuff"\n{SMALL}concurrency = 8\n', 21**-0.5),
    ],
)
def test_where_updates_may_be_stale_the_least_factor_is_that_of_the_stalest(
    text: str, least: float
) -> None:
    found = secure_of(f"{text}{SECURE}")
    assert found is not None
    assert found.least_factor == pytest.approx(least)


def test_noise_that_devices_add_is_said() -> None:
    private = PRIVATE + 'mechanism = "distributed"\n'
    found = secure_of(f"{SMALL}{private}{SECURE.replace('clip = 0.5', '')}")
    assert found is not None
    assert found.noise is not None
    assert found.noise > 1


def test_a_task_of_a_computation_says_how_many_sums_are_added(tmp_path: Path) -> None:
    settings = SECURE.replace("clip = 0.5", "")
    plan = Plan.parse(f"{PLAN}minimum = 2\n{settings}", tmp_path)
    rules = plan.round_rules(statistics_bundle(tmp_path).manifest)
    found = secure_of_tasks(plan, rules)
    assert found == SecureTask("helper", 2, 16, helper=KEY, reports=plan.round.cohort)
    told = why_not_secure(found, CheckIn(1, "a", 10, privacy=("secure",), encodings=("masked24",)))
    assert "masked sums travel as masked64" in told
    new = CheckIn(1, "a", 10, privacy=("secure",), encodings=("masked64",))
    assert why_not_secure(found, new) == ""


PLAIN, NOISY = SecureTask("helper", 2, 20), SecureTask("helper", 2, 20, noise=1.0)


@pytest.mark.parametrize(
    ("secure", "privacy", "told"),
    [
        (None, (), ""),
        (None, ("secure", "secure-noise"), ""),
        (None, ("secure", "secure-required"), "only in runs with secure aggregation"),
        (PLAIN, (), "the device cannot mask its update"),
        (PLAIN, ("clip", "local-noise", "required"), "the device cannot mask its update"),
        (PLAIN, ("secure",), ""),
        (PLAIN, ("secure", "secure-required"), ""),
        (NOISY, ("secure",), "add noise to their updates before they mask them"),
        (NOISY, ("secure", "secure-noise"), ""),
    ],
)
def test_a_device_is_told_why_it_has_no_task(
    secure: SecureTask | None, privacy: tuple[str, ...], told: str
) -> None:
    why = why_not_secure(secure, CheckIn(1, "a", 10, privacy=privacy))
    assert (told in why) if told else not why
