"""What a round costs its devices."""

from __future__ import annotations

from fleetlearn_simulator.fleet.round_costs import RoundCosts
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from rounds import running_task


def test_costs_that_come_together_are_those_that_come_one_by_one() -> None:
    running = RunningTasks.from_rows(
        running_task(number, 1.0)._replace(began=0.1 * number, tier=number % 3)
        for number in range(20)
    )
    times = [10 + 0.3 * number for number in range(20)]
    found = []
    for parts in ([1] * 20, [20], [3, 10, 7]):
        costs, done = RoundCosts(), 0
        for count in parts:
            rows = slice(done, done + count)
            costs.accept(running, rows, times[rows])
            done += count
        found.append(costs.summary())
    assert found[0] == found[1] == found[2]
    assert found[0]["accepted"] == {0: 7, 1: 7, 2: 6}
    assert found[0]["device_seconds"]["wasted"] == 0.0
