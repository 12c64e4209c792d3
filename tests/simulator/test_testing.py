"""The test kit passes our laws, sources and partitions and those of the page, and finds planted
mistakes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_simulator import Devices, Scenario, VanishingTasks, in_slots
from fleetlearn_simulator.data import partitions
from fleetlearn_simulator.data.factory import make_source
from fleetlearn_simulator.population.availability_laws import AvailabilityLaw, our_law
from fleetlearn_simulator.population.failure_laws import Hazards
from fleetlearn_simulator.scenario.sections import Availability, DataSection, Zone
from fleetlearn_simulator.testing import (
    check_availability,
    check_failures,
    check_partition,
    check_source,
    small_scenario,
)

PAGE = Path(__file__).parents[2] / "docs" / "start" / "your-own-algorithm.md"


MODULES = ("commuters", "fair_rounds", "sensors", "steady_server", "thin_updates")


def code_of_page(name: str) -> str:
    found = re.search(rf"```python\n# {name}\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_page_s_examples_pass_the_page_s_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(code_of_page(name))
    monkeypatch.syspath_prepend(tmp_path)
    test: dict[str, Any] = {}
    try:
        exec(code_of_page("test_my_package"), test)
        test["test_they_are_what_fleetlearn_expects"]()
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)


def test_our_hazards_pass() -> None:
    check_failures(Hazards([[0.01, 0.02], [0.001, 0.0], [0.0, 0.0]], [[1.0, 2.0]] * 3))


@pytest.mark.parametrize(
    "rule",
    [
        Availability(),
        Availability(kind="bernoulli", share=0.3, slot=600.0),
        Availability(
            kind="diurnal", share=0.25, slot=3600.0, swing=4.0, peak=3.0, zones=(Zone(hours=2.0),)
        ),
        Availability(kind="markov", on=500.0, off=1500.0),
    ],
    ids=lambda rule: rule.kind,
)
def test_our_laws_of_availability_pass(rule: Availability) -> None:
    check_availability(our_law(rule))


def test_our_trace_passes(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("device,on,off\na,0,100\nb,250.5,400\na,300,1000\n")
    check_availability(our_law(Availability(kind="trace", file=file, repeat=1500.0)))


def parts(groups: partitions.Groups) -> list[Any]:
    return [groups.of(device) for device in range(len(groups.sizes))]


def test_our_partitions_pass() -> None:
    def starts(labels: Any, devices: int) -> Any:
        return partitions.equal(len(labels), devices)

    check_partition(
        lambda labels, devices, random: parts(partitions.iid(random, starts(labels, devices)))
    )
    check_partition(
        lambda labels, devices, random: parts(partitions.shards(random, labels, devices, 2))
    )
    check_partition(
        lambda labels, devices, random: parts(
            partitions.dirichlet(random, labels, starts(labels, devices), 0.3)
        )
    )


class OfScenario:
    """One of our sources, as an own one."""

    def __init__(self, settings: DataSection, manifest: Manifest) -> None:
        self.made = lambda seed: make_source(settings, seed, 50, manifest)

    def examples(self, ids: Any, seed: int) -> Any:
        return self.made(seed).examples(ids)

    def arrays(self, device: int, seed: int) -> Any:
        return self.made(seed).arrays(device)

    def test(self, seed: int) -> Any:
        return self.made(seed).test()


def test_our_sources_pass(softmax: Path) -> None:
    from fleetlearn_protocol import open_bundle

    manifest = open_bundle(softmax).manifest
    check_source(OfScenario(DataSection(seed=1, alpha=0.5, beta=0.5, iid=False), manifest))


# --- planted mistakes ---


def stays(tasks: VanishingTasks) -> Any:
    return np.full_like(tasks.seconds, np.inf)


def by_order(tasks: VanishingTasks) -> Any:
    after = stays(tasks)
    after[1] = np.arange(len(tasks.devices))
    return after


def with_own_chance(tasks: VanishingTasks) -> Any:
    return np.random.default_rng().uniform(size=tasks.seconds.shape)


def of_all_together(tasks: VanishingTasks) -> Any:
    return np.broadcast_to(tasks.seconds.mean() if tasks.seconds.size else 0.0, tasks.seconds.shape)


def in_place(tasks: VanishingTasks) -> Any:
    tasks.luck[:] = 0.5
    return stays(tasks)


@pytest.mark.parametrize(
    ("law", "says"),
    [
        (by_order, r"of \d+ of the tasks the law said something else"),
        (with_own_chance, "something else when it was asked again"),
        (of_all_together, r"of 1 of the tasks the law said something else"),
        (in_place, r"the law changed tasks\.luck"),
        (lambda tasks: tasks.seconds[0], r"returned float64 of shape \(200,\) for 200 tasks"),
        (lambda tasks: np.full_like(tasks.seconds, np.nan), "said nan s for device"),
        (lambda tasks: tasks.seconds - 50, "expected at least 0, or infinity"),
        (lambda tasks: tasks.seconds > 5, "returned bool of shape"),
    ],
)
def test_planted_mistakes_of_failure_laws_are_found(law: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_failures(law)


class Changed(AvailabilityLaw):
    """A right law, but for a function."""

    def __init__(self, **changes: Callable[[Devices, float], Any]) -> None:
        self.right, self.changes = in_slots(0.4, 600.0), changes

    def _ask(self, what: str, devices: Devices, t: float) -> Any:
        return self.changes.get(what, getattr(self.right, what))(devices, t)

    def online(self, devices: Devices, t: float) -> Any:
        return self._ask("online", devices, t)

    def until(self, devices: Devices, t: float) -> Any:
        return self._ask("until", devices, t)

    def next_online(self, devices: Devices, t: float) -> Any:
        return self._ask("next_online", devices, t)


def test_the_law_itself_is_right() -> None:
    check_availability(Changed())


def by_own_chance(devices: Devices, t: float) -> Any:
    return np.random.default_rng().uniform(size=len(devices)) < 0.5


def after(seconds: float) -> Callable[[Devices, float], Any]:
    return lambda devices, t: np.full(len(devices), t + seconds)


@pytest.mark.parametrize(
    ("what", "function", "says"),
    [
        ("online", lambda devices, t: np.arange(len(devices)) % 2 == 0, "something else"),
        ("online", by_own_chance, "something else"),
        ("online", lambda devices, t: np.ones(len(devices)), r"returned float64 of shape \(200,\)"),
        ("until", after(5000.0), r"and at [\d.]+ s online\(\) says False"),
        ("until", after(-1.0), r"expected a time from then on"),
        ("next_online", after(1.0), "just after it online"),
        ("next_online", after(np.nan), "said nan for device"),
    ],
)
def test_planted_mistakes_of_availability_laws_are_found(
    what: str, function: Any, says: str
) -> None:
    with pytest.raises(AssertionError, match=says):
        check_availability(Changed(**{what: function}))


def test_what_is_no_law_is_found() -> None:
    with pytest.raises(AssertionError, match="has not the functions online, until and next_online"):
        check_availability(stays)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a object has not the functions examples, arrays"):
        check_source(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("chance", [1.5, -0.1, np.nan])
def test_a_probability_is_from_0_to_1(chance: float) -> None:
    says = f"the probability of being online is {chance}; expected at least 0 and at most 1"
    with pytest.raises(ValueError, match=says):
        in_slots(chance)
    with pytest.raises(AssertionError, match=says):
        check_availability(in_slots(lambda devices, middle: np.full_like(middle, chance)))


class Data:
    """A right source, but for what is changed."""

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)

    def examples(self, ids: Any, seed: int) -> Any:
        return 3 + ids % 4

    def arrays(self, device: int, seed: int) -> Any:
        random = np.random.default_rng([seed, device])
        return {"x": random.normal(size=(3 + device % 4, 2)).astype(np.float32)}

    def test(self, seed: int) -> Any:
        return {"x": np.zeros((7, 2), np.float32)}


def test_the_source_itself_is_right() -> None:
    check_source(Data())


def of(shape: Callable[[int], tuple[int, ...]], seeds: Callable[[int, int], Any]) -> Any:
    return lambda device, seed: {
        "x": np.random.default_rng(seeds(seed, device)).normal(size=shape(device))
    }


def right_shape(device: int) -> tuple[int, ...]:
    return 3 + device % 4, 2


def two_widths(device: int) -> tuple[int, ...]:
    return 3 + device % 4, 2 + device % 2


def same(device: int) -> tuple[int, ...]:
    return 3, 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"examples": lambda ids, seed: 3 + ids[:1] % 4}, r"returned shape \(1,\)"),
        ({"examples": lambda ids, seed: 3.0 + ids % 4}, "returned float64; expected integers"),
        ({"examples": lambda ids, seed: ids * 0}, "no device has an example"),
        ({"examples": lambda ids, seed: 3 + np.arange(len(ids)) % 4}, "something else"),
        ({"examples": lambda ids, seed: 4 + ids % 4}, r"rows, and examples\(\) says"),
        ({"arrays": of(right_shape, lambda seed, device: None)}, "was another when it was asked"),
        ({"arrays": of(right_shape, lambda seed, device: [device])}, "the data's seed has no"),
        ({"arrays": of(two_widths, lambda *both: both)}, "another device's arrays have"),
        (
            {"examples": lambda ids, seed: 3 + ids * 0, "arrays": of(same, lambda seed, _: seed)},
            "all devices have the same examples",
        ),
        ({"test": lambda seed: {"x": np.zeros((7, 3), np.float32)}}, r"test\(\) has"),
    ],
)
def test_planted_mistakes_of_sources_are_found(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_source(Data(**changes))


def whole(labels: Any, devices: int, random: Any) -> list[Any]:
    return np.array_split(random.permutation(len(labels)), devices)


def in_their_place(labels: Any, devices: int, random: Any) -> list[Any]:
    labels.sort()
    return whole(labels, devices, random)


def by_another_generator(labels: Any, devices: int, random: Any) -> list[Any]:
    return whole(labels, devices, np.random.default_rng())


def too_few_parts(labels: Any, devices: int, random: Any) -> list[Any]:
    return whole(labels, devices - 1, random)


class Remembers:
    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, labels: Any, devices: int, random: Any) -> list[Any]:
        self.first, before = whole(labels, devices, random), self.first
        return before or self.first


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        (by_another_generator, "another part"),
        (Remembers(), "another part"),
        (in_their_place, "the partition changed the labels"),
        (too_few_parts, "returned 19 parts for 20"),
        (lambda labels, devices, random: [random.permutation(9)] * devices, "to several devices"),
        (lambda labels, devices, random: [labels[:0]] * devices, "no device has an example"),
    ],
)
def test_planted_mistakes_of_partitions_are_found(partition: Any, says: str) -> None:
    check_partition(whole)
    with pytest.raises(AssertionError, match=says):
        check_partition(partition)


def test_the_scenario_for_tests_has_two_tiers() -> None:
    scenario = small_scenario(seed=4)
    assert isinstance(scenario, Scenario)
    assert (scenario.seed, [*scenario.tiers]) == (4, ["fast", "slow"])
    assert {*Devices(scenario, np.arange(50)).tier.tolist()} == {0, 1}
