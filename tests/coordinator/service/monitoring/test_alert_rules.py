"""The table of alerts, and the rules for Prometheus that are made from it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import get_args

import fleetlearn_coordinator.service.monitoring
import pytest
from fleetlearn_coordinator.plan.service_settings import (
    AlertName,
    AlertSettings,
    ServiceError,
    ServiceSettings,
)
from fleetlearn_coordinator.service.monitoring.alert_rules import RULES, prometheus_rules, shown
from fleetlearn_coordinator.service.monitoring.catalogue import SPECS

PACKAGED = Path(fleetlearn_coordinator.service.monitoring.__file__).with_name(
    "prometheus_rules.yml"
)
PAGE = Path(__file__).parents[4] / "docs" / "operate" / "monitoring.md"


def test_each_alert_is_about_a_metric_that_is_there_and_a_key() -> None:
    assert [rule.name for rule in RULES] == [*get_args(AlertName)]
    for rule in RULES:
        spec = SPECS[rule.metric]
        assert spec.kind == "gauge"
        assert spec.labels in (("run",), ())
        assert rule.limit == 0 or rule.limit in AlertSettings.__struct_fields__
    keys = {rule.limit for rule in RULES if rule.limit}
    others = {"webhook", "webhook_ca", "command", "off"}
    assert {*AlertSettings.__struct_fields__} - others == keys, "each key is a rule's"


def test_limits_are_in_the_metrics_units() -> None:
    settings = AlertSettings(no_round=2.0, disk_free=0.5, certificate_days=3.0)
    limits = {rule.name: rule.limit_of(settings) for rule in RULES}
    assert limits["NoRound"] == 120
    assert limits["DiskLow"] == 2**29
    assert limits["CertificateEnds"] == 3 * 86400
    assert limits["RunFailed"] == 0


def test_values_are_shown_for_people() -> None:
    assert shown(90, "seconds") == "90 seconds"
    assert shown(1900, "seconds") == "32 minutes"
    assert shown(3 * 86400, "seconds") == "3 days"
    assert shown(-3 * 86400, "seconds") == "-3 days"
    assert shown(0.256, "share") == "25.6 %"
    assert shown(0.90449, "spent") == "90.5 %", "what is spent is never shown as less"
    assert shown(3 * 2**19, "bytes") == "2 MiB"
    assert shown(1.2345, "times") == "1.23"


def test_the_packages_rules_are_the_tables() -> None:
    assert PACKAGED.read_text("utf-8") == prometheus_rules(AlertSettings())


def test_rules_follow_a_service_files_alerts() -> None:
    text = prometheus_rules(AlertSettings(no_round=5.0, off=("LossRises",)))
    assert 'expr: "fleetlearn_round_age_seconds > 300"' in text
    assert "LossRises" not in text
    assert text.count("- alert: ") == len(RULES), "one is off, and one is Prometheus' alone"


def test_promtool_takes_them() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    found = subprocess.run(
        [promtool, "check", "rules", PACKAGED], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert f"{len(RULES) + 1} rules found" in found.stdout


def test_the_page_lists_each_alert() -> None:
    settings = AlertSettings()
    rows = [line.split("|") for line in PAGE.read_text("utf-8").splitlines()]
    known = {
        row[1].strip(" `"): (row[2].strip(" `"), row[3].strip())
        for row in rows
        if len(row) > 4 and row[1].strip(" `") in get_args(AlertName)
    }
    assert known == {
        rule.name: (str(rule.limit or ""), f"{getattr(settings, str(rule.limit), ''):}")
        for rule in RULES
    }


def test_alerts_that_tell_nobody_are_refused(tmp_path: Path) -> None:
    for alerts, words in (
        ({}, r"\[alerts\] tells nobody"),
        ({"command": ["x"], "webhook_ca": "none.pem"}, "webhook_ca = .*none.pem is not a file"),
        ({"command": ["x"], "off": ["NoRounds"]}, "NoRounds"),
        ({"webhook": "ftp://x"}, "webhook"),
        ({"command": ["x"], "no_rounds": 3.0}, "no_rounds"),
    ):
        with pytest.raises(ServiceError, match=words):
            ServiceSettings.read({"alerts": alerts}, tmp_path)
