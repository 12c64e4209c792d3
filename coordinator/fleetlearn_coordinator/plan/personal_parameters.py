"""Whether the parameters that a bundle keeps on the devices are those that a recipe needs there."""

from __future__ import annotations

from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.plan.recipes import RECIPES


def personal_misfit(name: str, manifest: Manifest) -> str | None:
    """Return why recipe ``name`` cannot run this bundle, and what to export instead; None if it can."""
    match RECIPES[name].personal:
        case "some":
            return _lacks_personal(name, manifest)
        case "normalisation":
            return _not_the_normalisation(name, manifest)
    return None


def _lacks_personal(name: str, manifest: Manifest) -> str | None:
    if any(row.personal for row in manifest.parameters):
        return None
    return (
        f"recipe {name} needs personal parameters, which stay on the devices, and bundle {manifest.name} has none. "
        'Export it with export_bundle(..., personal=["head"]), where "head" is the name of the model\'s last layer'
    )


def _not_the_normalisation(name: str, manifest: Manifest) -> str | None:
    """FedBN keeps what belongs to normalisation layers on the devices, and nothing else."""
    norms = {*(manifest.normalisation or ())}
    export = f'Export it with export_bundle(..., personal="normalisation") for recipe {name}'
    if not norms:
        return (
            f"recipe {name} keeps normalisation layers on the devices, and the manifest of bundle {manifest.name} "
            f"names none: the model has none of PyTorch's, or an earlier version exported it. {export}"
        )
    for row in manifest.parameters:
        if row.personal and row.name not in norms:
            return (
                f"recipe {name} keeps normalisation layers alone on the devices, and in bundle {manifest.name} the "
                f'parameter {row.name}, of another layer, is personal too. {export}, or set recipe = "fedper", which '
                "takes any personal parameters"
            )
        if row.name in norms and not row.personal:
            return (
                f"recipe {name} keeps all normalisation layers on the devices, and in bundle {manifest.name} the "
                f"parameter {row.name} of such a layer travels. {export}"
            )
    return None
