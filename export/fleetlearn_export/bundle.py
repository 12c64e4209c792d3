"""``export_bundle``: makes a training bundle from a PyTorch model and writes it to disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fleetlearn_protocol.manifest import LocalStep, TrainMany
from fleetlearn_protocol.preprocessing import Preprocessing
from torch import nn

from fleetlearn_export.errors import ExportError
from fleetlearn_export.export_settings import ExportSettings
from fleetlearn_export.graphs.half_precision import Compute
from fleetlearn_export.inspection.memory_budget import memory_budget
from fleetlearn_export.model.arguments import Targets
from fleetlearn_export.model.fine_tuning import Trained
from fleetlearn_export.model.frozen_weights import Stored
from fleetlearn_export.model.steps import Function
from fleetlearn_export.split_parts import checked_folder, export_split, part_settings
from fleetlearn_export.written_bundle import Exported, write_exported

log = logging.getLogger("fleetlearn.export")
MOST_NAMED = 5
"""Parameters that one line of the log names."""


def export_bundle(
    model: nn.Module,
    loss: Function | None = None,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    path: str | PathLike[str] | None = None,
    *,
    step: LocalStep | Function | None = None,
    metrics: Mapping[str, Function] | None = None,
    names: Sequence[str] | None = None,
    targets: Targets = None,
    hyper: Mapping[str, float | None] | None = None,
    features: Function | None = None,
    train: Trained | None = None,
    frozen: Stored = "float32",
    cache_features: bool = False,
    personal: Sequence[str] = (),
    sparse: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    kept: Sequence[str] = (),
    many: TrainMany | None = None,
    memory: str | None = None,
    batch: int | None = None,
    compute: Compute = "float32",
    preprocessing: Preprocessing | dict[str, Any] | str | PathLike[str] | None = None,
    name: str | None = None,
    split: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Write ``model``, and how it is trained, as a training bundle: a folder at ``path``.

    Args:
        model: In any mode; the export does not change it. Parameters with ``requires_grad``
            (float32) are trained and travel; frozen ones become constants of the graphs, and so do
            those on which the loss does not depend. Buffers that training changes travel too. Tied
            weights are one parameter. Dropout and other randomness come from a seed that is an
            input of the graph.
        loss: ``loss(outputs, *targets)``, where ``outputs`` is what the model returns: a scalar,
            the mean over the batch. Leave it out if the model returns its loss, as those of
            transformers do: alone, or in a dict, dataclass or tuple, where it is named ``loss`` or
            is the only scalar. Such a model is called with the labels too.
        example: Arrays or tensors such as ``(x, y)``: the model's inputs, then the loss's targets.
            Or a dict such as ``{"input_ids": ..., "labels": ...}``: the model is called with its
            arrays by name. The first axis of each is the examples' and is free in the bundle; the
            example fixes the other axes and the dtypes. The checks train on these rows, of real
            data: two are enough, and of more than four, four are used.
        step: The optimizer step compiled into the bundle; plain SGD unless given. Or a step of your
            own, a function ``(params, state, batch, hyper) -> params, state, metrics`` in PyTorch;
            see ``fleetlearn_export.model.steps``.
        metrics: Name -> ``metric(outputs, *targets)``: a scalar, the mean over the batch, or a
            value for each example.
        names: The names of the example's arrays; ``x`` and ``y`` unless given, numbered (``x0``,
            ``x1``) if several. A dict has its own.
        targets: How many of the example's arrays, the last ones, are labels, which the loss and
            the metrics get; 1 unless given. Of a dict: their names; unless given, each with "label"
            in it, ``y``, ``target``, ``targets``, ``start_positions`` and ``end_positions``.
        hyper: Default values of the step's hyper-parameters. A LocalStep's ``lr`` has no default:
            the plan must give it. A step of your own has exactly these; None means that the plan
            must give a value.
        features: For a contrastive step: ``features(outputs)`` returns the features, a float tensor
            (n, ...).
        train: What is trained, for this export: a parameter's name, a name with wildcards
            (``head.*``), a module's name, a list of these, or a function ``(name, parameter) ->
            bool``. All other parameters are frozen, and a module that has parameters and trains
            none of them runs in evaluation mode, as for inference: its BatchNorm uses its running
            statistics and does not change them, its dropout does nothing. Unless given,
            ``requires_grad`` decides, and all modules run in training mode.
        frozen: The dtype in which the bundle stores frozen weights. "float16" is half the download,
            "int8" a quarter, with a scale for each output channel; small tensors, such as biases
            and norms, stay float32. Devices decode a weight when they need it.
            ``effect_of_rounding`` of the result says what the rounding changes.
        cache_features: Adds graphs with which a device computes what lies before the first trained
            layer once for each of its examples, keeps the results, and trains and evaluates from
            them, in all epochs and rounds. For this the frozen part must do the same with an
            example each time: no dropout, no statistics of a batch.
        personal: Trained parameters, and buffers that training changes, that never leave the
            device: names, names with wildcards, or modules' names (FedPer's head). Or
            "normalisation": those of all normalisation layers (FedBN).
        sparse: Tables of which a device needs the rows that its data name, such as the embedding of
            a catalogue: names, names with wildcards, or modules' names. Devices fetch, train and
            send these rows alone. All have the same number of rows, and are looked up in with the
            batch's integers as they are.
        state: For a step of your own: the initial values (float32) of what one step passes to the
            next.
        kept: Names in ``state`` whose values outlive a task: the device's next task begins with
            them.
        many: Adds train_many.onnx, several steps of a block of devices in one call, for simulating:
            ``TrainMany(devices, steps)``, with ``lr_by_step=True`` for plans with
            [local.step_schedule].
        memory: What a device's process may take at the peak of a step with ``batch`` examples, such
            as ``"200 MiB"``. The step then takes the batch in micro-batches, or its backward pass
            computes results of the forward pass again, as little as the budget allows.
        compute: The dtype that the convolutions and matrix products of a step take. "float16" pays
            on devices that compute with it, such as GPUs; everything else stays float32, and the
            loss is scaled.
        preprocessing: How devices make the example's arrays of raw data, for training and for
            prediction: a TOML or JSON file, or a dict that says the same (docs/start/data.md). It
            is a part of the bundle; the example is given as it is prepared.
        name: The bundle's name, for people; the path's stem unless given.
        split: The name of a layer behind which the model is divided, for split learning. Its two
            parts are written too, as bundles of their own in the folder ``NAME.split`` beside
            ``NAME.bundle``: ``device.bundle`` is what ends with the layer's output (its forward
            pass; its backward pass and step), ``top.bundle`` is the rest (its step, with the
            gradient for that output). ``LocalStep`` with ``optimizer`` and ``weight_decay`` only.
        progress: Called with a few words at the beginning of each stage. Without it what the export
            leaves out of training is logged (``fleetlearn.export``); ``Exported`` says the same.

    Before writing, each operator of the graphs, their gradients, a few steps, sums and outputs are
    compared with PyTorch. The folder appears complete or not at all; it replaces an older bundle at
    ``path``.

    Raises ExportError; the text names the operator or parameter, its location in the user's code,
    and what to do.
    """
    if example is None or path is None:
        needed = {
            "example, one batch of arrays such as example=(x, y)": example,
            'path, the folder to write, such as path="digits.bundle"': path,
        }
        missing = ", and ".join(text for text, value in needed.items() if value is None)
        raise TypeError(f"export_bundle needs {missing}")
    if split is not None and (loss is None or isinstance(example, Mapping)):
        given = "an example that is a dict" if loss is not None else "a model that returns its loss"
        raise ExportError(
            f"split= and {given}; a split model has loss=, a function of its outputs and the "
            "labels, and an example that is a tuple such as (x, y)"
        )
    told, progress = progress is not None, progress or (lambda stage: None)
    settings = ExportSettings(
        step=step if step is not None else LocalStep(),
        features=features,
        hyper=hyper,
        personal=personal,
        sparse=sparse,
        state=state,
        kept=kept,
        train=train,
        frozen=frozen,
        cache_features=cache_features,
        many=many,
        budget=memory_budget(memory, batch),
        compute=compute,
        progress=progress,
    )
    part_steps = None
    if split is not None:
        _check_split(settings, preprocessing)
        part_steps = part_settings(step, hyper, progress)
        checked_folder(parts_folder(path))  # before the work: the parts are written last
    exported = write_exported(
        model,
        loss,
        example,
        path,
        settings,
        metrics=metrics,
        names=names,
        targets=targets,
        preprocessing=preprocessing,
        name=name,
    )
    if exported.without_gradient and not told:
        log.warning(_left_alone(exported.without_gradient))
    if split is None or part_steps is None or loss is None or isinstance(example, Mapping):
        return exported
    parts = export_split(
        model,
        loss,
        example,
        parts_folder(path),
        split,
        part_steps,
        metrics=metrics,
        names=names,
        targets=targets if isinstance(targets, int) else 1,
    )
    difference = max(exported.difference, parts.difference)
    return exported._replace(parts=parts, difference=difference)


