"""The factors of learning rates: the vectors' bits, the closed forms, PyTorch's schedulers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_protocol.learning_rates import factor_at, half_wave, power
from fleetlearn_protocol.messages import StepSchedule

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors" / "learning_rates.json"
CASES = json.loads(VECTORS.read_text("ascii"))["factors"]
LR = 0.3
STEPS = 40


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_bits_of_the_vectors(case: dict[str, Any]) -> None:
    schedule = msgspec.convert(case["schedule"], StepSchedule)
    found = [factor_at(schedule, step, case["steps"]) for step in range(case["steps"])]
    assert found == case["factors"]
    assert all(0 < factor <= 1 for factor in found)


def test_the_wave_and_the_power_are_those_of_the_libraries() -> None:
    for share in (number / 997 for number in range(998)):
        assert abs(half_wave(share) - (1 + math.cos(math.pi * share)) / 2) < 4e-16
    assert all(a > b for a, b in pairwise(half_wave(number / 997) for number in range(998)))
    assert [power(0.9, n) for n in range(60)] == pytest.approx([0.9**n for n in range(60)], 1e-14)
    assert power(0.5, 2**53 - 1) == 0.0


def rates_of_pytorch(kind: str, **settings: Any) -> list[float]:
    """The learning rates of as many steps of PyTorch's own scheduler."""
    import torch
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler = getattr(lr_scheduler, kind)(optimizer, **settings)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "kind", "settings"),
    [
        (StepSchedule("step", every=7, factor=0.5), "StepLR", {"step_size": 7, "gamma": 0.5}),
        (StepSchedule("exponential", factor=0.93), "ExponentialLR", {"gamma": 0.93}),
        (
            StepSchedule("linear", steps=25, least=0.1),
            "LinearLR",
            {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 25},
        ),
        (
            StepSchedule("cosine", least=0.01),
            "CosineAnnealingLR",
            {"T_max": STEPS, "eta_min": 0.01 * LR},
        ),
        (
            StepSchedule("constant", warm_up=12, start=0.2),
            "LinearLR",
            {"start_factor": 0.2, "total_iters": 12},
        ),
        (
            # OneCycleLR reaches its peak at step 0.3 * 40 - 1, and its end at step 39.
            StepSchedule("one-cycle", warm_up=11, start=1 / 25, steps=28, least=1 / 25e4),
            "OneCycleLR",
            {"max_lr": LR, "total_steps": STEPS + 1 - 1, "cycle_momentum": False},
        ),
    ],
)
def test_the_rates_are_pytorchs(
    schedule: StepSchedule, kind: str, settings: dict[str, Any]
) -> None:
    if kind == "OneCycleLR":
        settings = settings | {"total_steps": STEPS + 1}
        schedule = msgspec.structs.replace(schedule, warm_up=11, steps=29)
        settings["pct_start"] = 12 / (STEPS + 1)
    found = [LR * factor_at(schedule, step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(rates_of_pytorch(kind, **settings), rel=1e-12)


def test_a_task_goes_on_where_the_round_before_ended() -> None:
    whole = StepSchedule("cosine", warm_up=6, start=0.1, steps=34)
    first = [factor_at(whole, step) for step in range(20)]
    second = [factor_at(msgspec.structs.replace(whole, first=20), step) for step in range(20)]
    assert first + second == [factor_at(whole, step) for step in range(STEPS)]


def test_a_task_that_is_shorter_than_its_warm_up_ends_in_it() -> None:
    short = StepSchedule("linear", warm_up=10, start=0.5)
    assert [factor_at(short, step, 3) for step in range(3)] == pytest.approx([0.5, 0.55, 0.6])
