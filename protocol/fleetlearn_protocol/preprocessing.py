"""What a bundle says of the way from raw data to its batch arrays: the same for training and for
prediction.

It is data, not code: a closed list of operations. ``fleetlearn_device.data.preprocessing`` carries
them out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.messages import MAX_EXACT, Number
from fleetlearn_protocol.paths import in_home

ColumnName = Annotated[str, Meta(min_length=1, max_length=256)]
WholeNumber = Annotated[int, Meta(ge=-MAX_EXACT, le=MAX_EXACT)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]
SomeNumbers = Number | Annotated[tuple[Number, ...], Meta(min_length=1, max_length=65536)]


class Resampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream gets a constant rate, by linear interpolation; labels keep their last value."""

    time: ColumnName
    """The column of times, in seconds, rising within a stream."""
    rate: Rate
    """Samples a second afterwards, from the first time on."""


class Windowing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream is cut into windows, which are the examples. What is left at its end is not used."""

    length: Annotated[int, Meta(ge=1, le=2**20)]
    """Rows of a window."""
    hop: Annotated[int, Meta(ge=1, le=2**20)]
    """Rows from the first row of a window to the first row of the next."""


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op"):
    pass


class Standardise(_Step, frozen=True, tag="standardise"):
    """(x - mean) / std."""

    mean: SomeNumbers
    """One number, or one for each element along ``axis``."""
    std: SomeNumbers
    """As ``mean``; not 0."""
    axis: Annotated[int, Meta(ge=-32, le=31)] = -1
    """Which axis several numbers are along; 0 is the examples', -1 the last."""


class Scale(_Step, frozen=True, tag="scale"):
    """x * factor + offset."""

    factor: Number
    """What x is multiplied by."""
    offset: Number = 0.0
    """What is added then."""


class Clip(_Step, frozen=True, tag="clip"):
    """min(max(x, low), high)."""

    low: Number
    """The least value afterwards."""
    high: Number
    """The greatest."""


class Log(_Step, frozen=True, tag="log"):
    """The natural logarithm of x + offset, which must be more than 0."""

    offset: Number = 0.0
    """What is added first: 1 for counts from 0 on."""


class Cast(_Step, frozen=True, tag="cast"):
    """x as another type. Numbers with a fraction become whole numbers towards 0."""

    dtype: Literal["float32", "float64", "int64", "int32", "uint8", "bool"]
    """The type afterwards."""


class Index(_Step, frozen=True, tag="index"):
    """The place of x among ``values``, from 0 on: class names become the model's numbers."""

    values: Annotated[tuple[str | WholeNumber, ...], Meta(min_length=1, max_length=65536)]
    """All texts, or all whole numbers."""


class OneHot(_Step, frozen=True, tag="one_hot"):
    """A new last axis, 1 at x and 0 elsewhere. x is a whole number below ``classes``."""

    classes: Annotated[int, Meta(ge=1, le=65536)]
    """Length of the axis."""


class ChannelsFirst(_Step, frozen=True, tag="channels_first"):
    """The last axis becomes the first after the examples': (n, length, channels) becomes (n,
    channels, length), as PyTorch's convolutions take it."""


class Numeric(_Step, frozen=True, tag="numeric"):
    """x as float64, also where it is text. An empty text, NA, NaN and null are missing values:
    NaN. For computations alone."""


class ByteText(_Step, frozen=True, tag="bytes"):
    """x as the bytes of its text in UTF-8, along a new last axis: zeros follow a shorter text, and
    a longer one is cut off. A number is written as a whole number where it is one. For computations
    alone."""

    length: Annotated[int, Meta(ge=1, le=256)]
    """Of the axis."""


class Codes(_Step, frozen=True, tag="codes"):
    """Columns side by side, each as numbers in its own way: a column of categories as the place of
    x among them, from 0 on, and -1 where x is another; the others as ``numeric``. Missing values
    are NaN. For computations alone."""

    values: Annotated[
        tuple[Annotated[tuple[str, ...], Meta(max_length=4096)], ...],
        Meta(min_length=1, max_length=65536),
    ]
    """The categories of each column; none where it is one of numbers."""


