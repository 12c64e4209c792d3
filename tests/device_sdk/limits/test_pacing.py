"""Pauses between steps, worked by hand."""

from __future__ import annotations

import pytest
from fleetlearn_device.limits.pacing import LONGEST_REST, Pacing
from hypothesis import given, settings
from hypothesis import strategies as st


class Machine:
    """The time, and the processor time that the process used."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def step(self, seconds: float, processors: float) -> None:
        self.now, self.used = self.now + seconds, self.used + seconds * processors


@pytest.mark.parametrize(
    ("share", "threads", "seconds", "processors", "rest"),
    [
        (0.5, 1, 1.0, 1.0, 1.0),
        (0.2, 1, 1.0, 1.0, 4.0),
        (1.5, 2, 3.0, 2.0, 1.0),  # 6 s of processors, 4 s at 1.5 of them
        (0.5, 1, 1.0, 0.25, 0.0),  # it waited for the data, and used less than its share
        (0.5, 1, 1.0, 3.0, 1.0),  # two other threads of the program do not count
        (1.0, 1, 1.0, 1.0, 0.0),
        (0.01, 1, 10.0, 1.0, LONGEST_REST),
    ],
)
def test_a_rest_brings_a_step_down_to_its_share(
    share: float, threads: int, seconds: float, processors: float, rest: float
) -> None:
    machine = Machine()
    pacing = Pacing(share, threads, lambda: machine.now, lambda: machine.used)
    pacing.begin()
    machine.step(seconds, processors)
    assert pacing.after_step() == pytest.approx(rest)


@settings(max_examples=40)
@given(
    st.floats(0.05, 2.0),
    st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0.0, 1.0)), min_size=1, max_size=50),
)
def test_over_all_steps_the_share_is_kept(share: float, steps: list[tuple[float, float]]) -> None:
    machine = Machine()
    pacing = Pacing(share, 1, lambda: machine.now, lambda: machine.used)
    pacing.begin()
    for seconds, processors in steps:
        machine.step(seconds, processors)
        machine.step(pacing.after_step(), 0.0)
    assert machine.used <= share * machine.now * (1 + 1e-9)


def test_what_a_busy_machine_kept_from_a_step_is_made_up_for_within_a_second() -> None:
    machine = Machine()
    pacing = Pacing(0.5, 1, lambda: machine.now, lambda: machine.used)
    pacing.begin()
    machine.step(1.0, 0.1)  # the other programs had the rest of the processor
    assert pacing.after_step() == 0.0
    machine.step(0.8, 1.0)  # 0.9 s in 1.8 s: exactly its share
    assert pacing.after_step() == pytest.approx(0.0)
    machine.step(100.0, 0.0)
    assert pacing.after_step() == 0.0
    machine.step(3.0, 1.0)  # of the hundred seconds one counts
    assert pacing.after_step() == pytest.approx(2.0)
