"""Statistics of many devices' tables are those of all rows together."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
from computing import computed, texts
from fleetlearn_coordinator.aggregation.computations import statistics
from fleetlearn_coordinator.aggregation.computations.registry import BadTotalError, RunComputation
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.settings import (
    CategoryColumn,
    ComputationSettings,
    NumberColumn,
    Statistics,
)
from fleetlearn_protocol.computations.statistics import bucket_of, key_of
from hypothesis import given, settings
from hypothesis import strategies as st

NAN = float("nan")
AGE = NumberColumn("age", range=(0.0, 120.0), quantiles=(0.25, 0.5), error=0.0, bins=12)
INCOME = NumberColumn("income", quantiles=(0.5,), error=1e-3, bins=8)
CITY = CategoryColumn("city", top=5)
SMOKER = CategoryColumn("smoker", values=("yes", "no"), longest=8)
ALL = Statistics(numbers=(AGE, INCOME), categories=(CITY, SMOKER))


def divided(table: dict[str, np.ndarray], cuts: list[int]) -> list[dict[str, np.ndarray]]:
    """Cut a table's rows into one table for each device."""
    rows = len(next(iter(table.values())))
    places = sorted({0, rows, *(cut % rows for cut in cuts)})
    return [
        {name: column[begin:end] for name, column in table.items()}
        for begin, end in itertools.pairwise(places)
    ]


def table(rows: int = 3000, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    age = np.round(random.normal(45, 20, rows), 1)
    age[random.random(rows) < 0.05] = NAN
    cities = [f"city {number}" for number in random.zipf(1.6, rows) % 500]
    return {
        "age": age,
        "income": random.lognormal(10, 1, rows),
        "city": texts(cities),
        "smoker": texts(random.choice(["yes", "no", "", "maybe"], rows), 8),
    }


def test_by_hand() -> None:
    asked = Statistics(numbers=(NumberColumn("x", range=(0.0, 8.0), bins=4),))
    one, other = {"x": np.array([1.0, NAN, 3.0])}, {"x": np.array([9.0, 4.0])}
    found, states = computed(asked, [one, other])
    assert len(states) == 1
    assert (found["devices"], found["rows"], found["done"]) == (2, 5, True)
    x = found["columns"]["x"]
    assert (x["missing"], x["below"], x["above"]) == (1, 0, 1)
    assert x["mean"] == 4.0  # 1, 3, 8 (for 9) and 4
    assert x["variance"] == 6.5
    assert x["deviation"] == 6.5**0.5
    assert x["histogram"] == {"edges": [0.0, 2.0, 4.0, 6.0, 8.0], "rows": [1, 1, 1, 0]}


def test_numbers_are_those_of_the_pooled_rows() -> None:
    whole = table()
    found, states = computed(ALL, divided(whole, [100, 700, 701, 2500]))
    assert (found["devices"], found["rows"]) == (5, 3000)
    age = whole["age"][~np.isnan(whole["age"])]
    x = found["columns"]["age"]
    assert x["missing"] == 3000 - len(age)
    assert (x["below"], x["above"]) == ((age < 0).sum(), (age > 120).sum())
    clipped = np.clip(age, 0, 120)
    assert x["mean"] == pytest.approx(clipped.mean(), abs=x["mean_error"])
    assert x["mean_error"] < 1.2e-7
    assert x["variance"] == pytest.approx(clipped.var(), rel=1e-6)
    assert x["histogram"]["rows"] == np.histogram(age, np.linspace(0, 120, 13))[0].tolist()
    for share, quantile in zip((0.25, 0.5), x["quantiles"], strict=True):
        assert quantile["value"] == np.quantile(age, share, method="lower")
        assert quantile["rows_below"] == (age < quantile["value"]).sum()
        assert quantile["rows_between"] == (age == quantile["value"]).sum()
    assert len(states) <= 9  # 64 bits, 8 in each round, and the round that measures


def test_a_range_is_found_and_quantiles_keep_their_error() -> None:
    whole = table()
    asked = Statistics(numbers=(INCOME,))
    found, states = computed(asked, divided(whole, [10, 1000]))
    income, x = whole["income"], found["columns"]["income"]
    low, high = x["range"]
    assert low <= income.min() <= x["minimum"]["most"]
    assert x["maximum"]["least"] <= income.max() <= high
    assert (x["below"], x["above"]) == (0, 0)
    assert high - income.max() <= 1e-3 * high
    assert x["mean"] == pytest.approx(income.mean(), abs=x["mean_error"])
    assert x["variance"] == pytest.approx(income.var(), rel=1e-6)
    (median,) = x["quantiles"]
    exact = np.quantile(income, 0.5, method="lower")
    assert median["least"] <= exact <= median["most"]
    assert median["most"] - median["least"] <= 1e-3 * median["most"]
    edges = np.array(x["histogram"]["edges"])
    assert x["histogram"]["rows"] == np.histogram(income, edges)[0].tolist()
    assert len(states) == 4


def test_frequent_values_are_found_and_counted_exactly() -> None:
    whole = table()
    found, _ = computed(Statistics(categories=(CITY, SMOKER)), divided(whole, [500, 999]))
    counted = Counter(bytes(row).rstrip(b"\0").decode() for row in whole["city"])
    city = found["columns"]["city"]
    best = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
    assert [(each["value"], each["rows"]) for each in city["values"]] == best
    assert city["others"] == 3000 - sum(count for _, count in best)
    smoker = found["columns"]["smoker"]
    texts_of = [bytes(row).rstrip(b"\0").decode() for row in whole["smoker"]]
    assert smoker["missing"] == texts_of.count("")
    assert smoker["values"] == [
        {"value": value, "rows": texts_of.count(value)} for value in ("yes", "no")
    ]
    assert smoker["others"] == texts_of.count("maybe")


def test_a_value_of_one_row_in_twenty_is_found_among_many_rare_ones() -> None:
    random = np.random.default_rng(3)
    for attempt in range(20):
        rare = [f"rare {number}" for number in random.integers(0, 10**6, 1900)]
        rows = [*rare, *[f"often {attempt}"] * 100]
        found, _ = computed(Statistics(categories=(CITY,)), [{"city": texts(rows)}])
        assert {"value": f"often {attempt}", "rows": 100} in found["columns"]["city"]["values"]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=6), st.integers(20, 100), st.integers(0, 9))
