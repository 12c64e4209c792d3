"""With [secure] a device's update is nowhere at the coordinator: in no file of its folder, and
nowhere in its memory. Real processes; the memory is what a core dump would have."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from marked_fleet import MarkedFleet
from marked_update import traces_of
from memory_search import files_below, found_in, memory_of
from processes import Processes, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="memory is read from /proc"),
]


def wanted(fleet: MarkedFleet) -> dict[str, bytes]:
    """Return what must not be there: the updates of the first and of the last device."""
    first, *_, last = fleet.names
    return traces_of(first, fleet.initial) | traces_of(last, fleet.initial)


def in_files(fleet: MarkedFleet) -> set[str]:
    """Return what of the devices' updates the coordinator has in its folder and its log."""
    log = fleet.run.log("coordinator").encode()
    return found_in(chain(files_below(fleet.data), [log]), wanted(fleet))


def in_memory(fleet: MarkedFleet) -> set[str]:
    """Return what of the devices' updates the coordinator has in its memory."""
    return found_in(memory_of(fleet.run.running["coordinator"].pid), wanted(fleet))


def traces(fleet: MarkedFleet) -> set[str]:
    return in_files(fleet) | in_memory(fleet)


def test_no_update_is_at_the_coordinator(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """It is looked for while updates come, while the round waits for the helper, after a commit,
    and again and again while rounds go by."""
    fleet = MarkedFleet(run, bundle_path, shards, devices=4, stop__rounds=1_000_000)
    fleet.start_helper()
    fleet.start_coordinator()
    wait_for(lambda: "listening" in run.log("coordinator"), "the coordinator")
    run.kill("helper")
    for count, name in enumerate(fleet.names, 1):
        fleet.start_device(name)
        assert traces(fleet) == set(), f"with {count} devices"
    fleet.wait_for_reports(len(fleet.names))
    assert traces(fleet) == set(), "while the round waits for the helper"
    fleet.start_helper()
    for version in range(2, 5):
        fleet.wait_for_reports(version * len(fleet.names))
        assert traces(fleet) == set(), f"after version {version}"


def test_no_update_is_at_a_coordinator_without_a_helper(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """Devices that agree on masks in pairs: the coordinator puts secrets of theirs together, and
    they give it the sum alone."""
    no_helper = dict.fromkeys(("secure__helper", "secure__key", "secure__certificate"))
    settings = {"secure__mode": "pairwise", "round__minimum": 4, "secure__minimum": 4} | no_helper
    fleet = MarkedFleet(run, bundle_path, shards, devices=4, stop__rounds=1_000_000, **settings)
    fleet.start_coordinator()
    for count, name in enumerate(fleet.names, 1):
        fleet.start_device(name)
        assert traces(fleet) == set(), f"with {count} devices"
    for version in range(1, 5):
        fleet.wait_for_reports(version * len(fleet.names))
        assert traces(fleet) == set(), f"after version {version}"


def test_the_same_look_finds_updates_without_secure_aggregation(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = MarkedFleet(run, bundle_path, shards, devices=4)
    fleet.write_plain_plan(bundle_path, stop__rounds=1_000_000)
    fleet.start_coordinator()
    for name in fleet.names:
        fleet.start_device(name)
    fleet.wait_for_reports(4)
    assert in_files(fleet), "updates are in the spool files"
    wait_for(lambda: bool(in_memory(fleet)), "an update in the memory")
