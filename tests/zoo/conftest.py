"""Prints the figures of all exports after the tests."""

from __future__ import annotations

import pytest
from public_models.measured import HEADINGS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Reports carry properties from the processes of pytest-xdist to this one.
    reports = [
        report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)
    ]
    rows = [
        value for report in reports for key, value in report.user_properties if key == "exports"
    ]
    if rows:
        terminalreporter.section("exports")
        for row in (HEADINGS, ["---"] * len(HEADINGS), *sorted(rows)):
            terminalreporter.write_line(f"| {' | '.join(row)} |")
