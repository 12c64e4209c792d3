"""The files that [distil] names: whether they fit the plan's bundles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.distillation import misfit, read_unlabelled, student_inputs
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.npz import NpzError

from fleetlearn_coordinator.plan.plan_for_bundle import PlanError
from fleetlearn_coordinator.plan.plan_keys import PlanKeys


def distillation_bundles(plan: PlanKeys) -> list[Path]:
    """Return the distillation bundle of each of the plan's members, in their order. The plan has
    [distil]."""
    assert plan.distil is not None
    own = [member.distil for member in plan.family.values()] or [plan.distil.bundle]
    if len(own) < len(plan.members):  # they all have the plan's bundle
        own *= len(plan.members)
    return [path for path in own if path is not None]


def check_distillation(plan: PlanKeys, manifests: Mapping[str, Manifest]) -> list[Bundle]:
    """Return the plan's distillation bundles, in the order of its members; none where it has no
    [distil].

    ``manifests``: name of each member -> the manifest of its training bundle. Raises PlanError
    where a bundle is of another model, where the members' models cannot teach each other, and where
    the examples cannot be read or are not what the models take."""
    if plan.distil is None:
        return []
    found = [
        _opened(plan, f"family.{name}.distil" if plan.family else "distil.bundle", path, manifest)
        for (name, manifest), path in zip(
            manifests.items(), distillation_bundles(plan), strict=True
        )
    ]
    first, *others = (bundle.manifest for bundle in found)
    for other in others:
        same = student_inputs(other) == student_inputs(first)
        if not same or other.outputs[0].shape != first.outputs[0].shape:
            text = (
                f"[distil]: the models of bundles {first.name} and {other.name} take other arrays, "
                "or say another number of logits, so that neither can teach the other"
            )
            raise PlanError(Code.BAD_MESSAGE, f"{plan.file}: {text}")
    try:
        read_unlabelled(plan.distil.data, student_inputs(first))
    except NpzError as error:
        raise PlanError(Code.BAD_MESSAGE, f"{plan.file}: distil.data: {error}") from None
    return found


def _opened(plan: PlanKeys, key: str, path: Path, manifest: Manifest) -> Bundle:
    try:
        bundle = open_bundle(path)
        problem = misfit(manifest, bundle.manifest)
    except BundleError as error:
        raise PlanError(error.code, f"{plan.file}: {key}: {error.text}") from None
    if problem is not None:
        raise PlanError(Code.BAD_MESSAGE, f"{plan.file}: {key}: {problem}")
    return bundle