def _left_alone(names: Sequence[str]) -> str:
    """Say which parameters are not trained, in one line."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (
        f"the loss does not depend on {', '.join(names[:MOST_NAMED])}{more}: left alone, as "
        "torch.optim leaves what has no gradient, weight decay included"
    )


def parts_folder(path: str | PathLike[str]) -> Path:
    """Return where the parts of a bundle's model are: beside it, ``digits.split`` of
    ``digits.bundle``."""
    return Path(path).with_suffix(".split")


def _check_split(settings: ExportSettings, preprocessing: object) -> None:
    """Raise ExportError where a split model cannot have what else is asked for."""
    asked = {
        "features": settings.features is not None,
        "personal": bool(settings.personal),
        "sparse": bool(settings.sparse),
        "state": bool(settings.state),
        "kept": bool(settings.kept),
        "train": settings.train is not None,
        "frozen": settings.frozen != "float32",
        "cache_features": settings.cache_features,
        "many": settings.many is not None,
        "memory": settings.budget is not None,
        "compute": settings.compute != "float32",
        "preprocessing": preprocessing is not None,
    }
    given = [name for name, there in asked.items() if there]
    if given:
        raise ExportError(
            f"split= and {', '.join(given)}= were given; the parts of a split model do not have "
            "these: export the model without them, or without split"
        )
