from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from fleetlearn_export import Exported, ExportError, LocalStep, export_bundle
from fleetlearn_export.inspection.memory_budget import Budget, memory_budget
from fleetlearn_export.inspection.step_memory import MIB
from fleetlearn_export.inspection.summary import summary
from step_peak import estimated, measured
from torch import nn

BATCH = 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200 MiB", 200 * MIB), ("1.5GB", 1_500_000_000), (" 64 kib ", 64 * 1024)],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert memory_budget(text, 16) == Budget(expected, 16)


@pytest.mark.parametrize(
    ("memory", "batch", "error"),
    [
        ("200", 16, "expected a number and a unit"),
        ("200 MiB", None, "needs batch"),
        (None, 16, "give memory too"),
    ],
)
def test_what_is_refused(memory: str | None, batch: int | None, error: str) -> None:
    with pytest.raises(ExportError, match=error):
        memory_budget(memory, batch)


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (3, 16, 16, 16, 16, 16):
        layers += [
            nn.Conv2d(inputs, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def texts(made: Exported) -> list[str]:
    return [line.text for group in summary(made.bundle, BATCH) for line in group]


def export(
    case: zoo.Case, folder: Path, memory: str | None, stages: list[str], **options: Any
) -> Exported:
    """Export within the memory, if it is given, and measure a step: its peak is near the
    estimate."""
    made = export_bundle(
        case.module,
        case.loss,
        case.batch(4),
        folder / "tight.bundle",
        memory=memory,
        batch=None if memory is None else BATCH,
        progress=stages.append,
        **options,
    )
    assert measured(made.bundle, BATCH) == pytest.approx(estimated(made.bundle, BATCH), rel=0.1)
    return made


@pytest.mark.slow
def test_a_bundle_within_a_budget_trains_as_before_in_less_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = zoo.classifier(convolutions(), zoo.numbers(3, 32, 32), 10)
    stages: list[str] = []

    def within(memory: str | None) -> int:
        made = export(case, tmp_path, memory, stages, step=LocalStep("momentum"))
        assert any("are computed twice" in text for text in texts(made)) == (memory is not None)
        return estimated(made.bundle, BATCH)

    whole = within(None)
    budget = f"{(whole - 40 * MIB) // MIB} MiB"
    assert within(budget) <= (whole - 40 * MIB)
    assert any("of results again" in stage for stage in stages)
    with pytest.raises(ExportError, match=r"does not fit into 20 MiB: it needs about \d+ MiB"):
        within("20 MiB")


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(96 * 64, 10),
    )


@pytest.mark.slow
def test_micro_batches_save_memory_where_no_layer_looks_at_the_whole_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = zoo.classifier(attention(), zoo.numbers(96, 64), 10)
    stages: list[str] = []

    def within(memory: str | None) -> int:
        made = export(
            case,
            tmp_path,
            memory,
            stages,
            step=LocalStep("adam", clip=True),
            hyper={"max_norm": 1.0},
        )
        assert made.difference < 1e-3
        assert any("25 examples at a time" in text for text in texts(made)) == (memory is not None)
        return estimated(made.bundle, BATCH)

    whole = within(None)
    tight = within("120 MiB")
    assert tight <= 120 * MIB < whole
    assert any("in micro-batches of 25 of 100 examples" in stage for stage in stages)


def test_micro_batches_of_fewer_examples_than_the_example_draw_their_own_numbers(
    tmp_path: Path,
) -> None:
    """The check compares a step with PyTorch, which draws dropout's numbers for the whole batch at
    once."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 16384), nn.Dropout(0.5), nn.Linear(16384, 4))
    case = zoo.classifier(wide, zoo.numbers(64), 4)
    stages: list[str] = []
    export_bundle(
        wide,
        case.loss,
        case.batch(16),
        tmp_path / "b",
        memory="96 MiB",
        batch=160,
        progress=stages.append,
    )
    (said,) = (stage for stage in stages if "micro-batches" in stage)
    assert int(said.partition("micro-batches of ")[2].split()[0]) < 16
