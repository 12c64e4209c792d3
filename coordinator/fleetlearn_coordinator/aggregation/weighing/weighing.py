"""How the updates of a round are weighed, beside their examples and their staleness.

Each update x_i is multiplied by its factor when it is added, and the mean by a scale when all are
there:

    scale * sum(w_i * s_i * c_i * f_i * x_i) / sum(w_i)

with the weight w_i, staleness's factor s_i (staleness.py), the clip factor c_i of the norm bound
(norm_bound.py), and the factor f_i of the plan's rule (normalised.py, fair.py). Without a rule f_i
and the scale are 1. Rows marked ``buffer`` are no part of the update: the devices measured them,
and report their values (value_sum.py), which have no f_i and no scale.

Factors are above 0 and at most 1, as staleness's are, so that the exact sum holds as many updates
as without them: a rule with larger ones divides them by their largest value, and the scale
multiplies by it. A factor depends on its report and on the rounds that were committed before, not
on the other reports, so that updates can be added as they arrive. The scale depends on the set of
the round's reports: sums over them are fsum's, which rounds once, whatever the order.

What one round leaves for the next (``WeighingState``) is in the round's summary, and so survives
the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.messages import Evaluation, Report
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.own_calls import call_own
from fleetlearn_coordinator.aggregation.weighing import norm_bound
from fleetlearn_coordinator.aggregation.weighing.norm_bound import NormBound
from fleetlearn_coordinator.aggregation.weighing.norms import NOT_MEASURED, Norms

REFUSED = f"rejected: {Code.NORM_TOO_LARGE.value}"
"""The cause of a task's end whose update was too long. It begins as rounds/commands.py::REJECTED,
which this part does not import."""


class Reported(NamedTuple):
    """What is known of an accepted update beside its elements."""

    weight: int
    steps: int
    """Optimizer steps that the device did."""
    loss: float
    """The mean loss, on the device's data, of the model that its task began from."""
    norms: Norms = NOT_MEASURED
    clipped: bool | None = None
    """Whether the device had to shorten its update to the clip norm of a private round. None: it
    did not say."""

    def measured(self, evaluation: Evaluation | None) -> Reported:
        """Return the same with the loss that the device measured. None: it did not; its training's
        loss counts."""
        return (
            self
            if evaluation is None
            else self._replace(loss=evaluation.loss_sum / evaluation.examples)
        )


def reported_of(report: Report, weight: int, norms: Norms) -> Reported:
    """Return what is known of an update."""
    reported = Reported(weight, report.steps, report.loss, norms, report.clipped)
    return reported.measured(report.evaluation)


class WeighingState(NamedTuple):
    """What the committed rounds decide of the open one."""

    bound: float
    """On the norm of its updates. In a private round: the clip norm of ``PrivacyState``."""
    level: float | None
    """The rule's own number; None in its first round."""


class WeighingRule(NamedTuple):
    """An algorithm's way to weigh. ``level`` is a number that it carries from round to round."""

    name: str
    factor: Callable[[Reported, float | None], float]
    """The report, level -> f_i, above 0 and at most 1."""
    scale: Callable[[Collection[Reported], float | None], float]
    """The round's reports, their norms after clipping, and the level -> the scale. The same in
    every order."""
    next_level: Callable[[Collection[Reported], float | None], float | None]
    """The same -> the level of the next round."""
    needs_norms: bool
    needs_losses: bool


def own_rule(name: str, made: WeighingRule) -> WeighingRule:
    """Return a rule of another package, whose numbers are checked. ``name``: as the plan has it.
    What it returns raises FleetError where a number is none that a rule may give."""

    def factor(reported: Reported, level: float | None) -> float:
        return _of_own(made.factor, (reported, level), "a factor", most=1.0)

    def scale(reports: Collection[Reported], level: float | None) -> float:
        return _of_own(made.scale, (reports, level), "a scale", most=math.inf)

    def next_level(reports: Collection[Reported], level: float | None) -> float | None:
        def number() -> float | None:
            found = made.next_level(reports, level)
            return None if found is None else float(found)

        found = call_own("aggregation.weighing", number)
        if found is not None and not math.isfinite(found):
            raise FleetError(
                Code.NOT_FINITE, f"aggregation.weighing returned the level {found} for next round"
            )
        return found

    return made._replace(name=name, factor=factor, scale=scale, next_level=next_level)


def _of_own(
    function: Callable[..., float], given: tuple[Any, ...], what: str, most: float
) -> float:
    value = call_own("aggregation.weighing", lambda: float(function(*given)))
    if not math.isfinite(value) or not 0 < value <= most:
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        raise FleetError(
            Code.BAD_MESSAGE,
            f"aggregation.weighing returned {value} for {what}; expected one above 0{limit}",
        )
    return value


