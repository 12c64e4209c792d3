"""What ``export_bundle`` is given: kinds, names and values, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
import torch
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.messages import Name
from torch import Tensor, nn

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.gradient_hooks import refuse_accumulation_hooks
from fleetlearn_export.model.returned_loss import label_names
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.steps import Function

MOST = 4
"""How many rows of the example are used, at most. All runs of all checks cost as much for each:
with 64 images of 64 x 64, not 4, the export of ResNet-18 took 28 CPU-seconds, not 6, and 1.9 GiB,
not 0.7."""
DTYPES: tuple[str, ...] = get_args(get_type_hints(Input)["dtype"])
"""The dtypes that arrays of a batch, and outputs, may have."""


WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Modules that hold the user's model as ``module``, for training on several GPUs."""


class IndexRange(NamedTuple):
    """The integers that an array of a batch may hold: 0 to ``below`` - 1, and ``ignored``. Named as
    in the manifest."""

    below: int
    ignored: int | None


def check_kinds(model: object, loss: object, metrics: Mapping[str, object]) -> None:
    """Raise ExportError if the model is not a module that can be recorded, or a function is
    none."""
    if not isinstance(metrics, Mapping):
        raise ExportError(
            f"metrics= is a {type(metrics).__name__}; expected functions (outputs, *targets) by "
            'name, such as metrics={"accuracy": accuracy}'
        )
    functions = {"the loss": loss, **{f"metric {name}": metric for name, metric in metrics.items()}}
    for what, value in {"the model": model, **functions}.items():
        refuse_class(what, value)
    if not isinstance(model, nn.Module):
        raise ExportError(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
    for name, part in model.named_modules():
        what = name or "the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise ExportError(
                f"{what} is TorchScript (torch.jit), whose operators cannot be recorded: "
                "export the torch.nn.Module that it was made from"
            )
        if isinstance(part, WRAPPERS):
            inner = "model.module" if not name else f"the module inside, model.{name}.module"
            raise ExportError(
                f"{what} is wrapped in {type(part).__name__}, which spreads batches over several "
                f"GPUs; a device has one processor: give {inner}"
            )
    for what, function in functions.items():
        if not callable(function):
            raise ExportError(
                f"{what} is a {type(function).__name__}; expected a function (outputs, *targets)"
            )
    for name in metrics:
        check_name("metric", name)


def refuse_class(what: str, value: object) -> None:
    """Raise ExportError if the value is a class, such as ``nn.CrossEntropyLoss`` without
    brackets."""
    if isinstance(value, type):
        name = value.__name__
        raise ExportError(
            f"{what} is the class {name}; expected an object of the class: write {name}(...)"
        )


def check_name(what: str, name: object, kind: Any = Name) -> None:
    """Raise ExportError if the manifest cannot hold the name."""
    try:
        msgspec.convert(name, kind)
    except msgspec.ValidationError as error:
        raise ExportError(f"{what} name {name!r}: {error}") from None


Targets = int | Sequence[str] | None
"""How many of the example's last arrays are labels; of a dict their names. None: the last one, or
those of a dict that are called as labels are."""


class Arranged(NamedTuple):
    """An example as all of the export takes it: the inputs, then the labels."""

    arrays: tuple[Any, ...]
    names: list[str] | None
    """None: those that arrays without names have."""
    targets: int
    """How many of the arrays are labels."""
    by_name: list[str] | None
    """What the model is called with, if it is given by name."""


def arranged(
    example: Any, names: Sequence[str] | None, targets: Targets, *, returns_loss: bool
) -> Arranged:
    """Return the arguments of ``export_bundle`` in one form. ``returns_loss``: the model is called
    with the labels too. Raises ExportError."""
    if not isinstance(example, Mapping):
        if targets is not None and not isinstance(targets, int):
            raise ExportError(
                f"targets={targets!r} are names, and the example is a {type(example).__name__}; "
                "expected how many of its arrays, the last ones, are labels, or an example that is "
                "a dict"
            )
        # A model that returns its loss may need no labels: an autoencoder compares with its input.
        alone = returns_loss and isinstance(example, Sequence) and len(example) == 1
        count = int(not alone) if targets is None else targets
        return Arranged(example, None if names is None else list(names), count, None)
    among = list(example)
    if names is not None:
        raise ExportError(
            f"names={list(names)} were given, and the example is a dict, whose keys "
            f"{', '.join(map(str, among))} are the names: leave names= out"
        )
    if isinstance(targets, int | str):
        raise ExportError(
            f"targets={targets!r} was given, and the example is a dict; expected the labels' names "
            f"in a list, of {', '.join(map(str, among))}"
        )
    labels = label_names(among) if targets is None else list(targets)
    if unknown := [name for name in labels if name not in example]:
        raise ExportError(
            f"targets= names {', '.join(map(str, unknown))}; the example has "
            f"{', '.join(map(str, among))}"
        )
    if targets is None and not labels and not returns_loss:
        raise ExportError(
            f"no array of the example is called as labels are: {', '.join(map(str, among))}. Say "
            'which ones loss= gets, such as targets=["tags"], or targets=[] if it gets none'
        )
    inputs = [name for name in among if name not in labels]
    order = [*inputs, *(name for name in among if name in labels)]
    arrays = tuple(example[name] for name in order)
    return Arranged(arrays, order, len(labels), order if returns_loss else inputs)


