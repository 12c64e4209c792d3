"""Which devices can do a run's tasks, by what they say when they check in."""

from __future__ import annotations

from fleetlearn_protocol.errors import MAX_TEXT
from fleetlearn_protocol.messages import PLAIN, CheckIn
from fleetlearn_protocol.versions import SEPARATE_BUFFERS, STEP_SCHEDULES, agreed_version

from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.secure_tasks import why_not_secure
from fleetlearn_coordinator.service.allowed_functions import why_no_function
from fleetlearn_coordinator.service.task_privacy import why_not_private
from fleetlearn_coordinator.service.training_run.run import Run


def why_unable(run: Run, host: RunHost, check_in: CheckIn) -> str:
    """Return why the device cannot do any task of this run; empty if it can."""
    if check_in.wants == "model":
        return "the device takes no part, and fetches the newest model alone"
    if check_in.error:
        return f"the device says that it cannot work: {check_in.error}"[:MAX_TEXT]
    if not host.can_sign_for(check_in):
        return (
            f"the device does only tasks signed with {' or '.join(check_in.trusts)}, and this "
            "coordinator cannot"
        )
    if why := run.members.policy.why_not(check_in):
        return why
    if why := run.regions.why_not(check_in, host.region_of(check_in.device)):
        return why
    version = agreed_version(check_in)
    buffers = any(member.bundle.manifest.buffers for member in run.members.all)
    if buffers and version < SEPARATE_BUFFERS:
        return (
            "this run's model has buffers, such as BatchNorm's statistics, which version "
            f"{SEPARATE_BUFFERS} of the protocol carries; the device speaks version {version}. "
            "Update its fleetlearn"
        )
    if run.plan.local.step_schedule is not None and version < STEP_SCHEDULES:
        return (
            "this run's learning rate changes from step to step ([local.step_schedule]), which "
            f"devices know from version {STEP_SCHEDULES} of the protocol on; the device speaks "
            f"version {version}. Update its fleetlearn"
        )
    if why := why_not_private(run.reports.rules.privacy, check_in):
        return why
    if why := why_not_secure(run.tasks.secure, check_in):
        return why
    if why := why_no_function(
        run.members.all[0].bundle.manifest, check_in, run.plan.local.function
    ):
        return why
    algorithm, knows = run.plan.local.algorithm, (PLAIN, *check_in.algorithms)
    if algorithm in knows:
        return ""
    text = (
        f"this run trains with the algorithm {algorithm}, and the device knows {', '.join(knows)}"
    )
    return f"{text[: MAX_TEXT - 40]}. Update its fleetlearn"
