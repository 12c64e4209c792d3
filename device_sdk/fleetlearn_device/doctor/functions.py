"""The functions that the device's owner allows, against a bundle's, before the first task."""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.manifest import Manifest

from fleetlearn_device.computations.functions import bound, sum_up_function
from fleetlearn_device.doctor.finding import Finding, Findings
from fleetlearn_device.own_code import FunctionError, OwnFunctions, read_functions
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.task_data import TaskDataMaker

MEND = "mend the function, or the bundle's declaration of it (docs/algorithms/functions.md)"


def check_functions(
    allowed: Iterable[str], manifest: Manifest | None, source: str | None = None
) -> Findings:
    """Check that the allowed functions are there, and the bundle's function among them. With data,
    it is called with them, as the first task does."""
    texts = [*allowed]
    settings = None if manifest is None else manifest.computation
    if not texts and not isinstance(settings, FunctionSums):
        return
    try:
        functions = read_functions(texts)
    except FunctionError as error:
        do = "install its package, or change --allow-function"
        yield Finding("functions", "bad", str(error), do)
        return
    if not isinstance(settings, FunctionSums) or manifest is None:
        yield Finding("functions", "good", f"runs may compute by {', '.join(functions)}")
        return
    try:
        bound(settings, functions)
    except FunctionError as error:
        yield Finding("functions", "bad", str(error), "allow it, if you trust it with the data")
        return
    if source is None:
        yield Finding("functions", "good", f"{settings.device} is allowed")
        return
    yield from _called(settings, functions, manifest, source)


def _called(
    settings: FunctionSums, functions: OwnFunctions, manifest: Manifest, source: str
) -> Findings:
    # Late: it imports what all kinds of computations compute with.
    from fleetlearn_protocol.computations.kinds import KINDS

    from fleetlearn_device.training.computing import RowCount

    counted = RowCount()
    try:
        data = TaskDataMaker(open_data(source)).of(manifest)
        rows = counted.rows_of(manifest, data)
        sum_up_function(KINDS["function"].first(settings), rows, settings, functions)
    except DataError:  # check_data says so
        return
    except FunctionError as error:
        yield Finding("functions", "bad", str(error), MEND)
        return
    found = f"{settings.device} returned what the bundle declares, of {counted.rows} rows"
    yield Finding("functions", "good", found)
