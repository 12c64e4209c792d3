"""What of a scenario contradicts itself about own laws of failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fleetlearn_coordinator.plan.toml_errors import near
from fleetlearn_protocol import extensions

from fleetlearn_simulator.scenario.own_algorithms import FAILURE_LAW
from fleetlearn_simulator.scenario.sections import HAZARDS

if TYPE_CHECKING:
    from fleetlearn_simulator.scenario.scenario import Scenario

_PHASES = ("download", "train", "upload")


def law_contradictions(scenario: Scenario) -> Iterator[str]:
    """Yield what does not go together in [failures] and in the tiers' tables of it."""
    failures = scenario.failures
    if failures.law == HAZARDS:
        if failures.parameters:
            yield (
                f"failures.parameters = {failures.parameters} are for an own law; failures.law is "
                f'"{HAZARDS}", whose keys are {", ".join(_PHASES)}'
            )
        return
    if not extensions.is_extension(FAILURE_LAW, failures.law):
        yield (
            f'failures.law = "{failures.law}" is not known{near(failures.law, [HAZARDS])} It takes '
            f'"{HAZARDS}", or {FAILURE_LAW.own}'
        )
    tables = {"failures": failures} | {
        f"tiers.{name}.failures": tier.failures for name, tier in scenario.tiers.items()
    }
    for where, table in tables.items():
        for phase in _PHASES:
            if value := getattr(table, phase):
                yield (
                    f'{where}.{phase} = {value} is a hazard of the law "{HAZARDS}"; '
                    f'failures.law = "{failures.law}" says when devices vanish. Leave one out'
                )
