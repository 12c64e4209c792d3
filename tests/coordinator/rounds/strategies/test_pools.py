"""Draws in proportion to weights: their statistics, and that they depend on nothing but the names
and the numbers."""

from __future__ import annotations

from collections import Counter
from itertools import islice, permutations

import pytest
from fleetlearn_coordinator.rounds.random_draws import picks, stream
from fleetlearn_coordinator.rounds.strategies.pools import Pools
from fleetlearn_coordinator.rounds.strategies.quotas import Quotas
from hypothesis import given
from hypothesis import strategies as st

WEIGHTS = {"a": 1, "b": 2, "c": 3, "d": 10, "e": 64, "f": 65}


def pools(weights: dict[str, int], labels: dict[str, tuple[str, ...]] | None = None) -> Pools:
    made = Pools(lambda name: (False, (labels or {}).get(name, ()), weights[name]))
    for name in weights:
        made.add(name)
    return made


def chi_square(counts: Counter[tuple[str, ...]], expected: dict[tuple[str, ...], float]) -> float:
    draws = counts.total()
    assert counts.keys() <= expected.keys()
    return sum(
        (counts[key] - draws * share) ** 2 / (draws * share) for key, share in expected.items()
    )


def test_splitmix_is_the_published_one() -> None:
    """The first numbers of its authors' program for the seed 1234567."""
    assert list(islice(stream(1234567), 3)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_one_draw_is_in_proportion_to_weights() -> None:
    draws = picks(5, 1, 1, 20_000)
    counts = Counter(tuple(pools(WEIGHTS).take([draw], None)) for draw in draws)
    total = sum(WEIGHTS.values())
    # 5 df, p = 0.001
    assert chi_square(counts, {(name,): weight / total for name, weight in WEIGHTS.items()}) < 20.5


def test_draws_one_after_the_other_are_in_proportion_to_what_is_left() -> None:
    """All ordered pairs of four devices, as Efraimidis and Spirakis' keys draw them: w_i / W * w_j
    / (W - w_i)."""
    weights = {name: WEIGHTS[name] for name in "abcd"}
    draws, total = picks(6, 1, 1, 40_000), sum(weights.values())
    counts = Counter(
        tuple(pools(weights).take(pair, None)) for pair in zip(draws[::2], draws[1::2], strict=True)
    )
    expected = {
        (i, j): weights[i] / total * weights[j] / (total - weights[i])
        for i, j in permutations(weights, 2)
    }
    assert chi_square(counts, expected) < 31.3  # 11 df, p = 0.001


def test_equal_weights_are_uniform_and_need_one_number_a_draw() -> None:
    weights = dict.fromkeys("abcdefgh", 16)
    counts = Counter(tuple(pools(weights).take([draw], None)) for draw in picks(7, 1, 1, 16_000))
    assert chi_square(counts, {(name,): 1 / 8 for name in weights}) < 24.3  # 7 df, p = 0.001


@given(st.permutations(sorted(WEIGHTS)), st.lists(st.integers(0, 2**64 - 1), max_size=8))
def test_the_order_of_arrival_does_not_matter(order: list[str], draws: list[int]) -> None:
    later = Pools(lambda name: (False, (), WEIGHTS[name]))
    for name in order:
        later.add(name)
    first = pools(WEIGHTS)
    assert later.take(draws, None) == first.take(draws, None)
    assert [*later] == [*first]
    assert len(later) == len(WEIGHTS) - min(len(draws), len(WEIGHTS))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=30))
def test_devices_come_and_go(steps: list[tuple[str, bool]]) -> None:
    made, there = Pools(lambda name: (name < "c", (), WEIGHTS[name])), set[str]()
    for name, comes in steps:
        made.add(name) if comes else made.discard(name)
        there = there | {name} if comes else there - {name}
        assert [*made] == sorted(there)
        assert made.explored() == sorted(
            made.explored(), key=lambda name: (WEIGHTS[name] - 1).bit_length()
        )
        assert {*made.explored()} == {name for name in there if name < "c"}
        assert all(made.pools.values()), "no pool is empty"
        assert all((name in made) == (name in there) for name in WEIGHTS)


def test_only_explored_or_only_others_are_drawn() -> None:
    made = Pools(lambda name: (name < "c", (), 1))
    for name in "abcd":
        made.add(name)
    assert {*made.take([1, 2, 3], None, explored=False)} == {"c", "d"}
    assert {*made.take([1, 2, 3], None, explored=True)} == {"a", "b"}


@pytest.mark.parametrize(
    ("share", "size", "most"), [(0.29, 100, 29), (0.5, 3, 1), (1.0, 4, 4), (0.1, 5, 0)]
)
def test_a_quota_is_a_share_rounded_down(share: float, size: int, most: int) -> None:
    names = [f"d{number:03d}" for number in range(size)]
    made = pools(dict.fromkeys(names, 1), dict.fromkeys(names, ("tier:a",)))
    quotas = Quotas({"tier:a": share}, size)
    assert made.most(quotas) == most
    assert len(made.take(range(size), quotas)) == most
    quotas.begin_round()
    assert len(made.take(range(size), quotas)) == min(most, size - most)


def test_quotas_of_labels_that_overlap() -> None:
    labels = {"a": ("x",), "b": ("x", "y"), "c": ("y",), "d": ()}
    made, quotas = pools(dict.fromkeys(labels, 1), labels), Quotas({"x": 0.25, "y": 0.25}, 4)
    assert made.most(quotas) == 3  # a, c, d
    taken = made.take(range(4), quotas)
    assert sum("x" in labels[name] for name in taken) <= 1
    assert sum("y" in labels[name] for name in taken) <= 1
    assert "d" in taken


def test_a_share_is_of_all_tasks_where_there_are_more_than_usual() -> None:
    """Slots of devices that failed are given again: the round has more tasks then."""
    quotas = Quotas({"x": 0.5}, 2)
    assert quotas.left("x") == 1
    quotas.count(("x",))
    assert not quotas.has_room(("x",))
    for _ in range(2):
        quotas.count(())
    assert quotas.has_room(("x",)), "two of four"
