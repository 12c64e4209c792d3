"""Carries out a bundle's preprocessing: raw arrays become the arrays of its batch.

What each operation does is said in ``fleetlearn_protocol.preprocessing`` and in PROTOCOL.md,
section 15.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol import preprocessing as told
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.preprocessing import Preparation, Preprocessing
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fleetlearn_device.data.raw import Raw, RawRows
from fleetlearn_device.runtimes.checks import DataError

TOGETHER = 1024
"""Examples that are prepared together: bounds the memory that float64 takes."""

Array = NDArray[Any]
MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Texts that stand for a missing number, in small letters."""
_TAKE_TEXT = (told.Index, told.Numeric, told.ByteText, told.Codes)
"""Operations that take text."""


class PreparedRows(NamedTuple):
    """The batch's arrays, and of which rows each example was made."""

    arrays: dict[str, Array]
    first: NDArray[np.int64]
    """The first row of each example: int64, shape (n,)."""
    last: NDArray[np.int64]
    """The last row."""


def prepare(
    raw: Raw, manifest: Manifest, wanted: Collection[str] | None = None
) -> dict[str, Array]:
    """Return the batch's arrays by name, made of raw ones as the bundle says: for training and for
    prediction alike.

    raw: Name -> array or column; the first axis counts examples, or rows of a stream. Of a bundle
    without preprocessing they are returned as they are. Arrays that ``raw`` lacks all columns of,
    such as labels at a prediction, are left out. wanted: the names of the arrays to make; all
    unless given. Raises DataError.
    """
    told = manifest.preprocessing
    if told is msgspec.UNSET:
        return dict(raw)
    if wanted is not None:
        told = only(told, wanted)
    rows = RawRows({name: np.asarray(array) for name, array in raw.items()})
    return prepared_rows(rows, told, manifest.batch, "the data").arrays


def only(told: Preprocessing, wanted: Collection[str]) -> Preprocessing:
    """Return the preprocessing that makes these arrays alone: a prediction reads no labels, which
    may be anything."""
    arrays = {name: array for name, array in told.arrays.items() if name in wanted}
    return msgspec.structs.replace(told, arrays=arrays)


def refuse_absent_columns(rows: RawRows, preprocessing: Preprocessing, source: str) -> None:
    """Raise DataError where a column is missing of any array: training needs them all."""
    absent = [name for name in preprocessing.raw if name not in rows.arrays]
    if absent:
        raise DataError(
            f"{source}: there is no column {', '.join(absent)}, which the bundle's preprocessing "
            f"reads; there are {', '.join(rows.arrays) or 'none'}"
        )


def prepared_rows(
    rows: RawRows, preprocessing: Preprocessing, inputs: Sequence[Input], source: str
) -> PreparedRows:
    """Return what ``prepare`` does, and the rows that each example was made of. Raises
    DataError."""
    made = {
        name: array
        for name, array in preprocessing.arrays.items()
        if {*_columns(array)} & set(rows.arrays)
    }
    kept = msgspec.structs.replace(preprocessing, arrays=made)
    refuse_absent_columns(rows, kept if made else preprocessing, source)
    columns: dict[str, Array] = {name: rows.arrays[name] for name in kept.raw}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{source}: the arrays have different lengths: {lengths}")
    streams = _streams(columns, kept)
    place = np.arange(next(iter(lengths.values())))
    if kept.resample is not msgspec.UNSET:
        columns, place, streams = _resampled(columns, streams, kept, rows, source)
    if kept.windows is not msgspec.UNSET:
        length, hop = kept.windows.length, kept.windows.hop
        starts = [
            np.arange(begin, end - length + 1, hop)
            for begin, end in streams
            if end - begin >= length
        ]
        if not starts:
            longest = max(end - begin for begin, end in streams)
            raise DataError(
                f"{source}: the longest stream has {longest} rows; expected at least {length}, the "
                "length of a window"
            )
        begins = np.concatenate(starts)
        first, last = place[begins], place[begins + length - 1]
    else:
        begins, first, last = np.arange(len(place)), place, place
    dtypes = {input_.name: np.dtype(input_.dtype) for input_ in inputs}
    arrays = {}
    for name, array in made.items():
        where = _Place(source, name, rows, first)
        if (whole := _as_it_is(columns, array, kept, dtypes.get(name))) is not None:
            arrays[name] = whole
            continue
        window = 1 if kept.windows is msgspec.UNSET else kept.windows.length
        parts = [
            _finished(_worked(part, array, where, number), dtypes.get(name), where, number)
            for number, part in _parts(columns, array, begins, window, kept, where)
        ]
        arrays[name] = np.concatenate(parts)
    return PreparedRows(arrays, first, last)


