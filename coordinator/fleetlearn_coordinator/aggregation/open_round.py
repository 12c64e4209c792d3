"""A round over a model: reports in, the next model out. The server and the simulator have this one.

Nothing here reads files or clocks; which reports count, and when the round ends, is decided in
``rounds/``. A report takes three steps, so that a driver can make it durable in between:
``receive`` weighs and checks it, ``accept`` counts it, ``add`` adds its elements, in any thread.
Then ``summary`` and ``commit`` end the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.private_sums import in_rows
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import BUFFERS, CONTROL, SUMS, UPDATE
from fleetlearn_protocol.secure.fixed_point import WeightedSum, Words
from fleetlearn_protocol.vector import Vector, gather
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import adaptive_mu
from fleetlearn_coordinator.aggregation.accepted_reports import (
    AcceptedReports,
    evaluations_of,
    kept_of,
    measured,
    staleness_of,
    weighed_of,
)
from fleetlearn_coordinator.aggregation.commit import NextModel, TaskBase, next_model
from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.exact_mean import add_up
from fleetlearn_coordinator.aggregation.exact_sums import (
    ExactSums,
    check_short,
    read_sums,
    short_ones,
)
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.modular_sum import (
    FixedPoint,
    MaskedSum,
    SumWords,
    subtract,
    unmask,
    unmask_sums,
)
from fleetlearn_coordinator.aggregation.optimizers import change_norm
from fleetlearn_coordinator.aggregation.privacy.round_release import RoundRelease, release_round
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_summary import summarise_staleness
from fleetlearn_coordinator.aggregation.round_sums import RoundSums, next_control
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Values
from fleetlearn_coordinator.aggregation.weighing.norms import NOT_MEASURED, Norms, measure
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported

H = "h"
"""The slot of FedDyn's server."""


class Refusal(NamedTuple):
    """Why a report is not accepted."""

    row: int
    error: ProtocolError


class Received(NamedTuple):
    """What a round says of reports."""

    accepted: ReportColumns
    """Those before the first that is refused, weighed."""
    refusal: Refusal | None
    """Why the one after them is refused. None: all are accepted."""


class CommittedRound(NamedTuple):
    """What a round made."""

    state: ModelState
    summary: dict[str, Any]


