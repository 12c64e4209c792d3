"""A run's data directory with few rounds whose numbers are written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import (
    ExchangeBegun,
    ExchangeEnded,
    Metadata,
    ModelMade,
    RoundClosed,
    RoundOpened,
)

DROPPED = {"lost": 2, "rejected: out-of-range": 3, "surplus": 4}


def write_computation_run(data: Path) -> Path:
    """A run of statistics with two rounds."""
    data.mkdir(parents=True, exist_ok=True)
    storage = find_storage(data)
    with storage.lock():
        ledger = storage.open_ledger(power=False, any_thread=False)
        plan = '{"round": {"goal": 5}, "local": {"algorithm": "statistics"}}'
        ledger.create({"plan": plan, "stop": '{"rounds": 1000000}'})
        for number in (1, 2):
            summary = {
                "reports": 5,
                "partial": 0,
                "dropped": {},
                "metrics": {},
                "train": {},
                "change": 0.5,
                "bytes_down": 1000,
                "bytes_up": 2000,
                "seconds": 59.5,
                "computation": f"exchange {number} of 2",
            }
            ledger.write(
                [
                    RoundOpened(number, 60.0 * number),
                    ModelMade(number, f"{number:064d}", number, 60.0 * (number + 1)),
                    RoundClosed(number, "committed", summary, 60.0 * (number + 1)),
                ]
            )
        ledger.close()
    return data


def write_hand_written_run(data: Path, *, finished: bool = False) -> Path:
    """Rounds 1 and 3 are committed and 2 is abandoned, one a minute, from 60 s on; the model of the
    first is evaluated on devices and on held-out data."""
    data.mkdir(parents=True, exist_ok=True)
    storage = find_storage(data)
    with storage.lock():
        ledger = storage.open_ledger(power=False, any_thread=False)
        ledger.create({"plan": '{"round": {"goal": 9}}'})
        for number in (1, 2, 3):
            add_round(ledger, number)
        add_evaluation(ledger)
        if finished:
            ledger.write([Metadata("finished", "3 rounds were wanted")])
        ledger.close()
    storage.held_out.write(1, {"examples": 4, "metrics": {"accuracy": 0.75}})
    return data


def add_round(ledger: Any, number: int) -> None:
    made = number != 2
    summary: dict[str, Any] = {
        "reports": 5,
        "partial": 1,
        "dropped": DROPPED,
        "metrics": {"loss": 1.0 / number, "accuracy": 0.1 * number} if made else {},
        "train": {"loss": 1.0 / number} if made else {},
        "evaluation": {"accuracy": 0.1 * number} if made else {},
        "change": 0.5 if made else 0.0,
        "bytes_down": 1000,
        "bytes_up": 2000,
        "seconds": 59.5,
    }
    rows: list[Any] = [RoundOpened(number, 60.0 * number)]
    if made:
        version = 1 if number == 1 else number - 1
        rows.append(ModelMade(version, f"{version:064d}", number, 60.0 * (number + 1)))
    outcome = "committed" if made else "abandoned"
    rows.append(RoundClosed(number, outcome, summary, 60.0 * (number + 1)))
    ledger.write(rows)


def add_evaluation(ledger: Any) -> None:
    summary = {"devices": 7, "examples": 70, "metrics": {"accuracy": 0.6}}
    ledger.write(
        [
            ExchangeBegun("evaluation", 1, 1, 1, None, None, 130.0),
            ExchangeEnded("evaluation", 1, 1, "valid", summary, 150.0),
        ]
    )
