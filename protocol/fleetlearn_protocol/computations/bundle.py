"""Writes a bundle that has a computation in place of graphs. No PyTorch is needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from safetensors.numpy import save

from fleetlearn_protocol.bundle import pack_bundle, write_bundle
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.settings import ComputationSettings, kind_of
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.manifest import (
    COMPUTATION_VERSION,
    FORMAT,
    MAX_ELEMENTS,
    PARAMETERS,
    LocalStep,
    Manifest,
    Parameter,
)
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.preprocessing import Preprocessing, read_preprocessing
from fleetlearn_protocol.toml_faults import fault_in_words

PAGES = {"statistics": "computations", "function": "functions"}
"""Kind -> the page of docs/algorithms about it."""
STATE_NAME = "computation.state"
"""The only row of the parameter table."""


class Questions(NamedTuple):
    """What a file of questions says."""

    name: str
    settings: ComputationSettings
    preprocessing: Preprocessing | UnsetType


def read_questions(path: str | os.PathLike[str]) -> Questions:
    """Return what a TOML file says of a computation: ``name``, ``kind``, the settings of the kind,
    and, where the arrays are made otherwise than the kind does by itself, ``preprocessing``.

    Raises ValueError, which names what is wrong and where.
    """
    try:
        given = msgspec.toml.decode(in_home(path).read_bytes())
    except OSError as error:
        raise ValueError(f"it cannot be read: {in_words(error)}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"this is not TOML: {error}") from None
    name = given.pop("name", None)
    if not isinstance(name, str) or not 1 <= len(name) <= 100:
        raise ValueError("name, the computation's for people, is missing, or not 1 to 100 long")
    told = given.pop("preprocessing", None)
    preprocessing = UNSET if told is None else read_preprocessing(told)
    return Questions(name, read_settings(given), preprocessing)


def read_settings(given: Mapping[str, Any]) -> ComputationSettings:
    """Return a computation's settings from what a TOML or JSON file says of them. Raises
    ValueError, which names what is wrong and where."""
    kind: Any = given.get("kind")
    if kind not in KINDS:
        found = "the key kind is missing" if kind is None else f"kind is {kind!r}"
        raise ValueError(f"{found}; expected one of {', '.join(KINDS)}")
    table = KINDS[kind].settings
    try:
        settings: ComputationSettings = msgspec.convert(given, table)
    except msgspec.ValidationError as error:
        page = PAGES.get(kind, "boosting")
        fault = fault_in_words(error, table)
        raise ValueError(f"{fault}. docs/algorithms/{page}.md says more") from None
    if (problem := settings.contradiction) is not None:
        raise ValueError(problem)
    return settings


def write_computation_bundle(
    target: str | os.PathLike[str],
    name: str,
    settings: ComputationSettings,
    preprocessing: Preprocessing | UnsetType = UNSET,
) -> Path:
    """Write a computation's bundle as one file, the same bytes each time. Returns ``target``.

    name: the bundle's, for people. preprocessing: how the arrays of its batch are made of raw
    data; left out: as the kind of computation does. Raises ValueError where the settings
    contradict themselves, BundleError, OSError.
    """
    if (problem := settings.contradiction) is not None:
        raise ValueError(problem)
    kind, target = KINDS[kind_of(settings)], Path(target)
    most = max(kind.state(settings).size, kind.sums(settings).size)
    if most > MAX_ELEMENTS:  # before memory is taken for them
        raise ValueError(
            f"its state or its sums have {most} numbers; they can have {MAX_ELEMENTS}. Ask for "
            "less: fewer columns, rounds, classes or bins, or less depth"
        )
    state = kind.first(settings)
    manifest = Manifest(
        format=FORMAT,
        version=COMPUTATION_VERSION,
        name=name,
        parameters=(Parameter(STATE_NAME, state.shape, 0),),
        batch=kind.arrays(settings),
        outputs=(),
        hyper=(),
        step=LocalStep("custom"),
        metrics=(),
        files={},
        preprocessing=kind.preprocessing(settings) if preprocessing is UNSET else preprocessing,
        computation=settings,
        sums=kind.sums(settings).size,
        made_by="fleetlearn_protocol",
    )
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        written = write_bundle(
            Path(folder, "bundle"), manifest, {PARAMETERS: save({STATE_NAME: state})}
        )
        return pack_bundle(written, target)
