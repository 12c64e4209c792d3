import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.manifest import (
    FORMAT,
    FORMAT_VERSION,
    Input,
    LocalStep,
    Manifest,
    Parameter,
)
from fleetlearn_simulator.data.factory import make_source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.sections import DataSection

X, Y = Input("x", "float32", (60,)), Input("y", "int64", ())


def manifest(*batch: Input, outputs: tuple[int, ...] = (10,)) -> Manifest:
    return Manifest(
        FORMAT,
        FORMAT_VERSION,
        "softmax",
        (Parameter("w", (60, 10), 0),),
        batch,
        (Input("logits", "float32", outputs),),
        (),
        LocalStep(),
        (),
        {},
    )


KINDS: list[dict[str, Any]] = [
    {"kind": "synthetic", "alpha": 1.0, "beta": 1.0, "examples": 50},
    {"kind": "synthetic", "alpha": 1.0, "beta": 1.0, "largest": 300},
    {"kind": "synthetic", "iid": True, "examples": 10, "power": 1.2, "largest": 200},
    {"kind": "hospitals", "setup": "non-iid", "examples": 100},
    {"kind": "fcube", "examples": 50},
    {"kind": "iid", "examples": 50},
    {"kind": "dirichlet", "alpha": 0.3, "examples": 50},
]


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_ten_million_devices_cost_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    bundle = manifest(Input("x", "float32", (3,)), Y)
    if keys["kind"] in ("iid", "dirichlet"):
        np.savez(tmp_path / "a.npz", x=np.zeros((100, 3)), y=np.arange(100) % 10)
        keys = {**keys, "arrays": tmp_path / "a.npz"}
    tracemalloc.start()
    source = make_source(DataSection(seed=0, **keys), 1, 10**7, bundle)
    ids = np.array([0, 9_999_999, 1234], np.int64)
    sizes = source.examples(ids)
    assert sizes.dtype == np.int64
    for device, size in zip(ids.tolist(), sizes.tolist(), strict=True):
        x, y = source.arrays(device)
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((size, 3), np.float32, (size,), np.int64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20  # less than a bit for each device
    test = source.test()
    assert test is not None
    assert test[0].shape == (len(test[1]), 3)


def test_labels_take_the_bundles_shape_and_dtype() -> None:
    bundle = manifest(Input("x", "float32", (2, 3)), Input("y", "float32", (1,)), outputs=(1,))
    x, y = make_source(
        DataSection(kind="hospitals", setup="balanced", seed=0, examples=20), 1, 4, bundle
    ).arrays(2)
    assert (x.shape, y.shape, y.dtype) == ((20, 2, 3), (20, 1), np.float32)
    assert set(y[:, 0].tolist()) == {0.0, 1.0}


def test_synthetic_has_the_bundles_classes() -> None:
    settings = DataSection(kind="synthetic", alpha=0.0, beta=0.0, seed=0, examples=200)
    found = set[int]()
    for device in range(40):
        found |= set(
            make_source(settings, 1, 40, manifest(X, Y, outputs=(4,))).arrays(device)[1].tolist()
        )
    assert found == {0, 1, 2, 3}


def test_what_iid_synthetic_devices_share_holds_on_the_test_set() -> None:
    """A linear model of all devices' labels, by least squares, is right on most of the test set."""
    source = make_source(
        DataSection(kind="synthetic", iid=True, seed=0, examples=50), 3, 60, manifest(X, Y)
    )
    x, y = source.examples_at(range(60), np.tile(np.arange(50), (60, 1)))
    fitted = np.linalg.lstsq(x.reshape(-1, 60), np.eye(10, dtype=np.float32)[y.reshape(-1)])[0]
    test = source.test()
    assert test is not None
    assert len(test[0]) == 360
    right = float((np.argmax(test[0] @ fitted, axis=1) == test[1]).mean())
    assert right > np.bincount(test[1]).max() / 360 + 0.2


def test_the_seed_makes_the_data() -> None:
    settings = DataSection(kind="synthetic", alpha=1.0, beta=1.0, seed=0, examples=5)
    first, same, other = (
        make_source(settings, seed, 9, manifest(X, Y)).arrays(4)[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_a_function_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\ndef f(d, s):\n    return np.full((2, 60), d), np.array([s, s])\n"
    )
    x, y = make_source(
        DataSection(kind="function", function="own:f", seed=0), 3, 9, manifest(X, Y), tmp_path
    ).arrays(4)
    assert x.tolist() == [[4.0] * 60] * 2
    assert y.tolist() == [3, 3]
    settings = DataSection(kind="function", function="own:f", seed=0, examples=2)
    assert make_source(settings, 3, 9, manifest(X, Y), tmp_path).examples(
        np.arange(2)
    ).tolist() == [2, 2]


REFUSED: list[tuple[dict[str, Any], Manifest, str]] = [
    (
        {"kind": "synthetic", "beta": 1.0},
        manifest(X, Y),
        'data.alpha is missing; data.kind = "synthetic" needs it',
    ),
    (
        {"kind": "synthetic", "alpha": 1.0, "beta": 1.0, "power": 1.0},
        manifest(X, Y),
        r"data.power = 1.0 needs data.examples",
    ),
    (
        {"kind": "synthetic", "iid": True},
        manifest(X, Y, outputs=(1,)),
        (
            r"as many classes as the model has outputs, at least 2; .* returns logits float32 \(n, "
            r"1\)\. Export a model"
        ),
    ),
    ({"kind": "hospitals"}, manifest(X, Y), "data.setup is missing"),
    (
        {"kind": "fcube"},
        manifest(X, Y),
        r"makes points of 3 coordinates; the bundle takes x float32 \(n, 60\), y int64",
    ),
    (
        {"kind": "fcube"},
        manifest(X),
        "makes inputs of floats and a label for each; the bundle takes x float32",
    ),
    ({"kind": "fcube"}, manifest(Y, Y), "makes inputs of floats"),
    ({"kind": "fcube"}, manifest(X, X), "makes inputs of floats"),
    ({"kind": "function"}, manifest(X, Y), "data.function is missing"),
    ({"kind": "iid"}, manifest(X, Y), "data.arrays is missing"),
]


@pytest.mark.parametrize(("keys", "bundle", "why"), REFUSED)
def test_what_does_not_fit_the_bundle(keys: dict[str, Any], bundle: Manifest, why: str) -> None:
    with pytest.raises(SimulatorError, match=why):
        make_source(DataSection(seed=0, **keys), 1, 9, bundle)
