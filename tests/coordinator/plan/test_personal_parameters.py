"""Which bundles the recipes with personal parameters take, and what is said of the others."""

from __future__ import annotations

import msgspec
import pytest
from fleetlearn_coordinator.plan.personal_parameters import personal_misfit
from fleetlearn_protocol.manifest import LocalStep, Manifest, Parameter

ROWS = ("body.weight", "norm.weight", "norm.running_mean", "head.weight")
NORMS = ROWS[1:3]


def bundle(*personal: str, norms: tuple[str, ...] = NORMS) -> Manifest:
    return Manifest(
        format="fleetlearn.bundle",
        version=1,
        name="digits",
        parameters=tuple(Parameter(name, (), row, personal=name in personal) for row, name in enumerate(ROWS)),
        batch=(),
        outputs=(),
        hyper=(),
        step=LocalStep(),
        metrics=(),
        files={},
        normalisation=norms or msgspec.UNSET,
    )


@pytest.mark.parametrize(
    ("recipe", "manifest"),
    [
        ("fedavg", bundle()),
        ("fedavg", bundle("head.weight")),
        ("fedper", bundle("head.weight")),
        ("fedper", bundle(*NORMS)),
        ("fedbn", bundle(*NORMS)),
    ],
)
def test_bundles_that_fit(recipe: str, manifest: Manifest) -> None:
    assert personal_misfit(recipe, manifest) is None


NONE = (
    "recipe fedper needs personal parameters, which stay on the devices, and bundle digits has none. Export it with "
    'export_bundle(..., personal=["head"]), where "head" is the name of the model\'s last layer'
)
EXPORT = 'Export it with export_bundle(..., personal="normalisation") for recipe fedbn'


@pytest.mark.parametrize(
    ("recipe", "manifest", "said"),
    [
        ("fedper", bundle(), NONE),
        (
            "fedbn",
            bundle("head.weight", norms=()),
            "recipe fedbn keeps normalisation layers on the devices, and the manifest of bundle digits names none: the "
            f"model has none of PyTorch's, or an earlier version exported it. {EXPORT}",
        ),
        (
            "fedbn",
            bundle(*NORMS, "head.weight"),
            "recipe fedbn keeps normalisation layers alone on the devices, and in bundle digits the parameter "
            f'head.weight, of another layer, is personal too. {EXPORT}, or set recipe = "fedper", which takes any '
            "personal parameters",
        ),
        (
            "fedbn",
            bundle("norm.weight"),
            "recipe fedbn keeps all normalisation layers on the devices, and in bundle digits the parameter "
            f"norm.running_mean of such a layer travels. {EXPORT}",
        ),
    ],
)
def test_bundles_that_do_not_fit_are_refused_with_what_to_export(recipe: str, manifest: Manifest, said: str) -> None:
    assert personal_misfit(recipe, manifest) == said