def _as_it_is(
    columns: Raw, array: Preparation, preprocessing: Preprocessing, dtype: np.dtype[Any] | None
) -> Array | None:
    """Return the column that the array is without any work, which may lie on the disk; None: there
    is work to do."""
    if preprocessing.windows is not msgspec.UNSET or not isinstance(array.columns, str):
        return None
    column = columns[array.columns]
    changed = column.dtype != dtype or any(
        not isinstance(step, told.Numeric) for step in array.steps
    )
    return None if changed else column


class _Place(NamedTuple):
    """Where an error says that it is."""

    source: str
    array: str
    rows: RawRows
    first: NDArray[np.int64]

    def of(self, example: int) -> str:
        return f"{self.source}, {self.rows.where(int(self.first[example]))}, {self.array}"


def _columns(array: Preparation) -> tuple[str, ...]:
    return (array.columns,) if isinstance(array.columns, str) else array.columns


def _streams(columns: Raw, preprocessing: Preprocessing) -> list[tuple[int, int]]:
    """Return where each stream begins and ends."""
    total = len(next(iter(columns.values())))
    if preprocessing.streams is msgspec.UNSET:
        return [(0, total)]
    column = columns[preprocessing.streams]
    cuts = [0, *(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist(), total]
    return list(pairwise(cuts))


def _resampled(
    columns: Raw,
    streams: list[tuple[int, int]],
    preprocessing: Preprocessing,
    rows: RawRows,
    source: str,
) -> tuple[dict[str, Array], NDArray[np.int64], list[tuple[int, int]]]:
    """Return the columns at a constant rate, the raw row before each of their rows, and the
    streams."""
    assert preprocessing.resample is not msgspec.UNSET
    time_name, rate = preprocessing.resample.time, preprocessing.resample.rate
    held = {
        name
        for array in preprocessing.arrays.values()
        if array.label is not msgspec.UNSET
        for name in _columns(array)
    }
    found: dict[str, list[Array]] = {name: [] for name in columns}
    places, ends = [], [0]
    for begin, end in streams:
        time = columns[time_name][begin:end].astype(np.float64)
        rising = np.diff(time) > 0
        if not rising.all():
            row = begin + int(rising.argmin()) + 1
            raise DataError(
                f"{source}, {rows.where(row)}, {time_name}: {time[row - begin]} comes after "
                f"{time[row - begin - 1]}; expected times that rise within a stream"
            )
        samples = int(np.floor((time[-1] - time[0]) * rate + 1e-6)) + 1
        wanted = time[0] + np.arange(samples) / rate
        before = np.searchsorted(time, wanted + 1e-6 / rate, side="right") - 1
        for name, column in columns.items():
            part = column[begin:end]
            if name in held or part.dtype.kind not in "biuf":
                found[name].append(part[before])
            else:
                found[name].append(_interpolated(wanted, time, part))
        places.append(begin + before)
        ends.append(ends[-1] + samples)
    joined = {name: np.concatenate(parts) for name, parts in found.items()}
    return joined, np.concatenate(places), list(pairwise(ends))


def _interpolated(wanted: Array, time: Array, values: Array) -> Array:
    flat = values.reshape(len(values), -1).astype(np.float64)
    columns = [np.interp(wanted, time, flat[:, i]) for i in range(flat.shape[1])]
    return np.stack(columns, axis=1).reshape(len(wanted), *values.shape[1:])


def _parts(
    columns: Raw,
    array: Preparation,
    begins: NDArray[np.int64],
    length: int,
    preprocessing: Preprocessing,
    where: _Place,
) -> Iterator[tuple[int, Array]]:
    """Yield (number of the first example, some examples of the array before its steps)."""
    views = [columns[name] for name in _columns(array)]
    if preprocessing.windows is not msgspec.UNSET:
        # The window's axis comes last there; the examples' second axis is where it belongs.
        views = [np.moveaxis(sliding_window_view(view, length, axis=0), -1, 1) for view in views]
    shapes = {view.shape[1:] for view in views}
    if len(shapes) > 1:
        raise DataError(f"{where.source}, {where.array}: columns of shapes {sorted(shapes)}")
    for start in range(0, len(begins), TOGETHER):
        chosen = begins[start : start + TOGETHER]
        parts = [_number_like(view[chosen], where, start) for view in views]
        part = parts[0] if isinstance(array.columns, str) else np.stack(parts, axis=-1)
        if array.label == "last":
            part = part[:, -1]
        elif array.label == "majority":
            part = np.stack([_majority(window) for window in part])
        yield start, part


def _majority(window: Array) -> Array:
    values, counts = np.unique(window, return_counts=True, axis=0)
    most: Array = values[counts.argmax()]
    return most


def _number_like(part: Array, where: _Place, start: int) -> Array:
    if part.dtype.kind in "biufUS":
        return part
    raise DataError(f"{where.of(start)}: values of {part.dtype}; expected numbers or text")


def _worked(part: Array, array: Preparation, where: _Place, start: int) -> Array:
    for step in array.steps:
        operation = OPERATIONS[type(step)]
        if part.dtype.kind in "US" and not isinstance(step, _TAKE_TEXT):
            raise DataError(
                f"{where.of(start)}: {str(part.flat[0])!r} is text; expected numbers, or the "
                "operation index first, which names the values"
            )
        part = operation(part, step, where, start)
    return part


def _finished(part: Array, dtype: np.dtype[Any] | None, where: _Place, start: int) -> Array:
    """Return the array in the batch's type, if its values allow that."""
    if dtype is None or part.dtype == dtype:
        return part
    if part.dtype.kind in "US":
        _worked(part, Preparation("", steps=(told.Scale(1.0),)), where, start)
    if dtype.kind in "iu" and part.dtype.kind == "f":
        _fail_at(np.rint(part) == part, part, where, start, "a whole number")
    if dtype.kind in "iu" and part.size:
        limits = np.iinfo(dtype)
        good = (part >= limits.min) & (part <= limits.max)
        _fail_at(good, part, where, start, f"what fits {dtype}")
    with np.errstate(over="ignore"):
        return part.astype(dtype)


def _fail_at(good: Array, part: Array, where: _Place, start: int, expected: str) -> None:
    """Raise DataError for the first value that is not good."""
    if not good.all():
        index = np.unravel_index(int(good.argmin()), good.shape)
        raise DataError(
            f"{where.of(start + int(index[0]))}: {part[index]} was found; expected {expected}"
        )


# The operations


def _float(part: Array) -> Array:
    return part.astype(np.float64)


def _standardise(part: Array, step: told.Standardise, where: _Place, start: int) -> Array:
    mean, std = (_along(values, part, step.axis, where) for values in (step.mean, step.std))
    found: Array = (_float(part) - mean) / std
    return found


def _along(values: Any, part: Array, axis: int, where: _Place) -> Any:
    """Return one number as it is, and several so that they lie along an axis of the array."""
    if not isinstance(values, tuple):
        return values
    if len(values) == 1:
        return values[0]
    if not -part.ndim <= axis < part.ndim or part.shape[axis] != len(values):
        raise DataError(
            f"{where.source}, {where.array}: standardise has {len(values)} numbers along axis "
            f"{axis} of an array of shape {('n', *part.shape[1:])}"
        )
    shape = [1] * part.ndim
    shape[axis] = len(values)
    return np.array(values, np.float64).reshape(shape)


def _scale(part: Array, step: told.Scale, where: _Place, start: int) -> Array:
    found: Array = _float(part) * step.factor + step.offset
    return found


def _clip(part: Array, step: told.Clip, where: _Place, start: int) -> Array:
    return np.clip(_float(part), step.low, step.high)


def _log(part: Array, step: told.Log, where: _Place, start: int) -> Array:
    moved = _float(part) + step.offset
    # NaN is a missing value, and stays one.
    _fail_at(~(moved <= 0), part, where, start, f"more than {-step.offset:g}, for its logarithm")
    found: Array = np.log(moved)
    return found


def _cast(part: Array, step: told.Cast, where: _Place, start: int) -> Array:
    dtype = np.dtype(step.dtype)
    if dtype.kind in "iu":
        part = np.trunc(_float(part)) if part.dtype.kind == "f" else part
        if part.dtype.kind == "f":
            _fail_at(np.isfinite(part), part, where, start, "a finite number")
    return _finished(part, dtype, where, start)


def _index(part: Array, step: told.Index, where: _Place, start: int) -> Array:
    text = isinstance(step.values[0], str)
    if text and part.dtype.kind == "f" and (np.rint(part) == part).all():
        part = part.astype(np.int64)  # as it stood in the file: 3 and not 3.0
    given = part.astype(str) if text else part
    values = np.array(step.values)
    order = np.argsort(values)
    found = np.minimum(np.searchsorted(values[order], given), len(values) - 1)
    _fail_at(values[order][found] == given, part, where, start, f"one of {_some(step.values)}")
    return order[found].astype(np.int64)


def _one_hot(part: Array, step: told.OneHot, where: _Place, start: int) -> Array:
    good = (np.rint(part) == part) & (part >= 0) & (part < step.classes)
    _fail_at(good, part, where, start, f"a whole number from 0 to {step.classes - 1}")
    hot: Array = (part[..., None] == np.arange(step.classes)).astype(np.float64)
    return hot


def _channels_first(part: Array, step: told.ChannelsFirst, where: _Place, start: int) -> Array:
    if part.ndim < 3:
        raise DataError(
            f"{where.source}, {where.array}: channels_first was given for an array of shape "
            f"{('n', *part.shape[1:])}; expected at least (n, length, channels)"
        )
    return np.moveaxis(part, -1, 1)


def _numeric(part: Array, step: told.Numeric, where: _Place, start: int) -> Array:
    if part.dtype.kind not in "US":
        return _float(part)
    text = np.char.strip(part.astype(str))
    missing = np.isin(np.char.lower(text), MISSING)
    found = np.full(part.shape, np.nan)
    for place in zip(*np.nonzero(~missing), strict=True):
        try:
            found[place] = float(text[place])
        except ValueError:
            _fail_at(missing | (text != text[place]), part, where, start, "a number or nothing")
    return found


def _codes(part: Array, step: told.Codes, where: _Place, start: int) -> Array:
    if part.ndim != 2 or part.shape[1] != len(step.values):
        raise DataError(
            f"{where.source}, {where.array}: codes has categories of {len(step.values)} columns; "
            f"the array has shape {('n', *part.shape[1:])}"
        )
    found = np.empty(part.shape)
    for number, values in enumerate(step.values):
        column = part[:, number]
        if not values:
            found[:, number] = _numeric(column, told.Numeric(), where, start)
            continue
        places = {value: place for place, value in enumerate(values)}
        different, rows = np.unique(_as_text(column).astype(str), return_inverse=True)
        found[:, number] = np.array([_code(text, places) for text in different.tolist()])[rows]
    return found


def _code(text: str, places: Mapping[str, int]) -> float:
    """Return the place of a text among categories, -1 for another one, NaN for none."""
    # Beside a column of texts the number 3 became 3.0.
    for given in (text, text.strip(), text.strip().removesuffix(".0")):
        if given in places:
            return places[given]
    return np.nan if text.strip().lower() in MISSING else -1.0


def _as_text(part: Array) -> Array:
    """Return numbers as they stood in the file: 3 and not 3.0, and nothing for NaN."""
    if part.dtype.kind != "f":
        return part
    whole = np.rint(part) == part
    numbers = np.where(whole, part, 0).astype(np.int64).astype(str)
    return np.where(whole, numbers, np.where(np.isnan(part), "", part.astype(str)))


def _byte_text(part: Array, step: told.ByteText, where: _Place, start: int) -> Array:
    part = _as_text(part)
    text = part if part.dtype.kind == "S" else np.char.encode(part.astype(str), "utf-8")
    cut = np.ascontiguousarray(text.astype(f"S{step.length}"))
    return cut.view(np.uint8).reshape(*part.shape, step.length)


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:10]))
    return shown + (f" and {len(values) - 10} more" if len(values) > 10 else "")


OPERATIONS: Mapping[type, Callable[[Array, Any, _Place, int], Array]] = {
    told.Standardise: _standardise,
    told.Scale: _scale,
    told.Clip: _clip,
    told.Log: _log,
    told.Cast: _cast,
    told.Index: _index,
    told.OneHot: _one_hot,
    told.ChannelsFirst: _channels_first,
    told.Numeric: _numeric,
    told.ByteText: _byte_text,
    told.Codes: _codes,
}
"""All that preprocessing can do: a bundle names a row, and brings no code."""
