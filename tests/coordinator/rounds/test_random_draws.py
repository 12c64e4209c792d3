"""Random draws: the same however many are made at a time."""

from __future__ import annotations

from fleetlearn_coordinator.rounds.random_draws import picks, task_seeds


def test_picks_do_not_depend_on_how_many_are_made_at_a_time() -> None:
    """One device after the other takes the place that it would have had of several; each is
    another's draw."""
    alone = [picks(7, 3, serial, 1)[0] for serial in range(1, 60)]
    assert len({*alone}) == 59
    for first, count in ((1, 59), (1, 7), (7, 1), (8, 8), (7, 10), (16, 16), (9, 0)):
        assert [*picks(7, 3, first, count)] == alone[first - 1 : first - 1 + count]
    assert all(0 <= number < 2**64 for number in alone)
    assert not {*alone} & {*picks(7, 4, 1, 59)}
    assert not {*alone} & {*picks(8, 3, 1, 59)}


def test_a_devices_seed_follows_from_run_round_and_device_alone() -> None:
    together = task_seeds(7, 3, ["a", "b", "c"])
    assert together == [seed for device in "abc" for seed in task_seeds(7, 3, [device])]
    assert len({*together, *task_seeds(7, 4, "abc"), *task_seeds(8, 3, "abc")}) == 9
    assert all(0 <= seed < 2**53 for seed in together)
