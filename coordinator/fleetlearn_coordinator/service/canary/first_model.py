"""The model that a canary's run begins with, and the one that it goes on from in its last step.

Both are written before the run is opened: the model's file first, then one batch of rows. A process
that is killed in between does it once more. The old run is only read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, in_words
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector, check_finite, digest, flatten, views
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fleetlearn_coordinator.aggregation.model_state import make_state
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.canary.about import FirstModel
from fleetlearn_coordinator.service.training_run.algorithm_change import give_up_rows
from fleetlearn_coordinator.service.training_run.written_model import write_model
from fleetlearn_coordinator.storage.blobs import PARAMETERS
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, Row, TiedVectorsForgotten
from fleetlearn_coordinator.storage.store import BEGINS_AT, OPTIMIZER_STATE, Store

TOOK = "canary_took"
"""Key of the metadata: the old run's version from which the canary's run went on in its last
step."""


class _FoundModel(NamedTuple):
    vector: Vector
    """float32, shape (P,), as the canary's bundle has it."""
    state: Mapping[str, Vector]
    """Of the server optimizer that made it."""
    optimizer: str | None
    version: int
    """The number of the old run's version, or of the one that would come next."""


def why_misfit(old: Manifest, new: Manifest) -> str:
    """Return why a model of one bundle is none of another; empty: it is one."""
    shapes = [{row.name: row.shape for row in each.travelling} for each in (old, new)]
    before, after = shapes
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            return (
                f"parameter {name} has shape {before.get(name, 'none')} in {old.name} and "
                f"{after.get(name, 'none')} in {new.name}"
            )
    return ""


def find_first_model(old: Plan, new: Manifest, first: FirstModel) -> _FoundModel | None:
    """Return the model; None: the bundle's own. Raises FleetError (there is no such version or
    file, it does not fit, or is damaged)."""
    if first.of_bundle:
        return None
    storage = find_storage(old.data_dir)
    with storage.read_ledger() as ledger:
        known = {made.version: made for made in ledger.known_models()}
    newest = max(known, default=0)
    if first.file is not None:
        return _FoundModel(_read_file(Path(first.file), new), {}, None, newest + 1)
    version = newest if first.version is None else first.version
    if version not in known or version not in storage.models.model_versions():
        there = ", ".join(map(str, storage.models.model_versions())) or "none yet"
        text = f"{storage.where} does not have version {version}; it keeps {there}"
        raise StoreError(Code.UNKNOWN_CONTENT, text)
    made, manifest = known[version], open_bundle(old.bundle, files=()).manifest
    if misfit := why_misfit(manifest, new):
        raise FleetError(Code.BAD_MESSAGE, f"the model of {old.file} does not fit: {misfit}")
    tensors = storage.models.load_model(version, made.sha256)
    vectors = {
        name: flatten(views(each, manifest.travelling), new.travelling)
        for name, each in tensors.items()
        if each.shape == (manifest.size,)
    }
    vector = vectors.pop(PARAMETERS)
    state = {name.removeprefix(OPTIMIZER_STATE): each for name, each in vectors.items()}
    number = newest if first.version is None else newest + 1
    return _FoundModel(vector, state, made.optimizer, number)


def _read_file(file: Path, manifest: Manifest) -> Vector:
    """Read a safetensors file with the model's tensors, or with one flat tensor ``parameters``.
    Raises FleetError."""
    try:
        tensors = load_file(file)
        flat = tensors.get(PARAMETERS)
        if flat is not None and flat.shape == (manifest.size,):
            vector = np.ascontiguousarray(flat, np.float32)
        else:
            floats = {name: each.astype(np.float32) for name, each in tensors.items()}
            vector = flatten(floats, manifest.travelling)
        check_finite(vector)
    except (SafetensorError, ValueError, OSError) as error:
        text = f"{file} cannot be the model of {manifest.name}: {in_words(error)}"
        raise FleetError(Code.BAD_MESSAGE, text) from None
    except ProtocolError as error:
        raise FleetError(error.code, f"{file}: {error.text}") from None
    return vector


def begin_model(
    store: Store, bundle: Bundle, plan: Plan, old: Plan, first: FirstModel, wall: float
) -> None:
    """Write the first model of a canary's run, if the run is new. ``wall``: Unix time. Raises
    FleetError."""
    if store.ledger.newest_model() is not None:
        return
    found = find_first_model(old, bundle.manifest, first)
    if found is None:
        return  # the run begins as any other does
    store.write([Metadata(BEGINS_AT, found.version)])
    store.write(_rows_of(store, bundle, plan, found, found.version, wall))


def take_newest(store: Store, bundle: Bundle, plan: Plan, old: Plan, wall: float) -> None:
    """Let a canary's run go on from the old run's newest model, once. What its devices were doing
    is given up. ``wall``: Unix time. Raises FleetError."""
    newest = store.ledger.newest_model()
    if newest is None or store.ledger.get(TOOK) is not None:
        return
    found = find_first_model(old, bundle.manifest, FirstModel())
    assert found is not None
    version = max(newest[0], found.version) + 1
    rows = _rows_of(store, bundle, plan, found, version, wall)
    tied = [TiedVectorsForgotten()] if plan.tied else []
    store.write([*rows, *give_up_rows(store.ledger), *tied, Metadata(TOOK, found.version)])


def _rows_of(
    store: Store, bundle: Bundle, plan: Plan, found: _FoundModel, version: int, wall: float
) -> list[Row]:
    """Write a model's file as this version. Returns the rows with which it counts. The server
    optimizer goes on from its state, where the plan has the same one."""
    rules = plan.round_rules(bundle.manifest)
    slots = rules.optimizer.init(found.vector)
    if found.optimizer == rules.optimizer.name and found.state.keys() >= slots.keys():
        slots = {name: found.state[name] for name in slots}
    state = make_state(
        rules,
        None,
        version=version,
        model=found.vector,
        optimizer_state=slots,
        vectors={name: np.zeros_like(found.vector) for name in plan.vectors},
    )
    made = ModelMade(version, digest(found.vector), 0, wall)
    return write_model(rules, store, made, state)
