from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.manifest import Input
from fleetlearn_simulator.data.npz_source import npz_source
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.sections import DataSection

INPUTS = (Input("x", "float32", (2,)), Input("y", "int64", (), 10))
TOTAL = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1,000 examples: x is (place, label), labels 0 to 9 of 100 each, in no order; 20 writers of
    50."""
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat(np.arange(10), 100)).astype(np.uint8)
    x = np.stack([np.arange(TOTAL), y], axis=1).astype(np.float64)
    writer = rng.permutation(np.repeat(np.arange(0, 60, 3), 50)).astype(np.int32)
    np.savez(tmp_path / "data.npz", x=x, y=y, writer=writer, other=np.zeros(3))
    return tmp_path


def made(
    folder: Path, population: int, kind: Any, seed: int = 1, file: str = "data.npz", **keys: Any
) -> Source:
    return npz_source(
        DataSection(kind=kind, seed=0, arrays=Path(file), **keys), seed, population, INPUTS, folder
    )


def places(source: Source, device: int) -> list[int]:
    """Of a device's examples; checks that they fit the bundle and each other."""
    x, y = source.arrays(device)
    assert (x.dtype, y.dtype, x.shape[1:], y.shape[1:]) == (np.float32, np.int64, (2,), ())
    np.testing.assert_array_equal(x[:, 1], y)
    assert len(x) == source.examples(np.array([device]))[0]
    return [int(place) for place in x[:, 0]]


DIVIDED: list[dict[str, Any]] = [
    {"kind": "iid"},
    {"kind": "iid", "power": 1.5},
    {"kind": "dirichlet", "alpha": 0.2},
    {"kind": "dirichlet", "alpha": 0.2, "power": 1.5},
    {"kind": "shards", "shards": 2},
]
DRAWN: list[dict[str, Any]] = [
    {"kind": "iid", "examples": 30},
    {"kind": "iid", "examples": 5, "power": 1.5, "largest": 60},
    {"kind": "dirichlet", "alpha": 0.2, "examples": 30},
    {"kind": "shards", "shards": 2, "examples": 30},
    {"kind": "column", "column": "writer", "examples": 30},
]


@pytest.mark.parametrize("keys", DIVIDED, ids=str)
def test_divided_each_example_is_on_one_device_or_in_the_test_set(
    folder: Path, keys: dict[str, Any]
) -> None:
    source = made(folder, 40, **keys)
    test = source.test()
    assert test is not None
    assert len(test[0]) == 100
    everything = [place for device in range(40) for place in places(source, device)]
    assert sorted([*everything, *test[0][:, 0].astype(int).tolist()]) == list(range(TOTAL))
    again = made(folder, 40, **keys)
    assert [places(again, device) for device in (7, 3)] == [
        places(source, device) for device in (7, 3)
    ]
    assert places(made(folder, 40, seed=2, **keys), 7) != places(source, 7)


@pytest.mark.parametrize("keys", DRAWN, ids=str)
def test_drawn_any_number_of_devices_can_be_had(folder: Path, keys: dict[str, Any]) -> None:
    source, again = made(folder, 10**7, **keys), made(folder, 10**7, **keys)
    test = source.test()
    assert test is not None
    held = set(test[0][:, 0].astype(int).tolist())
    assert len(held) == 100
    devices = (0, 5, 9_999_999)
    first = [places(source, device) for device in devices]
    assert first == [places(again, device) for device in reversed(devices)][::-1]
    assert not held & {place for each in first for place in each}
    assert first[0] != first[1]
    sizes = source.examples(np.arange(10_000))
    assert (sizes.min(), sizes.max()) == ((5, 60) if "power" in keys else (30, 30))


def test_given_sizes_are_divided_while_there_are_enough(folder: Path) -> None:
    source = made(folder, 30, "iid", examples=30)
    everything = [place for device in range(30) for place in places(source, device)]
    assert len(set(everything)) == len(everything) == 900
    drawn = made(folder, 31, "iid", examples=30)
    everything = [place for device in range(31) for place in places(drawn, device)]
    assert len(everything) == 930
    assert 500 < len(set(everything)) < 700  # 900 (1 - e^(-930/900)) = 580


def test_examples_of_several_devices_are_taken_at_once(folder: Path) -> None:
    source = made(folder, 50, "iid")
    places = np.array([[0, 17, 4], [1, 1, 2], [5, 6, 7]])
    x, y = source.examples_at([3, 1, 3], places)
    assert (x.shape, y.shape) == ((3, 3, 2), (3, 3))
    for row, device in enumerate((3, 1, 3)):
        np.testing.assert_array_equal(x[row], source.arrays(device)[0][places[row]])
        np.testing.assert_array_equal(y[row], source.arrays(device)[1][places[row]])


