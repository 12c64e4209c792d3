"""What becomes of tasks: the phases by hand, hazards against their survival functions, and who
sends what."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.train import train
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.failures import (
    CAUSES,
    TaskFates,
    sample_answer_fates,
    sample_task_fates,
)
from fleetlearn_simulator.scenario.corruptions import CORRUPTIONS
from fleetlearn_simulator.scenario.scenario import Scenario
from line_bundle import line_data, write_line_bundle

PLAN = '[plan]\nbundle = "a.bundle"\nround.goal = 4\nlocal.evaluate = false\n'
COUNT = 20_000


def scenario(text: str = "", plan: str = "", *, size: int = COUNT, seed: int = 5) -> Scenario:
    whole = f"seed = {seed}\n{PLAN}{plan}\n[population]\nsize = {size}\n{text}"
    return Scenario.parse(whole, Path("/base"), file="a.toml")


def drawn(rule: Scenario, ids: Any = None, round: int = 3, **changes: Any) -> TaskFates:
    ids = np.arange(COUNT) if ids is None else np.asarray(ids)
    settings = {"now": 0.0, "deadline": 600.0, "steps": 100, "down": 0, "up": 0} | changes
    for key in ("steps", "down", "up"):
        settings[key] = np.full(len(ids), settings[key])
    return sample_task_fates(rule, ids, round, **settings)


class Fate(NamedTuple):
    """One of ``TaskFates``, in words."""

    seconds: float
    cause: str
    steps: int
    corrupt: str
    factor: float
    tier: int
    download: float
    train: float
    upload: float


def rows(found: TaskFates) -> list[Fate]:
    sample_task_fates = map(Fate._make, zip(*(column.tolist() for column in found), strict=True))
    return [
        # indices until here
        fate._replace(cause=CAUSES[int(fate.cause)], corrupt=CORRUPTIONS[int(fate.corrupt)])
        for fate in sample_task_fates
    ]


def share_of(found: TaskFates, cause: str) -> float:
    return float((found.cause == CAUSES.index(cause)).mean())


def close(share: float, expected: float, count: int = COUNT) -> bool:
    """Within 4.5 standard deviations of a binomial share."""
    return abs(share - expected) < 4.5 * math.sqrt(expected * (1 - expected) / count)


ALL = """
[tiers.a]
spread = 0.5
[tiers.b]
failures.train = 0.3
failures.crash = 0.2
[failures]
download = 0.01
train = {rate = 0.01, shape = 2}
upload = 0.01
crash = 0.1
stragglers = 0.3
corrupt = [{share = 0.2, kind = "scaled", factor = 3}, {share = 0.1, kind = "stale"}]
"""


def test_a_fate_depends_on_the_seed_the_device_and_the_round_alone() -> None:
    some = [7, 99, 0, 3, 7]
    sizes = {"down": 1_000_000, "up": 1_000_000}
    whole = drawn(scenario(ALL, size=10_000_000), np.arange(100), **sizes)
    for column, expected in zip(drawn(scenario(ALL, size=100), some, **sizes), whole, strict=True):
        assert np.array_equal(column, expected[some])
    for other in (
        drawn(scenario(ALL, seed=6), some, **sizes),
        drawn(scenario(ALL), some, 4, **sizes),
    ):
        assert not np.array_equal(other.seconds, whole.seconds[some])


def test_a_fate_by_hand() -> None:
    """Two seconds of download, 0.5 + 100 * 0.02 s of training at half the speed, four seconds of
    upload, and twice the latency."""
    rule = scenario(
        "[compute]\nstart_seconds = 0.5\n[tiers.x]\nspeed = 0.5\ndownload = 1e6\nupload = "
        "5e5\nlatency = 0.25"
    )
    (fate,) = rows(drawn(rule, [3], down=2_000_000, up=2_000_000))
    assert fate._asdict() == {
        "seconds": pytest.approx(0.25 + 2 + 2 * 2.5 + 0.25 + 4),
        "cause": "",
        "steps": 100,
        "corrupt": "",
        "factor": 1.0,
        "tier": 0,
        "download": pytest.approx(2.25),
        "train": pytest.approx(5.0),
        "upload": pytest.approx(4.25),
    }
    assert [type(value) for value in fate] == [
        float,
        str,
        int,
        str,
        float,
        int,
        float,
        float,
        float,
    ]


def test_evaluating_takes_a_third_of_a_step_for_each_batch() -> None:
    plan = f"{PLAN}local.epochs = 5\n[population]\nsize = 9"
    without, evaluating = (
        drawn(Scenario.parse(text, Path("/base"), file="a.toml"), [0])
        for text in (plan, plan.replace("false", "true"))
    )
    assert evaluating.train[0] - without.train[0] == pytest.approx(100 / 5 * 0.02 / 3)


def answered(rule: Scenario, work: float | None = None, up: int = 0) -> tuple[Any, Any]:
    """Of COUNT devices that are asked for the third time, in 10,000 bytes: the seconds and the
    causes in words."""
    ids, turns = np.arange(COUNT), np.full(COUNT, 3)
    steps = None if work is None else np.full(COUNT, work)
    down, sent = np.full(COUNT, 10_000), np.full(COUNT, up)
    seconds, cause = sample_answer_fates(
        rule, "poll", ids, turns, now=0.0, work=steps, down=down, up=sent
    )
    return seconds, np.array(CAUSES)[cause]


def test_an_answer_by_hand() -> None:
    """A device of half the speed fetches in 0.5 + 10 seconds, works for 4 + 6 x 0.4, and sends."""
    compute = "[compute]\nstart_seconds = 2.0\nstep_seconds = 0.2\n"
    tier = "[tiers.slow]\nspeed = 0.5\nlatency = 0.5\ndownload = 1000\nupload = 100\n"
    rule = scenario(compute + tier)
    for work, up, expected in (
        (None, 0, 10.5 + 0.5),
        (None, 50, 10.5 + 1.0),
        (6.0, 50, 10.5 + 6.4 + 1.0),
    ):
        seconds, causes = answered(rule, work, up)
        assert seconds == pytest.approx(expected)
        assert {*causes} == {""}


@pytest.mark.parametrize(("cause", "seconds"), [("download", 10.5), ("train", 8.0), ("upload", 3)])
def test_devices_vanish_while_they_fetch_work_and_send(cause: str, seconds: float) -> None:
    rate = 0.05
    tier = "[tiers.slow]\nlatency = 0.5\ndownload = 1000\nupload = 100\n"
    rule = scenario(f"[compute]\nstep_seconds = 2.0\n[failures]\n{cause} = {rate}\n{tier}")
    _, causes = answered(rule, 4.0, 250)
    assert {*causes} == {"", cause}
    assert close((causes == cause).mean(), 1 - math.exp(-rate * seconds))
    _, causes = answered(rule, None, 0)
    assert {*causes} == ({"", cause} if cause == "download" else {""}), "no work, nothing to send"


@pytest.mark.parametrize("phase", ["download", "train", "upload"])
@pytest.mark.parametrize(("rate", "shape"), [(0.05, 1.0), (0.05, 3.0), (0.2, 0.5)])
def test_hazards_have_their_survival_function(phase: str, rate: float, shape: float) -> None:
    """Of a phase of ten seconds: exp(-(rate * 10)^shape) come through it; those that vanish do at
    times of that law."""
    rule = scenario(
        f"[compute]\nstep_seconds = 0.1\n[tiers.x]\nlatency = 0\ndownload = 1e6\nupload = 1e6\n"
        f"[failures]\n{phase} = {{rate = {rate}, shape = {shape}}}"
    )
    found = drawn(rule, down=10_000_000, up=10_000_000)
    gone = found.cause == CAUSES.index(phase)
    assert set(found.cause.tolist()) == {0, CAUSES.index(phase)}
    assert close(gone.mean(), 1 - math.exp(-((rate * 10) ** shape)))
    begin = {"download": 0.0, "train": 10.0, "upload": 20.0}[phase]
    for t in (2.0, 5.0, 8.0):
        assert close(
            (gone & (found.seconds < begin + t)).mean(), 1 - math.exp(-((rate * t) ** shape))
        )
    assert found.seconds[~gone].tolist() == pytest.approx([30.0] * int((~gone).sum()))


def test_a_number_is_a_constant_hazard() -> None:
    as_number, as_table = (
        scenario(f"[failures]\ntrain = {value}") for value in ("0.3", "{rate = 0.3}")
    )
    for one, other in zip(drawn(as_number), drawn(as_table), strict=True):
        assert np.array_equal(one, other)
    assert close(share_of(drawn(as_number), "train"), 1 - math.exp(-0.3 * 2))


def test_the_hazards_of_the_phases_are_independent() -> None:
    rule = scenario(
        "[failures]\ndownload = 0.1\ntrain = 0.1\nupload = 0.1\n[compute]\nstep_seconds = 0.05"
    )
    found = drawn(rule, down=12_375_000, up=6_187_500)  # with the latency of 0.05 s: 5 seconds each
    stays = math.exp(-0.5)
    assert close(share_of(found, "download"), 1 - stays)
    assert close(share_of(found, "train"), stays * (1 - stays))
    assert close(share_of(found, "upload"), stays**2 * (1 - stays))
    assert close(share_of(found, ""), stays**3)


def test_a_tiers_own_failures_come_first() -> None:
    rule = scenario(
        "[tiers.a]\n[tiers.b.failures]\ntrain = 0\n[tiers.c.failures]\ncrash = "
        "1.0\n[failures]\ntrain = 0.5"
    )
    found = drawn(rule)
    assert set(found.cause[found.tier == 1].tolist()) == {0}
    assert close(
        (found.cause[found.tier == 0] != 0).mean(), 1 - math.exp(-1), int((found.tier == 0).sum())
    )
    assert set(found.cause[found.tier == 2].tolist()) == {
        CAUSES.index("train"),
        CAUSES.index("crash"),
    }


def test_a_crash_comes_at_a_uniform_part_of_the_training() -> None:
    found = drawn(scenario("[failures]\ncrash = 0.25"))
    crashed = found.cause == CAUSES.index("crash")
    assert close(crashed.mean(), 0.25)
    part = (found.seconds - found.download)[crashed] / found.train[crashed]
    for fraction in (0.1, 0.5, 0.9):
        assert close((part < fraction).mean(), fraction, len(part))


def test_stragglers_do_some_of_their_epochs() -> None:
    """One to four of five, each as often; they report after that."""
    found = drawn(scenario("[failures]\nstragglers = 0.4", "local.epochs = 5"), steps=100)
    assert set(found.cause.tolist()) == {0}
    assert close((found.steps < 100).mean(), 0.4)
    for steps in (20, 40, 60, 80):
        assert close((found.steps == steps).mean(), 0.1)
    assert np.allclose(found.seconds, 0.1 + 0.02 * found.steps)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 0), (0.5, 5), (0.9, 9), (0.94, 9), (1.0, 10)]
)
def test_an_exact_number_of_stragglers(share: float, expected: int) -> None:
    """In each round others of ten, each as often; which they are does not depend on their order."""
    rule = scenario(
        f"[failures]\nstragglers = {share}\nexact_stragglers = true", "local.epochs = 5"
    )
    ids, times = np.arange(10), np.zeros(10)
    for round in range(200):
        slow = drawn(rule, ids, round).steps < 100
        assert slow.sum() == expected
        assert np.array_equal(drawn(rule, ids[::-1], round).steps[::-1] < 100, slow)
        times += slow
    assert times.sum() == 200 * expected
    if 0 < expected < 10:
        assert all(close(count / 200, expected / 10, 200) for count in times)


def test_stragglers_of_one_epoch_do_some_of_its_steps() -> None:
    found = drawn(scenario("[failures]\nstragglers = 1.0"), steps=4)
    for steps in (1, 2, 3):
        assert close((found.steps == steps).mean(), 1 / 3)
    assert set(drawn(scenario("[failures]\nstragglers = 1.0"), steps=1).steps.tolist()) == {1}


def test_stragglers_may_be_discarded() -> None:
    """The same devices, after the same work, without a report."""
    text = "[failures]\nstragglers = 0.4\n"
    kept, dropped = (
        drawn(scenario(text + more, "local.epochs = 5")) for more in ("", "discard = true")
    )
    slow = kept.steps < 100
    assert np.array_equal(dropped.cause, np.where(slow, CAUSES.index("straggler"), 0))
    assert np.allclose(dropped.seconds[slow], 0.05 + 0.02 * kept.steps[slow])
    assert np.array_equal(dropped.seconds[~slow], kept.seconds[~slow])
    whole = drawn(scenario("[failures]\nstragglers = 1.0\ndiscard = true"), steps=1)
    assert not whole.cause.any()  # of one step there is no part


@pytest.mark.parametrize(
    ("budget", "step"), [(1.0, 0.125), (0.1, 0.125), (1.1, 0.25), (100.0, 0.125), (0.5, 0.5)]
)
def test_a_time_budget_leaves_as_many_steps_as_on_a_device(
    tmp_path: Path, budget: float, step: float
) -> None:
    """Against the device's own loop, with a clock that moves by a step's time at each step."""
    runtime = open_runtime(write_line_bundle(tmp_path / "line.bundle"), kind="onnx")
    now, plain = 0.0, runtime.step

    def timed(batch: Any, **values: Any) -> float:
        nonlocal now
        now += step
        return plain(batch, **values)

    runtime.step = timed  # type: ignore[method-assign]
    done = train(
        runtime,
        line_data(40),
        hyper={row.name: 0.01 for row in runtime.manifest.hyper},
        epochs=3,
        batch_size=10,
        seed=1,
        time_budget=budget,
        evaluate=False,
        clock=lambda: now,
    )
    rule = scenario(
        f"[compute]\nstep_seconds = {step}", f"local.epochs = 3\nlocal.time_budget = {budget}"
    )
    (fate,) = rows(drawn(rule, [0], steps=12))
    assert (fate.steps, fate.cause, fate.train) == (done.steps, "", pytest.approx(now))


def test_the_deadline_limits_training_too() -> None:
    """As on a device, a tenth of it is kept for the upload; with nothing left the device gives
    up."""
    rule = scenario("[compute]\nstep_seconds = 1.0\n[tiers.x]\nlatency = 0\ndownload = 1e6")
    (some,) = rows(drawn(rule, [0], now=1000.0, deadline=1100.0, down=40_000_000))
    assert (some.cause, some.steps, some.seconds) == ("", 50, pytest.approx(90.0))
    (late,) = rows(drawn(rule, [0], now=1000.0, deadline=1100.0, down=90_000_000))
    assert (late.cause, late.seconds) == ("out-of-time", pytest.approx(90.0))


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", "local.time_budget = 50.0"),
        ("", "round.deadline = 50.0"),
        ("[failures]\nstragglers = 1.0", "local.epochs = 4"),
    ],
)
def test_a_masked_task_that_is_cut_short_is_given_back(text: str, plan: str) -> None:
    secure = (
        "[plan.secure]\nmode = 'helper'\nhelper = 'https://h.example:1'\n"
        f"key = '{'ab' * 32}'\ncertificate = '{'cd' * 32}'\nclip = 1.0\nminimum = 2\n"
    )
    tail = "[compute]\nstep_seconds = 1.0\n[tiers.x]\nlatency = 0\n" + text
    asked = {"deadline": 50.0} if "deadline" in plan else {}
    plan += "\nround.minimum = 3"
    (free,) = rows(drawn(scenario(tail, plan), [0], **asked))
    assert free.cause == ""
    assert 0 < free.steps < 100, "part of the work is reported"
    (masked,) = rows(drawn(scenario(secure + tail, plan), [0], **asked))
    assert (masked.cause, masked.seconds) == ("out-of-time", pytest.approx(free.train))
    (whole,) = rows(drawn(scenario(secure + tail.replace(text, "")), [0]))
    assert whole.cause == ""


def test_an_outage_that_outlasts_the_grace_ends_the_regions_tasks() -> None:
    text = (
        "[failures]\nregions = 2\noutages = [{region = 1, begin = 100, end = "
        "130}]\n[tiers.x]\nlatency = 0"
    )
    rule = scenario(text, "round.grace = 20.0")
    for now, cause, seconds in (
        (99.0, "outage", 1.0),
        (105.0, "outage", 0.0),
        (90.0, "", 2.0),
        (115.0, "", 2.0),
    ):
        here, away = rows(drawn(rule, [1, 2], now=now, deadline=now + 600))
        assert (here.cause, here.seconds) == (cause, pytest.approx(seconds))
        assert away.cause == ""
    assert {fate.cause for fate in rows(drawn(scenario(text, "round.grace = 30.0"), now=99.0))} == {
        ""
    }


def test_some_devices_always_send_bad_updates() -> None:
    rule = scenario(ALL)
    found = drawn(rule)
    for kind, share, factor in (
        ("scaled", 0.2, 3.0),
        ("stale", 0.1, 1.0),
        ("", 0.7, 1.0),
        ("flipped", 0, 1),
    ):
        bad = found.corrupt == CORRUPTIONS.index(kind)
        assert close(bad.mean(), share) if share else not bad.any()
        assert set(found.factor[bad].tolist()) <= {factor}
    assert np.array_equal(found.corrupt, drawn(rule, round=4).corrupt)
    assert {fate.corrupt for fate in rows(found)} == {"", "scaled", "stale"}


def test_a_step_must_have_been_measured() -> None:
    with pytest.raises(SimulatorError, match='step_seconds = "measure": a step must be measured'):
        drawn(scenario('[compute]\nstep_seconds = "measure"'), [0])
