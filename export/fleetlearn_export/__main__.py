"""The command ``fleetlearn-export``."""

from __future__ import annotations

import importlib
import inspect as signatures
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from fleetlearn_protocol import BundleError, open_bundle
from fleetlearn_protocol.command_line import needs
from fleetlearn_protocol.errors import in_words

from fleetlearn_export.errors import ExportError
from fleetlearn_export.installation import check_installation

if TYPE_CHECKING:
    from fleetlearn_export.written_bundle import Exported

with needs("fleetlearn-export", "export"):
    import typer
    from fleetlearn_protocol.typer_app import command_app, fail
    from rich import box
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table

COMMANDS = ("export", "inspect", "quantize")

app = command_app("fleetlearn-export", "PyTorch model to training bundle.")

BatchSize = Annotated[
    int, typer.Option("--batch", min=1, help="Examples in the batch for which costs are given.")
]


def main() -> None:
    """``fleetlearn-export MODULE:FUNCTION --output DIR`` is short for
    ``fleetlearn-export export ...``."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] not in (*COMMANDS, "--help", "--version"):
        arguments.insert(0, "export")
    app(arguments)


@app.command()
def export(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help=(
                "A function without arguments that returns a dict: the arguments of "
                "fleetlearn_export.export_bundle but path, so at least model, loss and example. "
                "The module is looked for in the current folder too."
            ),
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The bundle's folder; an older bundle there is replaced."),
    ],
    batch: BatchSize = 20,
    distillation: Annotated[
        bool,
        typer.Option(
            "--distillation",
            help="Write the bundle with which a coordinator distils the model, for distil.bundle "
            "of a plan.",
        ),
    ] = False,
) -> None:
    """Export a PyTorch model as a training bundle, and say what it holds."""
    with _errors_as_one_line():
        check_installation()
        from fleetlearn_export.bundle import export_bundle
        from fleetlearn_export.distillation import distillation_of, export_distillation
        from fleetlearn_export.inspection.summary import Line, summary

        _check_folder(output)
        arguments = _arguments(function)
        try:
            signatures.signature(export_bundle).bind(path=output, **arguments)
        except TypeError as error:
            raise ExportError(
                f"{function} returned {sorted(arguments)}, not export_bundle's arguments: {error}"
            ) from None
        write: Callable[..., Exported] = export_bundle
        if distillation:
            write, arguments = export_distillation, distillation_of(arguments)
        with _stages() as stage:
            made = write(path=output, **{"progress": stage, **arguments})
            stage("measuring what a step costs")
            groups = summary(
                made.bundle,
                batch,
                frozen=made.frozen,
                without_gradient=made.without_gradient,
                outputs_left_out=made.outputs_left_out,
                without_ort_training=made.without_ort_training,
            )
        checked = [Line("checked", f"largest difference from PyTorch {made.difference:.1e}")]
        if made.operators:
            checked.append(Line("", made.operators))
        if not made.batch_of_one:
            checked.append(
                Line("", "a batch of one example cannot be trained on, in PyTorch either")
            )
        if made.effect_of_rounding is not None:
            effect = (
                f"rounding what is frozen changes an output by {100 * made.effect_of_rounding:.2g} "
                "% of the largest"
            )
            checked.append(Line("", effect))
        by_pytorch = [
            Line("by PyTorch's exporter", f"{graph}, since our own table lacks {reason}")
            for graph, reason in made.by_pytorch.items()
        ]
        _show(made.bundle.manifest.name, [*groups, checked, by_pytorch])


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's folder or zip.")],
    batch: BatchSize = 20,
) -> None:
    """Check a bundle's files and say what it holds."""
    with _errors_as_one_line():
        check_installation()
        from fleetlearn_export.inspection.summary import summary

        opened = open_bundle(bundle)
        _show(opened.manifest.name, summary(opened, batch))