def test_a_column_gives_each_value_a_device(folder: Path) -> None:
    with np.load(folder / "data.npz") as archive:
        writer = archive["writer"]
    source = made(folder, 20, "column", column="writer")
    test = source.test()
    assert test is not None
    for device in range(20):
        assert {int(writer[place]) for place in places(source, device)} == {3 * device}
        assert len(set(places(source, device))) == 45
    assert (
        sorted(writer[test[0][:, 0].astype(int)].tolist())
        == np.repeat(np.arange(0, 60, 3), 5).tolist()
    )
    drawn = made(folder, 50, "column", column="writer", examples=7)
    assert {int(writer[place]) for place in places(drawn, 43)} == {9}


def test_another_label(folder: Path) -> None:
    with np.load(folder / "data.npz") as archive:
        writer = archive["writer"]
    source = made(folder, 10, "shards", shards=2, label="writer", test=0.0)
    assert all(
        len({int(writer[place]) for place in places(source, device)}) <= 2 for device in range(10)
    )
    assert source.test() is None


def test_the_files_own_test_set(folder: Path) -> None:
    with np.load(folder / "data.npz") as archive:
        arrays = dict(archive)
    np.savez(folder / "both.npz", **arrays, test_x=np.ones((4, 2)), test_y=np.arange(4))
    source = made(folder, 10, "iid", file="both.npz")
    test = source.test()
    assert test is not None
    assert test[0].dtype == np.float32
    np.testing.assert_array_equal(test[1], np.arange(4))
    assert sum(len(places(source, device)) for device in range(10)) == TOTAL
    np.savez(folder / "half.npz", **arrays, test_x=np.ones((4, 2)))
    with pytest.raises(
        SimulatorError,
        match=r"has the test arrays \['test_x'\]; expected all of \['test_x', 'test_y'\]",
    ):
        made(folder, 10, "iid", file="half.npz")


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (
        901,
        {"kind": "iid"},
        (
            r"data.npz has 900 examples to train on, too few to be divided among 901 devices\. "
            r"Make pop"
        ),
    ),
    (451, {"kind": "shards", "shards": 2}, "among 451 devices with 2 shards each"),
    (
        21,
        {"kind": "column", "column": "writer"},
        r"population.size = 21, and the array writer of .* has 20 values",
    ),
    (9, {"kind": "column"}, 'data.column is missing; data.kind = "column" needs it'),
    (9, {"kind": "dirichlet"}, "data.alpha is missing"),
    (
        9,
        {"kind": "dirichlet", "alpha": 0.0},
        r"data.alpha = 0\.0: a Dirichlet distribution takes a number above 0",
    ),
    (
        9,
        {"kind": "column", "column": "author"},
        r"and not \['author'\]; expected \['author', 'x', 'y'\]",
    ),
    (
        9,
        {"kind": "column", "column": "other"},
        r"the array other is float64 of shape \(3,\); expected one integer for each",
    ),
    (9, {"kind": "dirichlet", "alpha": 1.0, "label": "x"}, "the array x is float64"),
    (9, {"kind": "iid", "file": "none.npz"}, "none.npz does not exist; expected an .npz file"),
    (
        9,
        {"kind": "iid", "file": "text.npz"},
        "text.npz is a text file, such as CSV; expected an .npz file of plain arrays",
    ),
    (9, {"kind": "iid", "file": "one.npz"}, "one.npz is a single array .* writes one"),
    (
        9,
        {"kind": "iid", "file": "wide.npz"},
        r"wide.npz: array x has shape \(5, 3\); expected \(n, 2\)",
    ),
    (9, {"kind": "iid", "file": "label.npz"}, "label.npz: array y has the value 10 in example 2"),
    (9, {"kind": "iid", "file": "short.npz"}, "different numbers of examples: {'x': 5, 'y': 4}"),
]


@pytest.mark.parametrize(("population", "keys", "why"), REFUSED)
def test_what_is_refused(folder: Path, population: int, keys: dict[str, Any], why: str) -> None:
    (folder / "text.npz").write_text("no archive")
    with (folder / "one.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(folder / "wide.npz", x=np.zeros((5, 3)), y=np.zeros(5, int))
    np.savez(folder / "label.npz", x=np.zeros((4, 2)), y=np.array([0, 9, 10, -1]))
    np.savez(folder / "short.npz", x=np.zeros((5, 2)), y=np.zeros(4, int))
    with pytest.raises(SimulatorError, match=why):
        made(folder, population, **keys)
