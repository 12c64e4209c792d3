from pathlib import Path

import numpy as np
import pytest
from fleetlearn_protocol.manifest import Input
from fleetlearn_simulator.data.generators import Arrays, Ids
from fleetlearn_simulator.data.sources import CachedSource, FunctionSource, Source
from fleetlearn_simulator.errors import SimulatorError

INPUTS = (Input("x", "float32", (3,)), Input("y", "int64", ()))
FILE = """
import numpy as np
import {helper}

def device(number, seed):
    rng = np.random.default_rng([seed, number])
    count = number + 2
    return rng.standard_normal((count, 3)), {helper}.labels(count)

def named(number, seed):
    x, y = device(number, seed)
    return {{"y": y, "x": x}}

def fails(number, seed):
    raise KeyError(number)

def wrong(number, seed):
    return np.zeros((4, 5)), np.zeros(4, int)

value = 3
"""
SIZES = """
def examples(number, seed):
    return {number_of}

def test(seed):
    return np.full((2, 3), seed), np.arange(2)
"""


def write(folder: Path, *, helper: str, more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(FILE.format(helper=helper) + more)
    (folder / f"{helper}.py").write_text(
        "import numpy as np\n\ndef labels(count):\n    return np.arange(count)\n"
    )
    return folder


def test_a_users_function(tmp_path: Path) -> None:
    folder = write(tmp_path, helper="labels_of_first")
    source = FunctionSource("mine:device", 5, INPUTS, folder)
    assert source.examples(np.array([[3, 0], [9, 3]])).tolist() == [[5, 2], [11, 5]]
    x, y = source.arrays(3)
    assert (x.dtype, x.shape) == (np.float32, (5, 3))
    assert y.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(x, FunctionSource("mine:named", 5, INPUTS, folder).arrays(3)[0])
    assert not np.array_equal(x, FunctionSource("mine:device", 6, INPUTS, folder).arrays(3)[0])
    assert source.test() is None


def test_its_module_may_say_the_sizes_and_have_a_test_set(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        helper="labels_of_second",
        more=SIZES.format(number_of="number + 2 if number < 7 else 1"),
    )
    source = FunctionSource("mine:device", 5, INPUTS, folder)
    assert source.examples(np.array([1, 8])).tolist() == [3, 1]
    assert len(source.arrays(1)[0]) == 3
    test = source.test()
    assert test is not None
    np.testing.assert_array_equal(test[0], np.full((2, 3), 5, np.float32))
    with pytest.raises(
        SimulatorError,
        match=r"mine:device\(8, 5\) returned 10 examples, .* examples\(8, 5\) is 1; they",
    ):
        source.arrays(8)


def test_all_devices_may_be_said_to_have_as_many(tmp_path: Path) -> None:
    folder = write(tmp_path, helper="labels_of_fifth", more=SIZES.format(number_of="1"))
    source = FunctionSource("mine:device", 5, INPUTS, folder, 6)
    assert source.examples(np.array([1, 2])).tolist() == [6, 6]
    assert len(source.arrays(4)[0]) == 6
    with pytest.raises(
        SimulatorError,
        match=r"mine:device\(1, 5\) returned 3 examples, and data.examples is 6; they must",
    ):
        source.arrays(1)


def test_it_may_be_named_examples(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\ndef examples(d, s):\n    return np.ones((d, 3)), np.ones(d, int)\n"
    )
    source = FunctionSource("own:examples", 5, INPUTS, tmp_path)
    assert source.examples(np.array([4])).tolist() == [4]
    assert len(source.arrays(4)[0]) == 4


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    inputs = (INPUTS[0], Input("y", "int64", (), 4))
    source = FunctionSource("mine:device", 5, inputs, write(tmp_path, helper="labels_of_classes"))
    assert source.arrays(2)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        SimulatorError, match=r"mine:device\(3, 5\) .* array y has the value 4 in example 4"
    ):
        source.arrays(3)


def test_two_scenarios_have_modules_of_the_same_name(tmp_path: Path) -> None:
    sizes = []
    for number in ("1", "2"):
        folder = write(
            tmp_path / number, helper=f"labels_{number}", more=SIZES.format(number_of=number)
        )
        sizes.append(FunctionSource("mine:device", 5, INPUTS, folder).examples(np.array([0]))[0])
    assert sizes == [1, 2]


