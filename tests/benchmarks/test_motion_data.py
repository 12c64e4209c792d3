"""Windows of wrist-worn motion, from a small file in the form of seglearn's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture
def motion(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, which finds its neighbours as a study does."""
    monkeypatch.syspath_prepend(str(STUDIES))
    import _motion_data

    return _motion_data


def recorded() -> dict[str, Any]:
    """Two people, three recordings. A sample is its own number, in all six channels."""
    lengths = (1000, 500, 450)
    return {
        "X": [np.repeat(np.arange(n, dtype=float)[:, None], 6, axis=1) for n in lengths],
        "y": np.array([0, 6, 3]),
        "subject": np.array([2, 1, 2]),
        "side": np.array([1.0, 0.0, 0.0]),
        "X_labels": ["ax", "ay", "az", "wx", "wy", "wz"],
        "y_labels": ["PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW"],
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    file = folder / "seglearn" / "data" / "watch_dataset.npy"
    file.parent.mkdir(parents=True)
    np.save(file, np.array(content, dtype=object), allow_pickle=True)
    return folder


def test_recordings_are_read(tmp_path: Path, motion: Any) -> None:
    found = motion.read_watch(write(tmp_path, recorded()))
    assert found["motion"].shape == (1950, 6)
    assert found["motion"].dtype == np.float32
    assert found["lengths"].tolist() == [1000, 500, 450]
    assert found["subject"].tolist() == [2, 1, 2]
    assert found["right"].tolist() == [True, False, False]


def test_windows_of_people(tmp_path: Path, motion: Any) -> None:
    """The last quarter of a recording's windows tests; no window to train on shares a sample."""
    first, second = motion.people_of(motion.read_watch(write(tmp_path, recorded())))
    # 500 samples have windows from 0, 50, ..., 400: nine, of which two test and one is between.
    assert first.train[0][:, 0, 0].tolist() == [0, 50, 100, 150, 200, 250]
    assert first.test[0][:, 0, 0].tolist() == [350, 400]
    assert first.train[1].tolist() == [6] * 6
    assert second.train[0].shape[1:] == (6, 100)
    assert second.train[0].dtype == np.float32
    assert {*second.test[1].tolist()} == {0, 3}
    for each in (first, second):
        for label in np.unique(each.test[1]):
            train = each.train[0][each.train[1] == label]
            assert train.max() < each.test[0][each.test[1] == label].min()


def damaged(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    content = recorded()
    change(content)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (damaged(lambda found: found.pop("side")), "not seglearn's watch data"),
        (damaged(lambda found: found["X_labels"].reverse()), "channels and exercises"),
        (damaged(lambda found: found["X"].pop()), "has 2 recordings, and not as many labels"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, motion: Any, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        motion.read_watch(write(tmp_path, content))


def test_seglearns_own_file(motion: Any) -> None:
    from _packaged_data import is_installed

    if not is_installed(motion.WATCH):
        pytest.skip("seglearn's data are not installed: make .venv/.studies")
    people = motion.people()
    assert len(people) == 10
    for person in people:
        assert {*person.train[1].tolist()} == {*person.test[1].tolist()} == set(range(7))
    assert sum(len(person.train[1]) for person in people) == 3373
    assert motion.others(0, 0)[0] is people[1].train[0]
    assert motion.others(0, 5)[0] is people[0].train[0]
    everybody = motion.everybody(0, 9)
    assert len(everybody[1]) == 3373 - len(people[9].train[1])
