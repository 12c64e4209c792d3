"""Which alerts fire: each is told once, and once more when it is over, also where the coordinator
was restarted meanwhile."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.monitoring.alert_rules import RULES, AlertRule
from fleetlearn_coordinator.service.monitoring.catalogue import HistogramValue, Samples

logger = logging.getLogger("fleetlearn.coordinator")

FILE = "alerts.json"
OVER = 120.0
"""Seconds for which a value must be within its limit before its alert is over: a run that an error
stops at each start is one alert, not one for each start."""
Firing = dict[str, dict[str, float]]
"""Name of a rule -> run, or "" for the process -> since when it has fired, in Unix time."""


class AlertNotice(msgspec.Struct, frozen=True):
    """What somebody is told: the JSON of a webhook's body and of a command's input."""

    alert: str
    """The rule's name."""
    state: str
    """``firing`` or ``resolved``."""
    severity: str
    """``warning`` or ``critical``."""
    run: str
    """Empty: it is about the whole process."""
    text: str
    """For people."""
    value: float | None
    """Of the rule's metric. None: the metric is gone, because its run is."""
    limit: float
    since: float
    """When it began to fire, in Unix time."""
    at: float
    """Now, in Unix time."""
    coordinator: str
    """The machine's name."""


class Alerts:
    """The state of all alerts. ``evaluate`` may be called in any thread, once at a time."""

    def __init__(
        self,
        settings: AlertSettings,
        folder: Path | None,
        tell: Callable[[AlertNotice], None],
    ) -> None:
        """``folder``: where what fires is remembered for the next process. None: nowhere. ``tell``
        must return at once."""
        self._settings, self._tell = settings, tell
        self._file = None if folder is None else folder / FILE
        self._firing = self._read()
        self._turning: dict[tuple[str, str], float] = {}
        """Rule and run -> since when the value has been on the other side of the limit than the
        alert's state says."""
        self._values: dict[tuple[str, str], float] = {}

    def is_firing(self, rule: str, run: str) -> bool:
        """Return whether somebody was told of this, and not yet that it is over."""
        return run in self._firing.get(rule, {})

    def evaluate(self, samples: Samples, now: float) -> None:
        """Tell what has begun to fire and what is over. ``now``: Unix time."""
        changed = False
        for rule in RULES:
            if rule.name not in self._settings.off:
                changed |= self._evaluate(rule, samples, now)
        if changed:
            self._write()

    def _evaluate(self, rule: AlertRule, samples: Samples, now: float) -> bool:
        limit, changed = rule.limit_of(self._settings), False
        values = {
            (labels[0] if labels else ""): value
            for labels, value in samples.get(rule.metric, ())
            if not isinstance(value, HistogramValue)
        }
        for run in {*values, *self._firing.get(rule.name, {})}:
            value, key = values.get(run), (rule.name, run)
            beyond = value is not None and rule.is_beyond(value, limit)
            if beyond == self.is_firing(rule.name, run):
                self._turning.pop(key, None)
            elif now - self._turning.setdefault(key, now) >= (rule.lasts if beyond else OVER):
                del self._turning[key]
                self._change(rule, run, value, limit, now, firing=beyond)
                changed = True
        return changed

    def _change(
        self, rule: AlertRule, run: str, value: float | None, limit: float, now: float, *,
        firing: bool,
    ) -> None:  # fmt: skip
        runs = self._firing.setdefault(rule.name, {})
        since = runs.setdefault(run, now) if firing else runs.pop(run)
        whose = f"run {run}: " if run else ""
        if firing and value is not None:
            text = f"{whose}{rule.say(value)}"
            known = said("alert-fires", alert=rule.name, run=run, value=value, limit=limit)
            logger.warning("alert %s fires: %s", rule.name, text, extra=known)
        else:
            text = f"{whose}{rule.name} is over"
            logger.info("alert %s", text, extra=said("alert-over", alert=rule.name, run=run))
        state, host = "firing" if firing else "resolved", socket.gethostname()
        self._tell(
            AlertNotice(rule.name, state, rule.severity, run, text, value, limit, since, now, host)
        )

    def _read(self) -> Firing:
        if self._file is None:
            return {}
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Firing)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            text = "%s cannot be read, so what is wrong now is told again: %s"
            logger.warning(text, self._file, error)
            return {}

    def _write(self) -> None:
        if self._file is None:
            return
        draft = self._file.with_name(f"{FILE}.draft")
        try:
            draft.write_bytes(msgspec.json.encode(self._firing))
            draft.replace(self._file)
        except OSError as error:  # such as a full disk, which an alert may be about
            text = "%s cannot be written, so after a restart what is wrong is told again: %s"
            logger.warning(text, self._file, error)
