"""A checked report, its parts in its spool file."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.messages import Report

from fleetlearn_coordinator.aggregation.reports import ReportColumns


class SpooledReport(NamedTuple):
    """A checked report, its parts in its spool file."""

    device: str
    report: Report
    version: int | None
    """Of the model that its task began from. None: an earlier version of this package gave the
    task."""
    columns: ReportColumns
    spool_file: int = -1
    """The number of that file. Negative: the parts are in the sums already."""

    @property
    def task(self) -> str:
        return self.report.task