@app.command()
def quantize(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE|INFER.ONNX", help="A trained infer.onnx, or a bundle: its first model."
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="SET.npz",
            help="Examples: arrays named as the model's inputs and, to score it, y.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The int8 ONNX file to write.")
    ],
) -> None:
    """Write an int8 model for faster and smaller inference, and say how it differs on a set."""
    with _errors_as_one_line():
        check_installation()
        from fleetlearn_export.inspection.summary import Line
        from fleetlearn_export.quantize import quantize, read_data, read_model

        with _stages() as stage:
            stage("reading")
            content, targets = read_model(model)
            arrays = read_data(data)
            stage("measuring ranges, and comparing")
            made = quantize(content, arrays, targets)
        draft = output.with_name(f".{output.name}.draft")
        try:
            draft.write_bytes(made.content)
            draft.replace(output)
        except OSError as error:
            raise ExportError(f"{output} cannot be written: {in_words(error)}") from None
        kinds = ", ".join(f"{name} {count}" for name, count in made.operators.items())
        weights = "{:,} of {:,} in 8 bits".format(*made.elements)
        size = f"{made.size_before:,} -> {len(made.content):,} bytes"
        lines = [
            Line("written", str(output)),
            Line("made of", str(model)),
            Line("size", size),
            Line("weights", weights),
            Line("operators", kinds),
        ]
        compared = [
            Line("examples", f"{made.examples:,}"),
            *(
                Line(
                    score.name,
                    f"{score.before:.4g} -> {score.after:.4g}"
                    + f"  ({name})" * (len(made.scores) > 1),
                )
                for name, score in made.scores.items()
            ),
            Line("difference", f"{made.largest:.3g} at most, {made.mean:.3g} in the mean"),
            Line("", f"of outputs up to {made.magnitude:.3g}"),
        ]
        if not made.scores:
            compared.append(
                Line("accuracy", "not told: the set has no targets that fit the outputs")
            )
        _show(f"{output.name}, int8", [lines, compared])


@contextmanager
def _errors_as_one_line() -> Iterator[None]:
    """Print errors that the user can correct as one line on standard error, and exit with 1."""
    try:
        yield
    except (ExportError, BundleError, ImportError) as error:
        fail("fleetlearn-export", in_words(error))


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """Yield a function to call at the beginning of each stage. On a terminal, standard error shows
    stages and times.

    It writes to a copy of standard error, because ``silenced_process`` redirects the process's own.
    """
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as file:
        console = Console(file=file)
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        progress = Progress(
            *columns,
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )

        def finish() -> None:
            for task in progress.task_ids:
                progress.update(task, completed=1)

        def stage(text: str) -> None:
            finish()
            progress.add_task(text, total=1)

        with progress:
            yield stage
            finish()


def _check_folder(output: Path) -> None:
    """Raise ExportError if nothing can be written beside ``output``, before an export takes its
    time."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=output.parent):
            pass
    except OSError as error:
        raise ExportError(
            f"--output {output}: nothing can be written in {output.parent}: {in_words(error)}"
        ) from None


def _arguments(function: str) -> dict[str, Any]:
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        raise ExportError(
            f"{function!r} was given; expected MODULE:FUNCTION, such as examples.digits:export"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, and an import in it failed
        raise ExportError(
            f"there is no module {error.name} here or among the installed ones"
        ) from None
    if not callable(getattr(module, name, None)):
        raise ExportError(f"module {module_name} ({module.__file__}) has no function {name}")
    arguments = getattr(module, name)()
    if not isinstance(arguments, dict):
        raise ExportError(
            f"{function} returned a {type(arguments).__name__}; expected a dict of export_bundle's "
            "arguments"
        )
    return arguments


def _show(title: str, groups: Iterable[Iterable[tuple[str, str]]]) -> None:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=box.ROUNDED
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for group in groups:
        table.add_section()
        for label, text in group:
            table.add_row(label, text)
    # A name may contain brackets, which would be read as markup.
    Console(markup=False, highlight=False).print(table)


if __name__ == "__main__":
    main()
