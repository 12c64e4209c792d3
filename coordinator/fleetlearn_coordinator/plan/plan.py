"""A plan: everything that one training run is, in a TOML file. examples/plan.toml shows every key."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fleetlearn_protocol.algorithms import EXCHANGES
from fleetlearn_protocol.encodings import FLOAT32, RESIDUAL, find_encoding, leaves_residual
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import MODEL, UPDATE, Identifier
from msgspec import Meta

from fleetlearn_coordinator.aggregation import aggregators, optimizers
from fleetlearn_coordinator.aggregation import staleness as staleness_functions
from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.aggregation.participation_rates import FULL_WEIGHT, ParticipationRates
from fleetlearn_coordinator.aggregation.round_summary import PERSONAL
from fleetlearn_coordinator.aggregation.weighing.weighing import Weighing
from fleetlearn_coordinator.plan.aggregation_rules import contradictions_of_aggregation, weighing_rule
from fleetlearn_coordinator.plan.defaults import fill_defaults
from fleetlearn_coordinator.plan.local_algorithms import ALGORITHMS, Algorithm
from fleetlearn_coordinator.plan.personal_parameters import personal_misfit
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.plan.sections import (
    SECTIONS,
    Aggregation,
    Encoding,
    Evaluation,
    Local,
    Pace,
    Round,
    Server,
    Staleness,
    Stop,
)
from fleetlearn_coordinator.plan.selection_section import NESTED, Selection
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.plan.toml_errors import Section, near, read_tables, refuse_unknown
from fleetlearn_coordinator.rounds.settings import EvaluationSettings, PaceSettings, Settings


class PlanError(FleetError):
    """A plan that cannot be run. ``text`` names the file, the key, what was given and what is allowed."""


class Plan(Section, frozen=True, kw_only=True):
    """A checked plan with its recipe filled in. ``Plan.load`` reads one."""

    name: Identifier
    """Of the run: letters, digits, ``._-``."""
    bundle: Path
    """The training bundle, relative to the plan file."""
    recipe: str = "fedavg"
    """Where the defaults of [local] and [server] come from."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Makes the choice of devices and the order of their examples repeatable."""
    data_dir: Path
    """Where the run is kept, relative to the plan file. Default: ``<name>.run`` beside it."""
    durable: Literal["process", "power"] = "process"
    """What an acknowledged update survives: the process's death, or also the machine's (an fsync for each update)."""
    local: Local
    round: Round
    staleness: Staleness
    aggregation: Aggregation
    encoding: Encoding
    pace: Pace
    server: Server
    stop: Stop
    selection: Selection
    evaluation: Evaluation
    file: str
    """Where the plan came from, for messages. Not a key of the file."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError."""
        path = Path(path).expanduser()
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(Code.BAD_MESSAGE, f"{path}: the plan cannot be read: {error}") from None
        return cls.parse(text, path.absolute().parent, file=str(path))

    @classmethod
    def parse(cls, text: str, base: Path, *, file: str = "plan") -> Plan:
        """Read a plan from text; ``base`` is what its paths are relative to. Raises PlanError."""
        try:
            raw = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{file}: this is not TOML: {error}") from None
        return cls.read(raw, base, file=file)

    @classmethod
    def read(cls, raw: dict[str, Any], base: Path, *, file: str = "plan") -> Plan:
        """A plan from a plan file's tables, which are filled in on the way. Raises PlanError."""

        def place(_: type, given: object) -> Path:
            if not isinstance(given, str) or not given:
                raise TypeError("Expected a path")
            return (base / Path(given).expanduser()).absolute()

        try:
            if "service" in raw:
                raise ValueError(MOVED)
            refuse_unknown(raw, "plan", Plan, {**SECTIONS, **NESTED}, hidden=("file",))
            fill_defaults(raw)
            plan = read_tables({**raw, "file": file}, "plan", cls, place)
            for problem in _contradictions(plan):
                raise ValueError(problem)
        except ValueError as error:
            raise PlanError(Code.BAD_MESSAGE, f"{file}: {error}") from None
        return plan

    def stall(self, heartbeat: float) -> float:
        """Seconds that a task lives without progress. A slow device may take long to open a large model and to make
        its first step, and tells of its steps with its heartbeats alone, which are ``heartbeat`` seconds apart."""
        if self.round.stall is not None:
            return self.round.stall
        return max(30.0, 4 * heartbeat, min(self.round.deadline / 5, 300.0))

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """The metric that may stop the run -> the least and the greatest that a device's mean can be."""
        stop = self.stop
        if stop.metric is None:
            return {}
        # By default only on the side where one device's word would stop the run.
        return {stop.metric: stop.bounds or ((0.0, math.inf) if stop.direction == "below" else (-math.inf, 1.0))}

    def engine_settings(self, heartbeat: float) -> Settings:
        """What the engine needs of this plan, where devices give a sign of life every ``heartbeat`` seconds."""
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
            epsilon=self.stop.epsilon or 0.0,
            stall=self.stall(heartbeat),
            asynchronous=self.round.asynchronous,
            carry=self.round.late == "carry",
            max_staleness=self.staleness.max or 0,
            max_updates=self.most_updates_of_a_device if self.round.asynchronous else None,
            selection=self.selection.rules(self.round.deadline, self.round.max_weight),
            pace=None if self.pace.connected is None else PaceSettings(**msgspec.structs.asdict(self.pace)),
            evaluation=EvaluationSettings(
                self.evaluation.every or 0,
                self.evaluation.devices,
                self.evaluation.minimum,
                self.evaluation.deadline,
            ),
        )

    @property
    def most_updates_of_a_device(self) -> int | None:
        """How many updates of one device count in a round at most. None: any number."""
        rule = self.round
        if not rule.asynchronous:
            return 1
        # As written: 100 * 0.29 is 29, not 28.
        return None if rule.max_share is None else int(rule.goal * Decimal(str(rule.max_share)))

    @property
    def largest_weight(self) -> int:
        """The most that an update weighs in the mean."""
        most = {"uniform": 1, "examples": self.round.max_weight, "inverse-participation": FULL_WEIGHT}
        return most[self.round.weighting]

    def participation_rates(self) -> ParticipationRates | None:
        """Return what to count the devices' updates with, if their weights depend on it."""
        return ParticipationRates() if self.round.weighting == "inverse-participation" else None

    def staleness_factor(self, staleness: int) -> float:
        """Return what an update of this staleness counts, as a factor of its weight: above 0, and 1 for a fresh one."""
        rule = self.staleness
        if rule.function is None:  # no update is stale
            return 1.0
        hyper = staleness_functions.Hyper(rule.a or 0.0, rule.b or 0.0)
        return staleness_functions.FUNCTIONS[rule.function].of(staleness, hyper)

    def aggregator(self, buffers: Sequence[slice] = ()) -> aggregators.Aggregator[Any]:
        """Return the aggregator of updates. ``buffers``: the model's elements that are no trained parameters."""
        if self.aggregation.has_rule:
            return aggregators.mean_with_plain_buffers(buffers)
        return aggregators.make(self.aggregation.aggregator, self.aggregation.bounds)

    @property
    def algorithm(self) -> Algorithm:
        """What the devices' algorithm needs."""
        return ALGORITHMS[self.local.algorithm]

    @property
    def tied(self) -> tuple[str, ...]:
        """The tied vectors that devices keep."""
        return (*self.algorithm.tied, *((RESIDUAL,) if leaves_residual(self.encoding.up) else ()))

    @property
    def parts(self) -> dict[str, str]:
        """What a task asks its device to report: name of the part -> its encoding."""
        return {**self.exact_parts, UPDATE: self.encoding.up}

    @property
    def exact_parts(self) -> dict[str, str]:
        """The same for a device that does not know the update's encoding."""
        return dict.fromkeys(EXCHANGES[self.local.algorithm].parts, FLOAT32.name)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The vectors that each task has beside the model."""
        return tuple(name for name in EXCHANGES[self.local.algorithm].vectors if name != MODEL)

    def weighing(self, manifest: Manifest) -> Weighing:
        """Return how updates are weighed, beside their examples and their staleness. Raises PlanError where the
        bundle's step does not fit."""
        hyper = self.hyper(manifest)
        if self.algorithm.personal_model:  # the update is trained without the pull, whose weight mu is
            hyper["mu"] = 0.0
        try:
            rule = weighing_rule(self.aggregation, manifest.step, hyper)
        except ValueError as error:
            raise self._misfit(str(error), manifest) from None
        return Weighing(rule, self.aggregation.norm_bound)

    def aggregators(self, buffers: Sequence[slice] = ()) -> dict[str, aggregators.Aggregator[Any]]:
        """Return the aggregator of each part of a report. ``buffers``: as for ``aggregator``."""
        return {part: self.aggregator(buffers) if part == UPDATE else aggregators.MEAN for part in self.parts}

    def share(self, updates: int) -> float:
        """Return the share of all devices that took part in a round with this many updates. 1 where the number of
        devices is not known."""
        return 1.0 if self.server.devices is None else updates / self.server.devices

    def optimizer(self, manifest: Manifest) -> optimizers.Optimizer:
        """Return the server optimizer with its hyper-parameters, for the bundle's model."""
        return optimizers.make(self.server.optimizer, manifest.travelling, **self.server.hyper)

    def hyper(self, manifest: Manifest) -> dict[str, float]:
        """A value for each hyper-parameter of the bundle's step: the plan's, else the bundle's default.

        mu weights the terms that only some recipes use; with the others it is 0. Raises PlanError where the two do
        not fit.
        """
        named = {"lr": self.local.lr, "mu": self.local.mu}
        given = {**self.local.hyper, **{key: value for key, value in named.items() if value is not None}}
        declared = {row.name: row.default for row in manifest.hyper}
        needs, what = RECIPES[self.recipe].needs + self.algorithm.needs, self._needing()
        terms = [term for term in TERMS if getattr(manifest.step, term)]
        for need in needs:
            if not getattr(manifest.step, need):
                raise self._misfit(f"{what} needs a step with {SWITCHES[need]}.", manifest)
        if self.local.mu is not None and "mu" not in declared:
            raise self._misfit(f"local.mu = {self.local.mu} needs a step with a {' or '.join(TERMS)} term.", manifest)
        for key in given:
            if key not in declared:
                where = f"local.{key}" if key in named else f"local.hyper.{key}"
                raise self._misfit(
                    f"{where} = {given[key]} is not a value that the step takes{near(key, declared)}", manifest
                )
        if self.local.adaptive_mu and not manifest.step.proximal:
            raise self._misfit(f"local.adaptive_mu = true needs a step with {SWITCHES['proximal']}.", manifest)
        if terms and not set(terms) & set(needs):
            given.setdefault("mu", 0.0)
        values = {key: given.get(key, default) for key, default in declared.items()}
        for key, value in values.items():
            if value is None:
                where = f"local.{key}" if key in named else f"local.hyper.{key}"
                raise self._misfit(f"{where} is missing: the step needs it, and the bundle has no default.", manifest)
        return {key: value for key, value in values.items() if value is not None}

    def remarks(self, manifest: Manifest) -> list[str]:
        """Say what the bundle has and this plan does not use, for the log."""
        found = []
        if manifest.step.correction and "correction" not in self.algorithm.needs:
            found.append(
                "the bundle's step adds a correction to the gradient, and this plan has none: it is zeros. "
                'recipe = "scaffold" and recipe = "feddyn" use it'
            )
        if manifest.step.contrastive and not self.hyper(manifest).get("mu"):
            found.append(
                "the bundle's step has MOON's contrastive term, and its weight mu is 0: devices compute it for "
                'nothing. Set recipe = "moon" and local.mu, or export without it'
            )
        if remark := self.selection.remark(self.round.weighting):
            found.append(remark)
        return found

    def check_against(self, manifest: Manifest) -> None:
        """Raise PlanError where the plan and the bundle do not fit together."""
        self.weighing(manifest)
        if self.algorithm.plain_sgd and manifest.step.optimizer != "sgd":
            text = f"{self._needing()} takes a model's change for a sum of gradients: it needs a step of plain SGD."
            raise self._misfit(text, manifest)
        if self.algorithm.plain_sgd and manifest.compute is not msgspec.UNSET:
            text = f"{self._needing()} needs the gradient of each step, also of those that overflow {manifest.compute}."
            raise self._misfit(f"{text} Export it without compute=.", manifest)
        of_recipe = f"recipe {self.recipe}", RECIPES[self.recipe].personal
        for name, personal in (of_recipe, (self._needing(), self.algorithm.personal)):
            if (misfit := personal_misfit(name, personal, manifest)) is not None:
                raise PlanError(Code.BAD_MESSAGE, f"{self.file}: {misfit}.")
        known = ["loss", *manifest.metrics]
        if self.algorithm.personal_model and self.stop.measured_by == "round":
            known += [f"{PERSONAL}{name}" for name in known]
        if self.stop.metric is not None and self.stop.metric not in known:
            raise self._misfit(
                f'stop.metric = "{self.stop.metric}" is not measured{near(self.stop.metric, known)}', manifest
            )

    def check_service(self, service: ServiceSettings) -> None:
        """Raise PlanError where a process with these settings could not serve the plan."""
        if self.round.cohort > service.max_connections and self.round.asynchronous:
            text = (
                f"max_connections = {service.max_connections} of the service is less than round.concurrency = "
                f"{self.round.cohort}; as many tasks could never run at a time"
            )
        elif self.round.cohort > service.max_connections:
            text = (
                f"max_connections = {service.max_connections} of the service is less than the cohort of "
                f"{self.round.cohort} (round.goal * round.over_selection); no round could be full"
            )
        elif self.pace.connected is not None and self.pace.connected >= service.max_connections:
            text = (
                f"max_connections = {service.max_connections} of the service is not more than pace.connected = "
                f"{self.pace.connected}; a device that comes could not take the place of another"
            )
        elif self.round.stall is not None and self.round.stall < 2 * service.heartbeat:
            text = (
                f"round.stall = {self.round.stall} s is less than two heartbeats (heartbeat = {service.heartbeat} s of "
                "the service), with which devices tell of their progress"
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
        takes = ", ".join(row.name for row in manifest.hyper) or "nothing"
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
    "a plan has no table [service] any more. Move its keys, without the heading, to a file of their own, and start "
    "with `serve PLAN.toml --service SERVICE.toml`; for the simulator, to a table [service] of the scenario. "
    "durable is now a key of the plan itself, beside data_dir"
)
"""What the author of an older plan is told."""


