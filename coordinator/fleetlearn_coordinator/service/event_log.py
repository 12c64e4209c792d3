"""The log lines about what happens in one run: an observer (observers.py)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fleetlearn_protocol.epsilon_text import budget_text, share_text, spent_text
from fleetlearn_protocol.exchanges import FIT
from fleetlearn_protocol.quality_messages import QUALITY

from fleetlearn_coordinator.aggregation.round_summary import (
    describe,
    describe_dropped,
    describe_metrics,
)
from fleetlearn_coordinator.conversation.limits import LINE_BURST, LINE_RATE
from fleetlearn_coordinator.network.peer_log import FewLines
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    STALE,
    STALLED,
    SURPLUS,
    Ended,
    ExchangeOpened,
    Finish,
    Opened,
    RegionEnded,
)
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.waiting_words import named
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.observers import (
    ExchangeSummarised,
    ModelRestored,
    RoundEnded,
    RunEvent,
    TiedVectorsReset,
)
from fleetlearn_coordinator.service.run_log import RunLog

WHY = {
    LOST: "lost: the connection ended, and the device was not back in time",
    LATE: "late: the time was over before the report was here",
    SURPLUS: "surplus: the round had its reports without it",
    STALLED: "stalled: no step and no byte for too long (round.stall)",
    STALE: "stale: the model that the task began from is too old",
}
"""The engine's own causes. What devices fail and what is rejected is logged where their messages
are read."""

SHOWN = (
    "reports", "devices", "metrics", "dropped", "change", "seconds", "bytes_up", "bytes_down",
    "members", "regions", "goal",
)  # fmt: skip
"""Of a summary, what the log as JSON has."""
WARNED_AT = (0.8, 0.95)
"""Shares of the privacy budget that are warned of."""
NAMED = 20
"""Devices that one line of JSON names."""

_tasks = logging.getLogger("fleetlearn.coordinator.tasks")
_tasks.addFilter(FewLines(LINE_RATE, LINE_BURST, "tasks"))


class EventLog:
    """An observer that logs what a person wants to read of one run."""

    def __init__(self, log: RunLog, plan: Plan) -> None:
        self._log, self._plan = log, plan
        self._warned = 0.0
        """The largest share of the privacy budget that this process has warned of."""

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Log what happened."""
        ended: list[Ended] = []
        for event in events:
            match event:
                case Ended():
                    ended.append(event)
                case Opened(number, goal, devices) if goal is not None:
                    known = said("round-opened", round=number, goal=goal, devices=devices)
                    text = "round %d begins: it wants the reports of %d, and %d devices are there"
                    self._log.info(text, number, goal, devices, extra=known)
                case RegionEnded():
                    self._say_region_ended(event)
                case RoundEnded():
                    self._say_round_ended(event)
                case ExchangeOpened(number, version, kind, phase):
                    name = exchange_name(kind, number, phase)
                    known = said(
                        "exchange-begun", kind=kind, number=number, phase=phase, version=version
                    )
                    self._log.info("%s of model version %d begins", name, version, extra=known)
                case ExchangeSummarised():
                    self._say_exchange_ended(event)
                case TiedVectorsReset(algorithm):
                    self._log.warning(
                        "a device lost what it kept for %s: the vectors that go with it begin "
                        "again from zeros, here and on all devices; the model stays",
                        algorithm,
                        extra=said("tied-vectors-reset", algorithm=algorithm),
                    )
                case ModelRestored(version, restores, who, keeps_state):
                    self._log.warning(
                        "rolled back (%s): version %d is version %d's model; the server optimizer "
                        "%s",
                        who,
                        version,
                        restores,
                        "goes on from that version's state"
                        if keeps_state
                        else "begins from the beginning",
                        extra=said("rolled-back", version=version, restores=restores, who=who),
                    )
                case Finish(reason, rule):
                    known = said("finished", reason=reason, rule=rule)
                    self._log.info("finished: %s", reason, extra=known)
        if ended:
            self._say_tasks_ended(ended)

    def _say_region_ended(self, event: RegionEnded) -> None:
        number, region, is_done, reports, text = event
        known = said(
            "region-ended", round=number, region=region, done=is_done, reports=reports, why=text
        )
        if is_done:
            line = "region %s of round %d is done with %d reports: %s"
            self._log.info(line, region, number, reports, text, extra=known)
        else:
            line = "region %s of round %d has failed: %s"
            self._log.warning(line, region, number, text, extra=known)

    def _say_round_ended(self, event: RoundEnded) -> None:
        for name, devices in event.summary["left_out"].items():
            low, high = self._plan.bounds[name]
            text = "%d devices measured a %s beyond its bounds, %g to %g, and are left out of it"
            known = said("metric-left-out", round=event.number, metric=name, devices=devices)
            self._log.warning(text, devices, name, low, high, extra=known)
        found, number = describe(event.summary), event.number
        shown = {key: event.summary[key] for key in SHOWN if key in event.summary}
        if event.outcome == "committed":
            known = said("round-committed", round=number, version=event.version, **shown)
            self._log.info("round %d committed: %s", number, found, extra=known)
        else:
            known = said("round-abandoned", round=number, why=event.why, **shown)
            self._log.warning("round %d abandoned: %s; %s", number, event.why, found, extra=known)
        if "privacy" in event.summary:
            to_go = max(0, self._plan.stop.rounds - event.version)
            self._say_privacy(event.summary["privacy"], to_go)

    def _say_privacy(self, spent: Mapping[str, Any], to_go: int) -> None:
        """Say what a private run has spent with a release, and warn when that is nearly all.
        ``to_go``: rounds until stop.rounds."""
        release, epsilon, delta = spent["release"], spent["epsilon"], spent["delta"]
        budget = spent["of"]
        left = to_go if spent["left"] is None else min(to_go, spent["left"])
        text = "privacy: epsilon %s%s at delta %g after %d release%s%s"
        of = "" if budget is None else f" of {budget_text(budget)}"
        told = spent_text(epsilon, budget)
        more = f", {left} left"
        known = said(
            "privacy-spent", release=release, epsilon=epsilon, delta=delta, of=budget, left=left
        )
        self._log.info(text, told, of, delta, release, "s"[release == 1 :], more, extra=known)
        share = 0.0 if budget is None else epsilon / budget
        passed = [each for each in WARNED_AT if self._warned < each <= share]
        if passed:
            self._warned = passed[-1]
            known = said(
                "privacy-nearly-spent", release=release, epsilon=epsilon, delta=delta, of=budget,
                left=left, share=share,
            )  # fmt: skip
            text = (
                "%s of the privacy budget is spent: epsilon %s%s%s; the run finishes "
                "before the release that would go past it"
            )
            self._log.warning(text, share_text(share), told, of, more, extra=known)

    def _say_exchange_ended(self, event: ExchangeSummarised) -> None:
        name = exchange_name(event.kind, event.number, event.phase)
        outcome, describe_it = "valid" if event.valid else "invalid", DESCRIBE.get(event.kind)
        found = (describe_it or describe_answers)(event.summary)
        known = said(
            "exchange-ended",
            kind=event.kind,
            number=event.number,
            phase=event.phase,
            version=event.version,
            valid=event.valid,
            **{key: event.summary[key] for key in SHOWN if key in event.summary},
        )
        text = "%s of model version %d is %s: %s"
        self._log.info(text, name, event.version, outcome, found, extra=known)

    def _say_tasks_ended(self, ended: Iterable[Ended]) -> None:
        """Say which devices' tasks ended without a report that counts, and why: a line for each
        cause and round."""
        devices = defaultdict[tuple[int, str], list[str]](list)
        for device, _, number, cause in ended:
            if cause in WHY:
                devices[number, cause].append(device)
        for (number, cause), names in devices.items():
            who = f"device {names[0]} is" if len(names) == 1 else f"{named(names)} are"
            known = said(
                "tasks-ended", round=number, cause=cause, count=len(names), devices=names[:NAMED]
            )
            _tasks.info(
                "%sround %d: %s %s",
                self._log.begin,
                number,
                who,
                WHY[cause],
                extra={**known, "run": self._log.run},
            )


