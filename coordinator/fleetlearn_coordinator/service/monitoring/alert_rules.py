"""Every alert: one metric, and a limit that it is above or below. The coordinator's own alerts
(``alerts.py``) and the rules for Prometheus (``prometheus_rules``) are made from this table."""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from fleetlearn_protocol.epsilon_text import share_text

from fleetlearn_coordinator.plan.service_settings import AlertSettings

MINUTE, DAY, GIB = 60.0, 86400.0, float(2**30)
Unit = Literal["seconds", "share", "spent", "times", "bytes", "none"]


class AlertRule(NamedTuple):
    """When somebody is to be told."""

    name: str
    metric: str
    direction: Literal["above", "below"]
    limit: str | float
    """A key of ``[alerts]``, or a number that no key changes."""
    scale: float
    """What the key is multiplied by, which makes it the metric's unit."""
    lasts: float
    """Seconds for which the metric must be beyond the limit before the alert fires."""
    severity: Literal["warning", "critical"]
    unit: Unit
    text: str
    """What is wrong, for people; VALUE stands for the metric's value."""

    def limit_of(self, settings: AlertSettings) -> float:
        """Return the limit, in the metric's unit."""
        value = getattr(settings, self.limit) if isinstance(self.limit, str) else self.limit
        return float(value) * self.scale

    def is_beyond(self, value: float, limit: float) -> bool:
        """Return whether somebody is to be told of this value."""
        return value > limit if self.direction == "above" else value < limit

    def say(self, value: float) -> str:
        """Return what is wrong, for people."""
        return self.text.replace("VALUE", shown(value, self.unit))


RULES: tuple[AlertRule, ...] = (
    AlertRule(
        "NoRound", "fleetlearn_round_age_seconds", "above", "no_round", MINUTE, 30.0, "warning",
        "seconds", "no round was committed for VALUE",
    ),
    AlertRule(
        "FewDevices", "fleetlearn_devices_present_ratio", "below", "devices_share", 1.0, 120.0,
        "warning", "share", "the devices present are only VALUE of the most in the last hour",
    ),
    AlertRule(
        "RefusalsRise", "fleetlearn_refused_ratio", "above", "refused_share", 1.0, 30.0, "warning",
        "share", "VALUE of the reports of the last 10 minutes were refused",
    ),
    AlertRule(
        "NotFinite", "fleetlearn_not_finite_ratio", "above", "not_finite_share", 1.0, 30.0,
        "critical", "share",
        "VALUE of the trainings of the last 10 minutes diverged, or the loss is not finite",
    ),
    AlertRule(
        "LossRises", "fleetlearn_loss_ratio", "above", "loss_ratio", 1.0, 30.0, "warning", "times",
        "the loss is VALUE times the lowest of the last 20 rounds",
    ),
    AlertRule(
        "DiskLow", "fleetlearn_disk_free_bytes", "below", "disk_free", GIB, 30.0, "critical",
        "bytes", "VALUE are left on the disk of the data directory",
    ),
    AlertRule(
        "CertificateEnds", "fleetlearn_certificate_left_seconds", "below", "certificate_days", DAY,
        30.0, "warning", "seconds",
        "the coordinator's certificate ends in VALUE; then devices refuse it",
    ),
    AlertRule(
        "RunFailed", "fleetlearn_run_failed", "above", 0.0, 1.0, 0.0, "critical", "none",
        "the run was stopped by an error, which the log has",
    ),
    AlertRule(
        "CanaryWentBack", "fleetlearn_canary_went_back", "above", 0.0, 1.0, 0.0, "warning", "none",
        "the canary went back to the old run; `fleetlearn-coordinator canary status` says why",
    ),
    AlertRule(
        "PrivacySpent", "fleetlearn_privacy_spent_ratio", "above", "privacy_share", 1.0, 0.0,
        "warning", "spent", "VALUE of the privacy budget is spent; at all of it the run finishes",
    ),
)  # fmt: skip


def shown(value: float, unit: Unit) -> str:
    """Return a value for people."""
    match unit:
        case "seconds" if abs(value) >= 2 * DAY:
            return f"{value / DAY:.3g} days"
        case "seconds" if abs(value) >= 2 * MINUTE:
            return f"{value / MINUTE:.0f} minutes"
        case "seconds":
            return f"{value:.0f} seconds"
        case "share":
            return f"{100 * value:.3g} %"
        case "spent":
            return share_text(value)
        case "bytes":
            return f"{value / 2**20:.0f} MiB"
        case _:
            return f"{value:.3g}"


# For Prometheus

_TEMPLATES: dict[Unit, str] = {
    "seconds": "{{ $value | humanizeDuration }}",
    "share": "{{ $value | humanizePercentage }}",
    "spent": "{{ $value | humanizePercentage }}",
    "bytes": "{{ $value | humanize1024 }}B",
    "times": '{{ $value | printf "%.3g" }}',
    "none": "{{ $value }}",
}
_HEAD = """\
# Alert rules of fleetlearn for Prometheus, made by `fleetlearn-coordinator prometheus-rules`, with
# the limits of a service file's [alerts] or their defaults. The scrape job is called fleetlearn.
groups:
  - name: fleetlearn
    rules:
"""


def prometheus_rules(settings: AlertSettings) -> str:
    """Return the rules as YAML for Prometheus' ``rule_files``."""
    rules = [
        _rule("FleetlearnDown", 'up{job="fleetlearn"} == 0', 60.0, "critical",
              "the coordinator at {{ $labels.instance }} cannot be scraped"),
    ]  # fmt: skip
    for rule in RULES:
        if rule.name in settings.off:
            continue
        sign = ">" if rule.direction == "above" else "<"
        expression = f"{rule.metric} {sign} {rule.limit_of(settings):.12g}"
        text = rule.text.replace("VALUE", _TEMPLATES[rule.unit])
        name = f"Fleetlearn{rule.name}"
        whose = "{{ with $labels.run }}run {{ . }}: {{ end }}"
        rules.append(_rule(name, expression, rule.lasts, rule.severity, whose + text))
    return _HEAD + "".join(rules)


def _rule(name: str, expression: str, lasts: float, severity: str, text: str) -> str:
    # A JSON string is a YAML string.
    return (
        f"      - alert: {name}\n"
        f"        expr: {json.dumps(expression)}\n"
        f"        for: {lasts:.0f}s\n"
        f"        labels:\n"
        f"          severity: {severity}\n"
        f"        annotations:\n"
        f"          summary: {json.dumps(text)}\n"
    )
