"""What a plan has to do with its bundle: the step's values, what the bundle must have, and what it
has that the plan does not use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import StepSchedule

from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.participation_rates import FULL_WEIGHT
from fleetlearn_coordinator.aggregation.round_summary import PERSONAL
from fleetlearn_coordinator.aggregation.weighing.weighing import Weighing
from fleetlearn_coordinator.plan.aggregation_rules import weighing_rule
from fleetlearn_coordinator.plan.computation_rules import computation_misfit
from fleetlearn_coordinator.plan.personal_parameters import personal_misfit
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.privacy_rules import privacy_misfit, privacy_remarks
from fleetlearn_coordinator.plan.privacy_terms import private_bound
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.plan.row_rules import row_misfit
from fleetlearn_coordinator.plan.scores_rules import scores_misfit
from fleetlearn_coordinator.plan.sections import Models, Stop
from fleetlearn_coordinator.plan.secure_rules import secure_misfit, secure_remarks
from fleetlearn_coordinator.plan.toml_errors import near
from fleetlearn_coordinator.plan.without_effect import without_effect

TERMS = ("proximal", "contrastive")
"""Switches of the bundle's step whose weight is mu."""
SWITCHES = {
    "proximal": "a proximal term (export it with proximal=True)",
    "contrastive": "a contrastive term (export it with contrastive=True)",
    "correction": "a correction of its gradient (export it with correction=True)",
}
"""Switch of the bundle's step -> what it is, for people."""


class PlanError(FleetError):
    """A plan that cannot be run. ``text`` names the file, the key, what was given and what is
    allowed."""


