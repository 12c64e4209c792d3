"""Which way a share of the processors is kept to: by planted control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fleetlearn_device.limits.control_group import set_cpu_quota
from fleetlearn_device.limits.cpu_share import limit_cpu
from system_trees import plant

GROUP = "sys/fs/cgroup/system.slice/fleet.service"


def test_a_group_of_its_own_is_limited_by_the_kernel_and_put_back(tmp_path: Path) -> None:
    files = plant(tmp_path, {
        "proc/self/cgroup": "0::/system.slice/fleet.service",
        f"{GROUP}/cgroup.procs": os.getpid(), f"{GROUP}/cpu.max": "max 100000",
    })  # fmt: skip
    quota, pacing = limit_cpu(50.0, 2, files)
    assert pacing is None
    assert quota is not None
    assert (tmp_path / GROUP / "cpu.max").read_text() == "50000 100000"
    quota.undo()
    assert (tmp_path / GROUP / "cpu.max").read_text() == "max 100000"


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "4:memory:/x"},  # control groups of version 1
        {"proc/self/cgroup": "0::/system.slice/fleet.service"},  # nothing can be written there
        {
            "proc/self/cgroup": "0::/system.slice/fleet.service",
            f"{GROUP}/cgroup.procs": f"1\n{os.getpid()}",  # a login's, with others in it
            f"{GROUP}/cpu.max": "max 100000",
        },
    ],
)
def test_elsewhere_the_training_pauses(tmp_path: Path, files: dict[str, object]) -> None:
    quota, pacing = limit_cpu(50.0, 1, plant(tmp_path, files))
    assert quota is None
    assert pacing is not None
    limit = tmp_path / GROUP / "cpu.max"
    assert not limit.exists() or limit.read_text().strip() == "max 100000"


def test_without_a_limit_nothing_is_done() -> None:
    assert limit_cpu(None, 1) == (None, None)
    assert set_cpu_quota(None, 50.0) is None
