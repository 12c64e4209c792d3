"""A committed model, with all that the rounds after it need of the rounds before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_coordinator.aggregation import adaptive_mu
from fleetlearn_coordinator.aggregation.adaptive_mu import MuState
from fleetlearn_coordinator.aggregation.optimizers import State
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.tied_sum import EMPTY_SUM, TiedSum
from fleetlearn_coordinator.aggregation.weighing.weighing import WeighingState


@dataclass(frozen=True, eq=False)
class ModelState:
    """One version of the model. A round begins from one, and its commit makes the next. Nobody
    writes into its arrays; what follows from it is computed when it is asked for."""

    version: int
    model: Vector
    """float32, shape (P,)."""
    optimizer_state: State
    """Of the server optimizer."""
    vectors: Mapping[str, Vector]
    """What devices fetch beside the model, by name: SCAFFOLD's c."""
    weighing: WeighingState
    """What the committed rounds decide of the next round's weighing."""
    mu: MuState
    """What they decide of its mu, where the plan lets mu follow the loss."""
    tied_sum: TiedSum = EMPTY_SUM
    """What is known of c or h, where the algorithm has one of them."""
    privacy: PrivacyState | None = None
    """What the releases so far leave for the next one, where the plan has [privacy]."""
    members: tuple[ModelState, ...] = ()
    """Of a family (family_round.py): the members' states in order. Their arrays are parts of this
    one's. Empty: the run has one model."""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the model's bytes."""
        return digest(self.model)

    @cached_property
    def vector_digests(self) -> Mapping[str, str]:
        """The SHA-256 of each of the vectors, by name."""
        return {name: digest(vector) for name, vector in self.vectors.items()}


def make_state(
    rules: RoundRules,
    last: Mapping[str, Any] | None,
    *,
    version: int,
    model: Vector,
    optimizer_state: State,
    vectors: Mapping[str, Vector],
    tied_sum: TiedSum = EMPTY_SUM,
    privacy: PrivacyState | None = None,
) -> ModelState:
    """Return the state at this model. ``last``: the summary of the last committed round; None
    before the first."""
    return ModelState(
        version,
        model,
        optimizer_state,
        vectors,
        rules.weighing.state_after(last),
        adaptive_mu.state_after(last, rules.first_mu),
        tied_sum,
        privacy,
    )