class PlanForBundle(PlanKeys, frozen=True, kw_only=True):
    """The keys of a plan beside a bundle's manifest. ``Plan`` adds how a run of them goes."""

    @property
    def largest_weight(self) -> int:
        """The most that an update weighs in the mean."""
        most = {
            "uniform": 1,
            "examples": self.round.max_weight,
            "inverse-participation": FULL_WEIGHT,
        }
        return most[self.round.weighting]

    def weighing(self, manifest: Manifest) -> Weighing:
        """Return how updates are weighed, beside their examples and their staleness. Raises
        PlanError where the bundle's step does not fit."""
        hyper = self.hyper(manifest)
        if not self.algorithm.pulls:
            hyper["mu"] = 0.0
        try:
            rule = weighing_rule(self.aggregation, manifest.step, hyper)
        except ValueError as error:
            raise self._misfit(str(error), manifest) from None
        if self.aggregation.normalise and manifest.step.proximal and hyper["mu"]:
            self._refuse_schedules(
                "aggregation.normalise = true with a proximal term needs lr * mu to stay", manifest
            )
        bound = self.aggregation.norm_bound
        # Masked updates are clipped by devices, unwatched; sums are watched by their aggregator.
        watched = self.secure is None and not self.algorithm.computes
        if self.privacy is not None and watched:
            bound = private_bound(self.privacy, self.largest_weight, manifest.size)
        return Weighing(rule, bound)

    def hyper(self, manifest: Manifest) -> dict[str, float]:
        """A value for each hyper-parameter of the bundle's step and of the algorithm: the plan's,
        else their default.

        mu weights the terms that only some recipes use; with the others it is 0. A recipe that is
        made of such a term needs a mu. Raises PlanError where plan and bundle do not fit.
        """
        if manifest.split is not msgspec.UNSET:
            raise PlanError(
                Code.BAD_MESSAGE,
                f"{self.file}: bundle {manifest.name} is the {manifest.split.part} of a split "
                "model, which devices do not train by rounds; expected a bundle of a whole model",
            )
        named = {"lr": self.local.lr, "mu": self.local.mu}
        given = {
            **self.local.hyper,
            **{key: value for key, value in named.items() if value is not None},
        }
        declared = {hyper.name: hyper.default for hyper in manifest.hyper}
        if both := sorted(declared.keys() & self.algorithm.hyper.keys()):
            text = f"{self._needing()} has a value {both[0]} of its own, and so has the step."
            raise self._misfit(f"{text} Export the step with another name for it.", manifest)
        declared |= {name: own.default for name, own in self.algorithm.hyper.items()}
        needs, what = RECIPES[self.recipe].needs + self.algorithm.needs, self._needing()
        terms = [term for term in TERMS if getattr(manifest.step, term)]
        for need in needs:
            if not getattr(manifest.step, need):
                raise self._misfit(f"{what} needs a step with {SWITCHES[need]}.", manifest)
        if self.local.mu is not None and "mu" not in declared:
            raise self._misfit(
                f"local.mu = {self.local.mu} needs a step with a {' or '.join(TERMS)} term.",
                manifest,
            )
        for key in given:
            if key not in declared:
                where = f"local.{key}" if key in named else f"local.hyper.{key}"
                raise self._misfit(
                    f"{where} = {given[key]} is not a value that the step "
                    f"takes{near(key, declared)}",
                    manifest,
                )
        if self.local.adaptive_mu and not manifest.step.proximal:
            raise self._misfit(
                f"local.adaptive_mu = true needs a step with {SWITCHES['proximal']}.", manifest
            )
        # The bundle has a term that the recipe does not use: its weight is 0, and `remarks` says
        # so.
        if terms and not set(terms) & set(needs):
            given.setdefault("mu", 0.0)
        values = {key: given.get(key, default) for key, default in declared.items()}
        for key, value in values.items():
            if value is None:
                where = f"local.{key}" if key in named else f"local.hyper.{key}"
                if key in self.algorithm.hyper:
                    text = f"{where} is missing: {what} needs it, {self._expected(key)}."
                else:
                    text = f"{where} is missing: the step needs it, and the bundle has no default."
                raise self._misfit(text, manifest)
            if key in self.algorithm.hyper and not self.algorithm.hyper[key].takes(value):
                text = f"local.hyper.{key} = {value}; expected {self._expected(key)}."
                raise self._misfit(text, manifest)
        weighted = [term for term in TERMS if term in needs]
        if weighted and self.local.mu is None and not self.local.adaptive_mu and not values["mu"]:
            text = (
                f"local.mu is missing, and the bundle's default is 0: without the {weighted[0]} "
                f"term, whose weight mu is, {what} is another algorithm. Set local.mu, such as "
                "0.01; local.mu = 0 says that this is meant."
            )
            raise self._misfit(text, manifest)
        if "lr" not in values:
            self._refuse_schedules("it changes the step's lr", manifest)
        return {key: value for key, value in values.items() if value is not None}

    def hyper_of(self, version: int, hyper: Mapping[str, float]) -> dict[str, float]:
        """Return the hyper-parameters of tasks that begin from this version. ``hyper``: the step's,
        without the schedule."""
        schedule = self.local.schedule
        if schedule is None:
            return {**hyper}
        return {**hyper, "lr": hyper["lr"] * schedule.factor_of(version)}

    def steps_of(self, version: int) -> StepSchedule | None:
        """Return the schedule of the steps of tasks that begin from this version. None: their
        learning rate stays."""
        schedule = self.local.step_schedule
        return None if schedule is None else schedule.of_task(version)

    def _refuse_schedules(self, reason: str, manifest: Manifest) -> None:
        """Raise PlanError if the plan has a schedule."""
        for key in ("schedule", "step_schedule"):
            if getattr(self.local, key) is not None:
                raise self._misfit(f"[local.{key}]: {reason}.", manifest)

    def remarks(self, manifest: Manifest) -> list[str]:
        """Say what the bundle has and this plan does not use, for the log."""
        texts = []
        if manifest.step.correction and "correction" not in self.algorithm.needs:
            texts.append(
                "the bundle's step adds a correction to the gradient, and this plan has none: it "
                'is zeros. recipe = "scaffold" and recipe = "feddyn" use it'
            )
        needed = [
            term for term in TERMS if term in RECIPES[self.recipe].needs + self.algorithm.needs
        ]
        if needed and self.local.mu == 0 and not self.local.adaptive_mu:
            texts.append(
                f"local.mu = 0: {self._needing()} without its {needed[0]} term is another algorithm"
            )
        if manifest.step.contrastive and not self.hyper(manifest).get("mu"):
            texts.append(
                "the bundle's step has MOON's contrastive term, and its weight mu is 0: devices "
                'compute it for nothing. Set recipe = "moon" and local.mu, or export without it'
            )
        texts += without_effect(self)
        if remark := self.selection.remark(self.round.weighting):
            texts.append(remark)
        return texts + privacy_remarks(self) + secure_remarks(self)

    def check_bundle(self, manifest: Manifest) -> None:
        """Raise PlanError where the plan and the bundle do not fit together."""
        for misfit in (
            computation_misfit(self, manifest),
            scores_misfit(self, manifest),
            row_misfit(self, manifest),
        ):
            if misfit is not None:
                raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {misfit}.")
        if (why := _unready(manifest)) is not None:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {why}.")
        self.weighing(manifest)
        if (text := self.algorithm.misfit(self.hyper(manifest))) is not None:
            raise self._misfit(f"{text}.", manifest)
        if self.algorithm.plain_sgd and manifest.step.optimizer != "sgd":
            text = (
                f"{self._needing()} takes a model's change for a sum of gradients: it needs a step "
                "of plain SGD."
            )
            raise self._misfit(text, manifest)
        if self.algorithm.plain_sgd and manifest.compute is not msgspec.UNSET:
            text = (
                f"{self._needing()} needs the gradient of each step, also of those that overflow "
                f"{manifest.compute}."
            )
            raise self._misfit(f"{text} Export it without compute=.", manifest)
        of_recipe = f"recipe {self.recipe}", RECIPES[self.recipe].personal
        for name, personal in (of_recipe, (self._needing(), self.algorithm.personal)):
            if (misfit := personal_misfit(name, personal, manifest)) is not None:
                raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {misfit}.")
        for misfit in (privacy_misfit(self, manifest), secure_misfit(self, manifest)):
            if misfit is not None:
                raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {misfit}.")
        rules: dict[str, Stop | Models] = {"stop": self.stop, "models": self.models}
        for section, rule in rules.items():
            known = ["loss", *manifest.metrics]
            if self.algorithm.personal_model and rule.measured_by == "round":
                known += [f"{PERSONAL}{name}" for name in known]
            if rule.metric is not None and rule.metric not in known:
                text = (
                    f'{section}.metric = "{rule.metric}" is not measured{near(rule.metric, known)}'
                )
                raise self._misfit(text, manifest)

    def _expected(self, key: str) -> str:
        return self.algorithm.hyper[key].expected

    def _needing(self) -> str:
        """Return what of the plan needs something of the bundle."""
        if self.local.algorithm in ("plain", self.recipe):
            return f"recipe {self.recipe}"
        return f'local.algorithm = "{self.local.algorithm}"'

    def _misfit(self, what: str, manifest: Manifest) -> PlanError:
        terms = [f"a {term} term" for term in TERMS if getattr(manifest.step, term)]
        step = " with ".join([manifest.step.optimizer, *([" and ".join(terms)] if terms else [])])
        takes = ", ".join(hyper.name for hyper in manifest.hyper) or "nothing"
        return PlanError(
            Code.BAD_MESSAGE,
            f"{self.file}: {what} Bundle {manifest.name}: its step is {step} and takes {takes}; "
            f"its metrics are {', '.join(['loss', *manifest.metrics])}.",
        )


def _unready(manifest: Manifest) -> str | None:
    """Return why this process cannot make a state of what devices compute; None: it can, or they
    train."""
    if (settings := manifest.computation) is msgspec.UNSET:
        return None
    return RunComputation(kind_of(settings), settings).unready()
