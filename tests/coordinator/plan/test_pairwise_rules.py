"""[secure] with mode = "pairwise": its defaults, its graph, and what it is refused with."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.pairwise_rules import graph_for
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_protocol.secure.graph import graph_of
from plans import PAIRWISE, SECURE, SMALL

ROUND = SMALL.replace("goal = 4", "goal = {goal}\nminimum = {minimum}")


def secure_of(text: str):
    secure = Plan.parse(text, Path("/base")).secure
    assert secure is not None
    return secure


def test_defaults() -> None:
    secure = secure_of(f"{SMALL}minimum = 4\ndeadline = 90\n{PAIRWISE}")
    assert (secure.adversaries, secure.dropouts, secure.server) == (0.05, 0.1, "semi-honest")
    assert (secure.degree, secure.threshold, secure.roster, secure.deadline) == (
        None, None, None, 90.0,
    )  # fmt: skip
    assert secure_of(f"{SMALL}minimum = 4\ndeadline = 900\n{PAIRWISE}").deadline == 300.0
    assert secure_of(f"{SMALL}minimum = 4\n{PAIRWISE}roster = 'a.txt'").roster == Path(
        "/base/a.txt"
    )


def test_the_graph_follows_the_number_of_devices() -> None:
    large = ROUND.format(goal=1000, minimum=300) + PAIRWISE
    secure = secure_of(large)
    assert graph_for(secure, 1000) == graph_of(1000, 0.05, 0.1) == (36, 19)
    assert graph_for(secure, 20) == graph_of(20, 0.05, 0.1)
    assert graph_for(secure_of(f"{large}degree = 40\n"), 1000) == (40, 19)
    assert graph_for(secure_of(f"{large}degree = 40\nthreshold = 30\n"), 1000) == (40, 30)
    assert graph_for(secure_of(f"{large}degree = 40\nthreshold = 20\n"), 25) == (24, 20)
    small = ROUND.format(goal=40, minimum=30) + PAIRWISE
    semi = secure_of(f'{small}server = "semi-malicious"\n')
    assert graph_for(semi, 40) == graph_of(40, 0.05, 0.1, consistent=False) == (39, 30)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{SMALL}minimum = 2\n{PAIRWISE}", "and 2 devices (round.minimum): of 2 devices a share"),
        (
            ROUND.format(goal=1000, minimum=900) + f"{PAIRWISE}adversaries = 0.33\ndropouts = 0.33",
            "each would need 274 neighbours, and can have 96",
        ),
        (
            ROUND.format(goal=120, minimum=100) + f'{PAIRWISE}server = "semi-malicious"\n',
            "and 100 devices (round.minimum): where the coordinator may tell devices different",
        ),
        (
            ROUND.format(goal=40, minimum=30)
            + f'{PAIRWISE}server = "semi-malicious"\nthreshold = 20\n',
            "leave secure.degree and secure.threshold out",
        ),
        (
            ROUND.format(goal=40, minimum=10) + f"{PAIRWISE}degree = 20\nthreshold = 12\n",
            "and 10 devices (round.minimum): 12 neighbours of each of 10 devices would have to",
        ),
        (
            f'recipe = "fedbuff"\n{SMALL}minimum = 4\n{PAIRWISE}',
            'with round.participation = "asynchronous"',
        ),
        (f'{SMALL}minimum = 4\nlate = "carry"\n{PAIRWISE}', 'with round.late = "carry"'),
        (f"{SMALL}minimum = 4\n[pace]\nconnected = 9\n{PAIRWISE}", "pace.connected = 9: a device"),
        (f'{SMALL}minimum = 4\n{PAIRWISE}helper = "https://a.example"', 'secure.helper = "https:'),
        (f"{SMALL}{SECURE}dropouts = 0.2", 'secure.dropouts = 0.2 with secure.mode = "helper"'),
        (f"{SMALL}{SECURE}".replace("key =", "# key ="), "secure.key is missing"),
        (f"{SMALL}minimum = 4\n{PAIRWISE}degree = 3", "secure.degree"),
        (f"{SMALL}minimum = 4\n{PAIRWISE}degree = 98", "secure.degree"),
        (f"{SMALL}minimum = 4\n{PAIRWISE}adversaries = 1.0", "secure.adversaries"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text, Path("/base"))
    assert reason in str(caught.value)
