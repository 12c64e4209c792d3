"""How a share of the processors is kept to: by the kernel where that is allowed, else by pauses."""

from __future__ import annotations

import logging

from fleetlearn_device.conditions.condition import SystemFiles
from fleetlearn_device.conditions.machine import own_control_group
from fleetlearn_device.limits.control_group import CpuQuota, set_cpu_quota
from fleetlearn_device.limits.pacing import Pacing

log = logging.getLogger("fleetlearn.device")


def limit_cpu(
    percent: float | None, threads: int, files: SystemFiles | None = None
) -> tuple[CpuQuota | None, Pacing | None]:
    """Limit this process to ``percent`` of one processor, by its own control group where it may
    write that, and else by pauses between steps: one of the two is returned. ``threads``: that a
    step has."""
    if percent is None:
        return None, None
    group = own_control_group(SystemFiles() if files is None else files)
    quota = set_cpu_quota(group, percent)
    if quota is not None:
        log.info("the kernel limits this process to %g %% of a processor (%s)", percent, group)
        return quota, None
    log.info("the training pauses between its steps to use %g %% of a processor", percent)
    return None, Pacing(percent / 100, threads)
