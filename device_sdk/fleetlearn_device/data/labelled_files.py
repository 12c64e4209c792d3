"""Folders of files, one for each example, and how their classes are told: by folders or by a
table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.data.csv_file import read_csv
from fleetlearn_device.data.raw import Choices, files_version
from fleetlearn_device.runtimes.checks import DataError


class LabelChoices(NamedTuple):
    """The options by which files get their classes."""

    labels: str
    """A CSV file, its path from the folder: the columns ``file`` and ``label``. Empty: the names of
    the folders are the classes."""
    classes: tuple[str, ...]
    """The names of the classes in the order of the model's numbers. Empty: the labels are numbers,
    or stay text for the bundle's preprocessing."""


def label_choices(choices: Choices) -> LabelChoices:
    """Take the options ``labels`` and ``classes``."""
    return LabelChoices(choices.text("labels"), choices.names("classes"))


def labelled_files(
    folder: Path, endings: Sequence[str], choices: LabelChoices
) -> tuple[list[Path], NDArray[Any]]:
    """Return the files, sorted, and the label of each: int64, or text where no classes were given.

    Raises DataError: no file, a file that the table names and that is not there, a class that is
    none of ``classes``.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one of {', '.join(endings)} files")
    if choices.labels:
        table = folder / choices.labels
        rows = read_csv(table)
        if not {"file", "label"} <= set(rows.arrays):
            raise DataError(
                f"{table}: its columns are {', '.join(rows.arrays)}; expected file and label"
            )
        files = [folder / str(name) for name in rows.arrays["file"]]
        for row, file in enumerate(files):
            if not file.is_file():
                raise DataError(f"{table}, {rows.where(row)}, file: {file} does not exist")
        return files, _numbered(rows.arrays["label"], choices.classes, folder)
    files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in endings)
    if not files:
        raise DataError(
            f"{folder} has no folders of {', '.join(endings)} files; expected a folder for each "
            "class, such as cat/1.jpg, or labels=FILE.csv with the columns file and label"
        )
    return files, _numbered(np.array([file.parent.name for file in files]), choices.classes, folder)


def _numbered(labels: NDArray[Any], classes: tuple[str, ...], folder: Path) -> NDArray[Any]:
    if labels.dtype.kind == "f":
        return labels.astype(np.int64) if (labels == np.rint(labels)).all() else labels
    if not classes:
        # Their places in the alphabet would differ from device to device: not every device has
        # every class.
        numbers = all(str(label).isdecimal() for label in labels)
        return labels.astype(np.int64) if numbers else labels
    places = {name: place for place, name in enumerate(classes)}
    unknown = sorted({str(label) for label in labels} - set(places))
    if unknown:
        raise DataError(
            f"{folder}: there are the classes {', '.join(unknown)}; expected those of "
            f"classes={','.join(classes)}"
        )
    return np.array([places[str(label)] for label in labels], np.int64)


def folder_version(folder: Path, endings: Sequence[str], labels: str) -> Any:
    """Return what changes when a file is added, removed or written."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in endings)
    return tuple(map(str, files)), files_version(*files, *([folder / labels] if labels else []))
