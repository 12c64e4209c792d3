"""A run with several models, a *family*: a round has an ``OpenRound`` for each member.

A family's model is one vector, the members' vectors one after the other, and so is each slot of its
server optimizer. What is stored, restored and counted is that one vector. A report is of one
member, and is averaged with the other reports of that member alone. A member without a report in a
round keeps its model and its optimizer's state.

A run with one model is a family of one member, whose round is an ``OpenRound``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import model_state
from fleetlearn_coordinator.aggregation.accepted_reports import measured
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import CommittedRound, OpenRound, Received
from fleetlearn_coordinator.aggregation.optimizers import State, change_norm
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_summary import MEMBERS, summarise_staleness


class MemberRules(NamedTuple):
    """One model of a family."""

    name: str
    """Empty where the run has one model."""
    rules: RoundRules
    size: int
    """Elements of its vector."""


class FamilyRules:
    """The members of a run, in the plan's order, and how their reports become the next models."""

    def __init__(self, members: Iterable[MemberRules]) -> None:
        """Raise ValueError where a member's rules need what a family's round does not have."""
        self.members = tuple(members)
        ends = [0, *accumulate(member.size for member in self.members)]
        self.places = [slice(*edges) for edges in pairwise(ends)]
        """Where each member's elements are in the family's vector."""
        if self.is_family:
            for name, rules, _ in self.members:
                if rules.privacy is not None or rules.secure is not None:
                    raise ValueError(f"member {name}: a family's rounds have no privacy or masks")

    @property
    def is_family(self) -> bool:
        """Whether the run has several models, or one that has a name."""
        return len(self.members) > 1 or self.members[0].name != ""

    @property
    def size(self) -> int:
        """Elements of the family's vector."""
        return sum(member.size for member in self.members)

    def models_of(self, model: Vector) -> dict[str, Vector]:
        """Return name of each member -> its part of the family's vector ``model``, as a view."""
        names = (member.name for member in self.members)
        return {name: model[place] for name, place in zip(names, self.places, strict=True)}

    def init(self, model: Vector) -> State:
        """Return the server optimizer's state before the first round, for the family's vector."""
        return self.members[0].rules.optimizer.init(model)

    def open_round(self, state: ModelState) -> OpenRound | FamilyRound:
        """Return a round over this state, without reports."""
        if self.is_family:
            return FamilyRound(self, state)
        return OpenRound(self.members[0].rules, state)

    def make_state(self, last: Mapping[str, Any] | None, **whole: Any) -> ModelState:
        """Return the state at this model. ``last``: the summary of the last committed round; None
        before the first. ``whole``: as for ``model_state.make_state``, for the whole family."""
        if not self.is_family:
            return model_state.make_state(self.members[0].rules, last, **whole)
        summaries = (last or {}).get(MEMBERS, {})
        states = [
            model_state.make_state(member.rules, summaries.get(member.name), **_part(whole, place))
            for member, place in zip(self.members, self.places, strict=True)
        ]
        first = model_state.make_state(self.members[0].rules, None, **whole)
        return replace(first, members=tuple(states))

    def join(self, states: Sequence[ModelState]) -> ModelState:
        """Return the family's state, in new memory. ``states``: the members', of one version."""
        first = states[0]
        whole: dict[str, Any] = {
            "model": np.concatenate([each.model for each in states]),
            "optimizer_state": _joined([each.optimizer_state for each in states]),
            "vectors": _joined([each.vectors for each in states]),
        }
        return self.cut(replace(first, **whole, members=tuple(states)))

    def cut(self, state: ModelState) -> ModelState:
        """Return the state with its members' arrays and versions taken from its own."""
        if not self.is_family:
            return state
        whole = {
            "version": state.version,
            "model": state.model,
            "optimizer_state": state.optimizer_state,
            "vectors": state.vectors,
        }
        members = (
            replace(own, **_part(whole, place))
            for own, place in zip(state.members, self.places, strict=True)
        )
        return replace(state, members=tuple(members))


def _part(whole: Mapping[str, Any], place: slice) -> dict[str, Any]:
    """Return the same arguments for one member: views of the arrays' elements at ``place``."""
    part = dict(whole)
    part["model"] = whole["model"][place]
    for name in ("optimizer_state", "vectors"):
        part[name] = {key: vector[place] for key, vector in whole[name].items()}
    return part


def _joined(parts: Sequence[Mapping[str, Vector]]) -> dict[str, Vector]:
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


class FamilySums:
    """The sums of a family's round, as ``RoundSums`` has them, by the members' names."""

    def __init__(self, rounds: Mapping[str, OpenRound]) -> None:
        self._rounds = rounds

    def to_tensors(self) -> dict[str, NDArray[np.generic]]:
        """Return the states as flat tensors by name, which may share their memory."""
        return {
            f"{name}/{tensor}": values
            for name, round in self._rounds.items()
            for tensor, values in round.sums.to_tensors().items()
        }

    def first_version_tensors(self) -> dict[str, NDArray[np.generic]]:
        """Return nothing: the first version had no families."""
        return {}

    def load_tensors(self, tensors: Mapping[str, NDArray[np.generic]]) -> None:
        """Undo ``to_tensors``, in new memory. Raises ValueError if the tensors are of no such
        states."""
        for name, round in self._rounds.items():
            prefix = f"{name}/"
            own = {
                tensor.removeprefix(prefix): values
                for tensor, values in tensors.items()
                if tensor.startswith(prefix)
            }
            round.sums.load_tensors(own)


