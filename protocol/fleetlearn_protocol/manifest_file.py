"""manifest.json as bytes: written, read, and checked for what contradicts itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import msgspec

from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import (
    ACTIVATIONS,
    COMPUTATION_VERSION,
    EVAL,
    FORMAT,
    FROZEN,
    FROZEN_VERSION,
    GRADIENT,
    INFER,
    MANIFEST,
    MAX_ELEMENTS,
    MAX_MANIFEST_BYTES,
    OF_FEATURES,
    ORT_TRAINING,
    PARAMETERS,
    PERSONAL,
    PREPROCESSING_VERSION,
    PUBLIC,
    PUBLIC_VERSION,
    REFERENCES_READ,
    SPLIT_VERSION,
    TOP_STEP,
    TRAIN,
    TRAIN_MANY,
    VERSIONS,
    Manifest,
    Parameter,
    State,
)
from fleetlearn_protocol.preprocessing import OF_COMPUTATIONS
from fleetlearn_protocol.preprocessing import contradiction as preprocessing_contradiction

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?")
"""A name in a file path: it neither begins nor ends with a dot, and its characters are safe in
every file system."""


class _Envelope(msgspec.Struct):
    format: str
    version: int


def write_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json: the same manifest gives the same bytes."""
    return (
        msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=1) + b"\n"
    )


