"""Writes a bundle that has a computation in place of graphs. No PyTorch is needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from safetensors.numpy import save

from fleetlearn_protocol.bundle import pack_bundle, write_bundle
from fleetlearn_protocol.computations.kinds import KINDS, kind_of
from fleetlearn_protocol.computations.settings import ComputationSettings
from fleetlearn_protocol.manifest import (
    COMPUTATION_VERSION,
    FORMAT,
    PARAMETERS,
    LocalStep,
    Manifest,
    Parameter,
)
from fleetlearn_protocol.preprocessing import Preprocessing

STATE_NAME = "computation.state"
"""The only row of the parameter table."""


def read_settings(given: Mapping[str, Any]) -> ComputationSettings:
    """Return a computation's settings from what a TOML or JSON file says of them. Raises
    ValueError, which names what is wrong and where."""
    try:
        settings: ComputationSettings = msgspec.convert(given, ComputationSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}. PROTOCOL.md, section 15, lists what there is") from None
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
