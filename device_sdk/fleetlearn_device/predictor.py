"""Predictions with the model that a device keeps, in any process, without a network."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from fleetlearn_protocol.bundle import Bundle, write_inference_model
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.vector import Vector
from msgspec import UNSET
from numpy.typing import ArrayLike, NDArray

from fleetlearn_device.data.preprocessing import prepare
from fleetlearn_device.runtimes.checks import DataError, check_batch, check_ranges
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.sessions import StepError, session_options
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.kept_states import personal_name, read_kept
from fleetlearn_device.storage.model_in_use import ModelInUse, read_model, stamp_of, version_of
from fleetlearn_device.storage.state_directory import state_folder
from fleetlearn_device.training.kept_state import kept_state_size

Which = Literal["personal", "shared"]
"""``personal``: with what is the device's own, if it has anything. ``shared``: the model as the
coordinator sent it."""
BATCH = 256
"""Most examples that are predicted at a time, unless the user says otherwise."""

Predicted = NDArray[Any] | dict[str, NDArray[Any]]


class LoadedModel(NamedTuple):
    """A model, ready to predict."""

    version: tuple[object, ...]
    """What changes when there is another one."""
    model: ModelInUse
    manifest: Manifest
    session: Any
    inputs: tuple[Input, ...]
    """The arrays that the model takes."""
    outputs: tuple[str, ...]
    """The names of its outputs."""


class Predictor:
    """Predicts with the newest model of a device's state directory.

    The directory may be in use by a device that trains: when it takes a newer model, the next
    prediction is made with that one. Predictions may be asked for from several threads at once.

    Args:
        state_dir: The device's state directory.
        which: ``personal``: the device's personal model (Ditto, pFedMe, APFL), or the shared one
            with the device's personal parameters; the shared one where the device has neither.
            ``shared``: the shared model; personal parameters have their initial values.
        threads: Threads inside an operator.

    Raises ValueError, NoModelError (a StateError: no model came yet), StateError (damaged).
    """

    def __init__(
        self, state_dir: str | os.PathLike[str], *, which: Which = "personal", threads: int = 1
    ) -> None:
        if which not in get_args(Which):
            raise ValueError(f"which is {which!r}; expected one of {', '.join(get_args(Which))}")
        if threads < 1:
            raise ValueError(f"{threads} threads; expected at least 1")
        self.folder, self.which, self.threads = state_folder(state_dir), which, threads
        self._lock = threading.Lock()
        self._loaded = self._load()

    @property
    def model(self) -> ModelInUse:
        """Which model the last prediction was made with, or will be the first."""
        return self._loaded.model

    @property
    def loaded(self) -> LoadedModel:
        """The same, ready to predict."""
        return self._loaded

    def refresh(self) -> bool:
        """Take the newest model, as each prediction does. Returns whether it is another one.

        Where it cannot be read, the one before stays; raises StateError then.
        """
        with self._lock:
            if self._version() == self._loaded.version:
                return False
            self._loaded = self._load()
            return True

    def predict(self, x: ArrayLike | Mapping[str, ArrayLike], batch_size: int = BATCH) -> Predicted:
        """Return the model's outputs for these examples.

        x: An array whose first axis counts the examples, or arrays by the model's names of its
        inputs; further names are passed over. Where the bundle has preprocessing: raw arrays by
        name, whose first axis counts examples or rows of a stream. batch_size: Most examples at a
        time. Returns an array whose first axis counts the examples, or, from a model with several
        outputs, arrays by name.

        Raises DataError, StepError, StateError.
        """
        if self._version() != self._loaded.version:
            self.refresh()
        loaded = self._loaded
        return self.run(loaded, _prepared(x, loaded), batch_size)

    def run(
        self,
        loaded: LoadedModel,
        x: ArrayLike | Mapping[str, ArrayLike],
        batch_size: int = BATCH,
    ) -> Predicted:
        """Return what a model that was loaded gives for examples that are prepared. Arguments,
        result and errors are as above."""
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1")
        arrays = _arrays(x, loaded.inputs)
        count = len(arrays[0])
        pieces = [
            _run(loaded, [array[begin : begin + batch_size] for array in arrays])
            for begin in range(0, count, batch_size)
        ]
        joined = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
        if len(joined) == 1:
            return joined[0]
        return dict(zip(loaded.outputs, joined, strict=True))

    def onnx(self) -> bytes:
        """Return the model as an ONNX file: any ONNX Runtime runs it. Raises StateError."""
        _, _, bundle, vector = self._read()
        return write_inference_model(bundle, vector)

    def _read(self) -> tuple[tuple[object, ...], ModelInUse, Bundle, Vector]:
        """Return the model as it is now, and what changes when there is another."""
        before = version_of(self.folder)
        model, bundle, shared = read_model(self.folder)
        version = before, *self._stamps(model)
        vector = shared if self.which == "shared" else self._own(bundle, shared)
        return version, model, bundle, vector

    def _own(self, bundle: Bundle, shared: Vector) -> Vector:
        """Return the personal model, or the shared one with the device's personal parameters."""
        manifest, kept = bundle.manifest, self.folder / "kept"
        personal = read_kept(kept / personal_name(bundle.sha256), manifest.size, or_more=True)
        if personal is not None:
            return personal
        own = manifest.local_size - manifest.size
        state = read_kept(kept / bundle.sha256, kept_state_size(manifest)) if own else None
        return shared if state is None else np.concatenate([shared, state[:own]])

    def _load(self) -> LoadedModel:
        version, model, bundle, vector = self._read()
        session = import_onnxruntime().InferenceSession(
            write_inference_model(bundle, vector),
            session_options(self.threads),
            providers=["CPUExecutionProvider"],
        )
        rows = {row.name: row for row in bundle.manifest.batch}
        names = [value.name for value in session.get_inputs()]
        unknown = [name for name in names if name not in rows]
        if unknown:
            raise StateError(f"infer.onnx of bundle {model.name} has unknown inputs: {unknown}")
        outputs = tuple(value.name for value in session.get_outputs())
        inputs = tuple(rows[name] for name in names)
        return LoadedModel(version, model, bundle.manifest, session, inputs, outputs)

    def _version(self) -> tuple[object, ...]:
        """Return what changes when there is another model: a call of the file system, or three."""
        return version_of(self.folder), *self._stamps(self._loaded.model)

    def _stamps(self, model: ModelInUse) -> list[tuple[int, int] | None]:
        if self.which == "shared":
            return []
        names = model.bundle, personal_name(model.bundle)
        return [stamp_of(self.folder / "kept" / name) for name in names]


