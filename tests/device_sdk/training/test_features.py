"""Features that are computed once for each example: the same training, in less work, in bounded
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from features import BYTES, examples, features_bundle
from fleetlearn_device import open_runtime
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training import features as module
from fleetlearn_device.training.algorithms import run_algorithm
from fleetlearn_device.training.data import ArrayData
from fleetlearn_device.training.features import TOGETHER, FeatureCache, graphs_of
from fleetlearn_device.training.train import BadValuesError, StoppedError, TrainingResult, train
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.manifest import FEATURES
from fleetlearn_protocol.messages import CONTROL, UPDATE
from numpy.typing import NDArray

N = 100
ALL = N * BYTES


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return features_bundle(tmp_path_factory.mktemp("features") / "features.bundle").bundle


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of examples in each run of features.onnx."""
    counted: list[int] = []
    right = module.run

    def run(
        session: Any, binding: Any, file: str, arrays: tuple[NDArray[Any], ...], *rest: Any
    ) -> None:
        assert file == FEATURES
        counted.append(len(arrays[0]))
        right(session, binding, file, arrays, *rest)

    monkeypatch.setattr(module, "run", run)
    return counted


def data(n: int = N, seed: int = 0) -> ArrayData:
    x, y = examples(n, seed)
    return ArrayData({"x": x.numpy(), "y": y.numpy()})


def trained(
    bundle: Bundle, cache: FeatureCache | None, given: ArrayData | None = None, **options: Any
) -> TrainingResult:
    """Train for three epochs, from features if there is a cache."""
    runtime = open_runtime(bundle.path, from_features=cache is not None)
    given = given or data()
    settings: dict[str, Any] = {
        "hyper": {"lr": 0.2},
        "epochs": 3,
        "batch_size": 8,
        "seed": 5,
        "evaluate": True,
    }
    return train(runtime, cache.of(given) if cache else given, **{**settings, **options})


@pytest.mark.parametrize("algorithm", ["scaffold", "scaffold-gradient"])
def test_an_algorithm_does_the_same_from_features(tmp_path: Path, algorithm: str) -> None:
    bundle = features_bundle(
        tmp_path / "corrected.bundle", step=LocalStep("sgd", correction=True)
    ).bundle
    luck, size = np.random.default_rng(0), bundle.manifest.size
    server, own = luck.normal(size=(2, size)).astype(np.float32)
    inputs = Inputs(bundle.parameters()[:size], None, {CONTROL: server}, {CONTROL: own})
    settings = TaskSettings({"lr": 0.05}, 2, 8, 5)
    whole, kept = (
        run_algorithm(
            algorithm, open_runtime(bundle.path, from_features=cache is not None), bundle,
            cache.of(data()) if cache else data(), inputs, settings,
        )
        for cache in (None, FeatureCache(bundle, 1, ALL))
    )  # fmt: skip
    for name in (UPDATE, CONTROL):
        assert np.abs(whole.parts[name]).max() > 0.05
        np.testing.assert_allclose(kept.parts[name], whole.parts[name], atol=1e-5)


def test_the_training_is_the_same_as_of_whole_models(bundle: Bundle) -> None:
    """Within the rounding of float32, since a graph in two parts is optimised otherwise. What is
    random, the dropout behind the features, draws the same numbers."""
    whole, kept = trained(bundle, None), trained(bundle, FeatureCache(bundle, 1, ALL))
    assert np.abs(whole.update).max() > 0.05
    np.testing.assert_allclose(kept.update, whole.update, atol=1e-6)
    assert (kept.steps, kept.seen, kept.examples) == (whole.steps, whole.seen, whole.examples)
    assert kept.loss == pytest.approx(whole.loss, abs=1e-6)
    assert kept.metrics == pytest.approx(whole.metrics, abs=1e-6)
    assert kept.evaluation is not None
    assert whole.evaluation is not None
    assert kept.evaluation.loss_sum == pytest.approx(whole.evaluation.loss_sum, rel=1e-6)


def test_each_feature_is_computed_once(bundle: Bundle, runs: list[int]) -> None:
    """In the first task's beginning; not in other epochs, the evaluation or the next task."""
    cache = FeatureCache(bundle, 1, ALL)
    first = trained(bundle, cache)
    assert (sum(runs), max(runs)) == (N, 8)
    again = trained(bundle, cache)
    assert sum(runs) == N
    assert first.update.tobytes() == again.update.tobytes()
    assert str(cache) == f"features of {N} of {N} examples are kept, 0.00229 MiB"