def read_manifest(content: bytes) -> Manifest:
    """Read and check manifest.json. Raises BundleError, naming what is wrong and what was
    expected."""
    # Before anything is decoded: the bytes come from somebody else.
    if len(content) > MAX_MANIFEST_BYTES:
        raise BundleError(
            Code.TOO_LARGE, f"a manifest of {len(content)} bytes; the limit is {MAX_MANIFEST_BYTES}"
        )
    try:
        content.decode()
        # First format and version alone: a later version may have other fields, and its error must
        # say so.
        envelope = msgspec.json.decode(content, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(
            Code.BAD_MESSAGE, f"{MANIFEST} is not a bundle's manifest: {error}"
        ) from None
    if envelope.format != FORMAT:
        raise BundleError(
            Code.BAD_MESSAGE, f"{MANIFEST} is of format {envelope.format!r}; expected {FORMAT!r}"
        )
    if envelope.version not in VERSIONS:
        raise BundleError(
            Code.BAD_VERSION,
            f"the bundle is of version {envelope.version}; this fleetlearn reads versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}. "
            + (
                "Update fleetlearn."
                if envelope.version > VERSIONS[-1]
                else "Export the model again."
            ),
        )
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(Code.BAD_MESSAGE, f"{MANIFEST} is damaged: {error}") from None
    for contradiction in CONTRADICTIONS:
        problem = contradiction(manifest)
        if problem is not None:
            raise BundleError(Code.BAD_MESSAGE, f"{MANIFEST} contradicts itself: {problem}")
    return manifest


def _odd_path(manifest: Manifest) -> str | None:
    for path in manifest.files:
        if not all(map(_PLAIN_NAME.fullmatch, path.split("/"))):
            return f"file path {path!r} is not a plain path below the bundle"
    return None


def _repeated_name(manifest: Manifest) -> str | None:
    for what, names in (
        ("parameter", [parameter.name for parameter in manifest.parameters]),
        ("batch array", [array.name for array in manifest.batch]),
        ("feature", [array.name for array in manifest.features or ()]),
        ("output", [array.name for array in manifest.outputs]),
        ("hyper-parameter", [hyper.name for hyper in manifest.hyper]),
        ("metric", list(manifest.metrics)),
        ("state", [slot.name for slot in manifest.state]),
        ("reference", list(manifest.references)),
        ("normalisation parameter", list(manifest.normalisation or ())),
        # Some file systems do not tell upper case from lower.
        ("file", [path.lower() for path in (MANIFEST, *manifest.files)]),
    ):
        for name, after in pairwise(sorted(names)):
            if name == after:
                return f"{what} {name} is there twice"
    return None


def _range_of_no_integers(manifest: Manifest) -> str | None:
    for array in manifest.batch:
        if array.below is not None and array.dtype not in ("int64", "int32", "uint8"):
            return (
                f"batch array {array.name} is {array.dtype} and has a range; integers alone have "
                "one"
            )
    return None


def _taken_hyper_name(manifest: Manifest) -> str | None:
    if any(hyper.name == "seed" for hyper in manifest.hyper):
        return "a hyper-parameter is named seed, which is the random steps' own input"
    return None


def _file_and_folder(manifest: Manifest) -> str | None:
    folders = {
        path[:end].lower()
        for path in manifest.files
        for end, mark in enumerate(path)
        if mark == "/"
    }
    for path in manifest.files:
        if path.lower() in folders:
            return f"{path} is a file and a folder"
    return None


def _frozen_in_old_version(manifest: Manifest) -> str | None:
    if FROZEN in manifest.files and manifest.version < FROZEN_VERSION:
        return (
            f"{FROZEN} is in a bundle of version {manifest.version}; it needs version "
            f"{FROZEN_VERSION}"
        )
    return None


def _preprocessing_in_old_version(manifest: Manifest) -> str | None:
    has_it = manifest.preprocessing is not msgspec.UNSET
    if has_it and manifest.version < PREPROCESSING_VERSION:
        return (
            f"preprocessing is in a bundle of version {manifest.version}; it needs version "
            f"{PREPROCESSING_VERSION}"
        )
    return None


def _split_in_old_version(manifest: Manifest) -> str | None:
    if manifest.split is not msgspec.UNSET and manifest.version < SPLIT_VERSION:
        return (
            f"a part of a split model is in a bundle of version {manifest.version}; it needs "
            f"version {SPLIT_VERSION}"
        )
    return None


def _split_that_does_not_fit(manifest: Manifest) -> str | None:
    split = manifest.split
    parts = {ACTIVATIONS: "bottom", TOP_STEP: "top"}
    for path, part in parts.items():
        expected = split is not msgspec.UNSET and split.part == part
        if (path in manifest.files) != expected:
            return f"{path} and a split model's {part} belong together; one of them is missing"
    if split is msgspec.UNSET:
        return None
    rows = [cut.activations for cut in split.cuts]
    if any(row.dtype != "float32" for row in rows):
        return "activations are float32"
    if len({cut.party for cut in split.cuts}) < len(split.cuts):
        return "a party is there twice"
    if split.part == "top":
        if any(cut.bundle is msgspec.UNSET for cut in split.cuts):
            return "a top names the bundle of each party's bottom; one is missing"
        if list(manifest.batch[: len(rows)]) != rows:
            return "the batch of a top begins with the parties' activations"
    elif len(rows) != 1 or manifest.batch[-1] != msgspec.structs.replace(rows[0], name=GRADIENT):
        return f"the batch of a bottom ends with {GRADIENT}, shaped as its activations"
    return None


def _preprocessing_of_other_arrays(manifest: Manifest) -> str | None:
    if manifest.preprocessing is msgspec.UNSET:
        return None
    names = sorted(array.name for array in manifest.data_arrays)
    if sorted(manifest.preprocessing.arrays) != names:
        return (
            f"preprocessing makes the arrays {sorted(manifest.preprocessing.arrays)}; the batch "
            f"has {names}"
        )
    problem = preprocessing_contradiction(manifest.preprocessing)
    return None if problem is None else f"preprocessing: {problem}"


def _half_of_many(manifest: Manifest) -> str | None:
    if (manifest.many is not None) != (TRAIN_MANY in manifest.files):
        return f"{TRAIN_MANY} and the entry `many` belong together; one of them is missing"
    return None


def _features_that_are_none(manifest: Manifest) -> str | None:
    if manifest.features is msgspec.UNSET:
        if any(path in manifest.files for path in OF_FEATURES):
            return (
                f"{', '.join(OF_FEATURES)} and the entry `features` belong together; the entry is "
                "missing"
            )
        return None
    of_batch = {array.name: array for array in manifest.batch}
    for feature in manifest.features:
        if of_batch.get(feature.name, feature) != feature:
            return f"feature {feature.name} is an array of the batch, and not the same there"
    if not manifest.computed_features:
        return "all features are arrays of the batch: none is computed"
    return None


def _operations_of_computations(manifest: Manifest) -> str | None:
    if manifest.preprocessing is msgspec.UNSET or manifest.computation is not msgspec.UNSET:
        return None
    for name, array in manifest.preprocessing.arrays.items():
        for step in array.steps:
            if isinstance(step, OF_COMPUTATIONS):
                return (
                    f"array {name} of the preprocessing has the operation "
                    f"{step.__struct_config__.tag}, which is for computations alone"
                )
    return None


def _odd_computation(manifest: Manifest) -> str | None:
    settings = manifest.computation
    if settings is msgspec.UNSET:
        if manifest.sums is not msgspec.UNSET:
            return "it has sums, and no computation whose sums they are"
        return None if manifest.outputs else "infer.onnx has no output"
    if manifest.version < COMPUTATION_VERSION:
        return (
            f"a computation is in a bundle of version {manifest.version}; it needs version "
            f"{COMPUTATION_VERSION}"
        )
    if (problem := settings.contradiction) is not None:
        return f"computation: {problem}"
    # What computations are is imported where a bundle has one.
    from fleetlearn_protocol.computations.kinds import KINDS

    kind = KINDS[kind_of(settings)]
    if (state := kind.state(settings).size) != manifest.size or manifest.buffers:
        return f"its computation has a state of {state} elements; the table has {manifest.size}"
    if (sums := kind.sums(settings).size) != manifest.sums:
        return f"its computation has {sums} sums; the manifest says {manifest.sums or 0}"
    if manifest.batch != kind.arrays(settings):
        return "the arrays of its batch are not those of its computation"
    if others := sorted({*manifest.files} - {PARAMETERS}):
        return f"it has a computation, and beside it the file {others[0]}"
    return None


def _odd_public(manifest: Manifest) -> str | None:
    public = manifest.public
    if public is msgspec.UNSET:
        if PUBLIC in manifest.files:
            return f"{PUBLIC} and the entry `public` belong together; the entry is missing"
        return None
    if manifest.version < PUBLIC_VERSION:
        return (
            f"public examples are in a bundle of version {manifest.version}; they need version "
            f"{PUBLIC_VERSION}"
        )
    if manifest.computation is not msgspec.UNSET:
        return "it has a computation, and public examples beside it"
    shape = (public.examples, public.classes)
    shapes = [row.shape for row in manifest.parameters if not (row.buffer or row.personal)]
    if shapes != [shape] or len(manifest.parameters) > 1:
        return f"its table has {shapes}; expected one row of class scores, {shape}"
    if [(row.dtype, row.shape) for row in manifest.outputs] != [("float32", (public.classes,))]:
        return f"its outputs are not one array of {public.classes} class scores"
    if manifest.hyper or manifest.state or manifest.references:
        return "it has public examples, and beside them what a step has"
    if others := sorted({*manifest.files} - {PARAMETERS, PUBLIC}):
        return f"it has public examples, and beside them the file {others[0]}"
    return None


def _missing_file(manifest: Manifest) -> str | None:
    expected = [PARAMETERS]
    if manifest.has_graphs:
        expected = [TRAIN, EVAL, INFER, PARAMETERS]
    if manifest.public is not msgspec.UNSET:
        expected.append(PUBLIC)
    if any(path.startswith("ort_training/") for path in manifest.files):
        expected += [f"ort_training/{name}" for name in ORT_TRAINING]
    if manifest.features is not msgspec.UNSET:
        expected += OF_FEATURES
    for path in expected:
        if path not in manifest.files:
            return f"{path} is missing"
    return None


def _missing_reference(manifest: Manifest) -> str | None:
    for switch, references in REFERENCES_READ.items():
        for reference in references:
            if getattr(manifest.step, switch) and reference not in manifest.references:
                return (
                    f"a {switch} step reads the reference {reference}, which is not among "
                    f"{manifest.references}"
                )
    return None


def _gap_in_table(manifest: Manifest) -> str | None:
    tables: tuple[tuple[str, Sequence[Parameter | State]], ...] = (
        ("parameter", manifest.parameters),
        ("state", manifest.state),
    )
    for what, table in tables:
        end = 0
        for entry in table:
            if entry.offset != end:
                return (
                    f"{what} {entry.name} begins at element {entry.offset}; the ones before it "
                    f"end at {end}"
                )
            end += prod(entry.shape)
            if end > MAX_ELEMENTS:
                return (
                    f"up to {what} {entry.name} there are {end} elements; the limit is "
                    f"{MAX_ELEMENTS}"
                )
    return None


def _unknown_normalisation(manifest: Manifest) -> str | None:
    unknown = set(manifest.normalisation or ()) - {
        parameter.name for parameter in manifest.parameters
    }
    if unknown:
        return f"{min(unknown)} is of a normalisation layer, and no parameter has this name"
    return None


def _personal_before_travelling(manifest: Manifest) -> str | None:
    if manifest.parameters[0].personal:
        return "every parameter is personal: nothing travels"
    for row, after in pairwise(manifest.parameters):
        if row.personal and not after.personal:
            return (
                f"parameter {after.name} comes after {row.name}, which is personal; those are the "
                "last"
            )
    return None


def _odd_sparse_rows(manifest: Manifest) -> str | None:
    sparse = manifest.sparse
    if sparse is msgspec.UNSET:
        return None
    if not manifest.has_graphs:
        return "it has sparse rows, and no graphs"
    if manifest.buffers or manifest.step.optimizer == "custom":
        return "a model with sparse rows has no buffers that travel, and a step of LocalStep"
    if {"correction", "previous"} & {*manifest.references}:
        return "a model with sparse rows has a step that reads no correction and no previous model"
    if (manifest.local_size > manifest.size) != (PERSONAL in manifest.files):
        return f"it has sparse rows: {PERSONAL} belongs to it where parameters are personal"
    travelling = {row.name: row for row in manifest.travelling}
    for name in sparse.tables:
        if name not in travelling:
            return f"sparse table {name} is no parameter that travels"
        if travelling[name].shape[:1] != (sparse.rows,) or len(travelling[name].shape) < 2:
            return (
                f"sparse table {name} has shape {travelling[name].shape}; its first axis must have "
                f"{sparse.rows} rows, and there must be a second one"
            )
    kept = [slot.name for slot in manifest.state if slot.kept]
    if kept:
        return f"state {kept[0]} is kept from task to task, where rows of tables are not"
    arrays = {array.name: array for array in manifest.batch}
    for name in sparse.arrays:
        if name not in arrays or arrays[name].dtype not in ("int64", "int32"):
            return (
                f"array {name}, which is to name rows, is no array of int64 or int32 of the batch"
            )
        if arrays[name].below != sparse.rows or arrays[name].ignored is not None:
            return f"array {name} names rows: its integers must be 0 to {sparse.rows - 1}"
    return None


def _overlap_in_infer(manifest: Manifest) -> str | None:
    if not manifest.has_graphs:
        return None
    # A device writes a trained infer.onnx by replacing these bytes in place.
    rows = [
        (parameter.infer_offset, prod(parameter.shape), parameter.name)
        for parameter in manifest.parameters
        if parameter.infer_offset is not None
    ]
    free = 0
    for begin, elements, name in sorted(rows):
        if begin < free:
            return f"the bytes of parameter {name} in {INFER} overlap another's"
        free = begin + 4 * elements
    if free > manifest.files[INFER].size:
        return (
            f"the parameters' bytes end at {free} in {INFER}, which has "
            f"{manifest.files[INFER].size}"
        )
    return None


# In this order: the later ones count on what the earlier ones found right.
CONTRADICTIONS: tuple[Callable[[Manifest], str | None], ...] = (
    _odd_path,
    _repeated_name,
    _range_of_no_integers,
    _taken_hyper_name,
    _file_and_folder,
    _frozen_in_old_version,
    _preprocessing_in_old_version,
    _preprocessing_of_other_arrays,
    _split_in_old_version,
    _split_that_does_not_fit,
    _half_of_many,
    _features_that_are_none,
    _operations_of_computations,
    _missing_file,
    _missing_reference,
    _gap_in_table,
    _unknown_normalisation,
    _personal_before_travelling,
    _odd_computation,
    _odd_public,
    _odd_sparse_rows,
    _overlap_in_infer,
)
"""What the types alone cannot say. Each returns what is wrong, or None."""
