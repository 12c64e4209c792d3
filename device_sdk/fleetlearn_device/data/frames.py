"""Data that a program holds in other libraries' objects. They are recognised by their class's
module: none of these libraries is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_device.data.raw import RawRows
from fleetlearn_device.runtimes.checks import DataError


def columns_of(frame: Any, name: str) -> RawRows:
    """Return the columns of a frame of pandas or Polars. Raises DataError on a missing value."""
    arrays: dict[str, NDArray[Any]] = {}
    for column in frame.columns:
        values = frame[column].to_numpy()
        if values.dtype.kind == "O":
            values = _plain(values, str(column), name)
        arrays[str(column)] = values
    return RawRows(arrays, lambda row: f"row {row} (the first is 0)", of_text=True)


def _plain(values: NDArray[Any], column: str, name: str) -> NDArray[Any]:
    """Return text or lists of numbers, which libraries hand over as Python objects, as a plain
    array."""
    for row, value in enumerate(values):
        if value is None or value != value:  # NaN, which is not itself
            raise DataError(
                f"{name}, row {row} (the first is 0), {column}: the value is missing; expected one"
            )
    try:
        array = np.array(values.tolist())
    except ValueError as error:
        raise DataError(f"{name}, {column}: no array can be made of it: {error}") from None
    if array.dtype.kind not in "biufU":
        raise DataError(
            f"{name}, {column}: its values are of {array.dtype}; expected numbers or text"
        )
    return array


def _columns_of_dataset(dataset: Any, name: str) -> RawRows:
    """Return the columns of a dataset of Hugging Face's library."""
    columns = dataset.with_format("numpy")[:]
    arrays = {str(key): np.asarray(value) for key, value in columns.items()}
    return RawRows(arrays, lambda row: f"row {row} (the first is 0)", of_text=True)


FRAMES: dict[tuple[str, str], Callable[[Any, str], RawRows]] = {
    ("pandas", "DataFrame"): columns_of,
    ("polars", "DataFrame"): columns_of,
    ("datasets", "Dataset"): _columns_of_dataset,
}
"""(the library's name, the class's name) -> the function that reads its columns."""


def frame_reader(value: object) -> Callable[[Any, str], RawRows] | None:
    """Return the function that reads the columns of this object; None if it is no frame."""
    for kind in type(value).__mro__:
        reader = FRAMES.get((kind.__module__.partition(".")[0], kind.__name__))
        if reader is not None:
            return reader
    return None


def is_loader(value: object) -> bool:
    """Return whether this is a PyTorch DataLoader over a dataset that knows its length."""
    return any(
        kind.__module__.startswith("torch.utils.data") and kind.__name__ == "DataLoader"
        for kind in type(value).__mro__
    ) and hasattr(getattr(value, "dataset", None), "__len__")


def loader_examples(loader: Any) -> int:
    """Return how many examples a pass over a DataLoader gives now."""
    sampler: Any = getattr(loader, "sampler", None)
    examples: int = len(sampler) if hasattr(sampler, "__len__") else len(loader.dataset)
    if getattr(loader, "drop_last", False) and loader.batch_size:
        examples -= examples % loader.batch_size
    return examples
