"""What devices state, and which rules keep them from tasks."""

from __future__ import annotations

from typing import Any

import pytest
from fleetlearn_coordinator.rounds.selection_rules import Eligibility, Stated, labels_of, stated_in
from fleetlearn_protocol.messages import CheckIn

GOOD = Stated(100, "onnx", 2**30, frozenset({"tier:phone", "tag:eu"}), True, "unmetered")
ALL = Eligibility(
    least_examples=100,
    least_memory=2**30,
    runtimes=frozenset({"onnx"}),
    all_labels=frozenset({"tag:eu"}),
    no_labels=frozenset({"tag:beta"}),
    tiers=frozenset({"tier:phone"}),
    charging=True,
    unmetered=True,
)


def test_a_check_in_states_labels_and_the_runtime_s_name() -> None:
    message = CheckIn(
        1,
        "d",
        7,
        "onnx 1.31.1 on cuda",
        memory=5,
        tags=("eu",),
        tier="phone",
        charging=False,
        network="metered",
    )
    assert stated_in(message) == Stated(7, "onnx", 5, labels_of("phone", ("eu",)), False, "metered")
    assert stated_in(CheckIn(1, "d", 7)) == Stated(7)


def test_who_meets_every_rule_is_eligible() -> None:
    assert ALL.refusals(GOOD) == {}
    assert Eligibility().refusals(Stated()) == {}


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"examples": 99}, "least_examples", "99 examples"),
        ({"memory": 2**30 - 1}, "least_memory", "1024 MiB of memory"),
        ({"memory": None}, "least_memory", "memory not stated"),
        ({"runtime": "ort-training"}, "runtimes", "runtime ort-training"),
        ({"runtime": ""}, "runtimes", "runtime not stated"),
        ({"labels": frozenset({"tier:phone"})}, "tags", "no tag:eu"),
        ({"labels": GOOD.labels | {"tag:beta"}}, "without_tags", "tag:beta"),
        ({"labels": frozenset({"tag:eu", "tier:pi"})}, "tiers", "tier:pi"),
        ({"labels": frozenset({"tag:eu", "tag:phone"})}, "tiers", "tier not stated"),
        ({"charging": False}, "charging", "not charging"),
        ({"charging": None}, "charging", "not charging"),
        ({"network": "metered"}, "unmetered", "network metered"),
        ({"network": None}, "unmetered", "network not stated"),
    ],
)
def test_each_rule_keeps_others_out(change: dict[str, Any], key: str, said: str) -> None:
    assert ALL.refusals(GOOD._replace(**change)) == {key: said}
