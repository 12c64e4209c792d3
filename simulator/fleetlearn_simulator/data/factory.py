"""Make the data source that a scenario's [data] asks for."""

from __future__ import annotations

from math import prod
from pathlib import Path

from fleetlearn_device.runtimes.checks import describe
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.manifest import Manifest

from fleetlearn_simulator.data.generators import Cube, Generator, Hospitals, Synthetic
from fleetlearn_simulator.data.npz_source import npz_source, required
from fleetlearn_simulator.data.own_source import DeviceData, OwnSource
from fleetlearn_simulator.data.relabelled import RelabelledSource
from fleetlearn_simulator.data.sources import CachedSource, FunctionSource, GeneratedSource, Source
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.own_algorithms import DATA_SOURCE, allow_plugins, own
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.scenario.sections import DATA, DataSection


def source_of(scenario: Scenario, bundle: Bundle) -> CachedSource:
    """Make the source of a scenario's data. It keeps the arrays of the devices that were used
    last."""
    allow_plugins(scenario)  # each process that trains makes the source
    made = make_source(
        scenario.data, scenario.data.seed, scenario.population.size, bundle.manifest, scenario.base
    )
    if any(corruption.kind == "labels" for corruption in scenario.failures.corrupt):
        made = RelabelledSource(made, scenario)
    return CachedSource(made)


def make_source(
    settings: DataSection, seed: int, population: int, manifest: Manifest, base: Path | None = None
) -> Source:
    """Make the source of the data of devices 0 to population - 1, in the arrays that the bundle
    takes. ``base``: the folder that paths are relative to and in which a function's module is
    looked for. Default: the working directory. Raises SimulatorError.

    Generators make inputs with as many features as the bundle's first array has elements, and
    labels for its second array. The generator ``synthetic`` makes as many classes as the last axis
    of the first output is long.
    """
    base = (base or Path()).absolute()
    if settings.kind not in DATA:
        data = own(DATA_SOURCE, settings.kind, settings.parameters, "data.kind")
        if not isinstance(data, DeviceData):
            raise SimulatorError(
                f'data.kind = "{settings.kind}" returned a {type(data).__name__}; expected an '
                "object with the functions examples, arrays and test (DeviceData)"
            )
        return OwnSource(settings.kind, data, seed, manifest.batch)
    if settings.kind == "function":
        return FunctionSource(
            required(settings, "function"),
            seed,
            manifest.batch,
            settings.path or base,
            settings.examples,
        )
    if settings.kind in ("synthetic", "hospitals", "fcube"):
        return GeneratedSource(_generator(settings, seed, population, manifest), manifest.batch)
    return npz_source(settings, seed, population, manifest.batch, base)


def _generator(settings: DataSection, seed: int, population: int, manifest: Manifest) -> Generator:
    inputs = manifest.batch
    features = prod(inputs[0].shape)
    if len(inputs) != 2 or prod(inputs[1].shape) != 1 or not inputs[0].dtype.startswith("float"):
        raise _misfit(settings, "inputs of floats and a label for each", manifest)
    if settings.kind == "fcube":
        if features != 3:
            raise _misfit(settings, "points of 3 coordinates", manifest)
        return Cube(seed, population, settings.examples or 1000, settings.test)
    if settings.kind == "hospitals":
        return Hospitals(
            seed,
            required(settings, "setup"),
            population,
            features,
            settings.examples or 1000,
            settings.test,
        )
    classes = manifest.outputs[0].shape[-1] if manifest.outputs[0].shape else 1
    if classes < 2:
        raise _misfit(
            settings, "labels of as many classes as the model has outputs, at least 2", manifest
        )
    if settings.power is not None and settings.examples is None:
        raise SimulatorError(
            f"data.power = {settings.power} needs data.examples, the fewest that a device has"
        )
    return Synthetic(
        seed,
        alpha=0.0 if settings.iid else required(settings, "alpha"),
        beta=0.0 if settings.iid else required(settings, "beta"),
        population=population,
        iid=bool(settings.iid),
        features=features,
        classes=classes,
        size=settings.examples,
        power=settings.power,
        largest=settings.largest,
        test_share=settings.test,
    )


def _misfit(settings: DataSection, made: str, manifest: Manifest) -> SimulatorError:
    return SimulatorError(
        f'data.kind = "{settings.kind}" makes {made}; the bundle takes {describe(manifest.batch)} '
        f"and returns {describe(manifest.outputs)}. Export a model for such data, or choose "
        "another kind"
    )