class FamilyRound:
    """The reports of a family's round: in the place of an ``OpenRound``, which has the meaning of
    each method."""

    def __init__(self, family: FamilyRules, state: ModelState) -> None:
        """``state``: as ``FamilyRules.make_state`` or an earlier commit made it."""
        self.family, self.state = family, state
        self.rounds = [
            OpenRound(member.rules, own)
            for member, own in zip(family.members, state.members, strict=True)
        ]
        names = (member.name for member in family.members)
        self.sums = FamilySums(dict(zip(names, self.rounds, strict=True)))

    def receive(self, reports: ReportColumns) -> Received:
        return self.rounds[reports.member].receive(reports)

    def accept(self, reports: ReportColumns) -> None:
        self.rounds[reports.member].accept(reports)

    def add(self, reports: ReportColumns) -> None:
        self.rounds[reports.member].add(reports)

    def __len__(self) -> int:
        return sum(map(len, self.rounds))

    def staleness(self) -> list[int]:
        return [each for round in self.rounds for each in round.staleness()]

    def summary(self, dropped: Mapping[str, int]) -> dict[str, Any]:
        """Return what is known of the reports. The metrics are the means over the devices of all
        members; each member has its own in ``MEMBERS``."""
        rules = self.family.members[0].rules
        own = [_summary_of(round) for round in self.rounds]
        summary: dict[str, Any] = {
            "reports": len(self),
            "partial": sum(each["partial"] for each in own),
            **measured([each for round in self.rounds for each in round.accepted], rules),
        }
        if rules.outlive:
            summary["staleness"] = summarise_staleness(self.staleness())
        names = (member.name for member in self.family.members)
        members = dict(zip(names, own, strict=True))
        return summary | {"dropped": dropped, "change": 0.0, MEMBERS: members}

    def commit(
        self,
        number: int,
        summary: Mapping[str, Any],
        base: Vector | None = None,
        masks: Words | None = None,
    ) -> CommittedRound:
        """Make the next model of each member that has reports. Raises ValueError if none has."""
        assert masks is None, "masks were given for updates that have none"
        if not len(self):
            raise ValueError("a round without a report was to be committed; give one up instead")
        states, members = list[ModelState](), dict[str, Any]()
        for member, place, round in zip(
            self.family.members, self.family.places, self.rounds, strict=True
        ):
            own = summary[MEMBERS][member.name]
            if len(round):
                before = None if base is None else base[place]
                made = round.commit(number, own, before)
            else:
                made = CommittedRound(replace(round.state, version=round.state.version + 1), own)
            states.append(made.state)
            members[member.name] = made.summary
        whole = {**summary, MEMBERS: members, "change": _whole_change(members)}
        return CommittedRound(self.family.join(states), whole)


def _summary_of(round: OpenRound) -> dict[str, Any]:
    """Return a member's own summary. It has what the member's next round follows from, also where
    nobody reported."""
    summary = round.summary({})
    del summary["dropped"]  # nobody knows which member a device would have reported
    rule = round.rules.weighing.rule
    if rule is not None and not len(round):
        level = round.weighing_state.level
        summary["weighing"] = {"rule": rule.name, "scale": 1.0, "next_level": level}
    return summary


def _whole_change(members: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the L2 norm of the change of the family's vector."""
    return math.sqrt(math.fsum(each["change"] ** 2 for each in members.values()))


def replace_models(
    family: FamilyRules,
    committed: CommittedRound,
    before: ModelState,
    models: Mapping[str, Vector],
) -> CommittedRound:
    """Return the round with other models in the place of those that its commit made.

    ``before``: the state that the round changed. ``models``: name of each member that gets another
    one -> float32, (its size,). Raises ValueError on another name, shape or dtype, FleetError
    (not-finite)."""
    sizes = {member.name: member.size for member in family.members}
    for name, model in models.items():
        if model.dtype != np.float32 or model.shape != (sizes.get(name),):
            raise ValueError(
                f"member {name!r} was given {model.dtype} of shape {model.shape}; it takes float32 "
                f"of shape ({sizes.get(name)},)"
            )
        if not np.isfinite(model).all():
            text = f"the model of {name or 'the run'} has an element that is not finite"
            raise FleetError(Code.NOT_FINITE, text)
    state, summary = committed
    if not family.is_family:
        model = models.get("", state.model)
        change = change_norm(before.model, model)
        return CommittedRound(replace(state, model=model), {**summary, "change": change})
    states = [
        replace(own, model=models.get(member.name, own.model))
        for member, own in zip(family.members, state.members, strict=True)
    ]
    changes = {
        member.name: change_norm(old.model, new.model)
        for member, old, new in zip(family.members, before.members, states, strict=True)
    }
    members = {name: {**own, "change": changes[name]} for name, own in summary[MEMBERS].items()}
    whole = {**summary, MEMBERS: members, "change": _whole_change(members)}
    return CommittedRound(family.join(states), whole)
