"""``fleetlearn-coordinator public-bundle``: the bundle of a run whose devices tell class scores of
public examples, and keep their models (FedMD)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.typer_app import say

from fleetlearn_coordinator.commands.exits import expected_errors

app = typer.Typer()


@app.command("public-bundle")
def public_bundle(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA.npz", help="Examples without labels, as the models take them."
        ),
    ],
    classes: Annotated[int, typer.Option(help="Classes that each model scores.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle's file.")],
    array: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An array of the file that models take. Default: x."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What each device measures of its own model."),
    ] = None,
    name: Annotated[str, typer.Option(help="The bundle's name, for people.")] = "public examples",
) -> None:
    """Write the bundle of a run whose devices tell class scores alone (FedMD). It needs no
    PyTorch."""
    from fleetlearn_protocol.npz import NpzError, read_npz
    from fleetlearn_protocol.public_examples import write_public_bundle

    names = array or ["x"]
    with expected_errors():
        try:
            given = read_npz(data, lambda there: [each for each in names if each in there])
            if missing := [each for each in names if each not in given]:
                raise NpzError(f"{data} has no array {missing[0]}. Name the arrays: --array NAME")
            arrays = {each: given[each] for each in names}
            write_public_bundle(output, name, arrays, classes, metric or ())
        except ValueError as error:
            raise FleetError(Code.BAD_MESSAGE, str(error)) from None
    count = len(next(iter(arrays.values())))
    say(
        f"wrote {count} public examples to {output}: in each round a device fetches and sends "
        f"{4 * count * classes} bytes of class scores"
    )
