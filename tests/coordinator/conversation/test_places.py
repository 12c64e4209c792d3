"""Whose turn it is, without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetlearn_coordinator.conversation.places import (
    IDLE,
    NEW,
    PROVEN,
    WINDOW,
    Places,
    Proven,
    Turn,
)
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_protocol import describe
from msgspec.structs import fields

RATE = 1000.0


@dataclass(slots=True, eq=False)
class Moving(Turn):
    moved: int = 0

    def progress(self) -> int:
        return self.moved


def make(limit: int, *proven: str) -> Places[Moving]:
    known = Proven(100)
    for device in proven:
        known.add(device)
    return Places(limit, RATE, known)


def ask(places: Places[Moving], *names: str, idle: bool = False) -> list[Moving]:
    turns = [Moving(name) for name in names]
    for turn in turns:
        places.ask(turn, idle=idle)
    return turns


def given(places: Places[Moving], now: float = 0.0) -> list[tuple[str, str | None]]:
    """Whose turn it is, and who loses its place to it."""
    found = []
    while (step := places.next(now)) is not None:
        turn, loser = step
        found.append((turn.device, None if loser is None else loser.device))
    return found


def test_places_are_given_in_order_of_arrival() -> None:
    places = make(2)
    a, *_ = ask(places, "a", "b", "c")
    assert given(places) == [("a", None), ("b", None)]
    assert [turn.device for turn in places.waiting] == ["c"]
    places.leave(a)
    assert given(places) == [("c", None)]


def test_a_slow_one_keeps_its_place_until_somebody_waits() -> None:
    places = make(1)
    (a,) = ask(places, "a")
    assert given(places) == [("a", None)]
    places.measure(WINDOW)
    assert a.slow
    assert given(places) == []
    assert a in places.held
    ask(places, "b")
    assert given(places) == [("b", "a")]
    assert a not in places


def test_the_least_rate_is_enough_and_a_byte_less_is_not() -> None:
    places = make(1)
    (a,) = ask(places, "a")
    given(places)
    a.moved = int(RATE * WINDOW)
    places.measure(WINDOW)
    ask(places, "b")
    assert given(places) == []
    a.moved += int(RATE * WINDOW) - 1
    places.measure(1.5 * WINDOW)  # half a window is not looked at
    assert given(places) == []
    places.measure(2 * WINDOW)
    assert given(places) == [("b", "a")]


def test_a_rate_of_zero_never_takes_a_place() -> None:
    places: Places[Moving] = Places(1, 0.0, Proven(1))
    ask(places, "a", "b")
    given(places)
    places.measure(100 * WINDOW)
    assert given(places) == []


def test_who_was_slow_goes_to_the_end_of_the_queue() -> None:
    places = make(1)
    (a,) = ask(places, "a")
    given(places)
    ask(places, "b", "c")
    places.measure(WINDOW)
    assert given(places, WINDOW) == [("b", "a")]
    places.ask(a)
    assert [turn.device for turn in places.waiting] == ["c", "a"]
    places.measure(2 * WINDOW)
    assert given(places, 2 * WINDOW) == [("c", "b")]


def test_made_up_names_cannot_keep_proven_devices_waiting() -> None:
    """No rate is looked at: however soon the proven devices come, half of the places are theirs."""
    places = make(4, "p1", "p2", "p3")
    ask(places, *(f"ghost{number}" for number in range(50)))
    assert len(given(places)) == 4
    ask(places, "p1", "p2", "p3")
    assert [(turn, loser is not None) for turn, loser in given(places)] == [
        ("p1", True),
        ("p2", True),
    ]
    assert sum(turn.rank == NEW for turn in places.held) == 2
    for turn in list(places.held):
        if turn.rank == PROVEN:
            places.leave(turn)
            break
    assert given(places) == [("p3", None)]  # before the ghosts that wait for longer


def test_proven_devices_do_not_keep_new_ones_out() -> None:
    places = make(4, *(f"p{number}" for number in range(50)))
    proven = ask(places, *(f"p{number}" for number in range(50)))
    given(places)
    ask(places, "n1", "n2", "n3")
    got = []
    for turn in proven[:4]:
        places.leave(turn)
        got += [device for device, _ in given(places)]
    assert got == ["n1", "n2", "p4", "p5"]


def test_a_slow_device_is_new_again() -> None:
    places = make(1, "p")
    (turn,) = ask(places, "p")
    given(places)
    places.measure(WINDOW)
    assert (turn.rank, "p" in places.proven) == (NEW, False)


def test_a_device_with_a_task_goes_before_all_that_have_none() -> None:
    places = make(2)
    ask(places, "i1", "i2", "i3", idle=True)
    assert given(places) == [("i1", None), ("i2", None)]
    (a,) = ask(places, "a")
    assert given(places) == [("a", "i1")]
    ask(places, "b", "c")
    assert given(places) == [("b", "i2")]
    # slow or not, a device without a task takes no place from one that has a task
    places.measure(WINDOW)
    places.leave(next(turn for turn in places.waiting if turn.rank == NEW))
    assert given(places) == []
    assert {turn.rank for turn in places.waiting} == {IDLE}
    places.leave(a)
    assert given(places) == [("i3", None)]


def test_the_least_advanced_loses_first() -> None:
    places = make(2, "p")
    a, b = ask(places, "a", "b")
    given(places)
    a.moved, b.moved = 10, 20
    ask(places, "p")
    assert given(places) == [("p", "a")]


def test_leaving_twice_is_harmless() -> None:
    places = make(1)
    (a,) = ask(places, "a")
    places.leave(a)
    places.leave(a)
    assert given(places) == []


def test_the_proven_are_bounded_and_the_oldest_proof_is_forgotten() -> None:
    proven = Proven(2)
    for device in ("a", "b", "a", "c"):
        proven.add(device)
    assert [device in proven for device in "abc"] == [True, False, True]


def test_a_transfer_stalls_from_its_last_byte_on() -> None:
    places = make(1)
    (a,) = ask(places, "a")
    places.next(100.0)
    assert a.stalled(105.0) == 5.0
    a.moved += 1
    assert a.stalled(106.0) == 0.0
    assert a.stalled(126.0) == 20.0


def test_the_document_states_the_least_rate() -> None:
    text = (Path(describe.__file__).parents[1] / "PROTOCOL.md").read_text("utf-8")
    rate = {field.name: field.default for field in fields(ServiceSettings)}["least_rate"]
    assert f"(default {rate:,.0f} bytes per second), over some {WINDOW:.0f} s" in text
