"""The suite of faults: its schedules, and that it finds mistakes that are planted. ``make chaos``
runs it for an hour, ``make test-all`` for ten minutes."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

from tests.chaos.fault_kinds import KINDS, Abilities, Event
from tests.chaos.mistakes import MISTAKES
from tests.chaos.packets import ACK, RST, TCP, checksum, reset_for
from tests.chaos.scenario import PLANS, Scenario, scenario_of
from tests.chaos.schedule import Schedule, drawn, shortened

EVERYTHING = Abilities(machines=True, disks=True, clocks=True)
SECONDS = 14.0
"""Of the faults in which a planted mistake is looked for."""


def test_a_seed_gives_one_schedule(tmp_path: Path) -> None:
    for seed in range(30):
        scenario = scenario_of(seed)
        schedule = drawn(seed, scenario, 40.0, EVERYTHING)
        assert schedule == drawn(seed, scenario_of(seed), 40.0, EVERYTHING)
        schedule.write(tmp_path / "schedule.jsonl")
        assert Schedule.read(tmp_path / "schedule.jsonl") == schedule
        assert [event.at for event in schedule.events] == sorted(e.at for e in schedule.events)
        assert all(e.target in KINDS[e.kind].targets(scenario) for e in schedule.events)


def test_ten_seeds_have_all_plans_and_many_all_faults() -> None:
    assert {scenario_of(seed).plan for seed in range(10, 20)} == {*PLANS}
    kinds = {
        event.kind
        for seed in range(30)
        for event in drawn(seed, scenario_of(seed), 60.0, EVERYTHING).events
    }
    assert kinds == {*KINDS}


def test_faults_that_a_machine_cannot_do_are_left_out() -> None:
    """The others happen as before."""
    everything = drawn(3, scenario_of(3), 60.0, EVERYTHING).events
    nothing = drawn(3, scenario_of(3), 60.0, Abilities(False, False, False)).events
    assert list(nothing) == [event for event in everything if KINDS[event.kind].needs is None]
    assert 0 < len(nothing) < len(everything)


def test_a_file_that_is_no_schedule_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    for text in ("", "{}", "no JSON", '{"seed": 1, "seconds": 1, "scenario": {"plan": "fedavg"}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"other\.jsonl is no schedule"):
            Schedule.read(file)
    Schedule(1, scenario_of(1), 1.0, [Event(0.0, "flood", "hub")]).write(file)
    with pytest.raises(ValueError, match="no such faults: flood"):
        Schedule.read(file)


@pytest.mark.parametrize("needed", [{3}, {0, 17}, {5, 6, 19}, set()])
def test_a_schedule_is_shortened_to_the_faults_that_matter(needed: set[int]) -> None:
    events = [Event(float(number), "kill", "d0") for number in range(20)]
    whole = Schedule(1, scenario_of(1), 20.0, events)

    def fails(schedule: Schedule) -> bool:
        return needed <= {int(event.at) for event in schedule.events}

    short = shortened(whole, fails, tries=200)
    assert {int(event.at) for event in short.events} == needed


def test_no_more_tries_than_are_allowed() -> None:
    events = [Event(float(number), "kill", "d0") for number in range(20)]
    tries: list[Schedule] = []

    def fails(schedule: Schedule) -> bool:
        tries.append(schedule)
        return False

    whole = Schedule(1, scenario_of(1), 20.0, events)
    assert shortened(whole, fails, tries=7) == whole
    assert len(tries) == 7


def test_a_reset_is_one_that_its_receiver_takes() -> None:
    """A segment of 5 bytes with a number and an acknowledgement, and one that opens a
    connection."""
    hub, fleet = b"\x0a\x07\x00\x01", b"\x0a\x07\x00\x03"

    def packet(flags: int, content: bytes) -> bytes:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(content), 0, 0, 64, TCP, 0) + hub + fleet
        return head + struct.pack("!HHIIHHHH", 80, 9, 1000, 77, 5 << 12 | flags, 0, 0, 0) + content

    answer = reset_for(packet(ACK, b"hello"))
    assert answer is not None
    assert (answer[12:16], answer[16:20]) == (fleet, hub)
    assert struct.unpack_from("!HHIIH", answer, 20) == (9, 80, 77, 0, 5 << 12 | RST)
    assert checksum(answer[:20]) == 0
    assert checksum(fleet + hub + struct.pack("!HH", TCP, 20) + answer[20:]) == 0
    opening = reset_for(packet(2, b""))
    assert opening is not None
    assert struct.unpack_from("!HHIIH", opening, 20) == (9, 80, 0, 1001, 5 << 12 | RST | ACK)
    assert reset_for(packet(RST, b"")) is None


def test_the_checksum_of_rfc_1071() -> None:
    """Its example: the sum is ddf2, and the checksum its complement."""
    assert checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0xFFFF - 0xDDF2


# With real processes


def kills(plan: str) -> Schedule:
    """Return a schedule in which the coordinator and devices are killed again and again, while
    others are paused, so that a round is open at each kill."""
    luck = random.Random(plan)
    # of that plan alone power is lost
    power = plan == "fedprox"
    scenario = Scenario(plan, 4, durable="power" if power else "process")
    events, at = [], 0.5
    while at < SECONDS:
        events.append(Event(round(at, 2), "pause", luck.choice(scenario.names), 0.8))
        victim = luck.choice(["coordinator", "coordinator", *scenario.names])
        kind = "power" if power else "kill"
        target = "hub" if power and victim == "coordinator" else victim
        events.append(Event(round(at + luck.uniform(0.3, 0.7), 2), kind, target, 0.1))
        at += 1.0
    return Schedule(1, scenario, SECONDS, events)


def chaos(folder: Path, schedule: Schedule, *options: str) -> subprocess.CompletedProcess[str]:
    schedule.write(folder / "planned.jsonl")
    words = ["--schedule", str(folder / "planned.jsonl"), "--keep", str(folder / "kept")]
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_without_faults_has_the_models_that_were_worked_out(
    tmp_path: Path, plan: str
) -> None:
    done = chaos(tmp_path, Schedule(1, scenario_of([*PLANS].index(plan)), 3.0, []))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("plan", sorted({mistake.plan for mistake in MISTAKES.values()}))
def test_kills_alone_change_nothing(tmp_path: Path, plan: str) -> None:
    done = chaos(tmp_path, kills(plan))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(tmp_path: Path, name: str) -> None:
    done = chaos(tmp_path, kills(MISTAKES[name].plan), "--mistake", name)
    assert done.returncode == 1, done.stdout + done.stderr
    assert MISTAKES[name].found in done.stdout
    assert Schedule.read(tmp_path / "kept" / "seed-1" / "schedule.jsonl").events
