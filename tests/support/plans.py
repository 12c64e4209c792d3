"""For tests of plans: the shortest plan, and a manifest for it."""

from __future__ import annotations

from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    INFER,
    PARAMETERS,
    TRAIN,
    File,
    Hyper,
    Input,
    LocalStep,
    Manifest,
    Parameter,
)
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest

SMALL = 'name = "a"\nbundle = "a.bundle"\n[round]\ngoal = 4\n'
PRIVATE = "[privacy]\nnoise = 1.0\ndelta = 1e-6\npopulation = 1000\nclip = 0.5\n"
"""The shortest [privacy]."""
SECURE = (
    '[secure]\nmode = "helper"\nhelper = "https://helper.example:8770"\n'
    f'key = "{"a" * 64}"\ncertificate = "{"b" * 64}"\nclip = 0.5\n'
)
"""The shortest [secure] without [privacy]."""
PAIRWISE = '[secure]\nmode = "pairwise"\nclip = 0.5\n'
"""The same without a helper."""


def manifest(
    *,
    proximal: bool = True,
    step: LocalStep | None = None,
    hyper: tuple[Hyper, ...] = (Hyper("lr"), Hyper("mu")),
    metrics: tuple[str, ...] = ("accuracy",),
) -> Manifest:
    """Through its bytes, so that it is one that a bundle may have."""
    made = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name="digits",
        parameters=(Parameter("w", (2, 3), 0),),
        batch=(Input("x", "float32", (2,)),),
        outputs=(Input("scores", "float32", (3,)),),
        hyper=hyper,
        step=step or LocalStep("sgd", proximal=proximal),
        references=("anchor", "correction", "previous")
        if step
        else ("anchor",)
        if proximal
        else (),
        metrics=metrics,
        files={path: File("0" * 64, 1) for path in (TRAIN, EVAL, INFER, PARAMETERS)},
    )
    return read_manifest(write_manifest(made))
