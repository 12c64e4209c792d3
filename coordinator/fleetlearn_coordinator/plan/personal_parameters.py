"""Whether what a bundle keeps on the devices is what a recipe or an algorithm needs there."""

from __future__ import annotations

from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.plan.local_algorithms import Personal


def personal_misfit(name: str, personal: Personal | None, manifest: Manifest) -> str | None:
    """Return why recipe or algorithm ``name``, which needs ``personal`` on the devices, cannot run
    this bundle, and what to export instead. None: it can."""
    match personal:
        case "some":
            return _no_personal_parameters(name, manifest)
        case "in turns":
            return _no_personal_parameters(name, manifest) or _cannot_freeze(name, manifest)
        case "normalisation":
            return _not_the_normalisation(name, manifest)
        case "nothing":
            return _keeps_something(name, manifest)
    return None


def _no_personal_parameters(name: str, manifest: Manifest) -> str | None:
    if any(parameter.personal for parameter in manifest.parameters):
        return None
    return (
        f"{name} needs personal parameters, which stay on the devices, and bundle {manifest.name} "
        'has none. Export it with export_bundle(..., personal=["head"]), where "head" is the name '
        "of the model's last layer"
    )


def _cannot_freeze(name: str, manifest: Manifest) -> str | None:
    for switch, why in (
        (
            "clip",
            (
                "clips the gradient of all parameters together, so that frozen ones would change "
                "how the others move"
            ),
        ),
        ("contrastive", "compares with the previous model, which has one phase and not two"),
    ):
        if getattr(manifest.step, switch):
            return (
                f"{name} freezes the personal parameters and the others in turns, and the step of "
                f"bundle {manifest.name} {why}. Export it without {switch}=True"
            )
    return None


def _not_the_normalisation(name: str, manifest: Manifest) -> str | None:
    """FedBN keeps what belongs to normalisation layers on the devices, and nothing else."""
    norms = {*(manifest.normalisation or ())}
    export = f'Export it with export_bundle(..., personal="normalisation") for {name}'
    if not norms:
        return (
            f"{name} keeps normalisation layers on the devices, and the manifest of bundle "
            f"{manifest.name} names none: the model has none of PyTorch's, or an earlier version "
            f"exported it. {export}"
        )
    for parameter in manifest.parameters:
        if parameter.personal and parameter.name not in norms:
            return (
                f"{name} keeps normalisation layers alone on the devices, and in bundle "
                f"{manifest.name} the parameter {parameter.name}, of another layer, is personal "
                "too. "
                f'{export}, or set recipe = "fedper", which takes any personal parameters'
            )
        if parameter.name in norms and not parameter.personal:
            return (
                f"{name} keeps all normalisation layers on the devices, and in bundle "
                f"{manifest.name} the parameter {parameter.name} of such a layer travels. {export}"
            )
    return None


def _keeps_something(name: str, manifest: Manifest) -> str | None:
    kept = [
        *(
            f"the personal parameter {parameter.name}"
            for parameter in manifest.parameters
            if parameter.personal
        ),
        *(f"the state {slot.name}" for slot in manifest.state if slot.kept),
        *(["the previous model"] if "previous" in manifest.references else []),
    ]
    if not kept:
        return None
    return (
        f"{name} has a whole model for each device, and of bundle {manifest.name} devices keep "
        f"{kept[0]} besides. Export it without personal= and kept=, and with a step that does not "
        "read the previous model"
    )
