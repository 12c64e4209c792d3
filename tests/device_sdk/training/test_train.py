from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.train import (
    DivergedError,
    NoExamplesError,
    OutOfTimeError,
    StoppedError,
    TrainingResult,
    evaluate_data,
    train,
)
from fleetlearn_export import LocalStep, export_bundle
from fleetlearn_protocol.messages import Evaluation, StepSchedule
from line_bundle import line_data, write_line_bundle

HYPER = {"lr": 0.1, "mu": 0.01}


@pytest.fixture
def case(cases: Callable[[str], Any]) -> Any:
    return cases("softmax")


@pytest.fixture
def runtime(case: Any) -> Runtime:
    return open_runtime(case.path)


@pytest.fixture
def data(case: Any) -> tuple[Any, Any]:
    return case.x[:50], case.y[:50]


def run(runtime: Runtime, data: Any, **changes: Any) -> TrainingResult:
    settings = {"hyper": HYPER, "epochs": 2, "batch_size": 20, "seed": 3}
    return train(runtime, data, **(settings | changes))


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that moves on each time it is read."""
    ticks = count()
    return lambda: next(ticks) * seconds


def test_it_is_the_runtimes_steps_over_the_batches(case: Any, runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, data)
    by_hand = open_runtime(case.path)
    start = by_hand.parameters.copy()
    losses, hits = [], []
    for epoch in range(2):
        for batch in as_data(data).batches(20, 3, epoch):
            losses.append(by_hand.step(batch, **HYPER) * len(batch[0]))
            hits.append(by_hand.metrics["accuracy"] * len(batch[0]))
    np.testing.assert_array_equal(outcome.update, by_hand.parameters - start)
    assert np.abs(outcome.update).max() > 1e-3
    assert outcome.update.dtype == np.float32
    assert outcome.largest == np.abs(outcome.update).max()
    assert (outcome.steps, outcome.seen, outcome.examples, outcome.epochs) == (6, 100, 50, 2.0)
    assert outcome.complete
    assert outcome.loss == pytest.approx(sum(losses) / 100)
    assert outcome.metrics == pytest.approx({"accuracy": sum(hits) / 100})
    assert outcome.evaluation is None


@pytest.mark.parametrize("steps", [None, 4])
def test_a_schedule_multiplies_each_step_s_rate(
    case: Any, runtime: Runtime, data: Any, steps: int | None
) -> None:
    """Two passes of three batches: without a number of steps the wave goes over all six."""
    schedule = StepSchedule("cosine", warm_up=1, start=0.5, steps=steps)
    outcome = run(runtime, data, schedule=schedule)
    by_hand = open_runtime(case.path)
    start = by_hand.parameters.copy()
    length = steps or 5
    wave = [(1 + np.cos(np.pi * min(step, length) / length)) / 2 for step in range(5)]
    factors = [0.5, *(1e-4 + (1 - 1e-4) * height for height in wave)]
    batches = [batch for epoch in range(2) for batch in as_data(data).batches(20, 3, epoch)]
    for factor, batch in zip(factors, batches, strict=True):
        by_hand.step(batch, **(HYPER | {"lr": HYPER["lr"] * factor}))
    np.testing.assert_allclose(outcome.update, by_hand.parameters - start, atol=1e-7)
    assert outcome.factors == pytest.approx(sum(factors))
    runtime.load(start)
    assert run(runtime, data).factors == 6.0


def test_a_schedule_over_the_task_needs_batches_that_are_counted(
    runtime: Runtime, data: Any
) -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return as_data(data).batches(20, None)

    batches = [*as_data(data).batches(20, None)]
    counted, uncounted = (as_data(each, examples=50) for each in (batches, Stream()))
    start = runtime.parameters.copy()
    falling = StepSchedule("linear")
    assert run(runtime, counted, schedule=falling).factors == pytest.approx(3.5, rel=1e-3)
    runtime.load(start)
    with pytest.raises(DataError, match=r"local\.step_schedule\.steps in the plan"):
        run(runtime, uncounted, schedule=falling)
    assert run(runtime, uncounted, schedule=StepSchedule("linear", steps=6)).steps == 6


def test_a_schedule_needs_a_learning_rate(tmp_path: Path) -> None:
    own = write_line_bundle(tmp_path / "own.bundle", references=["anchor"])
    hyper = tuple(row for row in own.manifest.hyper if row.name != "lr")
    runtime = open_runtime(own)
    runtime.manifest = msgspec.structs.replace(own.manifest, hyper=hyper)
    with pytest.raises(ValueError, match=r"has no lr; it takes mu"):
        run(runtime, line_data(12), hyper={"mu": 0.1}, schedule=StepSchedule("constant"))


def test_the_update_outlives_further_training(runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, data)
    kept = outcome.update.copy()
    run(runtime, data)
    np.testing.assert_array_equal(outcome.update, kept)


def test_the_update_is_against_the_anchor(runtime: Runtime, data: Any) -> None:
    start = runtime.parameters.copy()
    plain = run(runtime, data, hyper={"lr": 0.1, "mu": 0.0})
    runtime.load(start, anchor=start + np.float32(1))
    moved = run(runtime, data, hyper={"lr": 0.1, "mu": 0.0})
    np.testing.assert_allclose(moved.update, plain.update - 1, atol=1e-6)


def test_the_same_seed_gives_the_same_update_and_another_another(
    runtime: Runtime, data: Any
) -> None:
    start = runtime.parameters.copy()
    updates = []
    for seed in (3, 3, 4):
        runtime.load(start)
        updates.append(run(runtime, data, seed=seed).update)
    np.testing.assert_array_equal(updates[0], updates[1])
    assert not np.array_equal(updates[0], updates[2])


def test_batch_size_zero_is_one_step_for_each_pass(runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, data, batch_size=0)
    assert (outcome.steps, outcome.seen) == (2, 100)


def test_partial_work_is_reported_as_what_it_is(runtime: Runtime, data: Any) -> None:
    # The clock is read at the start, when training begins (1 s later), and after each step (1 s
    # each). After step 4 5 s are over, and a fifth would end at 6 s.
    outcome = run(runtime, data, time_budget=5.5, clock=ticking(1.0))
    assert (outcome.steps, outcome.complete) == (4, False)
    assert outcome.seen == 20 + 20 + 10 + 20
    assert outcome.epochs == pytest.approx(1 + 20 / 50)
    assert outcome.seconds == 6.0
    assert outcome.examples == 50


def test_a_budget_that_ends_with_a_pass_counts_it_whole(runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, data, time_budget=4.5, clock=ticking(1.0))
    assert (outcome.steps, outcome.epochs, outcome.complete) == (3, 1.0, False)


def test_a_budget_that_just_suffices_is_complete(runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, data, time_budget=7.0, clock=ticking(1.0))
    assert (outcome.steps, outcome.complete) == (6, True)


def test_one_step_is_always_done(runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, data, time_budget=0.001, clock=ticking(1.0))
    assert (outcome.steps, outcome.complete, outcome.epochs) == (1, False, 0.4)


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_no_time_at_all_is_an_error(runtime: Runtime, data: Any, budget: float) -> None:
    with pytest.raises(OutOfTimeError, match="the time budget is"):
        run(runtime, data, time_budget=budget)


def test_it_stops_when_told_and_says_after_which_step(runtime: Runtime, data: Any) -> None:
    steps: list[int] = []
    with pytest.raises(StoppedError, match="stopped after step 2"):
        run(
            runtime,
            data,
            on_step=lambda step, loss: steps.append(step),
            should_stop=lambda: len(steps) == 2,
        )
    assert steps == [1, 2]
    with pytest.raises(StoppedError, match="evaluation was stopped"):
        run(runtime, data, evaluate=True, should_stop=lambda: True)


def test_on_step_hears_each_steps_loss(runtime: Runtime, data: Any) -> None:
    heard: list[tuple[int, float]] = []
    outcome = run(runtime, data, epochs=1, on_step=lambda *args: heard.append(args))
    assert [step for step, _ in heard] == [1, 2, 3]
    losses = [loss for _, loss in heard]
    assert outcome.loss == pytest.approx((20 * losses[0] + 20 * losses[1] + 10 * losses[2]) / 50)


def test_a_loss_that_is_not_finite_names_its_step(runtime: Runtime, data: Any) -> None:
    with pytest.raises(DivergedError, match=r"step [2-9]'s loss is (nan|inf)"):
        run(runtime, data, hyper={"lr": 3e38}, epochs=9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_are_not_finite_are_named(runtime: Runtime, data: Any, value: float) -> None:
    x, y = data[0].copy(), data[1]
    x[31, 7] = value
    named = (
        rf"array x has the value {value} in example 31 \(the first is 0\), at \[7\]; expected "
        rf"finite numbers"
    )
    with pytest.raises(
        DataError, match=named + r"\. With it, step [123]'s loss is (nan|inf)"
    ) as caught:
        run(runtime, (x, y))
    assert isinstance(caught.value, DivergedError)
    with pytest.raises(
        DataError, match=named + r"\. With it, before training, the model's summed loss"
    ):
        run(runtime, (x, y), evaluate=True)
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    with pytest.raises(DataError, match=named):
        run(runtime, as_data(batches, examples=50))


def test_finite_data_are_not_blamed_for_a_divergence(runtime: Runtime, data: Any) -> None:
    with pytest.raises(DivergedError) as caught:
        run(runtime, data, hyper={"lr": 3e38}, epochs=9)
    assert not isinstance(caught.value, DataError)


def test_a_model_that_takes_nan_for_what_is_missing_is_trained(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    filled = torch.nn.Sequential(Filled(), model)
    x, y = (
        np.random.default_rng(3).standard_normal((20, 4)).astype(np.float32),
        np.zeros((20, 1), np.float32),
    )
    path = tmp_path / "filled.bundle"
    export_bundle(filled, torch.nn.functional.mse_loss, (x[:4], y[:4]), path, step=LocalStep("sgd"))
    x[3, 2] = np.nan
    outcome = run(open_runtime(path), (x, y), hyper={"lr": 0.1})
    assert np.isfinite(outcome.update).all()


class Filled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(x)


@pytest.mark.parametrize("value", [-1, 10])
def test_a_label_that_is_no_class_is_named_before_any_step(
    runtime: Runtime, data: Any, value: int
) -> None:
    x, y = data[0], data[1].copy()
    y[42] = value
    steps: list[int] = []
    named = (
        rf"array y has the value {value} in example 42 \(the first is 0\); expected 0 to 9, or -100"
    )
    with pytest.raises(DataError, match=named):
        run(runtime, (x, y), on_step=lambda step, loss: steps.append(step))
    assert steps == []
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    with pytest.raises(
        DataError, match=rf"the value {value} in example 22 \(the first is 0\) of batch 1 of a pass"
    ):
        run(runtime, as_data(batches, examples=50))
    with pytest.raises(DataError, match=rf"the value {value} in example 22"):
        run(runtime, as_data(batches, examples=50), evaluate=True)


def test_a_label_that_the_loss_leaves_out_is_trained_as_pytorch_does(
    case: Any, runtime: Runtime, data: Any
) -> None:
    x, y = data[0], data[1].copy()
    y[:7] = -100
    run(runtime, (x, y), epochs=1, batch_size=0)
    update = runtime.parameters - runtime.anchor
    alone = open_runtime(case.path)
    alone.step((x[7:], y[7:]), **HYPER)  # the mean is over those that are not left out
    np.testing.assert_allclose(update, alone.parameters - alone.anchor, atol=1e-7)


def test_an_update_that_is_not_finite_diverges_though_each_loss_was(
    runtime: Runtime, data: Any
) -> None:
    # One step: its loss is from before the update, which is beyond float32.
    x, y = data
    with pytest.raises(DivergedError, match="the update after step 1 is not finite"):
        run(runtime, (x * np.float32(100), y), hyper={"lr": 3e38}, epochs=1, batch_size=0)


def test_evaluation_is_of_the_model_before_training_and_over_all_data(
    case: Any, runtime: Runtime
) -> None:
    data = case.x[:600], case.y[:600]
    outcome = run(runtime, data, evaluate=True, batch_size=64)
    logits = case.x[:600] @ case.model.weight.detach().numpy().T + case.model.bias.detach().numpy()
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum(1))
    assert outcome.evaluation is not None
    assert outcome.evaluation.examples == 600
    assert outcome.evaluation.loss_sum == pytest.approx(
        (log_sum - logits[np.arange(600), data[1]]).sum(), rel=1e-5
    )
    assert outcome.evaluation.metric_sums == {
        "accuracy": float((logits.argmax(1) == data[1]).sum())
    }


def test_evaluation_goes_in_batches_of_bounded_size(runtime: Runtime, case: Any) -> None:
    seen: list[int] = []

    class Recorded:
        manifest = runtime.manifest

        def evaluate(self, batch: Any) -> Any:
            seen.append(len(batch[0]))
            return runtime.evaluate(batch)

    data = case.x[:600], case.y[:600]
    whole = evaluate_data(Recorded(), data)
    parts = evaluate_data(Recorded(), data, batch_size=200)
    assert seen == [256, 256, 88, 200, 200, 200]
    assert whole.loss_sum == pytest.approx(parts.loss_sum, rel=1e-6)
    assert whole.metric_sums == parts.metric_sums


def test_each_batch_of_the_evaluation_is_told(runtime: Runtime, case: Any) -> None:
    """A device that evaluates for minutes before its first step makes progress."""
    told: list[str] = []
    run(
        runtime,
        (case.x[:600], case.y[:600]),
        evaluate=True,
        batch_size=200,
        on_evaluated=lambda: told.append("batch"),
        on_step=lambda steps, loss: told.append("step"),
    )
    assert told[:3] == ["batch"] * 3
    assert {*told[3:]} == {"step"}


def test_a_metric_that_the_data_do_not_define_is_left_out(runtime: Runtime, data: Any) -> None:
    class Undefined:
        """The runtime, with a metric more that is 0/0 on one of the batches."""

        manifest = runtime.manifest
        steps = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def step(self, batch: Any, **hyper: float) -> float:
            self.steps += 1
            return runtime.step(batch, **hyper)

        @property
        def metrics(self) -> dict[str, float]:
            return runtime.metrics | {"recall": float("nan") if self.steps == 2 else 0.5}

        def evaluate(self, batch: Any) -> Evaluation:
            part = runtime.evaluate(batch)
            return Evaluation(part.examples, part.loss_sum, {"accuracy": float("nan")})

    outcome = run(Undefined(), data, evaluate=True)
    assert set(outcome.metrics) == {"accuracy"}
    assert outcome.evaluation is not None
    assert outcome.evaluation.metric_sums == {}


class Stream:
    """A user's own source: each pass is a new generator."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.x), 15):
            yield self.x[start : start + 15].astype(np.float64), self.y[start : start + 15]