def test_any_division_of_the_rows_gives_the_same_states(
    cuts: list[int], batch: int, seed: int
) -> None:
    whole = table(90, seed)
    _, expected = computed(ALL, [whole])
    _, found = computed(ALL, divided(whole, cuts), batch)
    for state, other in zip(expected, found, strict=True):
        layout = KINDS["statistics"].state(ALL)
        one, two = layout.unpack(state), layout.unpack(other)
        del one["devices"], two["devices"]
        for name, values in one.items():
            assert values.tobytes() == two[name].tobytes(), name


def test_other_devices_in_a_later_round_leave_true_counts() -> None:
    """Devices come and go: what the last round says is of those that reported in it."""
    first, later = {"age": np.full(9, 10.0)}, {"age": np.full(4, 1e9)}
    asked = Statistics(numbers=(NumberColumn("age", quantiles=(0.5,), error=0.0),))
    state = KINDS["statistics"].first(asked)
    while not statistics.is_done(state, asked):
        begin = not statistics.state_layout(asked).unpack(state)["rounds"]
        total = sum_up(state, [first if begin else later], asked)
        state = statistics.advance(state, total, 1, asked)
    (median,) = statistics.result(state, asked)["columns"]["age"]["quantiles"]
    assert statistics.result(state, asked)["rows"] == 4
    # It was looked for among values near 10, and no row of the last round is there.
    assert (median["rows_below"], median["rows_between"]) == (0, 0)


def test_no_rows_and_infinite_values_end_too() -> None:
    asked = Statistics(numbers=(INCOME,), rounds=5)
    for values in (np.zeros(0), np.full(3, NAN), np.array([np.inf, -np.inf, 1.0])):
        found, states = computed(asked, [{"income": values}])
        assert len(states) <= 5
        msgspec.json.encode(found)  # no NaN, no infinity: they would be null
        assert b"null" not in msgspec.json.encode(found["columns"]["income"].get("range", []))