def _prepared(
    x: ArrayLike | Mapping[str, ArrayLike], loaded: LoadedModel
) -> ArrayLike | Mapping[str, ArrayLike]:
    """Return raw arrays as the bundle's preprocessing makes them. Raises DataError."""
    told = loaded.manifest.preprocessing
    if told is UNSET:
        return x
    if not isinstance(x, Mapping):
        raise DataError(
            "an array was given, and the bundle's preprocessing makes the model's inputs of arrays "
            f"by name; expected a dict with {', '.join(told.raw)}"
        )
    raw = {name: np.asarray(array) for name, array in x.items()}
    return prepare(raw, loaded.manifest, [row.name for row in loaded.inputs])


def _arrays(
    x: ArrayLike | Mapping[str, ArrayLike], inputs: tuple[Input, ...]
) -> tuple[NDArray[Any], ...]:
    """Return the inputs' arrays, checked. Raises DataError."""
    if isinstance(x, Mapping):
        given: Any = {row.name: x[row.name] for row in inputs if row.name in x}
    elif len(inputs) == 1:
        given = (x,)
    else:
        raise DataError(
            f"an array was given, and the model has the inputs "
            f"{', '.join(row.name for row in inputs)}; expected arrays by these names"
        )
    arrays = check_batch(given, inputs)
    check_ranges(arrays, inputs)
    return arrays


def _run(loaded: LoadedModel, arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    feed = {row.name: array for row, array in zip(loaded.inputs, arrays, strict=True)}
    try:
        found: list[NDArray[Any]] = loaded.session.run(list(loaded.outputs), feed)
    except Exception as error:  # each of ONNX Runtime's exceptions derives from Exception itself
        shapes = [array.shape for array in arrays]
        raise StepError(
            f"ONNX Runtime could not run infer.onnx on arrays of shapes {shapes}: {error}"
        ) from error
    return found