def test_the_users_own_batches_train_like_arrays_in_that_order(
    case: Any, runtime: Runtime, data: Any
) -> None:
    outcome = run(runtime, as_data(Stream(*data), examples=50), evaluate=True)
    assert (outcome.steps, outcome.seen, outcome.epochs, outcome.examples) == (8, 100, 2.0, 50)
    assert outcome.evaluation is not None
    assert outcome.evaluation.examples == 50
    by_hand = open_runtime(case.path)
    start = by_hand.parameters.copy()
    for _ in range(2):
        for batch in Stream(*data):
            by_hand.step(batch, **HYPER)
    np.testing.assert_array_equal(outcome.update, by_hand.parameters - start)


def test_partial_work_over_the_users_own_batches(runtime: Runtime, data: Any) -> None:
    outcome = run(runtime, as_data(Stream(*data), examples=50), time_budget=3.5, clock=ticking(1.0))
    assert (outcome.steps, outcome.seen, outcome.epochs) == (2, 30, 0.6)


def test_tensors_of_a_data_loader_will_do(runtime: Runtime, data: Any) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*map(torch.from_numpy, data)), batch_size=25)
    assert run(runtime, as_data(loader, examples=50)).steps == 4


def test_batches_that_lack_an_array_are_refused(runtime: Runtime, data: Any) -> None:
    with pytest.raises(DataError) as caught:
        run(runtime, as_data([(data[0],)], 50))
    words = "1 arrays were given; expected 2: x float32 (n, 64), y int64 (n,)"
    assert words in str(caught.value)