def exchange_name(kind: str, number: int, phase: int) -> str:
    """Return what people call an exchange."""
    kind = {"quality": "quality look", "fit": "cluster fit"}.get(kind, kind)
    return f"{kind} {number}" if phase == 1 else f"{kind} {number}, phase {phase},"


def describe_answers(summary: Mapping[str, Any]) -> str:
    """Return an exchange's summary in one line."""
    return f"{summary['devices']} devices answered, dropped: {describe_dropped(summary)}"


def describe_evaluation(summary: Mapping[str, Any]) -> str:
    """Return an evaluation's summary in one line."""
    dropped, metrics = describe_dropped(summary), describe_metrics(summary)
    metrics = f"{metrics} on the devices' training examples" if metrics else "no metrics"
    return (
        f"{summary['devices']} devices, {summary['examples']} examples, dropped: {dropped}; "
        f"{metrics}"
    )


def describe_look(summary: Mapping[str, Any]) -> str:
    """Return in one line what a look at devices' data found."""
    found = [*summary.get("features", ()), *summary.get("losses", ())]
    devices = dict.fromkeys(each["device"] for each in found)
    devices |= dict.fromkeys(summary.get("not_finite", ()))
    named = f"unlike the others: {', '.join(devices)}" if devices else "none is unlike the others"
    return f"{describe_answers(summary)}; {named} (fleetlearn-coordinator data-quality says more)"


def describe_fit(summary: Mapping[str, Any]) -> str:
    """Return in one line which models devices chose."""
    chosen = ", ".join(f"{name} {count}" for name, count in summary["chosen"].items())
    return (
        f"{describe_answers(summary)}; each trains the model that fits its data best: {chosen}; "
        f"{summary['in_doubt']} are in doubt"
    )


DESCRIBE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    EVALUATION: describe_evaluation,
    QUALITY: describe_look,
    FIT: describe_fit,
}
"""Kind of exchange -> what makes one line of its summary, where ``describe_answers`` says less."""
