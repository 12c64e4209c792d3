"""Windows of wrist-worn motion: ten people who did seven exercises of the shoulder with either arm.

Each person is a device. Of each of a person's 14 recordings the first windows are to train on, and
the last ones to test on; the windows between, which share samples with both, are left out.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _packaged_data import Arrays, Source, cached_arrays
from _personal_data import Device
from _pickled_tables import read_pickled_array
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

WATCH = Source(
    "seglearn",
    "1.2.5",
    "BSD 3-Clause (the package's)",
    "Burns et al. 2018, Shoulder Physiotherapy Exercise Recognition: Machine Learning the Inertial "
    "Signals from a Smartwatch, Physiological Measurement 39(7), arXiv 1802.01489",
)
EXERCISES = ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
CHANNELS = ("ax", "ay", "az", "wx", "wy", "wz")
"""Acceleration and angular velocity along three axes, 50 samples a second."""
WIDTH, STEP = 100, 50
"""Samples of a window, and from the beginning of one to the next: two seconds, overlapping by half,
as in seglearn's examples."""
TEST = 0.25
"""The share at the end of each recording on which nobody trains."""
Examples = tuple[NDArray[np.float32], NDArray[np.int64]]


def read_watch(folder: Path) -> Arrays:
    """Return the recordings of seglearn's file, one behind the other, as plain arrays.

    motion: float32 (samples, 6). lengths: samples of each recording. exercise, subject, right: of
    each recording. Raises ValueError for a file of another form.
    """
    file = folder / "seglearn" / "data" / "watch_dataset.npy"
    found: Any = read_pickled_array(file)
    try:
        labels = tuple(found["X_labels"]), tuple(found["y_labels"])
        recordings = [np.asarray(each, np.float32) for each in found["X"]]
        each = {key: np.asarray(found[key]) for key in ("y", "subject", "side")}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is not seglearn's watch data: {error!r}") from error
    if labels != (CHANNELS, EXERCISES):
        raise ValueError(f"{file} has channels and exercises {labels}; expected {CHANNELS}, "
                         f"{EXERCISES}")  # fmt: skip
    if {len(values) for values in each.values()} != {len(recordings)}:
        raise ValueError(f"{file} has {len(recordings)} recordings, and not as many labels")
    return {
        "motion": np.concatenate(recordings),
        "lengths": np.array([len(recording) for recording in recordings]),
        "exercise": each["y"].astype(np.int64),
        "subject": each["subject"].astype(np.int64),
        "right": each["side"].astype(bool),
    }


def people_of(watch: Arrays) -> tuple[Device, ...]:
    """Return each subject's windows, float32 (n, 6, 100), and exercises, int64 (n,), in the order
    of the subjects' numbers. Windows are as the watch measured them: in g and in radians a
    second."""
    recordings = np.split(watch["motion"], np.cumsum(watch["lengths"])[:-1])
    people = []
    for subject in np.unique(watch["subject"]):
        train, test = [], []
        for number in np.flatnonzero(watch["subject"] == subject):
            windows = windows_of(recordings[number])
            labels = np.full(len(windows), watch["exercise"][number])
            last = round(TEST * len(windows))
            train.append((windows[: len(windows) - last - 1], labels[: len(windows) - last - 1]))
            test.append((windows[len(windows) - last :], labels[len(windows) - last :]))
        people.append(Device(joined(train), joined(test)))
    return tuple(people)


def windows_of(recording: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a recording's windows: (samples, 6) -> (windows, 6, 100)."""
    return np.ascontiguousarray(sliding_window_view(recording, WIDTH, axis=0)[::STEP])


def joined(parts: list[Examples]) -> Examples:
    """Return all examples of the parts."""
    windows, labels = zip(*parts, strict=True)
    return np.concatenate(windows), np.concatenate(labels)


@cache
def people() -> tuple[Device, ...]:
    """Return the ten people of seglearn's file."""
    return people_of(cached_arrays(WATCH, "watch", 1, read_watch))


def others(device: int, left_out: int) -> Examples:
    """A device's examples to train on, for a scenario's data function. ``left_out``, the data's
    seed, is the person who is no device."""
    return people()[device + (device >= left_out)].train


def everybody(device: int, left_out: int) -> Examples:
    """The same of all others in one place: one device."""
    return joined([each.train for number, each in enumerate(people()) if number != left_out])
