"""A plan's rules on which devices are given tasks, and what devices state of themselves.

What a device states is its own word. It decides who is chosen; no update gets its weight by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fleetlearn_protocol.messages import CheckIn

UNIFORM, POWER_OF_CHOICE, OORT = "uniform", "power-of-choice", "oort"
STRATEGIES = (UNIFORM, POWER_OF_CHOICE, OORT)
"""Our strategies."""
NO_LABELS: Mapping[str, float] = MappingProxyType({})


class Stated(NamedTuple):
    """What a device says of itself at its check-in. None: it does not say."""

    examples: int = 1
    runtime: str = ""
    """The first word of what trains there: ``onnx``."""
    memory: int | None = None
    """Bytes of RAM."""
    labels: frozenset[str] = frozenset()
    """Its tier and its tags, as ``tier:phone`` and ``tag:eu``."""
    charging: bool | None = None
    network: str | None = None
    """``metered`` or ``unmetered``."""
    region: str = ""
    """The region that the driver finds it in, where rounds have regions. Empty: none."""


NOTHING_STATED = Stated()


def stated_in(check_in: CheckIn) -> Stated:
    """Return what a check-in states."""
    return Stated(
        check_in.examples,
        check_in.runtime.partition(" ")[0],
        check_in.memory,
        labels_of(check_in.tier, check_in.tags),
        check_in.charging,
        check_in.network,
    )


def labels_of(tier: str | None, tags: tuple[str, ...]) -> frozenset[str]:
    """Return the labels of a device with this tier and these tags."""
    return frozenset([*(f"tag:{tag}" for tag in tags), *([] if tier is None else [f"tier:{tier}"])])


def tags_in(labels: Iterable[str]) -> list[str]:
    """Return the tags among these labels."""
    return [label.removeprefix("tag:") for label in labels if label.startswith("tag:")]


class Eligibility(NamedTuple):
    """What a device must state to be given tasks."""

    least_examples: int = 1
    least_memory: int = 0
    """Bytes of RAM."""
    runtimes: frozenset[str] = frozenset()
    """Empty: any."""
    all_labels: frozenset[str] = frozenset()
    """Labels that it must have."""
    no_labels: frozenset[str] = frozenset()
    """Labels that it must not have."""
    tiers: frozenset[str] = frozenset()
    """Labels of tiers: it must have one of them. Empty: any label of a tier, or none."""
    charging: bool = False
    unmetered: bool = False

    def refusals(self, stated: Stated) -> dict[str, str]:
        """Return the plan's keys that keep the device from tasks, each with what it states. Empty:
        it may have one."""
        found: dict[str, str] = {}
        if stated.examples < self.least_examples:
            found["least_examples"] = f"{stated.examples} examples"
        if self.least_memory and (stated.memory or 0) < self.least_memory:
            found["least_memory"] = (
                "memory not stated"
                if stated.memory is None
                else f"{stated.memory / 2**20:.0f} MiB of memory"
            )
        if self.runtimes and stated.runtime not in self.runtimes:
            found["runtimes"] = f"runtime {stated.runtime or 'not stated'}"
        if missing := sorted(self.all_labels - stated.labels):
            found["tags"] = f"no {', no '.join(missing)}"
        if wrong := sorted(self.no_labels & stated.labels):
            found["without_tags"] = ", ".join(wrong)
        if self.tiers and not self.tiers & stated.labels:
            found["tiers"] = next(
                (label for label in stated.labels if label.startswith("tier:")), "tier not stated"
            )
        if self.charging and not stated.charging:
            found["charging"] = "not charging"
        if self.unmetered and stated.network != "unmetered":
            found["unmetered"] = f"network {stated.network or 'not stated'}"
        return found


ANY_DEVICE = Eligibility()


class Oort(NamedTuple):
    """Constants of Oort (strategies/oort.py)."""

    preferred: float
    """T, the seconds that a task may take without a penalty, at the beginning."""
    step: float
    """Delta: how many seconds the pacer adds to T."""
    window: int = 20
    """W: rounds after which the pacer looks at the utility."""
    penalty: float = 2.0
    """Alpha, the exponent of T / t."""
    exploration: float = 0.9
    """Epsilon at the beginning: the share of tasks for devices that have not reported yet."""
    decay: float = 0.98
    """What epsilon is multiplied by in each round."""
    least_exploration: float = 0.2
    cutoff: float = 0.95
    """Devices are drawn from those with at least this share of the utility that just suffices."""
    clip: float = 0.95
    """Utilities are limited to this quantile of all."""
    most_tasks: int = 10
    """A device that was given more tasks is chosen last."""


class SelectionRules(NamedTuple):
    """A plan's rules on selection."""

    strategy: str = UNIFORM
    """One of ``STRATEGIES``, or the name of ``own``."""
    eligibility: Eligibility = ANY_DEVICE
    by_examples: bool = False
    """Whether devices are drawn in proportion to their examples."""
    most_examples: int = 2**20
    """Examples above this do not make a device more likely."""
    weights: Mapping[str, float] = NO_LABELS
    """Label -> factor of the weight by which a device with the label is drawn."""
    quotas: Mapping[str, float] = NO_LABELS
    """Label -> largest share of a round's tasks that devices with the label are given."""
    once_in: int | None = None
    """A device that is given a task in round r is given the next in round r + this at the
    earliest."""
    candidates: float | None = 2.0
    """Power-of-choice, and an own strategy: candidates that are drawn for each task. None: all that
    wait."""
    oort: Oort | None = None
    """Given where the strategy is Oort."""
    own: Callable[[Any], Sequence[str]] | None = None
    """Given where the strategy is another package's: an ``own_strategy.SelectionStrategy``."""

    @property
    def remember(self) -> bool:
        """Whether devices' tasks and reports must be remembered, also over a restart."""
        return self.once_in is not None or bool(self.quotas) or self.strategy != UNIFORM

    @property
    def times_tasks(self) -> bool:
        """Whether the seconds from tasks to reports are remembered."""
        return self.oort is not None or self.own is not None
