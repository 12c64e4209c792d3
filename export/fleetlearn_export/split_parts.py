"""Exports the parts of a split model: for each party a bottom, and one top that all of them
share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
from fleetlearn_protocol import BundleError, open_bundle
from fleetlearn_protocol.manifest import GRADIENT, Cut, Input, LocalStep, SplitPart
from fleetlearn_protocol.paths import in_home
from torch import Tensor, nn

from fleetlearn_export.errors import ExportError
from fleetlearn_export.export_settings import ExportSettings
from fleetlearn_export.model.arguments import (
    array_row,
    check_name,
    default_array_names,
    named_batch,
)
from fleetlearn_export.model.cut import cut_model
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.steps import Function
from fleetlearn_export.model.user_model import evaluation_mode
from fleetlearn_export.written_bundle import Exported, ExportedParts, publish, write_exported

TOP = "top.bundle"
DEVICE = "device"
"""The party of a model that is split at a layer."""


class _Joined(nn.Module):
    """``top``, whose input is the activations of all parties side by side, on axis 1."""

    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.top = top

    def forward(self, *activations: Tensor) -> Any:
        return self.top(torch.cat(activations, 1))


def export_vertical(
    parties: Mapping[str, tuple[nn.Module, Sequence[Any]]],
    top: nn.Module,
    loss: Function,
    targets: Sequence[Any] | Any,
    path: str | PathLike[str],
    *,
    step: LocalStep | None = None,
    metrics: Mapping[str, Function] | None = None,
    hyper: Mapping[str, float | None] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    target_names: Sequence[str] | None = None,
    joined: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
) -> ExportedParts:
    """Write the bundles of a model that two or more parties train together, each with its own
    features of the same rows (SplitNN: Vepakomma, Gupta, Swedish, Raskar 2018, arXiv 1812.00564).

    Args:
        parties: Party's name -> its bottom, and an example of its arrays: a tuple such as ``(x,)``,
            of as many rows for each party. The bottom returns one float32 tensor (n, ...).
        top: Takes the activations of all parties, in their order here, and returns what the loss
            reads.
        loss: ``loss(outputs, *targets)``: a scalar, the mean over the batch.
        targets: The targets of the example's rows: an array, or a tuple of arrays.
        path: The folder, which gets ``NAME.bundle`` for each party and ``top.bundle``. A party
            needs its own bundle alone, the coordinator the top alone.
        step: The optimizer of all parts, each for its own parameters: LocalStep with ``optimizer``
            and ``weight_decay``.
        metrics: As for ``export_bundle``.
        hyper: Default values of the step's hyper-parameters.
        names: Party -> the names of its arrays; ``x`` unless given, numbered if several.
        target_names: ``y`` unless given, numbered if several.
        joined: Whether the top gets one tensor, the activations side by side on axis 1. Otherwise
            it gets one argument for each party.
        progress: Called with a few words at the beginning of each stage.

    Each part is compared with PyTorch as ``export_bundle`` does; also a bottom's forward pass, and
    the top's gradients for the activations. The folder appears complete or not at all.

    Raises ExportError.
    """
    given = targets if isinstance(targets, tuple | list) else (targets,)
    if not parties:
        raise ExportError("parties={} is empty; expected a bottom and an example for each party")
    folder = checked_folder(path)
    settings = part_settings(step, hyper, progress)
    row_names = list(target_names or default_array_names(1, len(given))[1:])
    modules, arrays = {}, dict[tuple[str, str], Any]()
    for party, row in parties.items():
        if not isinstance(row, tuple) or len(row) != 2 or not isinstance(row[0], nn.Module):
            raise ExportError(f"parties[{party!r}] is no tuple (module, example)")
        modules[party], example = row
        own = (names or {}).get(party) or default_array_names(len(example), 0)
        if len(own) != len(example):
            raise ExportError(f"names {own} for {len(example)} arrays of {party}")
        arrays |= {(party, name): array for name, array in zip(own, example, strict=True)}
    # All in one call, so that each keeps the same rows.
    numbered = [f"array{number}" for number in range(len(arrays))]
    if len(row_names) != len(given):
        raise ExportError(f"target_names {row_names} for {len(given)} targets")
    batch = named_batch([*arrays.values(), *given], [*numbered, *row_names], len(given))
    kept = dict(zip(arrays, (batch[name] for name in numbered), strict=True))
    bottoms = {
        party: _Bottom(module, {name: kept[owner, name] for owner, name in kept if owner == party})
        for party, module in modules.items()
    }
    whole = _Joined(top) if joined and len(bottoms) > 1 else top
    rows = [batch[name] for name in row_names]
    return _write_parts(folder, bottoms, whole, loss, rows, row_names, metrics, settings)


def export_split(
    model: nn.Module,
    loss: Function,
    example: Sequence[Any],
    path: Path,
    layer: str,
    settings: ExportSettings,
    *,
    metrics: Mapping[str, Function] | None,
    names: Sequence[str] | None,
    targets: int,
) -> ExportedParts:
    """Write the two parts of a model that is divided at a layer, as ``export_bundle`` says under
    ``split``. Raises ExportError."""
    batch = named_batch(example, names, targets)
    arrays = dict(list(batch.items())[: len(batch) - targets])
    cut = cut_model(model, layer, list(arrays.values()))
    given = [value for name, value in batch.items() if name not in arrays]
    row_names = [name for name in batch if name not in arrays]
    bottoms = {DEVICE: _Bottom(cut.bottom, arrays)}
    folder = checked_folder(path)
    return _write_parts(folder, bottoms, cut.top, loss, given, row_names, metrics, settings)


def part_settings(
    step: LocalStep | Function | None,
    hyper: Mapping[str, float | None] | None,
    progress: Callable[[str], None],
) -> ExportSettings:
    """Return the settings of a split model's parts. Raises ExportError on a step that such a model
    cannot have."""
    rule = LocalStep() if step is None else step
    if not isinstance(rule, LocalStep) or rule != LocalStep(
        rule.optimizer, weight_decay=rule.weight_decay
    ):
        given = rule if isinstance(rule, LocalStep) else getattr(rule, "__name__", type(rule))
        raise ExportError(
            f"the step of a split model is {given}; expected a LocalStep with `optimizer` and "
            "`weight_decay` alone: no part has the gradient of the whole model, which clipping "
            "needs, and there is no round whose model the others refer to"
        )
    return ExportSettings.plain(rule, hyper, progress)


class _Bottom(NamedTuple):
    """One party's module, and its arrays of the example."""

    module: nn.Module
    arrays: dict[str, Tensor]