def named_batch(
    example: Sequence[Any], names: Sequence[str] | None, targets: int
) -> dict[str, Tensor]:
    """Return the rows of the example that are used, by name, as new tensors. Raises
    ExportError."""
    if isinstance(example, Tensor) or not isinstance(example, Sequence):
        loads = hasattr(example, "__len__") and not isinstance(example, Tensor)
        batch = ": one batch, as next(iter(loader)) gives it" if loads else ""
        raise ExportError(
            f"the example is a {type(example).__name__}; expected a tuple of arrays such as "
            f"(x, y), or a dict of arrays by name{batch}"
        )
    if not 0 <= targets < len(example):
        raise ExportError(
            f"the example has {len(example)} arrays, of which the last {targets} are the loss's "
            "targets; expected at least one array before them, the model's input. Give the labels "
            "too, as in example=(x, y), or targets=0 if loss= gets the model's outputs alone"
        )
    names = (
        list(names) if names is not None else default_array_names(len(example) - targets, targets)
    )
    if (
        len(names) != len(example)
        or len(set(names)) != len(names)
        or not all(isinstance(name, str) and name.isidentifier() for name in names)
    ):
        raise ExportError(
            f"names {names} for an example of {len(example)} arrays; expected one identifier for "
            "each"
        )
    batch = {}
    for name, array in zip(names, example, strict=True):
        with as_export_error(f"example array {name} cannot become a tensor"):
            # Each array its own memory: one tensor in two places would be traced as one input.
            batch[name] = torch.as_tensor(array).detach().cpu().contiguous().clone()
        if not batch[name].dim():
            raise ExportError(
                f"example array {name} is a scalar; its first axis must be the examples'"
            )
        dtype = str(batch[name].dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ExportError(
                f"example array {name} is {dtype}; arrays are one of {', '.join(DTYPES)}"
            )
        with as_export_error(
            f"example array {name} of shape {tuple(batch[name].shape)} does not fit a bundle"
        ):
            array_row(name, batch[name])
    rows = {name: len(array) for name, array in batch.items()}
    if len(set(rows.values())) > 1 or not min(rows.values()):
        raise ExportError(
            "the first axis is the examples', the same for all arrays and at least 1; it has "
            f"{rows}"
        )
    count = min(rows.values())
    if count > MOST:
        # the first ones of sorted data would all have one label
        spread = torch.arange(MOST) * count // MOST
        batch = {name: array[spread] for name, array in batch.items()}
    if count == 1:
        # PyTorch treats a size of 1 as a constant.
        batch = {name: torch.cat([array, array]) for name, array in batch.items()}
    return batch


def default_array_names(inputs: int, targets: int) -> list[str]:
    """Return ``x`` and ``y``; of several inputs ``x0``, ``x1``, ..., of several targets ``y0``,
    ``y1``, ..."""
    return [
        *(["x"] if inputs == 1 else [f"x{i}" for i in range(inputs)]),
        *(["y"] if targets == 1 else [f"y{i}" for i in range(targets)]),
    ]


def array_row(name: str, value: Tensor, within: IndexRange | None = None) -> Input:
    """Return the manifest's row for an array. Raises msgspec.ValidationError if the manifest has no
    such dtype."""
    dtype = str(value.dtype).removeprefix("torch.")
    allowed = {} if within is None else within._asdict()
    return msgspec.convert(
        {"name": name, "dtype": dtype, "shape": tuple(value.shape[1:]), **allowed}, Input
    )


def check_parameters(model: nn.Module, loss: Function) -> None:
    """Raise ExportError if a parameter cannot be trained as it is, or if the loss has parameters of
    its own."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ExportError(
                f"{name} has no shape yet: run the model on the example once, so that its lazy "
                "modules know"
            )
        if tensor.device.type != "cpu":
            raise ExportError(f"{name} is on {tensor.device}; export from the CPU: model.cpu()")
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not trained:
        raise ExportError(
            "the model has no parameter with requires_grad: there is nothing to train"
        )
    for name, value in trained.items():
        if value.dtype != torch.float32:
            raise ExportError(
                f"parameter {name} is {value.dtype}; trained parameters are float32: convert with "
                "model.float(), or freeze it with requires_grad_(False)"
            )
        if not value.numel():
            raise ExportError(f"parameter {name} has shape {tuple(value.shape)}, no element at all")
        if not bool(torch.isfinite(value).all()):
            raise ExportError(f"parameter {name} holds NaN or infinity; every value must be finite")
    refuse_accumulation_hooks(model)
    _refuse_shared_memory(model)
    own = {id(value) for value in model.parameters()}
    if isinstance(loss, nn.Module):
        for name, value in loss.named_parameters():
            if value.requires_grad and id(value) not in own:
                raise ExportError(
                    f"the loss has a parameter of its own, {name}: make it a part of the model"
                )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise ExportError if a trained parameter shares elements with another tensor of the model:
    PyTorch's step would change both, and a graph has each for itself."""
    begins: list[tuple[int, int, str, bool]] = []
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.numel() and value.layout == torch.strided:
            span = (
                sum(
                    (size - 1) * abs(stride)
                    for size, stride in zip(value.shape, value.stride(), strict=True)
                )
                + 1
            )
            address = value.data_ptr()
            begins.append(
                (address, address + span * value.element_size(), name, value.requires_grad)
            )
    begins.sort()
    for (_, end, one, trained), (begin, _, other, also) in pairwise(begins):
        if begin < end and (trained or also):
            raise ExportError(
                f"{one} and {other} share memory, as after {other}.data = {one}.data, but are not "
                "the same parameter: PyTorch's step changes both at once, and a graph cannot. Tie "
                f"them as one parameter: assign {one} itself in the place of {other}"
            )