def test_a_process_that_begins_again_trains_alike_to_the_last_bit(bundle: Bundle) -> None:
    """A kept feature does not depend on the task in which it was computed."""
    warm = FeatureCache(bundle, 1, ALL)
    trained(bundle, warm, seed=17)
    results = [
        trained(bundle, cache).update.tobytes() for cache in (warm, FeatureCache(bundle, 1, ALL))
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("room", [0, 1, 33, 99])
def test_what_does_not_fit_is_computed_each_time(
    bundle: Bundle, runs: list[int], room: int
) -> None:
    cache = FeatureCache(bundle, 1, room * BYTES + BYTES - 1)
    found = trained(bundle, cache)
    passes = 3 + 1  # three epochs, and the evaluation
    assert sum(runs) == room + passes * (N - room)
    assert str(cache).startswith(f"features of {room} of {N} examples are kept")
    np.testing.assert_allclose(found.update, trained(bundle, None).update, atol=1e-6)


def test_other_data_are_computed_again(bundle: Bundle, runs: list[int]) -> None:
    cache = FeatureCache(bundle, 1, ALL)
    x, y = (value.numpy().copy() for value in examples(N))
    given = ArrayData((x, y))
    trained(bundle, cache, given)
    x[3] += 1  # the user's own array, in its place
    changed = trained(bundle, cache, given)
    assert sum(runs) == 2 * N
    np.testing.assert_allclose(changed.update, trained(bundle, None, given).update, atol=1e-6)
    trained(bundle, cache, data(40))
    assert sum(runs) == 2 * N + 40


def test_the_features_of_another_frozen_part_are_others(bundle: Bundle, tmp_path: Path) -> None:
    same = features_bundle(tmp_path / "same.bundle", hyper={"lr": 0.3}).bundle
    assert same.sha256 != bundle.sha256
    assert graphs_of(same) == graphs_of(bundle)
    other = features_bundle(tmp_path / "other.bundle", frozen="float16").bundle
    assert graphs_of(other) != graphs_of(bundle)


def test_batches_of_all_examples(bundle: Bundle, runs: list[int]) -> None:
    trained(bundle, FeatureCache(bundle, 1, ALL), batch_size=0, epochs=1)
    assert runs == [TOGETHER, TOGETHER, TOGETHER, N - 3 * TOGETHER]


def test_half_of_the_time_at_most_is_for_what_comes_first(bundle: Bundle, runs: list[int]) -> None:
    """Training goes on with the rest computed batch by batch; the next task computes what is
    left."""
    cache = FeatureCache(bundle, 1, ALL)
    seconds = iter(range(10_000))
    found = trained(
        bundle, cache, time_budget=20.0, clock=lambda: float(next(seconds)), evaluate=False
    )
    assert 0 < cache.kept < N
    assert found.steps > 1
    assert not found.complete
    trained(bundle, cache)
    assert cache.kept == N


def test_a_stop_is_heard_while_features_are_computed(bundle: Bundle) -> None:
    cache, asked = FeatureCache(bundle, 1, ALL), iter([False, False])
    with pytest.raises(StoppedError):
        trained(bundle, cache, should_stop=lambda: next(asked, True))
    assert cache.kept == 16


def test_computed_batches_are_progress(bundle: Bundle) -> None:
    done: list[None] = []
    trained(
        bundle, FeatureCache(bundle, 1, ALL), evaluate=False, on_evaluated=lambda: done.append(None)
    )
    assert len(done) == 13


def test_a_value_that_is_not_finite_is_named_in_the_users_array(bundle: Bundle) -> None:
    x, y = (value.numpy().copy() for value in examples(20))
    x[7, 2] = np.nan
    with pytest.raises(BadValuesError, match=r"array x has the value nan in example 7 .* at \[2\]"):
        trained(bundle, FeatureCache(bundle, 1, ALL), ArrayData((x, y)), evaluate=False)


def test_data_that_do_not_fit_are_refused(bundle: Bundle) -> None:
    cache = FeatureCache(bundle, 1, ALL)
    x, y = (value.numpy() for value in examples(20))
    with pytest.raises(DataError, match=r"array y has the value 3 "):
        cache.of(ArrayData((x, y + 1)))
    with pytest.raises(DataError, match=r"array x has shape \(20, 9\)"):
        cache.of(ArrayData((x[:, :9], y)))


def test_a_runtime_of_whole_models_takes_whole_batches(bundle: Bundle) -> None:
    assert [row.name for row in open_runtime(bundle.path).manifest.batch] == ["x", "y"]
    assert [row.name for row in open_runtime(bundle.path, from_features=True).manifest.batch] == [
        "feature0",
        "y",
    ]
    with pytest.raises(ValueError, match="only the runtime onnx trains from features"):
        open_runtime(bundle.path, "ort-training", from_features=True)
    assert open_bundle(bundle.path).manifest.computed_features[0].name == "feature0"
