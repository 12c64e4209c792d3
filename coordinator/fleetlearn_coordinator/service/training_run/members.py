"""A run's models: one, or the members of a family, and which of them each device trains.

What is stored is one vector, the members' vectors one after the other; only what meets a device or
a bundle knows members. A member is chosen once for each task, as the task is given, and the task's
row names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import CheckIn
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.clusters import starting_models
from fleetlearn_coordinator.aggregation.family_round import FamilyRules
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.plan.family_section import FamilyMember
from fleetlearn_coordinator.plan.initial_model import initial_model
from fleetlearn_coordinator.plan.plan import Plan


class RunMember(NamedTuple):
    """One of a run's models."""

    number: int
    """Its place among them, from 0."""
    name: str
    """Empty where the run has one model."""
    bundle: Bundle
    rules: RoundRules
    hyper: dict[str, float]
    """The values that its tasks have, except for a mu that follows the loss."""
    place: slice
    """Of its elements in the run's vector."""

    @property
    def size(self) -> int:
        """Elements of its vector."""
        return self.bundle.manifest.size


def open_bundles(plan: Plan, first: Bundle | None = None) -> dict[str, Bundle]:
    """Open the bundles of a plan's members, by their names. ``first``: the one of ``plan.bundle``,
    if it is open already. Raises BundleError."""
    opened = {} if first is None else {plan.bundle: first}
    for path in plan.members.values():
        if path not in opened:
            opened[path] = open_bundle(path)
    return {name: opened[path] for name, path in plan.members.items()}


def identity_of(bundles: Mapping[str, Bundle]) -> str:
    """Return what a data directory says of the run's models: the SHA-256 of the bundle, or of the
    names and bundles of a family."""
    if [*bundles] == [""]:
        return bundles[""].sha256
    named = [(name, bundle.sha256) for name, bundle in bundles.items()]
    return hashlib.sha256(msgspec.json.encode(named)).hexdigest()


def starts_of(plan: Plan, bundle: Bundle) -> list[Vector]:
    """Return the model that each cluster of a plan begins with, from their bundle's."""
    assert plan.clusters is not None
    clusters, manifest = plan.clusters, bundle.manifest
    model = initial_model(plan, bundle)
    return starting_models(model, manifest, clusters.count, plan.seed, clusters.spread)


class MemberPolicy(Protocol):
    """Says which member each device trains."""

    def join(self, check_in: CheckIn) -> None:
        """The device of this check-in, which ``why_not`` says nothing against, is connected."""

    def leave(self, device: str) -> None:
        """The device is not connected any more. Harmless where it was not."""

    def member_of(self, device: str) -> str:
        """Return the name of the member for the next task, or question, of a connected device."""

    def why_not(self, check_in: CheckIn) -> str:
        """Return why no member is for this device, for its owner; empty: one is."""


def first_fit(family: Mapping[str, FamilyMember], check_in: CheckIn) -> str | None:
    """Return the name of the first member that fits what a device says of itself; None: none
    does."""
    fits = (name for name, member in family.items() if not misfit_of(member, check_in))
    return next(fits, None)


def misfit_of(member: FamilyMember, check_in: CheckIn) -> str:
    """Return why the member does not fit the device, in a few words; empty: it does."""
    if member.memory is not None:
        if check_in.memory is None:
            return f"needs {member.memory} bytes of RAM, and the device does not say what it has"
        if check_in.memory < member.memory:
            return f"needs {member.memory} bytes of RAM, and the device has {check_in.memory}"
    missing = [tag for tag in member.tags if tag not in check_in.tags]
    return f"needs the tag {missing[0]}" if missing else ""


class FirstThatFits:
    """Gives each device the first member of the plan that fits it."""

    def __init__(self, family: Mapping[str, FamilyMember]) -> None:
        self._family = family
        self._member_of: dict[str, str] = {}

    def join(self, check_in: CheckIn) -> None:
        fits = first_fit(self._family, check_in)
        assert fits is not None
        self._member_of[check_in.device] = fits

    def leave(self, device: str) -> None:
        self._member_of.pop(device, None)

    def member_of(self, device: str) -> str:
        return self._member_of[device]

    def why_not(self, check_in: CheckIn) -> str:
        reasons = {name: misfit_of(member, check_in) for name, member in self._family.items()}
        if not all(reasons.values()):
            return ""
        listed = "; ".join(f"{name} {why}" for name, why in reasons.items())
        return f"no model of this run fits the device: {listed}"


