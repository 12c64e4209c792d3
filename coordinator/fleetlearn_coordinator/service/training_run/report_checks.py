"""Whether a report is one that its task asked for."""

from __future__ import annotations

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import ROWS, Report

from fleetlearn_coordinator.conversation.masked_reports import check_masked
from fleetlearn_coordinator.conversation.uploads import check_parts, check_work
from fleetlearn_coordinator.service.training_run.run import Run


def check_report(run: Run, report: Report, planned_before: int) -> None:
    """Raise ProtocolError unless the report is one that its task asked for.

    ``planned_before``: the last round whose tasks may be of an earlier process, with another plan.
    """
    plan, encodings = run.plan, {part.name: part.encoding for part in report.parts}
    has_rows = encodings.pop(ROWS, None) is not None
    exact = all(encoding == FLOAT32.name for encoding in encodings.values())
    member = run.members.of_task(report.task)
    manifest = member.bundle.manifest
    asked = plan.exact_parts(manifest) if exact else plan.parts(manifest)
    if has_rows:
        asked = plan.parts_of_rows(asked, manifest)
    check_parts(report, asked, manifest.elements_of)
    epochs, secure = plan.local.epochs, run.tasks.secure
    if secure is not None:
        check_masked(report, secure, run.engine.round_of(report.task), epochs)
    elif report.round > planned_before:
        check_work(report, epochs)