def _contradictions(plan: Plan) -> Iterable[str]:
    round_, stop = plan.round, plan.stop
    if round_.minimum > round_.goal:
        yield f"round.minimum = {round_.minimum} is more than round.goal = {round_.goal}; it takes 1 to the goal"
    measuring = plan.evaluation
    if measuring.minimum > measuring.devices:
        yield (
            f"evaluation.minimum = {measuring.minimum} is more than evaluation.devices = {measuring.devices}; it takes "
            "1 to the devices"
        )
    if plan.server.mix and (round_.goal != 1 or not round_.asynchronous or plan.server.optimizer != "sgd"):
        yield (
            "server.mix = true mixes the model with one device's at a time: it needs round.participation = "
            f'"asynchronous", round.goal = 1 (it is {round_.goal}) and server.optimizer = "sgd"'
        )
    yield from contradictions_of_aggregation(
        plan.aggregation, round_, mix=plan.server.mix, evaluate=plan.local.evaluate
    )
    yield from _contradictions_of_algorithm(plan)
    if round_.weighting == "inverse-participation" and (not round_.asynchronous or round_.goal == 1):
        yield (
            'round.weighting = "inverse-participation" weighs the updates of one buffer against each other: it needs '
            f'round.participation = "asynchronous" and a round.goal above 1 (it is {round_.goal})'
        )
    if plan.most_updates_of_a_device == 0:
        yield (
            f"round.max_share = {round_.max_share} of round.goal = {round_.goal} is less than one update; it takes "
            f"{1 / round_.goal:.3g} to 1"
        )
    yield from plan.selection.contradictions(
        asynchronous=round_.asynchronous, tasks=round_.goal if round_.asynchronous else round_.cohort
    )
    if round_.cohort > MAX_UPDATES:
        yield f"round.goal * round.over_selection gives a cohort of {round_.cohort}; the limit is {MAX_UPDATES}"
    if plan.local.time_budget is not None and plan.local.time_budget > round_.deadline:
        yield f"local.time_budget = {plan.local.time_budget} s is more than round.deadline = {round_.deadline} s"
    if plan.recipe == "fedsgd" and (plan.local.epochs, plan.local.batch_size) != (1, 0):
        yield (
            f"local.epochs = {plan.local.epochs} and local.batch_size = {plan.local.batch_size}: recipe fedsgd is one "
            'step on all examples, epochs = 1 and batch_size = 0; more steps are recipe = "fedavg"'
        )
    if leaves_residual(plan.encoding.up) and plan.aggregation.aggregator != aggregators.MEAN.name:
        yield (
            f'encoding.up = "{plan.encoding.up}" leaves most elements of each update out: the aggregator '
            f"{plan.aggregation.aggregator} compares updates element by element, or by their distances"
        )
    if plan.server.mix and plan.encoding.down == "float16":
        yield 'encoding.down = "float16": server.mix = true moves the model towards what devices were sent exactly'
    try:
        find_encoding(plan.encoding.up)
    except ProtocolError as error:
        yield f'encoding.up = "{plan.encoding.up}": {error.text}'
    if plan.pace.connected is None and plan.pace != Pace():
        yield "pace.longest and pace.check_ins need pace.connected, how many devices stay connected"
    if plan.pace.connected is not None and plan.pace.connected < round_.cohort:
        what = "round.concurrency" if round_.asynchronous else "the cohort (round.goal * round.over_selection)"
        yield f"pace.connected = {plan.pace.connected} is less than {what}, {round_.cohort}: rounds could not be full"
    for key in {"lr", "mu"} & set(plan.local.hyper):
        yield f"local.hyper.{key} has its own key: local.{key}"
    if stop.target is not None and stop.metric is None:
        yield f'stop.target = {stop.target} needs stop.metric, the name of a metric of the bundle or "loss"'
    if stop.metric is not None and stop.target is None:
        yield f'stop.metric = "{stop.metric}" needs stop.target, the value to stop at'
    if stop.bounds is not None and stop.metric is None:
        yield f"stop.bounds = {list(stop.bounds)} needs stop.metric, the metric that can be no more and no less"
    for low, high in plan.bounds.values():
        if stop.target is None or (low < high and low <= stop.target <= high):
            continue
        if stop.bounds is not None:
            yield f"stop.bounds = {list(stop.bounds)} takes the least and the greatest value, with the target between"
        yield (
            f"stop.target = {stop.target} needs stop.bounds = [least, greatest], what {stop.metric} can be for one "
            "example: a device that reports more or less must not stop the run"
        )
    if stop.metric is not None and stop.measured_by == "round" and not plan.local.evaluate:
        yield f'stop.metric = "{stop.metric}" is measured by the devices: it needs local.evaluate = true'
    if stop.measured_by == "held-out" and plan.evaluation.data is None:
        yield 'stop.measured_by = "held-out" needs evaluation.data, an .npz file of held-out data'
    if stop.measured_by == "evaluation" and plan.evaluation.every is None:
        yield 'stop.measured_by = "evaluation" needs evaluation.every, the number of rounds between two evaluations'


