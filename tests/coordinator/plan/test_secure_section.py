"""[secure] of a plan: its defaults, and values that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from plans import PRIVATE, SECURE, SMALL


def secure_of(text: str):
    secure = Plan.parse(text, Path("/base")).secure
    assert secure is not None
    return secure


@pytest.mark.parametrize(
    ("goal", "bits"), [(4, 20), (4096, 20), (4097, 18), (16384, 18), (16385, 16), (65537, 16)]
)
def test_the_bits_follow_from_the_goal(goal: int, bits: int) -> None:
    assert secure_of(f"{SMALL.replace('4', str(goal))}{SECURE}").bits == bits


def test_the_minimum_is_the_round_s_and_the_clip_norm_the_private_one() -> None:
    assert secure_of(f"{SMALL}{SECURE}").minimum == 2
    assert secure_of(f"{SMALL}minimum = 3\n{SECURE}").minimum == 3
    assert secure_of(f"{SMALL}{PRIVATE}{SECURE.replace('clip = 0.5', '')}").clip == 0.5
    plan = Plan.parse(f"{SMALL}{SECURE}", Path("/base"))
    assert not plan.local.evaluate, "nobody would look at what devices measure"
    assert Plan.parse(SMALL, Path("/base")).secure is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('mode = "helper"', 'mode = "pairwise"', "secure.mode"),
        ('mode = "helper"\n', "", "secure.mode"),
        ("https://", "http://", "secure.helper"),
        ("https://helper.example:8770", "https://", "secure.helper"),
        ("a" * 64, "a" * 63, "secure.key"),
        ("b" * 64, "B" * 64, "secure.certificate"),
        ("clip = 0.5", "clip = 0.0", "secure.clip"),
        ("clip = 0.5", "", "secure.clip"),
        ("clip = 0.5", "clip = 0.5\nbits = 14", "secure.bits"),
        ("clip = 0.5", "clip = 0.5\nminimum = 1", "secure.minimum"),
        ("clip = 0.5", "clip = 0.5\nkeys = 1", "secure.key"),
    ],
)
def test_values_that_are_none_are_refused_by_name(old: str, new: str, said: str) -> None:
    assert old in SECURE
    with pytest.raises(PlanError, match=said):
        secure_of(f"{SMALL}{SECURE.replace(old, new)}")
