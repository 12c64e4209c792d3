"""The command ``fleetlearn-export``."""

from __future__ import annotations

import importlib
import inspect as signatures
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:  # pragma: no cover
    sys.exit(f"fleetlearn-export: {error}. Install with: pip install 'fleetlearn[export]'")
from fleetlearn_protocol import Bundle, BundleError, open_bundle
from fleetlearn_protocol.manifest import TRAIN

from fleetlearn_export.errors import ExportError
from fleetlearn_export.installation import check_installation

if TYPE_CHECKING:
    from fleetlearn_export.bundle import Exported

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """``fleetlearn-export MODULE:FUNCTION --output DIR`` is short for ``fleetlearn-export export ...``."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in ("export", "inspect", "--help"):
        arguments.insert(0, "export")
    app(arguments)


@app.command()
def export(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns a dict: the arguments of fleetlearn_export.export_bundle "
            "but path, so at least model, loss and example. The module is looked for in the current folder too.",
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="The bundle's folder; an older bundle there is replaced.")
    ],
) -> None:
    """Export a PyTorch model as a training bundle, and say what it holds."""
    console = Console()
    try:
        check_installation()
        from fleetlearn_export.bundle import export_bundle

        arguments = _arguments(function)
        try:
            signatures.signature(export_bundle).bind(path=output, **arguments)
        except TypeError as error:
            raise ExportError(
                f"{function} returned {sorted(arguments)}, not export_bundle's arguments: {error}"
            ) from None
        with console.status(f"Exporting {function}, and checking it against PyTorch"):
            exported = export_bundle(path=output, **arguments)
    except (ExportError, ImportError) as error:
        _stop(error)
    show(console, exported.bundle, exported)


@app.command()
def inspect(bundle: Annotated[Path, typer.Argument(help="A bundle's folder or zip.")]) -> None:
    """Check a bundle's files and say what it holds."""
    try:
        check_installation()
        show(Console(), open_bundle(bundle))
    except (BundleError, ImportError) as error:
        _stop(error)


def _stop(error: Exception) -> None:
    Console(stderr=True, soft_wrap=True).print(
        f"fleetlearn-export: {error}", style="red", markup=False, highlight=False
    )
    raise typer.Exit(1) from None


def _arguments(function: str) -> dict[str, Any]:
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        raise ExportError(f"{function!r} was given; expected MODULE:FUNCTION, such as examples.digits:export")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise ExportError(f"there is no module {error.name} here or among the installed ones") from None
    if not callable(getattr(module, name, None)):
        raise ExportError(f"module {module_name} ({module.__file__}) has no function {name}")
    arguments = getattr(module, name)()
    if not isinstance(arguments, dict):
        raise ExportError(
            f"{function} returned a {type(arguments).__name__}; expected a dict of export_bundle's arguments"
        )
    return arguments


def show(console: Console, bundle: Bundle, exported: Exported | None = None) -> None:
    """Print a bundle's summary."""
    import onnx

    manifest = bundle.manifest
    trained = [row for row in manifest.parameters if not row.buffer]
    buffers = [row for row in manifest.parameters if row.buffer]
    graph = onnx.load_model_from_string(bundle.read(TRAIN)).graph
    operators = Counter(node.op_type for node in graph.node)
    step = manifest.step.optimizer + (" with proximal term" if manifest.step.proximal else "")

    table = Table(title=f"{manifest.name}  ({bundle.path})", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("bundle", bundle.sha256)
    table.add_row("parameters", f"{sum(prod(row.shape) for row in trained):,} in {len(trained)} tensors")
    if buffers:
        table.add_row("buffers", f"{sum(prod(row.shape) for row in buffers):,} in {len(buffers)} tensors")
    table.add_row("bytes per round", f"{4 * manifest.size:,} down, {4 * manifest.size:,} up")
    table.add_row(
        "batch", ", ".join(f"{row.name}: {row.dtype} {('n', *row.shape)}".replace("'", "") for row in manifest.batch)
    )
    table.add_row("step", step)
    table.add_row(
        "hyper-parameters",
        ", ".join(f"{row.name} ({'the plan says' if row.default is None else row.default})" for row in manifest.hyper),
    )
    table.add_row("metrics", ", ".join(manifest.metrics) or "none")
    table.add_row("train.onnx", f"{len(graph.node)} operators of opset {manifest.opset}, IR {manifest.ir_version}")
    table.add_row("", ", ".join(f"{name} {count}" for name, count in operators.most_common()))
    table.add_row("ort_training", "yes" if manifest.has_ort_training else "no")
    if exported and exported.without_ort_training:
        table.add_row("", exported.without_ort_training)
    table.add_row(
        "files", f"{sum(file.size for file in manifest.files.values()):,} bytes in {len(manifest.files)} files"
    )
    if exported:
        table.add_row("checked", f"largest difference from PyTorch {exported.difference:.1e}")
        if not exported.batch_of_one:
            table.add_row("", "a batch of one example cannot be trained on, in PyTorch either")
    console.print(table)


if __name__ == "__main__":
    main()
