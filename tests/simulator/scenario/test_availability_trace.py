"""Traces: what a file may hold, and what is said of each mistake."""

from pathlib import Path

import pytest
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.availability_trace import read_trace


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["t.csv, line 1: ''; expected the columns device,on,off"]),
        ("device,off,on\n", ["line 1: 'device,off,on'; expected the columns device,on,off"]),
        ("device,on,off\n", ["no device is ever online; expected a line device,on,off"]),
        ("device,on,off\na,1\n", ["line 2: 'a,1'; expected a device and two times"]),
        ("device,on,off\na,1,x\n", ["line 2: 'a,1,x'; expected a device and two times"]),
        (
            "device,on,off\na,1,2\nb,5,4\n",
            ["line 3: 'b,5,4'; expected device,on,off with 0 <= on < off <="],
        ),
        ("device,on,off\na,-1,2\n", ["line 2: 'a,-1,2'"]),
        ("device,on,off\na,1,nan\n", ["line 2: 'a,1,nan'"]),
        ("device,on,off\na,1,2,3\n", ["line 2: 'a,1,2,3'"]),
        ("device,on,off\na,1,2000\n", ["line 2: 'a,1,2000'", "off <= availability.repeat = 1000"]),
        ("device,on,off\na,1,5\nb,0,9\na,4,6\n", ["lines 2 and 4 overlap"]),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(SimulatorError) as refused:
        read_trace(str(tmp_path / "t.csv"), 1000.0)
    for part in expected:
        assert part in refused.value.text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match=r"availability.file = .*no.csv' cannot be read"):
        read_trace(str(tmp_path / "no.csv"), None)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    import os

    import numpy as np

    path = tmp_path / "t.csv"
    for number, end in enumerate((10.0, 20.0)):
        path.write_text(f"device, on, off\n x ,0,{end}\n\n")
        os.utime(path, ns=(number, number))
        assert read_trace(str(path), None).end(np.array([3]), np.array([5.0])).tolist() == [end]
