"""Load, memory and disk: what other programs leave."""

from __future__ import annotations

import os
import sys
from math import exp
from pathlib import Path

import pytest
from fleetlearn_device.conditions.condition import SystemFiles, UnreadableError
from fleetlearn_device.conditions.machine import (
    LoadMeter,
    needs_free_disk,
    needs_free_memory,
    needs_low_load,
    read_free_memory,
)
from system_trees import plant

PAGE = os.sysconf("SC_PAGE_SIZE")


class Machine:
    """A machine with 4 processors whose ticks a test sets: 100 in a second."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.own = folder, 0.0, 0.0
        self.busy = self.idle = 0
        self.meter = LoadMeter(
            self.run(0, 0, 0.0), lambda: self.now, lambda: self.own, self.first_look, 100
        )
        self.first = 40, 0.1
        """Busy ticks and own seconds of the first look."""

    def run(self, seconds: float, busy: int, own: float) -> SystemFiles:
        """Let time pass: all programs use ``busy`` ticks, the device ``own`` seconds of them."""
        self.now, self.own, self.busy = self.now + seconds, self.own + own, self.busy + busy
        self.idle += round(400 * seconds) - busy
        row = f"cpu  {self.busy} 0 0 {self.idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1"
        return plant(self.folder, {"proc/stat": row})

    def first_look(self, seconds: float) -> None:
        self.run(1.0, *self.first)


def test_the_load_is_that_of_other_programs_and_averaged(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    # 40 of 400 ticks are busy, 10 of them the device's own
    assert machine.meter.load() == pytest.approx(30 / 400)
    machine.run(5.0, 1900, 4.0)  # 1,900 of 2,000 ticks, 400 its own
    weight = 1 - exp(-5 / 15)
    assert machine.meter.load() == pytest.approx(weight * 0.75 + (1 - weight) * 30 / 400)
    before = machine.meter.load()  # at once: nothing has passed
    assert machine.meter.load() == before


def test_the_device_s_own_training_is_no_load(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.first = 400, 4.0
    assert machine.meter.load() == 0.0


def test_a_busy_machine_must_come_to_rest_a_little_below_the_bound(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.first = 210, 0.1  # 50 %
    low = needs_low_load(machine.meter, 52.0)
    assert low(True) is None
    assert low(False) == (
        "other programs keep the machine busy (50 % of its processors, needs at most 46.8 %)"
    )


def test_without_proc_nobody_can_tell(tmp_path: Path) -> None:
    files = SystemFiles(tmp_path, tmp_path)
    with pytest.raises(UnreadableError, match="does not say what the processors do"):
        LoadMeter(files).load()
    with pytest.raises(UnreadableError, match="does not say what is available"):
        read_free_memory(files)


MEMORY: dict[str, object] = {
    "proc/meminfo": "MemTotal: 4096000 kB\nMemAvailable:  204800 kB",
    "proc/self/statm": "9000 2560 800 1 0 2000 0",
    "proc/self/cgroup": "0::/",
}


def test_memory_is_what_others_leave_the_device_s_own_counted_as_free(tmp_path: Path) -> None:
    free = 200 * 2**20 + 2560 * PAGE
    assert read_free_memory(plant(tmp_path, MEMORY)) == free
    limited: dict[str, object] = {
        "proc/self/cgroup": "0::/system.slice/fleet.service",
        "sys/fs/cgroup/system.slice/fleet.service/memory.max": 100 * 2**20,
        "sys/fs/cgroup/system.slice/fleet.service/memory.current": 60 * 2**20,
    }
    assert read_free_memory(plant(tmp_path, limited)) == 40 * 2**20 + 2560 * PAGE
    group = "sys/fs/cgroup/system.slice/fleet.service/memory.max"
    assert read_free_memory(plant(tmp_path, {group: "max"})) == free


def test_too_little_memory_is_said_in_mebibytes(tmp_path: Path) -> None:
    files = plant(tmp_path, MEMORY | {"proc/self/statm": "1 0"})
    assert needs_free_memory(files, 200.0)(True) is None
    assert needs_free_memory(files, 200.0)(False) == (
        "too little free memory (200 MiB, needs 220 MiB)"
    )


def test_the_disk_is_the_one_where_the_state_directory_will_be(tmp_path: Path) -> None:
    assert needs_free_disk(tmp_path / "not/there/yet", 0.001)(True) is None
    why = needs_free_disk(tmp_path, 2.0**40)(True)
    assert why is not None
    assert why.startswith("too little free disk (")


def test_a_folder_that_may_not_be_entered_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter every folder: the error is planted."""

    def forbidden(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", forbidden)
    with pytest.raises(UnreadableError, match=r"says nothing .*Permission denied"):
        needs_free_disk(tmp_path, 1.0)(True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own files")
def test_this_machine_s_own_figures() -> None:
    """Real values, held to another source where there is one."""
    files = SystemFiles()
    assert 0.0 <= LoadMeter(files).load() <= 1.0
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 2**20 < read_free_memory(files) <= total


def test_a_system_without_sysconf_says_that_the_load_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows."""
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(UnreadableError, match="does not say what the processors do"):
        LoadMeter(SystemFiles(proc=tmp_path)).load()
