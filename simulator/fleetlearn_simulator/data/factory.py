"""What data the devices of a scenario have."""

from __future__ import annotations

from math import prod
from pathlib import Path

from fleetlearn_device.checks import describe
from fleetlearn_protocol.manifest import Manifest

from fleetlearn_simulator.data.generators import Arrays, Cube, Generator, Hospitals, Synthetic
from fleetlearn_simulator.data.npz_source import given, partition
from fleetlearn_simulator.data.sources import Called, Kept, Made, Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.sections import Data

__all__ = ["Arrays", "Kept", "Source", "make_source"]


def make_source(settings: Data, seed: int, population: int, manifest: Manifest, base: Path | None = None) -> Source:
    """The data of devices 0 to population - 1, in the arrays that the bundle takes. ``base``: what paths are relative
    to, and where a function's module is looked for; default: the working directory. Raises SimulatorError.

    Generators make inputs with as many features as the bundle's first array has elements, and labels for its second;
    synthetic of as many classes as the first output's last axis is long.
    """
    base = (base or Path()).absolute()
    if settings.kind == "function":
        return Called(given(settings, "function"), seed, manifest.batch, settings.path or base, settings.examples)
    if settings.kind in ("synthetic", "hospitals", "fcube"):
        return Made(_generator(settings, seed, population, manifest), manifest.batch)
    return partition(settings, seed, population, manifest.batch, base)


def _generator(settings: Data, seed: int, population: int, manifest: Manifest) -> Generator:
    inputs = manifest.batch
    features = prod(inputs[0].shape)
    if len(inputs) != 2 or prod(inputs[1].shape) != 1 or not inputs[0].dtype.startswith("float"):
        raise _misfit(settings, "inputs of floats and a label for each", manifest)
    if settings.kind == "fcube":
        if features != 3:
            raise _misfit(settings, "points of 3 coordinates", manifest)
        return Cube(seed, population, settings.examples or 1000, settings.test)
    if settings.kind == "hospitals":
        return Hospitals(seed, given(settings, "setup"), population, features, settings.examples or 1000, settings.test)
    classes = manifest.outputs[0].shape[-1] if manifest.outputs[0].shape else 1
    if classes < 2:
        raise _misfit(settings, "labels of as many classes as the model has outputs, at least 2", manifest)
    if settings.power is not None and settings.examples is None:
        raise SimulatorError(f"data.power = {settings.power} needs data.examples, the fewest that a device has")
    return Synthetic(
        seed,
        alpha=0.0 if settings.iid else given(settings, "alpha"),
        beta=0.0 if settings.iid else given(settings, "beta"),
        population=population,
        iid=bool(settings.iid),
        features=features,
        classes=classes,
        size=settings.examples,
        power=settings.power,
        largest=settings.largest,
        test_share=settings.test,
    )


def _misfit(settings: Data, made: str, manifest: Manifest) -> SimulatorError:
    return SimulatorError(
        f'data.kind = "{settings.kind}" makes {made}; the bundle takes {describe(manifest.batch)} and returns '
        f"{describe(manifest.outputs)}. Export a model for such data, or choose another kind"
    )
