"""What the report of a masked update must have: what the helper needs, and nothing of the device's
data."""

from __future__ import annotations

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import Report, SecureTask
from fleetlearn_protocol.withheld import without_data


def check_masked(report: Report, secure: SecureTask, round: int, epochs: int) -> None:
    """Raise ProtocolError (bad-message) unless the report of a task with this ``secure`` can be
    added up by its helper, and says nothing that was measured.

    round: the one in which the task was given: the device signed it. epochs: what the task asked
    for.
    """
    if report.round != round:
        _refuse(report, f"it names round {report.round}; the task is of round {round}")
    for name in ("sealed", "signature") if secure.mode == "helper" else ():
        if getattr(report, name) is None:
            _refuse(report, f"it has no `{name}`, without which the helper adds nothing up")
    silent = without_data(report, epochs)
    for name in report.__struct_fields__:
        if getattr(report, name) != getattr(silent, name):
            _refuse(
                report,
                f"its `{name}` is {getattr(report, name)}; with a masked update it must be "
                f"{getattr(silent, name)}, as what is measured tells of the device's data",
            )


def _refuse(report: Report, why: str) -> None:
    raise ProtocolError(Code.BAD_MESSAGE, f"the report of task {report.task} is refused: {why}")