def _write_parts(
    folder: Path,
    bottoms: Mapping[str, _Bottom],
    top: nn.Module,
    loss: Function,
    targets: Sequence[Any],
    target_names: Sequence[str],
    metrics: Mapping[str, Function] | None,
    settings: ExportSettings,
) -> ExportedParts:
    temporary = folder.with_name(f".{folder.name}.{token_hex(4)}.part")
    temporary.mkdir()
    try:
        cuts, outputs, written = [], [], dict[str, Exported]()
        for name, bottom in bottoms.items():
            settings.progress(f"the bottom of {name}")
            activations = _activations(name, bottom)
            cut = Cut(name, _row(name, activations))
            written[name] = _write_bottom(temporary, bottom, cut, activations, settings)
            cuts.append(Cut(name, cut.activations, written[name].bundle.sha256))
            outputs.append(activations)
        settings.progress("the top")
        made = write_exported(
            top,
            loss,
            (*outputs, *targets),
            temporary / TOP,
            settings._replace(split=SplitPart("top", tuple(cuts))),
            metrics=metrics,
            names=[*(cut.activations.name for cut in cuts), *target_names],
            targets=len(targets),
            name="top",
        )
        publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ExportedParts(
        folder,
        {
            name: row.bundle._replace(path=folder / f"{name}.bundle")
            for name, row in written.items()
        },
        made.bundle._replace(path=folder / TOP),
        max(made.difference, *(row.difference for row in written.values())),
    )


def _activations(name: str, bottom: _Bottom) -> Tensor:
    """Return what the bottom makes of the example. Raises ExportError unless it is what a top
    takes."""
    check_name("party", name)
    if not name.isidentifier() or f"{name}.bundle" == TOP:
        raise ExportError(f"party {name!r}; expected a name such as bank, and not top")
    if GRADIENT in bottom.arrays:
        raise ExportError(f"an array of {name} is named {GRADIENT}, which is the split's own")
    what = f"the bottom of {name} fails in PyTorch itself"
    with evaluation_mode(bottom.module), torch.no_grad(), as_export_error(what):
        made = bottom.module(*(value.clone() for value in bottom.arrays.values()))
    rows = len(next(iter(bottom.arrays.values())))
    fits = isinstance(made, Tensor) and made.dtype == torch.float32 and made.dim() > 1
    if not fits or len(made) != rows:
        found = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made)
        raise ExportError(
            f"the bottom of {name} gives {found} for {rows} rows; expected one float32 tensor "
            "(n, ...)"
        )
    activations: Tensor = made
    return activations


def _row(party: str, activations: Tensor) -> Input:
    return array_row(f"activations_{party}", activations)


def _write_bottom(
    folder: Path, bottom: _Bottom, cut: Cut, activations: Tensor, settings: ExportSettings
) -> Exported:
    # Gradients of any size and sign: the step is compared with PyTorch on them.
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(activations.shape, generator=random)
    return write_exported(
        bottom.module,
        product_loss,
        (*bottom.arrays.values(), gradient),
        folder / f"{cut.party}.bundle",
        settings._replace(split=SplitPart("bottom", (cut,))),
        names=[*bottom.arrays, GRADIENT],
        name=cut.party,
    )


def product_loss(activations: Tensor, gradient: Tensor) -> Tensor:
    """Return a loss whose gradient with respect to a row's activations is that row's ``gradient``,
    divided by the number of rows."""
    return (activations * gradient).flatten(1).sum(1).mean()


def checked_folder(path: str | PathLike[str]) -> Path:
    """Return the absolute path of the folder for the parts. Raises ExportError if something other
    than the parts of a split model is there."""
    try:
        folder = in_home(path).resolve()
    except ValueError as error:
        raise ExportError(f"the parts cannot be written: {error}") from None
    if not folder.parent.is_dir():
        raise ExportError(f"{folder.parent} is not a folder; {folder.name} would be written there")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        try:
            open_bundle(folder / TOP, files=())
        except BundleError as error:
            raise ExportError(
                f"{folder} exists and has no parts of a split model, so it is not replaced: {error}"
            ) from None
    return folder