class OpenRound:
    """The reports of a round, and their sums."""

    def __init__(self, rules: RoundRules, state: ModelState) -> None:
        """``state``: at the model that the round changes."""
        self.rules, self.state = rules, state
        self.weighing_state = state.weighing
        """What the committed rounds decide of this round's weighing."""
        if state.privacy is not None:
            self.weighing_state = state.weighing._replace(bound=state.privacy.clip)
        self.sums = RoundSums(rules.aggregators, state.model.size)
        self.accepted: list[AcceptedReports] = []
        """The reports that count, without their elements."""
        self.present = gather(state.model, rules.buffers)
        """The values of the buffers in the model that the round changes, (B,)."""

    # Reports

    def receive(self, reports: ReportColumns) -> Received:
        """Weigh and check reports. Nothing of the round changes: ``accept`` counts them, and
        ``add`` adds them."""
        weighed = reports
        if not self.rules.weighing.is_plain:
            weighed = replace(reports, weighed=self._weigh(reports))
        row = 0
        if len(reports) != 1:  # columns cost 10 us more than one report's check
            passes = self._passes(weighed)
            if passes.all():
                return Received(weighed, None)
            row = int(passes.argmin())
        try:
            self._check(weighed, row)
        except ProtocolError as error:
            return Received(weighed.first(row), Refusal(row, error))
        assert len(reports) == 1, f"report {row} is refused only together with others"
        return Received(weighed, None)

    def _weigh(self, reports: ReportColumns) -> list[Reported]:
        """Return what the weighing of these updates depends on; nothing where weight and staleness
        are all."""
        weighing, size, buffers = self.rules.weighing, self.state.model.size, self.rules.buffers
        norms: Sequence[Norms] = [NOT_MEASURED] * len(reports)
        if weighing.needs_norms:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
                norms = [
                    measure(reports.update(UPDATE, row), size, buffers)
                    for row in range(len(reports))
                ]
        clipped = reports.clipped or [None] * len(reports)
        weights, steps, losses = reports.weights, reports.steps, reports.loss
        columns = weights.tolist(), steps.tolist(), losses.tolist(), norms, clipped
        weighed = list(map(Reported._make, zip(*columns, strict=True)))
        if reports.evaluations:  # the loss before training says more than training's own
            pairs = zip(weighed, reports.evaluations, strict=True)
            weighed = [each.measured(evaluation) for each, evaluation in pairs]
        return weighed

    def _passes(self, reports: ReportColumns) -> NDArray[np.bool_]:
        """Return which reports ``_check`` lets pass, (n,)."""
        passes = self.sums.passes_check(reports)
        if BUFFERS in reports.largest:
            passes &= np.isfinite(reports.largest[BUFFERS])
        if self.rules.clips_sums:
            passes &= short_ones(reports.parts[SUMS])
        if self.rules.checks_sums:
            passes &= [self._can_be_sums(reports, row) for row in range(len(reports))]
        if reports.weighed:
            weighing, state = self.rules.weighing, self.weighing_state
            passes &= [weighing.passes_check(each, state) for each in reports.weighed]
        return passes

    def _check(self, reports: ReportColumns, row: int) -> None:
        """Raise ProtocolError (not-finite, out-of-range, norm-too-large) if a report must be
        refused."""
        largest = {part: float(column[row]) for part, column in reports.largest.items()}
        if not isfinite(largest.get(BUFFERS, 0.0)):
            raise ProtocolError(Code.NOT_FINITE, "a value of the model's buffers is not finite")
        self.sums.check(largest, int(reports.weights[row]))
        if self.rules.clips_sums:
            check_short(read_sums(reports.update(SUMS, row)))
        if self.rules.checks_sums:
            self._check_sums(reports, row)
        if reports.weighed:
            self.rules.weighing.check(reports.weighed[row], self.weighing_state)

    def _check_sums(self, reports: ReportColumns, row: int) -> None:
        """Raise ProtocolError (out-of-range) where a device's sums cannot be those of rows: the
        round could not go on from a total with them, nor any later one in which the device is."""
        assert self.rules.computation is not None
        self.rules.computation.check(read_sums(reports.update(SUMS, row)))

    def _can_be_sums(self, reports: ReportColumns, row: int) -> bool:
        try:
            self._check_sums(reports, row)
        except ProtocolError:
            return False
        return True

    def accept(self, reports: ReportColumns) -> None:
        """Count reports that ``receive`` accepted, for this round or an earlier one."""
        self.accepted.append(kept_of(reports))

    def add(self, reports: ReportColumns) -> None:
        """Add the parts of accepted reports to the sums. In any thread, one call at a time."""
        self.sums.add(reports, *self.terms(reports))

    def terms(self, reports: ReportColumns) -> tuple[Sequence[float], Values]:
        """Return with which factors, and which values of the buffers, accepted reports are
        added."""
        factors = list[float]()
        if self.rules.secure is None:  # else the device has multiplied before it masked
            # Not above 1, whatever the function: a private round counts on that.
            factors = [min(1.0, self.rules.staleness_factor(each)) for each in reports.staleness]
        values = self._values(reports, factors) if BUFFERS in reports.parts else NO_VALUES
        if reports.weighed:
            weighing, state = self.rules.weighing, self.weighing_state
            own = [weighing.factor(each, state) for each in reports.weighed]
            factors = [a * b for a, b in zip(factors or [1.0] * len(own), own, strict=True)]
        return factors, values

    def _values(self, reports: ReportColumns, stale: Sequence[float]) -> Values:
        """Return what reports say of the model's buffers. ``stale``: what their staleness leaves of
        it; empty: all of it."""
        column, size = reports.parts[BUFFERS], self.present.size
        rows = (
            column
            if isinstance(column, np.ndarray)
            else np.stack([each.read(0, size) for each in column])
        )
        factors = np.array(stale) if stale else np.ones(len(reports))
        if self.rules.weighing.bound is not None:
            weighing, state = self.rules.weighing, self.weighing_state
            factors *= [weighing.factor_of_values(row, self.present, state) for row in rows]
        return Values(rows, factors, self.present)

    # Masked updates that the helper does not add up

    def without(self, kept: Iterable[ReportColumns]) -> OpenRound:
        """Return the round in which of the accepted reports these alone count. It has the same
        sums: ``subtract`` takes the other reports off them."""
        rest = OpenRound(self.rules, self.state)
        rest.sums = self.sums
        for reports in kept:
            rest.accept(reports)
        return rest

    def subtract(self, reports: ReportColumns) -> None:
        """Take masked updates off the sum that ``add`` added. In any thread, one call at a time."""
        self.sums.add_waiting()
        ((part, state),) = self.sums.states.items()
        for row in range(len(reports)):
            subtract(state, reports.update(part, row))

    # The round's end

    def __len__(self) -> int:
        """How many reports count."""
        return sum(len(each.examples) for each in self.accepted)

    def summary(self, dropped: Mapping[str, int]) -> dict[str, Any]:
        """Return what is known of the reports and of their weighing, while the model stays as it
        is; ``commit`` states the model's change. ``dropped``: cause -> tasks that ended so."""
        rules, state = self.rules, self.state
        summary: dict[str, Any] = {
            "reports": len(self),
            "partial": len(self) - sum(int(each.complete.sum()) for each in self.accepted),
            **measured(self.accepted, rules),
        }
        if rules.outlive:
            summary["staleness"] = summarise_staleness(self.staleness())
        summary |= rules.weighing.summary(weighed_of(self.accepted), dropped, self.weighing_state)
        if rules.adaptive_mu:
            loss = summary["metrics"].get("loss")
            summary |= adaptive_mu.summary_of(state.mu, loss, rules.most_mu)
        return summary | {"dropped": dropped, "change": 0.0}

    def commit(
        self,
        number: int,
        summary: Mapping[str, Any],
        base: Vector | None = None,
        masks: Words | None = None,
    ) -> CommittedRound:
        """Make the next model of all reports, which must be added. Nothing of the round changes, so
        that this may run in any thread.

        ``number``: the round's. ``summary``: as ``summary`` returned it. ``base``: where the server
        mixes models, the one that the task of the only update began from. ``masks``: in a round of
        masked updates, the sum of exactly their masks, uint32, (P + 1,), or (3 S,) of sums. Raises
        ValueError if there are no reports, UnmaskError if the masks are not theirs, BadTotalError
        if a computation cannot go on from their sums, FleetError (not-finite: training has
        diverged).
        """
        rules, state = self.rules, self.state
        self.sums.add_waiting()
        if rules.computation is not None:
            return self._advanced(rules.computation, summary, masks)
        unmasked = self._unmasked(masks)
        released = self._release(unmasked)
        if released is not None:
            summary = {**summary, **released.summary}
        made = self._next_model(base, released, unmasked)
        vectors, tied_sum, optimizer_state = (
            dict[str, Vector](),
            state.tied_sum,
            made.optimizer_state,
        )
        if rules.devices is not None:
            if CONTROL in state.vectors:
                total = self.sums.states[CONTROL]
                vectors[CONTROL] = next_control(state.vectors[CONTROL], total, rules.devices)
            lost = sum(sum(each.lost_tied) for each in self.accepted)
            tied_sum = tied_sum.after(rules.devices, len(self), lost, number)
            if tied_sum.since == number:
                vectors = {name: np.zeros_like(vector) for name, vector in vectors.items()}
                if H in optimizer_state:
                    optimizer_state = {**optimizer_state, H: np.zeros_like(optimizer_state[H])}
        summary = {**summary, "change": made.change}
        after = ModelState(
            state.version + 1,
            made.model,
            optimizer_state,
            vectors,
            rules.weighing.state_after(summary),
            adaptive_mu.state_after(summary, state.mu.mu),
            tied_sum,
            None if released is None else released.state,
        )
        return CommittedRound(after, summary)

    def _advanced(
        self, computation: RunComputation, summary: Mapping[str, Any], masks: Words | None
    ) -> CommittedRound:
        """Return the computation's next state, made of the total of all sums."""
        before, privacy, total = self.state.model, self.state.privacy, self._total(masks)
        if self.rules.privacy is None:
            model = computation.advance(before, total, len(self))
        else:
            released = self._release_sums(total)
            privacy, summary = released.state, {**summary, **released.summary}
            scaled = released.mean * self.rules.privacy.goal
            noise = self.rules.privacy.noise * self.rules.privacy.clip
            model = computation.advance_noisy(before, scaled, len(self), noise)
        after = replace(self.state, version=self.state.version + 1, model=model, privacy=privacy)
        own = {"change": change_norm(before, model), "computation": computation.progress(model)}
        return CommittedRound(after, {**summary, **own})

    def _total(self, masks: Words | None) -> Sums:
        """Return the total of all devices' sums, int64, (S,)."""
        numbers = self.rules.secure
        if numbers is not None:
            assert isinstance(numbers, SumWords), "the plan's rules see to that"
            return unmask_sums(*self._masked(SUMS, masks), numbers)
        assert masks is None, "masks were given for sums that have none"
        added: ExactSums = self.sums.states[SUMS]
        if added.devices != len(self):
            raise ValueError(f"{len(self)} reports count; the sums of {added.devices} are added")
        return added.total

    def _release_sums(self, total: Sums) -> RoundRelease:
        """Return what a private round releases of its scaled sums: as a mean over the goal."""
        rules, state = self.rules.privacy, self.state.privacy
        assert rules is not None
        assert state is not None, "a private round begins from a private state"
        if not len(self):
            raise ValueError("the release of no sums was asked for; add one first")
        return release_round(rules, state, in_rows(total, rules.clip), (), ())

    def _unmasked(self, masks: Words | None) -> WeightedSum | None:
        """Return the sum of a round's masked updates. None: they are not masked."""
        numbers = self.rules.secure
        if numbers is None:
            assert masks is None, "masks were given for updates that have none"
            return None
        assert isinstance(numbers, FixedPoint), "the plan's rules see to that"
        return unmask(*self._masked(UPDATE, masks), numbers)

    def _masked(self, part: str, masks: Words | None) -> tuple[MaskedSum, Words]:
        """Return the masked sum of a part of all reports, and its masks."""
        if masks is None:
            raise ValueError("a round of masked updates needs the sum of their masks")
        state: MaskedSum = self.sums.states[part]
        if state.updates != len(self):
            raise ValueError(f"{len(self)} reports count; {state.updates} masked updates are added")
        return state, masks

    def _release(self, unmasked: WeightedSum | None) -> RoundRelease | None:
        """Return what a private round releases. None: the plan has no [privacy]."""
        rules, state = self.rules.privacy, self.state.privacy
        if rules is None:
            return None
        assert state is not None, "a private round begins from a private state"
        if not len(self):
            raise ValueError("the release of no updates was asked for; add one first")
        weighing = self.rules.weighing
        clipped = [weighing.clips(each, self.weighing_state) for each in weighed_of(self.accepted)]
        evaluations = evaluations_of(self.accepted)
        if unmasked is None:
            total = add_up(self.sums.states[UPDATE])
        else:  # its updates count with shares of the largest weight
            total = unmasked.total * rules.largest_weight
        return release_round(rules, state, total, clipped, evaluations)

    def _next_model(
        self, base: Vector | None, released: RoundRelease | None, unmasked: WeightedSum | None
    ) -> NextModel:
        rules, state = self.rules, self.state
        mixed = None
        if rules.mixing_rate is not None and base is not None:
            (staleness,) = self.staleness()
            mixed = TaskBase(base, rules.staleness_factor(staleness), rules.mixing_rate)
        return next_model(
            rules.aggregators[UPDATE],
            self.sums.states[UPDATE] if unmasked is None else unmasked,
            rules.optimizer,
            state.optimizer_state,
            state.model,
            mixed,
            rules.share(len(self)),
            rules.weighing.scale(weighed_of(self.accepted), self.weighing_state),
            None if released is None else released.mean,
        )

    def staleness(self) -> list[int]:
        """Return the staleness of the accepted updates, in order; empty where none can be stale."""
        return staleness_of(self.accepted)
