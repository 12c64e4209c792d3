"""Records as text: times, lengths, tables that fit in 80 columns with every number whole."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.commands import show
from fleetlearn_coordinator.commands.live import picture
from fleetlearn_coordinator.service.views.records import DeviceView, RoundView, RunView, Trend
from rich.console import Console, RenderableType

NOW = 1_800_000_000.0
DAY = 86400.0


def shown(what: RenderableType, width: int) -> list[str]:
    """Return the lines of a terminal that is so wide."""
    console = Console(width=width, markup=False, force_terminal=True, color_system=None)
    with console.capture() as found:
        console.print(what)
    return found.get().splitlines()


def rounds(outcome: str = "committed") -> list[RoundView]:
    dropped = {"failed: bad-data": 12, "lost": 3, "rejected: norm-too-large": 4}
    return [
        RoundView(
            number=1234, outcome=outcome, opened=NOW - 60, closed=NOW, seconds=61.25, reports=987,
            partial=1, lost={}, refused={}, surplus=0, loss=0.25,
            metrics={"loss": 0.25, "accuracy": 0.9375}, norm=0.001234, bytes_up=1, bytes_down=2,
            summary={"dropped": dropped},
        )
    ]  # fmt: skip


def run(**values: object) -> RunView:
    return RunView(name="digits", state="running", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (5400.0, "90 min"), (7200.0, "2 h"),
     (200_000.0, "2.31 d"), (-300.0, "-5 min")],
)  # fmt: skip
def test_lengths_of_time(seconds: float, said: str) -> None:
    assert show.span(seconds) == said


def test_times() -> None:
    assert show.date(NOW) == "2027-01-15 08:00:00Z"
    assert show.date(None) == ""
    assert show.clock(NOW - 60, NOW) == "07:59:00Z"
    assert show.clock(NOW - DAY, NOW) == "2027-01-14 08:00:00Z", "with its date where it is another"
    assert show.ago(NOW - 90, NOW) == "90 s ago"
    assert show.ago(NOW + 90, NOW) == "in 90 s"


def test_bars_from_the_least_to_the_greatest() -> None:
    assert show.bars([0.0, 1.0, 0.5]) == "▁█▅"
    assert show.bars([2.0, 2.0]) == "▁▁"


@pytest.mark.parametrize("outcome", ["committed", "abandoned"])
@pytest.mark.parametrize("width", [80, 120])
def test_rounds_fit_with_every_number_whole(width: int, outcome: str) -> None:
    lines = shown(show.rounds_table(rounds(outcome), NOW, width), width)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for number in ("1234", "987", "08:00:00Z", "0.25", "0.9375", "0.00123"):
        assert number in text
    assert ("61.25" in text) == (width == 120)
    assert ("abandoned" in text) == (outcome == "abandoned"), "never left out"


@pytest.mark.parametrize("width", [80, 120])
def test_devices_fit_with_what_they_said_whole(width: int) -> None:
    device = DeviceView(
        device="roof-7", connected=True, seen=NOW, done=1234, failed=56, lost=78, tags=["roof"],
        error="bad-data: KeyError: 3 (in load, mydata.py line 12)", error_at=NOW, enrolled=NOW,
    )  # fmt: skip
    lines = shown(show.devices_table([device], NOW, width), width)
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
    for words in ("roof-7", "08:00:00Z", "1234", "KeyError: 3", "line 12)"):
        assert words in text
    revoked = DeviceView(device="x", revoked=NOW)
    assert "revoked 2027" in " ".join(shown(show.devices_table([revoked], NOW, 200), 200))


def test_the_live_view_fits() -> None:
    found = run(
        running=True, opened=NOW - 30, deadline=NOW + 30, goal=8, accepted=3, leases=5, round=4,
        version=3, last_model=NOW - 30, rounds=rounds() * 50,
        trend={"loss": Trend([1.0, 0.5], -0.5)}, rounds_per_hour=60.0, eta=NOW + 3600,
        stop={"rounds": 63}, phase="open",
    )  # fmt: skip
    lines = shown(picture(found, 100, NOW, 80, 24), 80)
    assert len(lines) <= 24, "a terminal of 24 rows shows all of it"
    text = " ".join(" ".join(lines).split())
    assert "3 of 8, 5 out" in text
    assert "deadline in 30 s" in text
    assert "loss 0.5, -0.5 in 2 rounds █▁" in text
    assert "60 rounds an hour; stop.rounds = 63 at 09:00:00Z, in 60 min" in text


def test_why_a_coordinator_does_not_run() -> None:
    killed = show.run_lines(run(seen=NOW, live={"pid": 7}), NOW)
    assert "was killed" in killed[1]
    stopped = show.run_lines(run(seen=NOW, live={"pid": None}), NOW)
    assert "was stopped at 2027-01-15 08:00:00Z" in stopped[1]
    assert show.run_lines(run(finished="63 rounds"), NOW)[0].startswith("63 rounds; not running")
    assert "failed: the disk is full" in show.run_lines(run(failed="the disk is full"), NOW)
    assert "people want it paused" in show.run_lines(run(wanted="paused"), NOW)


def test_members_of_a_family_have_a_line_each() -> None:
    members = {
        "large": {"reports": 1, "metrics": {"loss": 0.25, "accuracy": 0.5}, "change": 0.125},
        "small": {"reports": 0, "metrics": {}, "change": 0.0},
    }
    (row,) = rounds()
    assert show.member_lines(row) == []
    row.summary["members"] = members
    assert show.member_lines(row) == [
        "large in round 1234: 1 report, loss 0.25, accuracy 0.5, change 0.125",
        "small in round 1234: 0 reports, change 0",
    ]
    live = {"members": {"large": 2, "small": 1}}
    lines = show.run_lines(run(running=True, opened=NOW, leases=3, live=live), NOW)
    assert any("3 tasks running (2 of large, 1 of small)" in line for line in lines)