class OneModel:
    """Gives every device the run's one model."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def join(self, check_in: CheckIn) -> None: ...

    def leave(self, device: str) -> None: ...

    def member_of(self, device: str) -> str:
        return self._name

    def why_not(self, check_in: CheckIn) -> str:
        return ""


class Members:
    """The models of one run, and which of them the tasks that are out are for."""

    def __init__(self, plan: Plan, bundles: Mapping[str, Bundle]) -> None:
        """``bundles``: as ``open_bundles`` returned them. Raises PlanError where the plan does not
        fit them."""
        manifests = {name: bundle.manifest for name, bundle in bundles.items()}
        plan.check_members(manifests)
        self.rules: FamilyRules = plan.family_rules(manifests)
        self.all = tuple(
            RunMember(number, name, bundle, own.rules, plan.hyper(bundle.manifest), place)
            for number, ((name, bundle), own, place) in enumerate(
                zip(bundles.items(), self.rules.members, self.rules.places, strict=True)
            )
        )
        self._by_name = {member.name: member for member in self.all}
        self._of_task: dict[str, RunMember] = {}
        """Task that is out, or may come back -> its member, in a family."""
        self.policy: MemberPolicy = OneModel(self.all[0].name)
        """Which member a device trains."""
        if plan.family:
            self.policy = FirstThatFits(plan.family)

    @property
    def is_family(self) -> bool:
        """Whether there are several, which have names."""
        return self.rules.is_family

    def named(self, name: str) -> RunMember:
        """Return the member of this name. Raises KeyError."""
        return self._by_name[name]

    def of_device(self, device: str) -> RunMember:
        """Return the member that a connected device trains next."""
        return self.named(self.policy.member_of(device))

    def give(self, device: str, task: str) -> RunMember:
        """Return the member for a new task of the device; ``of_task`` says the same from now on."""
        member = self.of_device(device)
        if self.is_family:
            self._of_task[task] = member
        return member

    def take_back(self, task: str, name: str | None) -> None:
        """An earlier process gave this task, for the member of this name."""
        if self.is_family:
            self._of_task[task] = self.named(name or "")

    def of_task(self, task: str) -> RunMember:
        """Return the member that a task is for. For a task that is over, or was never given, the
        largest one: nothing that is sent for it counts."""
        if not self.is_family:
            return self.all[0]
        return self._of_task.get(task) or max(self.all, key=lambda member: member.size)

    def keep(self, tasks: Collection[str]) -> None:
        """Forget which members all tasks but these were for."""
        if self.is_family:
            self._of_task = {
                task: member for task, member in self._of_task.items() if task in tasks
            }

    def first_model(self, plan: Plan) -> Vector:
        """Return the vector that a new run begins with: of each bundle what travels, and where the
        plan has clusters the points that they begin from."""
        if plan.clusters is not None:
            return np.concatenate(starts_of(plan, self.all[0].bundle))
        parts = (initial_model(plan, each.bundle) for each in self.all)
        return np.concatenate([*parts])

    def states_of(self, state: ModelState) -> tuple[ModelState, ...]:
        """Return the state of each member."""
        return state.members or (state,)

    def remarks(self, plan: Plan) -> list[str]:
        """Say what the bundles have and the plan does not use, for the log."""
        found = dict[str, list[str]]()
        for member in self.all:
            for remark in plan.remarks(member.bundle.manifest):
                found.setdefault(remark, []).append(member.name)
        if not self.is_family:
            return [*found]
        return [f"{', '.join(names)}: {remark}" for remark, names in found.items()]

    def bundles(self) -> Iterable[Bundle]:
        """Return the bundles, each once."""
        return {member.bundle.sha256: member.bundle for member in self.all}.values()
