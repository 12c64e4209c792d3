"""Which limits are allowed."""

from __future__ import annotations

import pytest
from fleetlearn_device.limits import device_limits
from fleetlearn_device.limits.device_limits import NO_LIMITS, DeviceLimits, check_limits


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (DeviceLimits(nice=20), "the limit nice is 20; expected 0 to 19"),
        (DeviceLimits(nice=-1), "the limit nice is -1"),
        (DeviceLimits(io="fast"), "the limit io is 'fast'; expected low or idle"),  # type: ignore[arg-type]
        (DeviceLimits(cpu=0), "cpu is 0; expected 1 to 100000 percent of one processor"),
        (DeviceLimits(memory=4), "memory is 4; expected 32 to"),
        (DeviceLimits(upload=1), "upload is 1; expected 16 to"),
        (DeviceLimits(cache=0), "cache is 0; expected 1 to"),
    ],
)
def test_what_cannot_be_a_limit_is_refused(limits: DeviceLimits, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_limits(limits)


def test_what_is_allowed() -> None:
    check_limits(NO_LIMITS)
    check_limits(DeviceLimits(19, "idle", 50, 200, 16, 16, 1))


def test_priorities_of_threads_are_linux_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_limits.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="are for threads of Linux, and this is darwin"):
        check_limits(DeviceLimits(nice=10))
    check_limits(DeviceLimits(cpu=50))
