"""[selection] of a plan: which devices are given tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
from fleetlearn_protocol import extensions
from fleetlearn_protocol.messages import MAX_EXAMPLES, Identifier
from msgspec import Meta

from fleetlearn_coordinator.plan.own_algorithms import SELECTION_STRATEGY
from fleetlearn_coordinator.plan.toml_errors import Positive, Section, near
from fleetlearn_coordinator.rounds.selection_rules import (
    OORT,
    POWER_OF_CHOICE,
    STRATEGIES,
    UNIFORM,
    Eligibility,
    SelectionRules,
)
from fleetlearn_coordinator.rounds.selection_rules import Oort as OortRules

KEY = "selection.strategy"
"""What names the strategy."""
Share = Annotated[float, Meta(gt=0, le=1)]
Factor = Annotated[float, Meta(gt=0, le=1000)]
Names = Annotated[tuple[Identifier, ...], Meta(max_length=100)]
Seconds = Annotated[float, Meta(gt=0, le=366 * 86400.0)]


class OortSection(Section, frozen=True, kw_only=True):
    """[selection.oort]: the constants of strategy = "oort" (Lai et al., arXiv 2010.06081)."""

    preferred_seconds: Seconds | None = None
    """T at the beginning: the seconds from a task to its report that cost no utility. Default: a
    tenth of round.deadline."""
    preferred_step: Seconds | None = None
    """Delta: seconds that the pacer adds to T. Default: a tenth of round.deadline."""
    window: Positive = 20
    """W, in rounds: the pacer compares the utility of the last W rounds with the utility of the W
    rounds before."""
    penalty: Annotated[float, Meta(ge=0, le=100)] = 2.0
    """Alpha, the exponent of T / t for a task of t > T seconds."""
    exploration: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """Epsilon at the beginning: the share of tasks for devices that have not reported yet."""
    decay: Share = 0.98
    """What epsilon is multiplied by in each round."""
    least_exploration: Annotated[float, Meta(ge=0, le=1)] = 0.2
    cutoff: Annotated[float, Meta(ge=0, le=1)] = 0.95
    """Devices are drawn from those with at least this share of the utility that just suffices."""
    clip: Share = 0.95
    """The quantile of all utilities to which each is limited."""
    most_tasks: Positive = 10
    """A device that was given this many tasks is chosen last."""


class SelectionSection(Section, frozen=True, kw_only=True):
    """[selection]: which devices are given tasks. Default: any, each with the same probability."""

    strategy: str = UNIFORM
    """uniform; power-of-choice: of a few candidates those with the largest loss; oort: by loss,
    examples and speed; or an own strategy, "my_package:my_strategy"."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Of an own strategy: its function's parameters."""
    candidates: Annotated[float, Meta(ge=1, le=1000)] | None = None
    """Candidates that are drawn for each task. Power-of-choice: the paper's d / m; default: 2. An
    own strategy chooses among them; default: among all that wait."""
    least_examples: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)] = 1
    """Fewest examples of a device."""
    least_memory: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Least MiB of RAM of a device."""
    runtimes: Names = ()
    """What may train: first words of the runtimes that devices state, such as "onnx". Default:
    anything."""
    tags: Names = ()
    """Tags that a device must have."""
    without_tags: Names = ()
    """Tags that a device must not have."""
    tiers: Names = ()
    """A device's tier must be one of these. Default: any."""
    charging: bool = False
    """Whether a device must be charging when it checks in."""
    unmetered: bool = False
    """Whether a device's network must be unmetered when it checks in."""
    weighting: Literal["uniform", "examples"] = "uniform"
    """Whether all devices are drawn with the same probability, or in proportion to their examples,
    up to round.max_weight."""
    tier_weights: dict[Identifier, Factor] = msgspec.field(default_factory=dict)
    """Tier -> factor of the weight by which its devices are drawn. Default: 1 each."""
    tag_weights: dict[Identifier, Factor] = msgspec.field(default_factory=dict)
    """Tag -> the same."""
    tier_quotas: dict[Identifier, Share] = msgspec.field(default_factory=dict)
    """Tier -> largest share of a round's tasks that its devices are given."""
    tag_quotas: dict[Identifier, Share] = msgspec.field(default_factory=dict)
    """Tag -> the same."""
    once_in: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """A device that is given a task in round r is given the next in round r + this at the earliest.
    Default: no limit."""
    oort: OortSection | None = None

    def rules(self, deadline: float, max_weight: int) -> SelectionRules | None:
        """Return the engine's rules, or None where there are none. Raises ExtensionError where an
        own strategy cannot be had."""
        if self == SelectionSection():
            return None
        oort = self.oort or OortSection()
        by_choice = self.strategy == POWER_OF_CHOICE
        own = None
        if self.strategy not in STRATEGIES:
            own = extensions.make_once(SELECTION_STRATEGY, self.strategy, self.parameters, KEY)
        return SelectionRules(
            strategy=self.strategy,
            eligibility=Eligibility(
                least_examples=self.least_examples,
                least_memory=math.ceil(self.least_memory * 2**20),
                runtimes=frozenset(self.runtimes),
                all_labels=frozenset(_labels("tag", self.tags)),
                no_labels=frozenset(_labels("tag", self.without_tags)),
                tiers=frozenset(_labels("tier", self.tiers)),
                charging=self.charging,
                unmetered=self.unmetered,
            ),
            by_examples=self.weighting == "examples" or by_choice,
            most_examples=max_weight,
            weights=_labelled(self.tier_weights, self.tag_weights),
            quotas=_labelled(self.tier_quotas, self.tag_quotas),
            once_in=self.once_in,
            candidates=self.candidates if own is not None else self.candidates or 2.0,
            own=own,
            oort=None
            if self.strategy != OORT
            else OortRules(
                oort.preferred_seconds or deadline / 10,
                oort.preferred_step or deadline / 10,
                *(getattr(oort, key) for key in OortRules._fields[2:]),
            ),
        )

    def contradictions(self, *, asynchronous: bool, tasks: int) -> Iterable[str]:
        """Yield what makes no sense, in words. ``tasks``: of a usual round."""
        is_own = self.strategy not in STRATEGIES
        if is_own and not extensions.is_extension(SELECTION_STRATEGY, self.strategy):
            yield (
                f'{KEY} = "{self.strategy}" is not known{near(self.strategy, STRATEGIES)} It takes '
                f"{', '.join(STRATEGIES)}, or {SELECTION_STRATEGY.own}"
            )
        if self.parameters and not is_own:
            yield (
                f"selection.parameters = {self.parameters} are for an own strategy; {KEY} is "
                f'"{self.strategy}"'
            )
        if self.strategy == "oort" and asynchronous:
            yield (
                'selection.strategy = "oort" is for synchronous rounds: its preferred duration T '
                "trades the utility of a round for its length, and asynchronous rounds wait for "
                'nobody; use "power-of-choice", or round.participation = "synchronous"'
            )
        if self.strategy != "uniform":
            for key in ("weighting", "tier_weights", "tag_weights"):
                if (value := getattr(self, key)) not in ("uniform", {}):
                    yield (
                        f'selection.{key} = {value!r}: strategy "{self.strategy}" has weights of '
                        'its own; weights are for strategy "uniform"'
                    )
        if self.candidates is not None and not is_own and self.strategy != POWER_OF_CHOICE:
            yield (
                f"selection.candidates = {self.candidates} is for strategy "
                f'"{POWER_OF_CHOICE}" and for own ones; selection.strategy is "{self.strategy}"'
            )
        if self.oort is not None and self.strategy != "oort":
            yield (
                f'[selection.oort] is for strategy "oort"; selection.strategy is "{self.strategy}"'
            )
        if both := sorted({*self.tags} & {*self.without_tags}):
            yield (
                f"selection.tags and selection.without_tags both name {both[0]}: no device could "
                "be eligible"
            )
        for key in ("tier_weights", "tier_quotas"):
            for name in sorted(getattr(self, key)):
                if self.tiers and name not in self.tiers:
                    yield f"selection.{key}.{name}: selection.tiers keeps this tier from all tasks"
        for key in ("tier_quotas", "tag_quotas"):
            for name, share in getattr(self, key).items():
                if Decimal(str(share)) * tasks < 1:
                    yield (
                        f"selection.{key}.{name} = {share} of the {tasks} tasks of a round is less "
                        f"than one; it takes {1 / tasks:.3g} to 1, or name it in "
                        "selection.without_tags, or leave it out of selection.tiers"
                    )

    def remark(self, weighting: str) -> str | None:
        """Return what the author of a plan may not mean, for the log. ``weighting``:
        round.weighting."""
        if weighting != "examples" or (
            self.weighting != "examples" and self.strategy != "power-of-choice"
        ):
            return None
        return (
            "devices are drawn in proportion to their examples, and their updates weigh as many "
            'examples: large devices count twice over. round.weighting = "uniform" weighs each '
            "update once"
        )


def _labels(kind: str, names: Iterable[str]) -> list[str]:
    return [f"{kind}:{name}" for name in names]


def _labelled(tiers: Mapping[str, Any], tags: Mapping[str, Any]) -> dict[str, float]:
    return {
        **{f"tier:{name}": value for name, value in tiers.items()},
        **{f"tag:{n}": v for n, v in tags.items()},
    }


NESTED: Mapping[str, type[Section]] = {"selection.oort": OortSection}
"""Tables within [selection]."""