def _contradictions_of_algorithm(plan: Plan) -> Iterable[str]:
    name, algorithm, server = plan.local.algorithm, plan.algorithm, plan.server
    if plan.local.personal_epochs is not None and not algorithm.personal_passes:
        with_passes = " and ".join(f'"{row}"' for row, each in ALGORITHMS.items() if each.personal_passes)
        yield (
            f"local.personal_epochs = {plan.local.personal_epochs} is for local.algorithm = {with_passes}; here it is "
            f'"{name}"'
        )
    if algorithm.tied and plan.aggregation.aggregator != aggregators.MEAN.name:
        yield (
            f'local.algorithm = "{name}" counts on what all devices that took part keep; the aggregator '
            f'{plan.aggregation.aggregator} leaves some of them out. It needs aggregation.aggregator = "mean"'
        )
    if plan.local.adaptive_mu and name != "plain":
        yield f'local.adaptive_mu = true is for local.algorithm = "plain"; mu of "{name}" is another number'
    if plan.local.adaptive_mu and plan.aggregation.normalise:
        yield "local.adaptive_mu = true changes mu from round to round; aggregation.normalise = true needs it to stay"
    bound = plan.aggregation.norm_bound
    if algorithm.tied and bound is not None and bound.action == "clip":
        yield (
            f'local.algorithm = "{name}": devices keep what their whole updates made, so these must count whole. It '
            'takes aggregation.norm_action = "refuse"'
        )
    if algorithm.tied and plan.aggregation.has_rule:
        yield f'local.algorithm = "{name}" works with the mean of whole updates, without normalise or q'
    if algorithm.tied and server.mix:
        yield f'local.algorithm = "{name}" works with the mean of several updates; server.mix = true has one at a time'
    if (server.optimizer == "feddyn") != (name == "feddyn"):
        yield (
            f'server.optimizer = "{server.optimizer}" and local.algorithm = "{name}": FedDyn needs "feddyn" for both, '
            'as recipe = "feddyn" has it'
        )
    if algorithm.counts_devices and server.devices is None:
        yield (
            f'local.algorithm = "{name}" needs server.devices, the number of all devices that may take part; an '
            "estimate will do, rather too high than too low"
        )
    if not algorithm.counts_devices and server.devices is not None:
        yield f'server.devices = {server.devices} is for local.algorithm = "scaffold" and "feddyn"; here it is "{name}"'