class Weighing(NamedTuple):
    """What a plan says of how updates are weighed."""

    rule: WeighingRule | None = None
    bound: NormBound | None = None

    @property
    def is_plain(self) -> bool:
        """Whether weight and staleness are all."""
        return self.rule is None and self.bound is None

    @property
    def needs_norms(self) -> bool:
        return self.bound is not None or (self.rule is not None and self.rule.needs_norms)

    @property
    def needs_losses(self) -> bool:
        return self.rule is not None and self.rule.needs_losses

    def state_after(self, summary: Mapping[str, Any] | None) -> WeighingState:
        """Return the state of the round after the last committed one. summary: that last round's;
        None before the first."""
        found = summary or {}
        bound = 0.0 if self.bound is None else self.bound.first
        if self.bound is not None and self.bound.quantile is not None:
            bound = found.get("norm", {}).get("next", bound)
        return WeighingState(bound, found.get("weighing", {}).get("next_level"))

    def check(self, reported: Reported, state: WeighingState) -> None:
        """Raise ProtocolError (norm-too-large) if the update must be refused."""
        if not self.passes_check(reported, state):
            raise ProtocolError(
                Code.NORM_TOO_LARGE,
                f"the update's L2 norm is {reported.norms.update:.6g}; the plan's bound is "
                f"{state.bound:.6g} now",
            )

    def passes_check(self, reported: Reported, state: WeighingState) -> bool:
        """Return whether ``check`` lets the update pass."""
        refuses = self.bound is not None and self.bound.action == "refuse"
        return not refuses or reported.norms.update <= state.bound

    def factor(self, reported: Reported, state: WeighingState) -> float:
        """Return what the update is multiplied by, beside weight and staleness: c_i * f_i."""
        factor = 1.0
        if self.bound is not None and self.bound.enforced is not None:
            norm, weight = reported.norms.update, reported.weight
            factor = norm_bound.enforced_factor(norm, weight, state.bound, self.bound.enforced)
        elif self.bound is not None and self.bound.action == "clip":
            factor = norm_bound.clip_factor(reported.norms.update, state.bound)
        return factor if self.rule is None else factor * self.rule.factor(reported, state.level)

    def factor_of_values(self, values: Vector, present: Vector, state: WeighingState) -> float:
        """Return how far the values of a report's buffers count, beside weight and staleness.
        ``present``: those of the present model. Both are float32, shape (B,)."""
        if self.bound is None or not values.size:
            return 1.0
        return norm_bound.clip_factor(norm_bound.distance(values, present), state.bound)

    def clips(self, reported: Reported, state: WeighingState) -> bool:
        """Return whether the update was longer than the bound: by its device's word, which clips
        before it sends, else by its norm."""
        return bool(reported.clipped) or reported.norms.update > state.bound

    def scale(self, reports: Collection[Reported], state: WeighingState) -> float:
        """Return what the mean of the round's trained parameters is multiplied by."""
        return (
            1.0
            if self.rule is None
            else self.rule.scale(self._clipped(reports, state), state.level)
        )

    def summary(
        self, reports: Collection[Reported], dropped: Mapping[str, int], state: WeighingState
    ) -> dict[str, Any]:
        """Return what goes into the round's summary. ``dropped``: cause -> tasks that ended so."""
        found: dict[str, Any] = {}
        if self.bound is not None and self.bound.enforced is None:
            norms = [each.norms.update for each in reports]
            within, refused = sum(norm <= state.bound for norm in norms), dropped.get(REFUSED, 0)
            found["norm"] = {
                "bound": state.bound,
                "clipped": len(norms) - within if self.bound.action == "clip" else 0,
                "refused": refused,
                "next": norm_bound.next_bound(
                    self.bound, state.bound, within, len(norms) + refused
                ),
            }
        if self.rule is not None and reports:
            clipped = self._clipped(reports, state)
            found["weighing"] = {
                "rule": self.rule.name,
                "scale": self.rule.scale(clipped, state.level),
                "next_level": self.rule.next_level(clipped, state.level),
            }
        return found

    def _clipped(self, reports: Collection[Reported], state: WeighingState) -> Collection[Reported]:
        """Return the reports with the norms that their updates count with."""
        if self.bound is None or not self.rule or not self.rule.needs_norms:
            return reports
        found = []
        for each in reports:
            factor = norm_bound.clip_factor(each.norms.update, state.bound)
            found.append(
                each._replace(norms=Norms(each.norms.update * factor, each.norms.trained * factor))
            )
        return found


PLAIN = Weighing()
