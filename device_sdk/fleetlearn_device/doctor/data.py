"""The device's data against a bundle, before the first task does that."""

from __future__ import annotations

from fleetlearn_protocol.bundle import Bundle, open_bundle
from fleetlearn_protocol.manifest import Manifest

from fleetlearn_device.doctor.finding import Finding, Findings
from fleetlearn_device.runtimes.checks import DataError, check_batch, describe, find_nonfinite
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.task_data import TaskDataMaker

ROWS = 1024
"""Examples that are looked at at a time."""


def check_data(source: str, manifest: Manifest | None) -> Findings:
    """Check data against a bundle's batch. None: no bundle is known, and the data are only read.

    What the device's first task would say is said here: array, example and value.
    """
    try:
        data = open_data(source)
    except DataError as error:
        yield Finding("data", "bad", str(error), "mend the data, or name others with --data")
        return
    if manifest is None:
        found = f"{source}: {data.examples} examples"
        do = "`fleetlearn-device check DATA BUNDLE` tells whether they fit a bundle"
        yield Finding("data", "unknown", f"{found}; no bundle is here to compare them with", do)
        return
    wants = f"the bundle {manifest.name} takes {describe(manifest.batch)}"
    try:
        fitting = TaskDataMaker(data).of(manifest).training.fit(manifest.batch)
        odd = None
        first = 0
        for batch in fitting.batches(ROWS, None):
            arrays = check_batch(batch, manifest.batch)
            odd = odd or find_nonfinite(arrays, manifest.batch, first)
            first += len(arrays[0])
    except DataError as error:
        text = str(error)
        shown = text if source in text else f"{source}: {text}"
        yield Finding("data", "bad", shown, f"mend the data: {wants}")
        return
    yield Finding("data", "good", f"{source}: {first} examples fit; {wants}")
    if odd is not None:
        do = "mend it, unless the model takes that for a missing value"
        yield Finding("data", "warning", f"{source}: {odd}", do)


def read_bundle(path: str) -> Manifest:
    """Return the manifest of a bundle, a folder or a zip file. Raises FleetError."""
    bundle: Bundle = open_bundle(path)
    return bundle.manifest
