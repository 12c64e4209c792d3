"""A plan: everything that one training run is, in a TOML file. examples/plan.toml shows every
key."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleetlearn_protocol import extensions
from fleetlearn_protocol.algorithms import EXCHANGES
from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.encodings import (
    FLOAT32,
    INT64,
    MASKED64,
    RESIDUAL,
    UINT32,
    Encoding,
    find_encoding,
    masked_encoding,
)
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.extensions import ExtensionError, ExtensionPoint
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import BUFFERS, MODEL, MOST_REPORTS, ROWS, SUMS, UPDATE
from fleetlearn_protocol.own_encodings import ENCODING, numbers
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.sparse_rows import row_layout
from msgspec import UNSET

from fleetlearn_coordinator.aggregation import adaptive_mu, aggregators, optimizers
from fleetlearn_coordinator.aggregation import staleness as staleness_functions
from fleetlearn_coordinator.aggregation.computations.registry import RunComputation
from fleetlearn_coordinator.aggregation.exact_sums import exact_sums
from fleetlearn_coordinator.aggregation.family_round import FamilyRules, MemberRules
from fleetlearn_coordinator.aggregation.modular_sum import (
    MaskedNumbers,
    SumWords,
    modular_sum,
)
from fleetlearn_coordinator.aggregation.participation_rates import ParticipationRates, UpdateWeights
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.round_sums import Aggregators
from fleetlearn_coordinator.aggregation.row_mean import row_mean
from fleetlearn_coordinator.plan.computation_rules import computation_misfit
from fleetlearn_coordinator.plan.contradictions import contradictions
from fleetlearn_coordinator.plan.defaults import fill_defaults
from fleetlearn_coordinator.plan.family_rules import family_misfit
from fleetlearn_coordinator.plan.family_section import FamilyMember
from fleetlearn_coordinator.plan.own_algorithms import (
    AGGREGATOR,
    SELECTION_STRATEGY,
    SERVER_OPTIMIZER,
    STALENESS_FUNCTION,
    STOP_RULE,
    WEIGHING_RULE,
    OwnName,
    find_aggregator,
)
from fleetlearn_coordinator.plan.pairwise_rules import pairwise_settings
from fleetlearn_coordinator.plan.plan_for_bundle import PlanError, PlanForBundle
from fleetlearn_coordinator.plan.privacy_terms import check_budget, privacy_rules
from fleetlearn_coordinator.plan.quality_section import quality_settings
from fleetlearn_coordinator.plan.regions_section import region_sections
from fleetlearn_coordinator.plan.schedule_section import ScheduleSection, StepScheduleSection
from fleetlearn_coordinator.plan.sections import SECTIONS
from fleetlearn_coordinator.plan.secure_rules import fixed_point
from fleetlearn_coordinator.plan.selection_section import NESTED
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.plan.toml_errors import (
    Section,
    paths_from,
    read_tables,
    refuse_unknown,
)
from fleetlearn_coordinator.privacy.accounting import PrivacyError
from fleetlearn_coordinator.rounds.own_stop_rule import OwnStopRule
from fleetlearn_coordinator.rounds.selection_rules import STRATEGIES, SelectionRules
from fleetlearn_coordinator.rounds.settings import (
    MEASURED_ON,
    EvaluationSettings,
    FitSettings,
    Settings,
)

__all__ = ["Plan", "PlanError"]

T = TypeVar("T")
MOST_TRIED = 1000
"""An own staleness function is tried before the run with each staleness up to this."""
INNER: Mapping[str, type[Section]] = {
    **NESTED,
    "local.schedule": ScheduleSection,
    "local.step_schedule": StepScheduleSection,
}
"""Tables in sections."""


class Plan(PlanForBundle, frozen=True, kw_only=True):
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
            refuse_unknown(
                raw, "plan", Plan, {**SECTIONS, **INNER, **_tables_by_name(raw)}, hidden=("file",)
            )
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
            **self.round.size._asdict(),
            deadline=self.round.deadline,
            grace=self.round.grace,
            gather=self.round.gather or 0.0,
            seed=self.seed,
            rounds=self.stop.rounds,
            metric=self.stop.metric,
            target=self.stop.target,
            below=self.stop.direction == "below",
            patience=self.stop.patience,
            least=self.stop.least or 0.0,
            measured_on=self._measured_on,
            epsilon=self.stop.epsilon or 0.0,
            stall=self.stall(heartbeat),
            asynchronous=self.round.asynchronous,
            carry=self.round.late == "carry",
            max_staleness=self.staleness.max or 0,
            max_updates=self.most_updates_of_a_device if self.round.asynchronous else None,
            selection=self._selection_rules,
            pace=self.pace.rules,
            evaluation=EvaluationSettings(
                self.evaluation.every or 0,
                self.evaluation.devices,
                self.evaluation.minimum,
                self.evaluation.deadline,
            ),
            quality=quality_settings(self.quality),
            pairwise=pairwise_settings(self),
            fit=self._fit_settings,
            regions=None if self.regions is None else self.regions.settings,
            share=self.round.share,
            separation=0 if self.privacy is None else self.privacy.separation,
            participations=None if self.privacy is None else self.privacy.participations,
            one_task=self.privacy is not None and self.privacy.mechanism == "local",
        )

    def own_names(self) -> list[OwnName]:
        """Return what the plan names of other packages."""
        found = []

        def add(point: ExtensionPoint[Any], name: str, key: str, given: Mapping[str, Any]) -> None:
            found.append(OwnName(point, name, key, given))

        choice, stop, server = self.selection, self.stop, self.server
        updates, stale = self.aggregation, self.staleness
        if choice.strategy not in STRATEGIES:
            add(SELECTION_STRATEGY, choice.strategy, "selection.strategy", choice.parameters)
        if stop.rule is not None:
            add(STOP_RULE, stop.rule, "stop.rule", stop.parameters)
        if updates.aggregator not in aggregators.AGGREGATORS:
            add(AGGREGATOR, updates.aggregator, "aggregation.aggregator", updates.parameters)
        if updates.weighing is not None:
            given = updates.weighing_parameters
            add(WEIGHING_RULE, updates.weighing, "aggregation.weighing", given)
        if server.optimizer not in optimizers.OPTIMIZERS:
            add(SERVER_OPTIMIZER, server.optimizer, "server.optimizer", server.parameters)
        if (own := self.encoding.own) is not None:
            add(ENCODING, own.function, "encoding.up", numbers(own))
        if stale.function is not None and stale.function not in staleness_functions.FUNCTIONS:
            add(STALENESS_FUNCTION, stale.function, "staleness.function", stale.parameters)
        return found

    def _own(
        self, point: ExtensionPoint[T], name: str, parameters: Mapping[str, Any], key: str
    ) -> T:
        """Return what another package's function makes. Raises PlanError where it cannot be had."""
        try:
            return extensions.make_once(point, name, parameters, key)
        except ExtensionError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {error}") from None

    @property
    def _selection_rules(self) -> SelectionRules | None:
        """Raises PlanError where an own strategy cannot be had."""
        try:
            return self.selection.rules(self.round.deadline, self.round.max_weight)
        except ExtensionError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {error}") from None

    def own_stop_rule(self) -> OwnStopRule | None:
        """Return the plan's own stop rule, before any round; None: it has none. Raises PlanError
        where it cannot be had."""
        rule = self.stop
        if rule.rule is None:
            return None
        return OwnStopRule(self._own(STOP_RULE, rule.rule, rule.parameters, "stop.rule"))

    @property
    def _fit_settings(self) -> FitSettings | None:
        """What the engine needs to have devices choose among models; None: they do not."""
        rule = self.round
        if self.clusters is None:
            return None
        deadline = self.clusters.deadline or rule.deadline
        return FitSettings(rule.cohort, rule.minimum, deadline)

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
        if rule.function not in staleness_functions.FUNCTIONS:
            key = "staleness.function"
            own = self._own(STALENESS_FUNCTION, rule.function, rule.parameters, key)
            return staleness_functions.own_factor(own, staleness)
        hyper = staleness_functions.StalenessConstants(rule.a or 0.0, rule.b or 0.0)
        return staleness_functions.FUNCTIONS[rule.function].of(staleness, hyper)

    def aggregator(self, buffers: Sequence[slice] = ()) -> aggregators.Aggregator[Any]:
        """Return the aggregator of updates. ``buffers``: the model's elements that are no trained
        parameters. Raises PlanError where an own one cannot be had."""
        numbers = fixed_point(self)
        if numbers is not None:
            return modular_sum(numbers)
        own = self.aggregation
        try:
            return find_aggregator(own.aggregator, own.bounds, own.parameters, buffers)
        except ValueError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {error}") from None

    @property
    def updates_kept(self) -> int:
        """How many updates of a round stay in spool files until it ends."""
        keeps = (
            self.aggregator().keeps_updates or self.secure is not None or self.keeps_device_models
        )
        return self.round.goal if keeps else 0

    @property
    def tied(self) -> tuple[str, ...]:
        """The tied vectors that devices keep."""
        return (*self.algorithm.tied, *((RESIDUAL,) if self.encoding.leaves_residual else ()))

    @property
    def up(self) -> Encoding:
        """How devices that know it encode their updates. Raises PlanError where an own encoding
        cannot be had."""
        try:
            return self.encoding.find()
        except ExtensionError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {error}") from None

    def parts(self, manifest: Manifest) -> dict[str, str]:
        """Return what a task asks its device to report: name of the part -> its encoding."""
        if self.algorithm.computes:
            return {SUMS: self._sums_encoding}
        up = self.up if self.secure is None else masked_encoding(self.secure.bits)
        return {**self.exact_parts(manifest), UPDATE: up.name}

    def parts_of_rows(self, parts: Mapping[str, str], manifest: Manifest) -> dict[str, str]:
        """Return the same for a device that can train sub-models: the rows come first, as they say
        how large the update is."""
        return {ROWS: UINT32.name, **parts} if self.sends_rows(manifest) else {**parts}

    def sends_rows(self, manifest: Manifest) -> bool:
        """Return whether devices that can are asked for the rows of sparse tables that they trained
        alone."""
        return manifest.sparse is not UNSET and self.aggregation.rows != "whole"

    def update_bytes(self, manifest: Manifest) -> int:
        """Return the most bytes that a device's update has. The last block of an own encoding may
        be 64 bytes larger."""
        # Own encodings are not larger than float32, and one that cannot be had is said elsewhere.
        own = self.encoding.own is not None
        parts = self.exact_parts(manifest) if own else self.parts(manifest)
        return sum(
            find_encoding(encoding).most_bytes(manifest.elements_of(part))
            for part, encoding in parts.items()
        )

    def exact_parts(self, manifest: Manifest) -> dict[str, str]:
        """Return the same for a device that does not know the update's encoding. With [secure] it
        is asked for a masked update as all are, and gives its task back: the coordinator must not
        see one that is not masked. Sums have one encoding, which all know that compute them, or
        that mask them."""
        if self.algorithm.computes:
            return {SUMS: self._sums_encoding}
        buffers = (BUFFERS,) if manifest.buffers else ()
        exact = dict.fromkeys((*EXCHANGES[self.local.algorithm].parts, *buffers), FLOAT32.name)
        if self.secure is None:
            return exact
        return {**exact, UPDATE: masked_encoding(self.secure.bits).name}

    @property
    def _sums_encoding(self) -> str:
        return INT64.name if self.secure is None else MASKED64.name

    @property
    def vectors(self) -> tuple[str, ...]:
        """The vectors that each task has beside the model."""
        return tuple(name for name in EXCHANGES[self.local.algorithm].vectors if name != MODEL)

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
        return RoundRules(
            aggregators=self._aggregators_of(manifest),
            weighing=self.weighing(manifest),
            optimizer=self.optimizer(manifest),
            staleness_factor=self.staleness_factor,
            outlive=self.round.asynchronous or self.round.late == "carry",
            mixing_rate=self._mixing_rate,
            devices=self.server.devices,
            metrics=(*manifest.metrics, "loss"),
            bounds=self.bounds,
            max_weight=self.round.max_weight,
            first_mu=hyper.get("mu", 0.0),
            adaptive_mu=self.local.adaptive_mu,
            most_mu=adaptive_mu.largest(hyper),
            computation=self.computation(manifest) if self.algorithm.computes else None,
            privacy=privacy_rules(self, self.largest_weight),
            secure=self.masked_numbers(manifest),
        )

    @property
    def _mixing_rate(self) -> float | None:
        if not self.server.mix:
            return None
        return {**optimizers.defaults(self.server.optimizer), **self.server.hyper}["lr"]

    def masked_numbers(self, manifest: Manifest) -> MaskedNumbers | None:
        """Return how what devices send is written before it is masked; None without [secure].
        Raises PrivacyError where devices are to add noise that cannot be."""
        if self.secure is None or not self.algorithm.computes:
            return fixed_point(self)
        reports = min(self.round.cohort, MOST_REPORTS)
        return SumWords(manifest.elements_of(SUMS), reports, self.privacy is not None)

    def masked_words(self, manifest: Manifest) -> int:
        """Return how many words a device of a plan with [secure] masks. ``manifest``: of its
        bundle. Raises ValueError where the plan has no [secure]."""
        numbers = self.masked_numbers(manifest)
        if numbers is None:
            raise ValueError(f"{self.file} has no [secure]: its devices mask nothing")
        return numbers.words(manifest.size)

    def _aggregators_of(self, manifest: Manifest) -> Aggregators:
        if self.algorithm.computes:
            masked, size = self.masked_numbers(manifest), manifest.elements_of(SUMS)
            private = self.privacy is not None
            plain = exact_sums(size, self.round.cohort, private=private)
            return {SUMS: plain if masked is None else modular_sum(masked)}
        layout = row_layout(manifest) if self.sends_rows(manifest) else None
        if layout is not None:
            return {UPDATE: row_mean(layout, touched=self.aggregation.rows == "touched")}
        return self.aggregators(manifest.buffers)

    def computation(self, manifest: Manifest) -> RunComputation:
        """Return what devices compute in place of training. Raises PlanError where they train."""
        if (misfit := computation_misfit(self, manifest)) is not None:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {misfit}.")
        if (settings := manifest.computation) is UNSET:
            text = f'recipe = "{self.recipe}" trains a model: nothing is computed beside it'
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {text}")
        return RunComputation(kind_of(settings), settings)

    def family_rules(self, manifests: Mapping[str, Manifest]) -> FamilyRules:
        """Return how the reports of a round become the next models. ``manifests``: of the bundles
        of ``members``. Raises as ``round_rules`` does."""
        return FamilyRules(
            MemberRules(name, self.round_rules(manifest), manifest.size)
            for name, manifest in manifests.items()
        )

    def optimizer(self, manifest: Manifest) -> optimizers.Optimizer:
        """Return the server optimizer with its hyper-parameters, for the bundle's model. Raises
        PlanError where an own one cannot be had."""
        name, table = self.server.optimizer, manifest.travelling
        if name not in optimizers.OPTIMIZERS:
            made = self._own(SERVER_OPTIMIZER, name, self.server.parameters, "server.optimizer")
            return optimizers.own_optimizer(name, made, table)
        return optimizers.make(self.server.optimizer, manifest.travelling, **self.server.hyper)

    def check_members(self, manifests: Mapping[str, Manifest]) -> None:
        """Raise PlanError where the plan and one of its bundles do not fit together, or the bundles
        of a family do not. ``manifests``: as for ``family_rules``."""
        for manifest in manifests.values():
            self.check_against(manifest)
        self.check_family(manifests)

    def check_family(self, manifests: Mapping[str, Manifest]) -> None:
        """Raise PlanError where the bundles of a family do not go together."""
        if self.is_family and (misfit := family_misfit(manifests)) is not None:
            raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {misfit}.")

    def check_against(self, manifest: Manifest) -> None:
        """Raise PlanError where the plan and the bundle do not fit together, or the budget of
        [privacy] does not allow one release."""
        self.check_bundle(manifest)
        self.check_privacy()

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
        self.check_own_rules(service)

    def check_own_rules(self, service: ServiceSettings) -> None:
        """Let the service's plugins be named in this process, and raise PlanError where one of them
        or one of the plan's own rules cannot be had."""
        try:
            if service.plugins is not None:
                service.plugins.allow()
        except ExtensionError as error:
            raise PlanError(Code.BAD_MESSAGE, f"[plugins] of the service: {error}") from None
        for each in self.own_names():
            self._own(each.point, each.name, each.parameters, each.key)
        self.aggregator()
        _ = self.up  # gateways and a start ask for it by its name on the wire
        for staleness in range(min(self.staleness.max or 0, MOST_TRIED) + 1):
            self._try_staleness(staleness)

    def _try_staleness(self, staleness: int) -> None:
        try:
            self.staleness_factor(staleness)
        except FleetError as error:
            raise PlanError(error.code, f"{self.file}: {error.text}") from None

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


def _tables_by_name(raw: Mapping[str, Any]) -> dict[str, type[Section]]:
    """Return the tables of a family's members and of regions, by dotted name."""
    family = raw.get("family")
    members = family if isinstance(family, dict) else ()
    return {**{f"family.{name}": FamilyMember for name in members}, **region_sections(raw)}


MOVED = (
    "a plan has no table [service] any more. Move its keys, without the heading, to a file of "
    "their own, and start with `serve PLAN.toml --service SERVICE.toml`; for the simulator, to a "
    "table [service] of the scenario. durable is now a key of the plan itself, beside data_dir"
)
"""What the author of an older plan is told."""
