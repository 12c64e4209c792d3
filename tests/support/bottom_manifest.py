"""The manifest of a bottom, without its graphs."""

from __future__ import annotations

from typing import Any

import msgspec
from fleetlearn_protocol.manifest import (
    ACTIVATIONS,
    EVAL,
    GRADIENT,
    INFER,
    PARAMETERS,
    TRAIN,
    Cut,
    File,
    Input,
    LocalStep,
    Manifest,
    Parameter,
    SplitPart,
)


def bottom_manifest(columns: int = 2, **more: Any) -> Manifest:
    """Return the manifest of a bottom of an array x, float32 (n, columns)."""
    files = (TRAIN, EVAL, INFER, PARAMETERS, ACTIVATIONS)
    made = Manifest(
        format="fleetlearn.bundle",
        version=5,
        name="bank",
        parameters=(Parameter("w", (columns,), 0),),
        batch=(Input("x", "float32", (columns,)), Input(GRADIENT, "float32", (1,))),
        outputs=(Input("output", "float32", (1,)),),
        hyper=(),
        step=LocalStep(),
        metrics=(),
        files={path: File("0" * 64, 100) for path in files},
        split=SplitPart("bottom", (Cut("bank", Input("activations_bank", "float32", (1,))),)),
    )
    return msgspec.structs.replace(made, **more)
