"""Private statistics on their disk: what each number's noise is, that no noise is drawn twice, what
a device may add, and where the run ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from answering import NOW
from computing import texts
from computing_fleet import ComputingFleet, result_of
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon
from fleetlearn_coordinator.service.training_run.private_budget import count_releases
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from fleetlearn_protocol.computations.private_sums import LENGTH
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.errors import Code, ProtocolError
from release_deaths import DEATHS, KilledError
from statistics_bundle import statistics_bundle

ASKED = Statistics(
    numbers=(NumberColumn("age", range=(0.0, 100.0), quantiles=(0.1, 0.5, 0.9), bins=100),),
    rounds=1,
)
ROWS, CLIP, NOISE = 40, 40.0, 1.0
DEVICES = [f"device-{number}" for number in range(20)]
TABLES = {
    device: {"age": np.random.default_rng(number).normal(50, 15, ROWS).clip(0, 100)}
    for number, device in enumerate(DEVICES)
}
ALL = np.concatenate([table["age"] for table in TABLES.values()])


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    def make(asked: Statistics = ASKED, rounds: int = 3, **privacy: Any) -> Plan:
        bundle = statistics_bundle(tmp_path, asked)
        terms = {"noise": NOISE, "delta": 1e-6, "population": 1000, "clip": CLIP, **privacy}
        rows = "".join(f"{key} = {value}\n" for key, value in terms.items() if value is not None)
        text = (
            f'recipe = "statistics"\nname = "run"\nbundle = "{bundle.path}"\n[round]\n'
            f"goal = {len(DEVICES)}\nminimum = 2\nover_selection = 1.0\n"
            f"[stop]\nrounds = {rounds}\n[privacy]\n{rows}"
        )
        return Plan.parse(text, tmp_path)

    return make


def begun(plan: Plan, tables: Any = TABLES) -> ComputingFleet:
    running = ComputingFleet(plan, tables)
    running.run.resume(NOW)
    running.check_in(*DEVICES)
    return running


def result(plan: Plan, devices: Sequence[str] = DEVICES) -> dict[str, Any]:
    """Return what comes out after these devices' reports."""
    running = begun(plan)
    running.answers(*devices)
    assert running.run.finished is not None
    running.store.close()
    return result_of(plan, running)