def test_rounds_are_limited() -> None:
    asked = Statistics(numbers=(msgspec.structs.replace(INCOME, error=0.0),), rounds=3)
    found, states = computed(asked, [table(50)])
    assert (len(states), found["rounds"], found["done"]) == (3, 3, True)
    one = msgspec.structs.replace(asked, rounds=1)
    assert len(computed(one, [table(50)])[1]) == 1


def test_progress_is_said_in_words() -> None:
    _, states = computed(ALL, [table(100)])
    lines = [statistics.progress(state, ALL) for state in states]
    assert lines[0] == "1 round so far, of at most 16"
    assert lines[-2].endswith("the next one measures")
    assert lines[-1] == "measured on 100 rows of 1 device"


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ({}, "there is no column"),
        ({"numbers": [{"name": "a"}, {"name": "a"}]}, "column a is there twice"),
        ({"numbers": [{"name": "a", "range": [3, 1]}]}, "column a has the range 3 to 1"),
        ({"numbers": [{"name": "a", "quantiles": [0.5, 0.5]}]}, "column a has a quantile twice"),
        ({"categories": [{"name": "c", "longest": 12}]}, "longest is 12"),
        ({"categories": [{"name": "c", "values": ["x", "x"]}]}, "column c has a value twice"),
        ({"categories": [{"name": "c", "values": ["x" * 30]}]}, "takes 30 bytes"),
        ({"categories": [{"name": "c", "values": [""]}]}, "takes 0 bytes"),
    ],
)
def test_what_contradicts_itself_is_said(given_: dict[str, object], text: str) -> None:
    found = msgspec.convert({"kind": "statistics", **given_}, ComputationSettings)
    assert found.contradiction is not None
    assert text in found.contradiction


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("rows", -1),
        ("rows", 2**62),
        ("number0.counts", -1),
        ("number0.parts", 2**61),
        ("number0.moments", 2**40),
        ("category0.sketch", -(2**60)),
        ("category1.counts", 11),
    ],
)
def test_a_total_that_can_be_of_no_rows_is_refused_by_name(place: str, value: int) -> None:
    """One hostile device's sums, added to those of others: a number too large for the state ended
    the coordinator, and a variance below 0 its command ``result``."""
    layout, first = KINDS["statistics"].sums(ALL), KINDS["statistics"].first(ALL)
    total = {name: np.zeros(shape, np.int64) for name, shape in layout.shapes.items()}
    total["rows"] += 10
    total[place].reshape(-1)[0] = value
    computation = RunComputation("statistics", ALL)
    with pytest.raises(BadTotalError, match=r"row"):
        computation.advance(first, layout.pack(total), 2)


def test_a_range_whose_variance_would_be_no_double_is_refused() -> None:
    far = Statistics(numbers=(NumberColumn("a", range=(-1e300, 1e300)),))
    assert "the farthest that it may end is 3.27339e+150" in (far.contradiction or "")


def test_a_bucket_spells_the_value_of_most_of_its_rows() -> None:
    """60 rows of "Ulm" and 40 of "Rom" in one bucket: each bit of Ulm has 60 rows or more."""
    longest, sketch = 8, np.zeros((2, 128, 65), np.int64)
    bits = {
        name: np.unpackbits(texts([name], longest)[0]).astype(np.int64) for name in ("Ulm", "Rom")
    }
    bucket = int(bucket_of(texts(["Ulm"], longest), 6)[0])  # of the first hash, after 3 rounds
    sketch[0, bucket, 0] = 100
    sketch[0, bucket, 1:] = 60 * bits["Ulm"] + 40 * bits["Rom"]
    assert list(statistics._spelt(sketch, longest, 3)) == [(b"Ulm", 60)]


@pytest.mark.parametrize(("high", "settled"), [(1.0009, True), (1.0011, False), (1.0, True)])
def test_a_quantile_is_settled_within_its_error(high: float, settled: bool) -> None:
    asked = Statistics(numbers=(NumberColumn("x", range=(0.0, 2.0), quantiles=(0.5,)),))
    after = {
        "rounds": 3,
        "number0.range": (0.0, 2.0),
        "number0.between": key_of(np.array([[1.0, high]])),
    }
    assert statistics._settled(after, asked) == settled
