"""The examples of own functions, held against scikit-learn on all rows in one place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from own_functions import (
    EXAMPLES,
    KIND,
    allowed_examples,
    computed_by,
    patients,
    points,
    questions,
)


@pytest.mark.parametrize("name", ["kmeans", "newton", "partial_fit"])
def test_both_sides_of_an_example_are_under_60_lines(name: str) -> None:
    files = [EXAMPLES / f"{name}.py", EXAMPLES / f"{name}.toml"]
    assert sum(len(file.read_text().splitlines()) for file in files) < 60


def test_kmeans_is_lloyds_algorithm_on_all_rows() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    settings = questions("kmeans")
    with allowed_examples() as functions:
        found, _ = computed_by(settings, points(), functions)
    whole = np.concatenate([table["x"] for table in points()])
    start = np.array(settings.state["centres"].value)
    model = cluster.KMeans(3, init=start, n_init=1, algorithm="lloyd", tol=0, max_iter=500)
    model.fit(whole)
    assert found["rounds"] >= 3
    assert found["rows"] == len(whole)
    np.testing.assert_allclose(found["state"]["centres"], model.cluster_centers_, rtol=0, atol=1e-9)
    assert found["metrics"]["inertia"] == pytest.approx(model.inertia_, rel=1e-12)


def test_newton_is_scikit_learns_logistic_regression() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    tables = patients()
    with allowed_examples() as functions:
        found, _ = computed_by(questions("newton"), tables, functions)
    x, y = (np.concatenate([table[name] for table in tables]) for name in ("x", "y"))
    model = linear_model.LogisticRegression(
        C=1.0, tol=1e-12, max_iter=10_000, solver="newton-cholesky"
    )
    model.fit(x, y)
    optimum = np.append(model.coef_, model.intercept_)
    np.testing.assert_allclose(found["state"]["model"], optimum, rtol=0, atol=1e-6)
    assert found["rounds"] < 10


def test_partial_fit_is_averaged_as_by_hand() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    tables = [{**table, "y": table["y"].astype(np.int64)} for table in patients()]
    with allowed_examples() as functions:
        found, _ = computed_by(questions("partial_fit"), tables, functions)
    coef, intercept = np.zeros((1, 3)), np.zeros(1)
    weights = np.array([len(table["y"]) for table in tables]) / sum(
        len(table["y"]) for table in tables
    )
    for _ in range(10):
        trained = []
        for table in tables:
            model = linear_model.SGDClassifier(
                loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=0.05, random_state=0
            )
            model.classes_ = np.array([0, 1])
            model.coef_, model.intercept_ = coef.copy(), intercept.copy()
            for _ in range(2):
                model.partial_fit(table["x"], table["y"])
            trained.append(model)
        coef = sum(w * each.coef_ for w, each in zip(weights, trained, strict=True))
        intercept = sum(w * each.intercept_ for w, each in zip(weights, trained, strict=True))
    np.testing.assert_allclose(found["state"]["coef"], coef, rtol=0, atol=1e-7)
    np.testing.assert_allclose(found["state"]["intercept"], intercept, rtol=0, atol=1e-7)


def test_the_order_of_the_devices_changes_no_bit() -> None:
    settings, tables = questions("newton"), patients()
    with allowed_examples() as functions:
        _, states = computed_by(settings, tables, functions)
        _, others = computed_by(settings, tables[::-1], functions)
    assert [state.tobytes() for state in states] == [state.tobytes() for state in others]


@pytest.mark.parametrize("name", ["kmeans", "newton", "partial_fit"])
def test_an_examples_file_makes_a_bundle(name: str, tmp_path: Path) -> None:
    from fleetlearn_protocol.bundle import open_bundle
    from fleetlearn_protocol.computations.bundle import write_computation_bundle

    settings = questions(name)
    bundle = open_bundle(write_computation_bundle(tmp_path / "a.bundle", name, settings))
    assert bundle.manifest.computation == settings
    assert bundle.manifest.size == KIND.state(settings).size