class Growing:
    """Data of the user's own, which grow while a pass reads them."""

    examples = 20

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def fit(self, inputs: Any) -> Growing:
        return self

    def batches(self, batch_size: int, seed: int | None, epoch: int = 0) -> Any:
        return as_data(self.arrays).batches(8, None)


class Endless(Stream):
    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize("kind", ["more", "endless", "own", "function"])
def test_a_pass_over_data_that_grow_ends_at_their_number_of_examples(
    case: Any, runtime: Runtime, data: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    given: Any = {
        "more": lambda: as_data(Stream(*data), 20),
        "endless": lambda: as_data(Endless(*data), 20),
        "own": lambda: Growing(*data),
        "function": lambda: as_data(Stream(*data), lambda: 20),
    }[kind]()
    with caplog.at_level("WARNING"):
        outcome = run(runtime, given, evaluate=True)
    other = open_runtime(case.path)
    expected = run(other, as_data(Stream(*(array[:20] for array in data)), 20), evaluate=True)
    assert outcome.examples == 20
    assert outcome.evaluation is not None
    assert expected.evaluation is not None
    assert outcome.evaluation.loss_sum == pytest.approx(expected.evaluation.loss_sum, rel=1e-6)
    assert "has more than their 20 examples: those beyond are left out" in caplog.text


def test_the_number_of_examples_may_grow_between_two_trainings(runtime: Runtime, data: Any) -> None:
    rows: list[Any] = [(data[0][:20], data[1][:20])]
    given = as_data(rows, lambda: sum(len(x) for x, _ in rows))
    assert run(runtime, given).examples == 20
    rows.append((data[0][20:50], data[1][20:50]))
    assert run(runtime, given).examples == 50


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_pass_without_examples_is_no_defect_of_the_data(
    runtime: Runtime, data: Any, evaluate: bool
) -> None:
    with pytest.raises(NoExamplesError, match="nothing to train on now"):
        run(runtime, as_data(Stream(data[0][:0], data[1][:0]), examples=20), evaluate=evaluate)


class Shrinking:
    """Batches of ten; each pass has fewer examples than the one before."""

    def __init__(self, x: Any, y: Any, *sizes: int) -> None:
        self.x, self.y, self.sizes = x, y, list(sizes)

    def __iter__(self) -> Any:
        size = self.sizes.pop(0)
        return iter(
            [
                (self.x[at : min(at + 10, size)], self.y[at : min(at + 10, size)])
                for at in range(0, size, 10)
            ]
        )


@pytest.mark.parametrize(
    ("sizes", "evaluate", "budget", "examples", "epochs"),
    [
        # 50 are stated: they would weigh more than twice what they are
        ([20, 20], False, None, 20, 2.0),
        ([40, 20], False, None, 30, 2.0),  # the mean of the passes
        ([20, 20, 20], True, None, 20, 2.0),  # the first pass is the evaluation's
        # the time was over in the first pass, of 40 as in the evaluation
        ([40, 40], True, 3.5, 40, 0.5),
        # no pass was completed: nothing better is known than what is stated
        ([40], False, 3.5, 50, 0.4),
    ],
)
def test_what_a_pass_gives_counts_not_what_is_stated(
    runtime: Runtime,
    data: Any,
    sizes: list[int],
    evaluate: bool,
    budget: float | None,
    examples: int,
    epochs: float,
) -> None:
    source = as_data(Shrinking(*data, *sizes), examples=50)
    clock = ticking(1.0) if budget else time.monotonic
    found = run(runtime, source, evaluate=evaluate, time_budget=budget, clock=clock)
    assert (found.examples, found.epochs) == (examples, epochs)


def test_where_no_pass_was_completed_an_earlier_one_counts(runtime: Runtime, data: Any) -> None:
    def cut(counted: int) -> Any:
        source = as_data(Shrinking(*data, 40), examples=50)
        return run(runtime, source, time_budget=3.5, clock=ticking(1.0), counted=counted)

    assert (cut(40).examples, cut(40).epochs) == (40, 0.5)
    assert (cut(10).examples, cut(10).epochs) == (20, 1.0), "this pass has given more already"


def test_bad_settings_are_refused_before_anything_is_done(runtime: Runtime, data: Any) -> None:
    start = runtime.parameters.copy()
    with pytest.raises(ValueError, match="epochs is 0; expected at least 1"):
        run(runtime, data, epochs=0)
    with pytest.raises(ValueError, match=r"\['momentum'\] are not the bundle's"):
        run(runtime, data, hyper={"lr": 0.1, "momentum": 0.9})
    with pytest.raises(ValueError, match=r"\['lr'\] were not given"):
        run(runtime, data, hyper={})
    with pytest.raises(ValueError, match="batch_size is -1"):
        run(runtime, data, batch_size=-1)
    with pytest.raises(ValueError, match="seed is -1"):
        run(runtime, data, seed=-1)
    np.testing.assert_array_equal(runtime.parameters, start)


def test_a_task_can_follow_a_task_on_one_runtime(case: Any, runtime: Runtime, data: Any) -> None:
    start = runtime.parameters.copy()
    first = run(runtime, data)
    runtime.load(start)
    again = run(runtime, data)
    np.testing.assert_array_equal(first.update, again.update)


class Heard:
    """The runtime, and the seeds that it was given."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.seeds: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def step(self, batch: Any, *, seed: int, **hyper: float) -> float:
        self.seeds.append(seed)
        return self.runtime.step(batch, seed=seed, **hyper)


def test_each_step_has_the_next_seed(runtime: Runtime, data: Any) -> None:
    heard = Heard(runtime)
    run(heard, data, seed=7)
    assert heard.seeds == [7, 8, 9, 10, 11, 12]
    heard.seeds.clear()
    run(heard, data, seed=2**53 - 2)
    assert heard.seeds == [2**53 - 2, 2**53 - 1, 0, 1, 2, 3]


def test_the_seed_decides_what_a_random_step_draws(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle", random=True)
    results = []
    for seed in (5, 5, 6):
        runtime = open_runtime(bundle)
        results.append(
            run(runtime, line_data(30), seed=seed, batch_size=0, hyper={"lr": 0.1}).update.tobytes()
        )
    assert results[0] == results[1] != results[2]


def test_the_update_is_of_what_travels_and_the_rest_is_kept(tmp_path: Path) -> None:
    runtime = open_runtime(write_line_bundle(tmp_path / "line.bundle", personal=True))
    start = runtime.local.copy()
    outcome = run(runtime, line_data(30), hyper={"lr": 0.1})
    np.testing.assert_array_equal(outcome.update, [*(runtime.local[:3] - start[:3]), 0])
    assert outcome.buffers.tolist() == [runtime.local[3]] != [start[3]], "a buffer is a value"
    assert outcome.kept_state.tolist() == [runtime.local[4]] != [start[4]]


def test_a_personal_part_that_is_not_finite_diverges(tmp_path: Path) -> None:
    runtime = open_runtime(write_line_bundle(tmp_path / "line.bundle", personal=True))
    x, y = line_data(4)
    with pytest.raises(
        DivergedError, match="the device's own part after step 1 is not finite: element 0"
    ):
        run(runtime, (np.zeros_like(x), y - 1), hyper={"lr": 3e38}, epochs=1, batch_size=0)