def test_each_number_is_as_near_as_its_noise_says(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(noise=0.1)
    found = result(plan)
    age = found["columns"]["age"]
    assert found["noise"]["rows"] == pytest.approx(0.1 * CLIP * sqrt(4))  # of four groups
    errors = {
        "rows": (found["rows"] - ALL.size, found["noise"]["rows"]),
        "mean": (age["mean"] - ALL.mean(), age["noise"]["mean"]),
        "deviation": (age["deviation"] - ALL.std(), age["noise"]["deviation"]),
    }
    for name, (error, noise) in errors.items():
        assert abs(error) < 6 * noise, name
    assert errors["mean"][0] != 0  # the rows are whole numbers: theirs may be
    assert age["noise"]["mean"] < 1  # 8 rows of 800, which may be at +-50
    for quantile in age["quantiles"]:
        # None: up to an end of the range
        least, most = quantile["least"] or 0.0, quantile["most"] or 100.0
        exact, wide = np.quantile(ALL, quantile["share"]), most - least
        assert 0 < wide < 60  # of 180 that were drawn the widest was 36
        assert abs(quantile["value"] - exact) < 2 * wide  # eight standard deviations
    values = [quantile["value"] for quantile in age["quantiles"]]
    assert values == sorted(values)
    assert min(age["histogram"]["rows"]) >= 0
    (row,) = read_status(plan.data_dir).rounds
    assert row.summary["privacy"]["release"] == 1
    assert row.summary["computation"].endswith("rows of 20 devices, with noise")


def test_epsilon_is_the_accountants_for_the_same_noise(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan()
    result(plan)
    spent = read_status(plan.data_dir).rounds[0].summary["privacy"]["epsilon"]
    assert spent == gaussian_epsilon(1 / NOISE, 1e-6)


@pytest.mark.parametrize("moment", DEATHS)
def test_a_kill_between_noise_and_commit_gives_the_same_bits(
    make_plan: Callable[..., Plan], tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of a run at the same open round: one closes it, the other is killed as it does."""
    plan = make_plan()
    running = begun(plan)
    running.answers(*DEVICES[:-1])
    running.store.close()
    copy = msgspec.structs.replace(plan, data_dir=tmp_path / "copy")
    shutil.copytree(plan.data_dir, copy.data_dir)
    count_releases(copy.data_dir, 0, NOW.wall, "command")
    result(copy, DEVICES[-1:])

    running = begun(plan)
    with monkeypatch.context() as patch:
        DEATHS[moment](patch)
        with pytest.raises(KilledError):
            running.answers(DEVICES[-1])
    running.store.close()
    running = ComputingFleet(plan, TABLES)
    running.run.resume(NOW)
    running.run.work.do_work(NOW)
    assert running.run.finished is not None
    running.store.close()
    assert read_model(plan.data_dir)[1].tobytes() == read_model(copy.data_dir)[1].tobytes()
    assert read_status(plan.data_dir).rounds[0].summary["privacy"]["release"] == 1


def test_sums_that_no_device_clipped_are_refused(make_plan: Callable[..., Plan]) -> None:
    """Those of software that knows nothing of it, and those that are one step too long."""
    running = begun(make_plan())
    one = np.zeros(len(running.sums_of("device-1")), np.int64)
    for wrong in ([LENGTH, 1], [2**40]):
        sums = one.copy()
        sums[: len(wrong)] = wrong
        with pytest.raises(ProtocolError, match="does not clip sums") as refused:
            running.answer(running.lease_of("device-1"), sums)
        assert refused.value.code == Code.NORM_TOO_LARGE
    one[0] = LENGTH
    running.answer(running.lease_of("device-1"), one)
    running.store.close()


def test_the_run_ends_at_its_budget(make_plan: Callable[..., Plan]) -> None:
    """It is rolled back and measures again, until the next release would go past the budget."""
    plan = make_plan(epsilon=gaussian_epsilon(sqrt(2) / NOISE, 1e-6) + 1e-6, rounds=9)
    result(plan)
    for left in (1, 0):
        running = begun(plan)
        assert running.run.budget.account is not None
        assert running.run.budget.account.left == left
        running.store.close()
        ask_to_roll_back(plan.data_dir, 0, "somebody")
        if left:
            result(plan)
    running = begun(plan)
    assert running.run.finished is not None
    assert running.run.finished.startswith("the privacy budget is spent")
    running.store.close()


def test_devices_that_count_more_rows_than_the_clip_norm_leave_the_mean(
    make_plan: Callable[..., Plan],
) -> None:
    """All have the same rows, and count as fewer; with next to no noise."""
    found = result(make_plan(clip=5.0, noise=1e-3))
    age = found["columns"]["age"]
    assert 100 <= found["rows"] < 400
    assert age["mean"] == pytest.approx(ALL.mean(), abs=1.0)
    assert age["deviation"] == pytest.approx(ALL.std(), abs=1.0)


def test_frequent_values_are_found_under_noise(make_plan: Callable[..., Plan]) -> None:
    """In two rounds that sketch and one that counts."""
    asked = Statistics(categories=(CategoryColumn("city", top=3, longest=8),), rounds=3)
    random = np.random.default_rng(5)
    names = [["Bonn", "Kiel", "Ulm"][min(2, int(number))] for number in random.exponential(1, 40)]
    plan = make_plan(asked=asked, noise=0.02)
    running = ComputingFleet(plan, {device: {"city": texts(names, 8)} for device in DEVICES})
    running.check_in(*DEVICES)
    for _ in range(3):
        running.answers(*DEVICES)
    assert running.run.finished is not None
    found = result_of(plan, running)["columns"]["city"]
    noise = found["noise"]["rows"]
    exact = {name: 20 * names.count(name) for name in {*names}}
    assert {row["value"] for row in found["values"]} == {*exact}
    for row in found["values"]:
        assert abs(row["rows"] - exact[row["value"]]) < 5 * noise
    running.store.close()


def test_private_trees_make_a_release_of_each_level(tmp_path: Path) -> None:
    """One of rows by class, and one of each level of each tree; with little noise they predict."""
    told = BoostedTrees(
        columns=(BoostColumn("a", range=(0.0, 1.0)),), loss="logistic", rounds=3, depth=1, bins=8
    )
    file = write_computation_bundle(tmp_path / "trees.bundle", "trees", told)
    x = {device: np.random.default_rng(i).random((ROWS, 1)) for i, device in enumerate(DEVICES)}
    tables = {
        device: {"x": rows.astype(np.float32), "y": (rows[:, 0] > 0.5).astype(np.int64)}
        for device, rows in x.items()
    }
    text = (
        f'recipe = "boosted-trees"\nname = "trees"\nbundle = "{file}"\n[round]\n'
        f"goal = {len(DEVICES)}\nminimum = 2\nover_selection = 1.0\n[stop]\nrounds = 4\n"
        f"[privacy]\nnoise = 0.1\ndelta = 1e-6\npopulation = 20\nclip = {CLIP}\n"
    )
    plan = Plan.parse(text, tmp_path)
    running = ComputingFleet(plan, tables)
    running.check_in(*DEVICES)
    for _ in range(4):
        running.answers(*DEVICES)
    assert running.run.finished == "the computation is done: 3 boosting rounds, with noise"
    found = result_of(plan, running)
    running.store.close()
    assert (found["splits"], found["loss"]) == (3, None)
    assert abs(found["rows"] - ROWS * len(DEVICES)) < 6 * 0.1 * CLIP * sqrt(2)
    releases = [row.summary["privacy"]["release"] for row in read_status(plan.data_dir).rounds]
    assert sorted(releases) == [1, 2, 3, 4]
