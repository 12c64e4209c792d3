"""A plan: everything that one training run is, in a TOML file. examples/plan.toml shows every
key."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_protocol.algorithms import EXCHANGES
from fleetlearn_protocol.encodings import FLOAT32, MASKED, RESIDUAL, leaves_residual
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import BUFFERS, MODEL, UPDATE
from fleetlearn_protocol.paths import in_home

from fleetlearn_coordinator.aggregation import adaptive_mu, aggregators, optimizers
from fleetlearn_coordinator.aggregation import staleness as staleness_functions
from fleetlearn_coordinator.aggregation.modular_sum import modular_sum
from fleetlearn_coordinator.aggregation.participation_rates import (
    FULL_WEIGHT,
    ParticipationRates,
    UpdateWeights,
)
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_summary import PERSONAL
from fleetlearn_coordinator.aggregation.weighing.weighing import Weighing
from fleetlearn_coordinator.plan.aggregation_rules import weighing_rule
from fleetlearn_coordinator.plan.contradictions import contradictions
from fleetlearn_coordinator.plan.defaults import fill_defaults
from fleetlearn_coordinator.plan.personal_parameters import personal_misfit
from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.privacy_rules import privacy_misfit, privacy_remarks
from fleetlearn_coordinator.plan.privacy_terms import check_budget, privacy_rules, private_bound
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.plan.sections import (
    SECTIONS,
    Models,
    Stop,
)
from fleetlearn_coordinator.plan.secure_rules import (
    fixed_point,
    secure_misfit,
    secure_remarks,
)
from fleetlearn_coordinator.plan.selection_section import NESTED
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.plan.toml_errors import near, paths_from, read_tables, refuse_unknown
from fleetlearn_coordinator.privacy.accounting import PrivacyError
from fleetlearn_coordinator.rounds.settings import MEASURED_ON, EvaluationSettings, Settings


class PlanError(FleetError):
    """A plan that cannot be run. ``text`` names the file, the key, what was given and what is
    allowed."""


class Plan(PlanKeys, frozen=True, kw_only=True):
    """A checked plan with its recipe filled in. ``Plan.load`` reads one."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError."""
        try:
            path = in_home(path)
            text = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(
                Code.BAD_MESSAGE, f"{path}: the plan cannot be read: {in_words(error)}"
            ) from None
        return cls.parse(text, path.absolute().parent, file=str(path))

    @classmethod
    def parse(cls, text: str, base: Path, *, file: str = "plan") -> Plan:
        """Read a plan from text; ``base`` is what its paths are relative to. Raises PlanError."""
        try:
            raw = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PlanError(Code.BAD_MESSAGE, f"{file}: this is not TOML: {error}") from None
        return cls.read(raw, base, file=file)

    @classmethod
    def read(cls, raw: dict[str, Any], base: Path, *, file: str = "plan") -> Plan:
        """A plan from a plan file's tables, which are filled in on the way. Raises PlanError."""
        try:
            if "service" in raw:
                raise ValueError(MOVED)
            if (
                raw
                and not raw.keys() & {*cls.__struct_fields__}
                and raw.keys() <= {*ServiceSettings.__struct_fields__}
            ):
                raise ValueError(
                    "this is a service file, and a plan is expected here: the file that names the "
                    "bundle"
                )
            refuse_unknown(raw, "plan", Plan, {**SECTIONS, **NESTED}, hidden=("file",))
            fill_defaults(raw)
            plan = read_tables({**raw, "file": file}, "plan", cls, paths_from(base))
            for problem in contradictions(plan):
                raise ValueError(problem)
        except ValueError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{file}: {error}") from None
        return plan

    def stall(self, heartbeat: float) -> float:
        """Seconds that a task lives without progress. A slow device may take long to open a large
        model and to make its first step, and tells of its steps with its heartbeats alone, which
        are ``heartbeat`` seconds apart."""
        if self.round.stall is not None:
            return self.round.stall
        return max(30.0, 4 * heartbeat, min(self.round.deadline / 5, 300.0))

    @property
    def _measured_on(self) -> str:
        """Whose examples ``stop.metric`` is of, and whether it has noise, in words."""
        by = self.stop.measured_by
        noised = by == "round" and self.privacy is not None and self.privacy.metrics == "noised"
        return MEASURED_ON[by] + (", with noise" if noised else "")

    def engine_settings(self, heartbeat: float) -> Settings:
        """What the engine needs of this plan, where devices give a sign of life every ``heartbeat``
        seconds."""
        return Settings(
            goal=self.round.goal,
            cohort=self.round.cohort,
            minimum=self.round.minimum,
            deadline=self.round.deadline,
            grace=self.round.grace,
            gather=self.round.gather or 0.0,
            seed=self.seed,
            rounds=self.stop.rounds,
            metric=self.stop.metric,
            target=self.stop.target or 0.0,
            below=self.stop.direction == "below",
            measured_on=self._measured_on,
            epsilon=self.stop.epsilon or 0.0,
            stall=self.stall(heartbeat),
            asynchronous=self.round.asynchronous,
            carry=self.round.late == "carry",
            max_staleness=self.staleness.max or 0,
            max_updates=self.most_updates_of_a_device if self.round.asynchronous else None,
            selection=self.selection.rules(self.round.deadline, self.round.max_weight),
            pace=self.pace.rules,
            evaluation=EvaluationSettings(
                self.evaluation.every or 0,
                self.evaluation.devices,
                self.evaluation.minimum,
                self.evaluation.deadline,
            ),
            separation=0 if self.privacy is None else self.privacy.separation,
            participations=None if self.privacy is None else self.privacy.participations,
            one_task=self.privacy is not None and self.privacy.mechanism == "local",
        )

    @property
    def largest_weight(self) -> int:
        """The most that an update weighs in the mean."""
        most = {
            "uniform": 1,
            "examples": self.round.max_weight,
            "inverse-participation": FULL_WEIGHT,
        }
        return most[self.round.weighting]

    def update_weights(self) -> UpdateWeights:
        """Return what updates weigh in the mean of a new run."""
        follows_rates = self.round.weighting == "inverse-participation"
        return UpdateWeights(self.largest_weight, ParticipationRates() if follows_rates else None)

    def staleness_factor(self, staleness: int) -> float:
        """Return what an update of this staleness counts, as a factor of its weight: above 0, and 1
        for a fresh one."""
        rule = self.staleness
        if rule.function is None:  # no update is stale
            return 1.0
        hyper = staleness_functions.StalenessConstants(rule.a or 0.0, rule.b or 0.0)
        return staleness_functions.FUNCTIONS[rule.function].of(staleness, hyper)

    def aggregator(self, buffers: Sequence[slice] = ()) -> aggregators.Aggregator[Any]:
        """Return the aggregator of updates. ``buffers``: the model's elements that are no trained
        parameters."""
        numbers = fixed_point(self)
        if numbers is not None:
            return modular_sum(numbers)
        return aggregators.make(self.aggregation.aggregator, self.aggregation.bounds, buffers)

    @property
    def updates_kept(self) -> int:
        """How many updates of a round stay in spool files until it ends."""
        return self.round.goal if self.aggregator().keeps_updates else 0

    @property
    def tied(self) -> tuple[str, ...]:
        """The tied vectors that devices keep."""
        return (*self.algorithm.tied, *((RESIDUAL,) if leaves_residual(self.encoding.up) else ()))

    def parts(self, manifest: Manifest) -> dict[str, str]:
        """Return what a task asks its device to report: name of the part -> its encoding."""
        up = self.encoding.up if self.secure is None else MASKED.name
        return {**self.exact_parts(manifest), UPDATE: up}

    def exact_parts(self, manifest: Manifest) -> dict[str, str]:
        """Return the same for a device that does not know the update's encoding. With [secure] it
        is asked for a masked update as all are, and gives its task back: the coordinator must not
        see one that is not masked."""
        buffers = (BUFFERS,) if manifest.buffers else ()
        exact = dict.fromkeys((*EXCHANGES[self.local.algorithm].parts, *buffers), FLOAT32.name)
        return exact if self.secure is None else {**exact, UPDATE: MASKED.name}

    @property
    def vectors(self) -> tuple[str, ...]:
        """The vectors that each task has beside the model."""
        return tuple(name for name in EXCHANGES[self.local.algorithm].vectors if name != MODEL)

    def weighing(self, manifest: Manifest) -> Weighing:
        """Return how updates are weighed, beside their examples and their staleness. Raises
        PlanError where the bundle's step does not fit."""
        hyper = self.hyper(manifest)
        # the update is trained without the pull, whose weight mu is
        if self.algorithm.personal_model:
            hyper["mu"] = 0.0
        try:
            rule = weighing_rule(self.aggregation, manifest.step, hyper)
        except ValueError as error:
            raise self._misfit(str(error), manifest) from None
        bound = self.aggregation.norm_bound
        if self.privacy is not None and self.secure is None:  # else devices clip, unwatched
            bound = private_bound(self.privacy, self.largest_weight, manifest.size)
        return Weighing(rule, bound)

    def aggregators(self, buffers: Sequence[slice] = ()) -> dict[str, aggregators.Aggregator[Any]]:
        """Return the aggregator of each part of a report, except ``buffers``, which the update's
        has too. ``buffers``: as for ``aggregator``."""
        parts = EXCHANGES[self.local.algorithm].parts
        return {
            # SCAFFOLD's c and its kin are means by definition, whatever the aggregator of updates.
            part: self.aggregator(buffers) if part == UPDATE else aggregators.MEAN
            for part in parts
        }

    def round_rules(self, manifest: Manifest) -> RoundRules:
        """Return how a round's reports become the next model. Raises PlanError where the bundle's
        step does not fit, and PrivacyError where [privacy] asks for a noise that cannot be
        computed."""
        hyper = self.hyper(manifest)
        server_hyper = {**optimizers.defaults(self.server.optimizer), **self.server.hyper}
        return RoundRules(
            aggregators=self.aggregators(manifest.buffers),
            weighing=self.weighing(manifest),
            optimizer=self.optimizer(manifest),
            staleness_factor=self.staleness_factor,
            outlive=self.engine_settings(0.0).outlive,
            mixing_rate=server_hyper["lr"] if self.server.mix else None,
            devices=self.server.devices,
            metrics=(*manifest.metrics, "loss"),
            bounds=self.bounds,
            max_weight=self.round.max_weight,
            first_mu=hyper.get("mu", 0.0),
            adaptive_mu=self.local.adaptive_mu,
            most_mu=adaptive_mu.largest(hyper),
            privacy=privacy_rules(self, self.largest_weight),
            secure=fixed_point(self),
        )

    def optimizer(self, manifest: Manifest) -> optimizers.Optimizer:
        """Return the server optimizer with its hyper-parameters, for the bundle's model."""
        return optimizers.make(self.server.optimizer, manifest.travelling, **self.server.hyper)

    def hyper(self, manifest: Manifest) -> dict[str, float]:
        """A value for each hyper-parameter of the bundle's step: the plan's, else the bundle's
        default.

        mu weights the terms that only some recipes use; with the others it is 0. A recipe that is
        made of such a term needs a mu. Raises PlanError where plan and bundle do not fit.
        """
        named = {"lr": self.local.lr, "mu": self.local.mu}
        given = {
            **self.local.hyper,
            **{key: value for key, value in named.items() if value is not None},
        }
        declared = {hyper.name: hyper.default for hyper in manifest.hyper}
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
                raise self._misfit(
                    f"{where} is missing: the step needs it, and the bundle has no default.",
                    manifest,
                )
        weighted = [term for term in TERMS if term in needs]
        if weighted and self.local.mu is None and not self.local.adaptive_mu and not values["mu"]:
            text = (
                f"local.mu is missing, and the bundle's default is 0: without the {weighted[0]} "
                f"term, whose weight mu is, {what} is another algorithm. Set local.mu, such as "
                "0.01; local.mu = 0 says that this is meant."
            )
            raise self._misfit(text, manifest)
        return {key: value for key, value in values.items() if value is not None}

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
        if remark := self.selection.remark(self.round.weighting):
            texts.append(remark)
        return texts + privacy_remarks(self) + secure_remarks(self)

    def check_against(self, manifest: Manifest) -> None:
        """Raise PlanError where the plan and the bundle do not fit together, or the budget of
        [privacy] does not allow one release."""
        if self.secure is not None:
            text = "[secure] is a draft: no device masks its update yet. Leave the table out"
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {text}")
        self.check_bundle(manifest)
        self.check_privacy()

    def check_bundle(self, manifest: Manifest) -> None:
        """Raise PlanError where the plan and the bundle do not fit together."""
        self.weighing(manifest)
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

    def check_privacy(self) -> None:
        """Raise PlanError where the budget of [privacy] cannot be computed, or does not allow one
        release."""
        try:
            check_budget(self)
        except PrivacyError as error:
            raise PlanError(error.code, f"{self.file}: {error.text}") from None

    def check_served(self, service: ServiceSettings) -> None:
        """Raise PlanError where a process with these settings could not serve the plan to devices
        that check in when they like."""
        if self.privacy is not None and self.privacy.sampling == "poisson":
            text = (
                'privacy.sampling = "poisson" is for the simulator: devices check in when they '
                "can, and no coin of the coordinator decides who takes part, so that the smaller "
                'epsilon would not be true. It takes privacy.sampling = "none"; the mechanism '
                '"dp-ftrl" needs little noise without any sampling'
            )
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {text}")
        self.check_service(service)

    def check_service(self, service: ServiceSettings) -> None:
        """Raise PlanError where a process with these settings could not serve the plan."""
        if self.round.cohort > service.max_connections and self.round.asynchronous:
            text = (
                f"max_connections = {service.max_connections} of the service is less than "
                f"round.concurrency = {self.round.cohort}; as many tasks could never run at a time"
            )
        elif self.round.cohort > service.max_connections:
            text = (
                f"max_connections = {service.max_connections} of the service is less than the "
                f"cohort of {self.round.cohort} (round.goal * round.over_selection); no round "
                "could be full"
            )
        # A device that checks in is connected before another one leaves for it.
        elif self.pace.connected is not None and self.pace.connected >= service.max_connections:
            text = (
                f"max_connections = {service.max_connections} of the service is not more than "
                f"pace.connected = {self.pace.connected}; a device that comes could not take the "
                "place of another"
            )
        elif self.round.stall is not None and self.round.stall < 2 * service.heartbeat:
            text = (
                f"round.stall = {self.round.stall} s is less than two heartbeats (heartbeat = "
                f"{service.heartbeat} s of the service), with which devices tell of their progress"
            )
        else:
            return
        raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {text}")

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


TERMS = ("proximal", "contrastive")
"""Switches of the bundle's step whose weight is mu."""
SWITCHES = {
    "proximal": "a proximal term (export it with proximal=True)",
    "contrastive": "a contrastive term (export it with contrastive=True)",
    "correction": "a correction of its gradient (export it with correction=True)",
}
"""Switch of the bundle's step -> what it is, for people."""
MOVED = (
    "a plan has no table [service] any more. Move its keys, without the heading, to a file of "
    "their own, and start with `serve PLAN.toml --service SERVICE.toml`; for the simulator, to a "
    "table [service] of the scenario. durable is now a key of the plan itself, beside data_dir"
)
"""What the author of an older plan is told."""
