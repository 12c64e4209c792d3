"""The priority of a thread: nice, and the class of its disk traffic (Linux)."""

from __future__ import annotations

import ctypes
import logging
import os
import platform

from fleetlearn_device.limits.device_limits import IoClass

log = logging.getLogger("fleetlearn.device")

IOPRIO_SET = {"x86_64": 251, "i686": 289, "i386": 289, "aarch64": 30, "armv7l": 314, "armv6l": 314,
              "armv8l": 314, "riscv64": 30, "ppc64le": 273, "s390x": 282}  # fmt: skip
"""The number of the system call ioprio_set, which the C library has no function for, by machine."""
WHO_PROCESS = 1
"""Of ioprio_set: a process or thread; 0 means the calling thread."""
IO_PRIORITIES: dict[IoClass, int] = {"low": (2 << 13) | 7, "idle": 3 << 13}
"""Class and level as the kernel takes them: best effort with the lowest level, and idle."""


def lower_priority(nice: int | None, io: IoClass | None) -> None:
    """Lower the priority of the calling thread, and of those that it begins later, such as ONNX
    Runtime's. It is never raised: that needs privileges. Where the system refuses, the log says so.
    """
    if nice is not None and not hasattr(os, "setpriority"):
        log.warning("the training's priority stays as it is: this system has no nice values")
    # Linux has a nice value for each thread: 0 is the calling one.
    elif nice is not None and nice > os.getpriority(os.PRIO_PROCESS, 0):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except OSError as error:
            log.warning("the training's priority stays as it is: %s", error.strerror)
    if io is not None:
        problem = _set_io_priority(IO_PRIORITIES[io])
        if problem:
            log.warning("the priority of the training's disk traffic stays as it is: %s", problem)


def _set_io_priority(value: int) -> str:
    """Return why it could not be set, or an empty text."""
    number = IOPRIO_SET.get(platform.machine())
    if number is None:
        return f"the number of ioprio_set is not known for {platform.machine()}"
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), WHO_PROCESS, 0, value) == 0:
        return ""
    return os.strerror(ctypes.get_errno())