def test_an_installed_modules_function() -> None:
    inputs = (Input("x", "int64", ()),)
    with pytest.raises(
        SimulatorError,
        match=r"operator:add\(2, 5\) returned what does not fit the bundle: a int was given",
    ):
        FunctionSource("operator:add", 5, inputs, Path()).arrays(2)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            "nowhere:device",
            (
                r"the module cannot be imported, ModuleNotFoundError: No module named 'nowhere'\. "
                r"It is .*"
            ),
        ),
        (
            "broken:device",
            (
                r"the module cannot be imported, ZeroDivisionError: .* \(in <module>, broken\.py "
                r"line 1\)\. It is"
            ),
        ),
        (
            "ending:device",
            r"the module cannot be imported, SystemExit: 1 \(in <module>, ending\.py",
        ),
        (
            "mine:devise",
            (
                r"mine.py has no function devise; .*devise\(device, seed\) .*: x float32 \(n, 3\), "
                r"y int64 \(n,\)"
            ),
        ),
        ("mine:value", "has no function value"),
        ("mine:fails", r"mine:fails\(4, 5\) failed: KeyError: 4 \(in fails, mine\.py line \d+\)"),
        (
            "mine:wrong",
            r"mine:wrong\(4, 5\) returned what does not fit the bundle: array x has shape \(4, 5\)",
        ),
    ],
)
def test_what_is_wrong_with_it_is_named(tmp_path: Path, function: str, why: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(1)\n")
    folder = write(tmp_path, helper="labels_of_third")
    with pytest.raises(SimulatorError, match=why):
        FunctionSource(function, 5, INPUTS, folder).arrays(4)


@pytest.mark.parametrize("number_of", ["-1", "2.5", "None"])
def test_sizes_that_are_none(tmp_path: Path, number_of: str) -> None:
    folder = write(tmp_path, helper="labels_of_fourth", more=SIZES.format(number_of=number_of))
    with pytest.raises(
        SimulatorError,
        match=r"examples\(0, 5\) beside mine:device returned .*; expected an integer, at",
    ):
        FunctionSource("mine:device", 5, INPUTS, folder).examples(np.array([0]))


class Counting(Source):
    """80 bytes for each device; counts how often it makes them."""

    made = 0

    def examples(self, ids: Ids) -> Ids:
        return np.full(np.shape(ids), 10)

    def arrays(self, device: int) -> Arrays:
        self.made += 1
        return (np.full(10, float(device)),)

    def test(self) -> Arrays | None:
        return (np.zeros(1),)


def test_kept_arrays_are_made_once_while_they_fit() -> None:
    below = Counting()
    source = CachedSource(below, limit=3 * 80)
    for device in (1, 2, 3, 1, 2, 3):
        assert source.arrays(device)[0][0] == device
    assert below.made == 3
    places = np.array([[0, 9], [3, 3], [9, 8]])
    (found,) = source.examples_at([3, 1, 3], places)
    assert found.tolist() == [[3, 3], [1, 1], [3, 3]]
    assert below.made == 3
    held = source.arrays(2)[0]
    source.arrays(4)  # it is made again
    assert below.made == 4
    assert held.tolist() == [2.0] * 10
    source.arrays(3)
    assert below.made == 5
    assert source.examples_at([4, 3, 4], places)[0].tolist() == [[4, 4], [3, 3], [4, 4]]
    assert below.made == 5


def test_more_devices_than_fit_are_taken_all_the_same() -> None:
    """They are made again for each block, not for each of its calls."""
    below = Counting()
    source = CachedSource(below, limit=3 * 80)
    for devices in ([*range(8)], [*range(8)], [3, 1], [*range(8, 0, -1)], [*range(8, 0, -1)]):
        made = below.made
        for _ in range(3):
            (found,) = source.examples_at(devices, np.tile(np.arange(4), (len(devices), 1)))
            assert found.tolist() == [[device] * 4 for device in devices]
        assert below.made <= made + 2 * len(devices)


def test_the_rest_is_as_it_was() -> None:
    source = CachedSource(Counting())
    assert source.examples(np.array([7])).tolist() == [10]
    assert source.test() is not None


def test_arrays_above_the_limit_are_not_kept() -> None:
    below = Counting()
    source = CachedSource(below, limit=10)
    assert [source.arrays(1)[0][0], source.arrays(1)[0][0]] == [1, 1]
    assert below.made == 2