Operation = (
    Standardise
    | Scale
    | Clip
    | Log
    | Cast
    | Index
    | OneHot
    | ChannelsFirst
    | Numeric
    | ByteText
    | Codes
)
OF_COMPUTATIONS = (Numeric, ByteText, Codes)
"""Operations that need a bundle with a computation."""


class Preparation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one array of the batch is made."""

    columns: ColumnName | Annotated[tuple[ColumnName, ...], Meta(min_length=1, max_length=65536)]
    """A raw array, or several side by side along a new last axis."""
    label: Literal["last", "majority"] | msgspec.UnsetType = msgspec.UNSET
    """One value for each window instead of all of its rows: that of the last row, or the most
    frequent one, the least of several."""
    steps: Annotated[tuple[Operation, ...], Meta(max_length=64)] = ()
    """What is done to the array, in this order."""


class Preprocessing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to raw data. Resampling comes first, then windows, then each array's steps."""

    arrays: Annotated[dict[ColumnName, Preparation], Meta(min_length=1, max_length=64)]
    """How each array of the batch is made."""
    resample: Resampling | msgspec.UnsetType = msgspec.UNSET
    """Where the raw data are a stream without a constant rate."""
    windows: Windowing | msgspec.UnsetType = msgspec.UNSET
    """Where the raw data are a stream, and examples are windows of it."""
    streams: ColumnName | msgspec.UnsetType = msgspec.UNSET
    """A raw array whose value changes where a new stream begins, such as a recording's number.
    Neither windows nor interpolation go over such a place. Left out: all rows are one stream."""

    @property
    def raw(self) -> tuple[str, ...]:
        """The names of the raw arrays that are read."""
        names: list[str] = []
        for array in self.arrays.values():
            names += [array.columns] if isinstance(array.columns, str) else array.columns
        if self.resample is not msgspec.UNSET:
            names.append(self.resample.time)
        if self.streams is not msgspec.UNSET:
            names.append(self.streams)
        return tuple(dict.fromkeys(names))


def read_preprocessing(
    given: Preprocessing | dict[str, Any] | str | os.PathLike[str],
) -> Preprocessing:
    """Return preprocessing from a TOML or JSON file, or from what such a file says, as a dict.

    Raises ValueError, which names what is wrong and where.
    """
    if isinstance(given, Preprocessing):
        found = given
    else:
        where = "preprocessing"
        try:
            if isinstance(given, dict):
                raw = given
            else:
                path = where = in_home(given)  # type: ignore[assignment]
                content = Path(path).read_bytes()
                toml = Path(path).suffix.lower() == ".toml"
                raw = msgspec.toml.decode(content) if toml else msgspec.json.decode(content)
            found = msgspec.convert(raw, Preprocessing)
        except OSError as error:
            raise ValueError(f"{where} cannot be read: {in_words(error)}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where}: {error}. docs/start/data.md lists what preprocessing may say"
            ) from None
    problem = contradiction(found)
    if problem is not None:
        raise ValueError(f"the preprocessing contradicts itself: {problem}")
    return found


def contradiction(preprocessing: Preprocessing) -> str | None:
    """Return what the types alone cannot say is wrong; None: nothing."""
    for name, array in preprocessing.arrays.items():
        if array.label is not msgspec.UNSET and preprocessing.windows is msgspec.UNSET:
            return f"array {name} has a label for each window, and there are no windows"
        for step in array.steps:
            problem = _wrong_step(step)
            if problem is not None:
                return f"array {name}: {problem}"
    return None


def _wrong_step(step: Operation) -> str | None:
    if isinstance(step, Clip) and not step.low <= step.high:
        return f"clip has low {step.low} above high {step.high}"
    if isinstance(step, Index):
        if len({type(value) for value in step.values}) > 1:
            return "index has both texts and numbers"
        if len(set(step.values)) < len(step.values):
            return "index has a value twice"
    if isinstance(step, Standardise):
        mean, std = (
            value if isinstance(value, tuple) else (value,) for value in (step.mean, step.std)
        )
        if not all(std):
            return "standardise has a std of 0"
        if len(mean) != len(std) and 1 not in (len(mean), len(std)):
            return f"standardise has {len(mean)} means and {len(std)} stds"
    return None
