"""A model and its loss as programs over flat lists of tensors: one training step, evaluation, and use.

The training step goes through PyTorch's joint graph: the forward pass is exported, PyTorch's own automatic
differentiation adds the backward pass to it, the update rule is written on top, and the whole is exported once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.experimental import _export_forward_backward
from torch.export.graph_signature import InputKind, OutputKind
from torch.func import functional_call
from torch.utils import _pytree as pytree

from fleetlearn_export.update import hyper_names, update

Function = Callable[..., Any]


class Source(NamedTuple):
    """What the user gave."""

    model: nn.Module
    loss: Function
    metrics: Mapping[str, Function]
    batch: dict[str, Tensor]
    """The example: at least two rows, each array its own copy."""
    targets: int
    """How many of the batch's last arrays go to the loss alone."""

    def inputs(self) -> dict[str, Tensor]:
        return dict(list(self.batch.items())[: len(self.batch) - self.targets])


class Program(NamedTuple):
    """An exported program and the names of what goes in and comes out, in order."""

    exported: ExportedProgram
    inputs: list[str]
    outputs: list[str]


class LossModule(nn.Module):
    """The batch -> the mean loss and the mean of each metric, by the user's own functions."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.model = source.model
        self.loss = source.loss
        self.metrics = list(source.metrics.values())
        self.inputs = len(source.batch) - source.targets

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        outputs, targets = self.model(*batch[: self.inputs]), batch[self.inputs :]
        loss = self.loss(outputs, *targets)
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return (loss, *(metric(outputs, *targets).float().mean() for metric in self.metrics))


class EvalModule(LossModule):
    """The batch -> the sum of the loss, the sum of each metric, and the number of examples (int64)."""

    def forward(self, *batch: Tensor) -> tuple[Tensor, ...]:
        means = super().forward(*batch)
        examples = batch[0].new_ones(batch[0].shape[:1], dtype=torch.int64).sum()
        return (*(mean * examples for mean in means), examples)


class InferModule(nn.Module):
    """The inputs -> the model's outputs, as a flat list."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.model = source.model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves(self.model(*inputs)))


class Called(nn.Module):
    """``inner``, with its model's parameters as the first arguments."""

    def __init__(self, inner: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        count = len(self.names)
        given = {f"model.{name}": value for name, value in zip(self.names, values[:count], strict=True)}
        result: tuple[Tensor, ...] = functional_call(self.inner, given, values[count:])
        return result


class Step(nn.Module):
    """One optimizer step as a function of parameters, anchors, batch and hyper-parameters."""

    def __init__(self, joint: ExportedProgram, names: list[str], batch: list[str], step: LocalStep) -> None:
        super().__init__()
        self.graph = joint.graph_module
        self.rule = step
        self.inputs = [f"param.{name}" for name in names]
        if step.proximal:
            self.inputs += [f"anchor.{name}" for name in names]
        self.inputs += [f"batch.{name}" for name in batch] + [f"hyper.{name}" for name in hyper_names(step)]
        self.names = names

        arrays = iter(batch)
        self.places: list[str] = []
        """For each argument of the joint graph, the input or the constant that it takes."""
        for number, spec in enumerate(joint.graph_signature.input_specs):
            name = (spec.target or "").removeprefix("model.")
            if spec.kind is InputKind.USER_INPUT:
                self.places.append(f"batch.{next(arrays)}")
            elif name in names:
                self.places.append(f"param.{name}")
            else:
                tensor = (
                    joint.constants[spec.target] if spec.target in joint.constants else joint.state_dict[spec.target]
                )
                self.register_buffer(f"constant_{number}", tensor.detach().clone())
                self.places.append(f"constant_{number}")

        outputs = joint.graph_signature.output_specs
        self.loss = next(i for i, spec in enumerate(outputs) if spec.kind is OutputKind.LOSS_OUTPUT)
        self.metrics = [i for i, spec in enumerate(outputs) if spec.kind is OutputKind.USER_OUTPUT]
        kinds = (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.BUFFER_MUTATION)
        self.changes = {
            (spec.target or "").removeprefix("model."): (i, spec.kind)
            for i, spec in enumerate(outputs)
            if spec.kind in kinds
        }

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, values, strict=True))
        results = self.graph(*(given[place] if place in given else getattr(self, place) for place in self.places))
        hyper = {name: given[f"hyper.{name}"] for name in hyper_names(self.rule)}
        changed = []
        for name in self.names:
            place, kind = self.changes[name]
            if kind is OutputKind.BUFFER_MUTATION:
                changed.append(results[place])
            else:
                parameter, anchor = given[f"param.{name}"], given.get(f"anchor.{name}")
                changed.append(update(self.rule, parameter, results[place], anchor, hyper))
        return (*changed, results[self.loss], *(results[i] for i in self.metrics))


def joint_program(source: Source) -> tuple[ExportedProgram, ExportedProgram]:
    """The loss as a forward program, and with PyTorch's backward pass joined to it. The model is in training mode."""
    forward = _export(LossModule(source), 0, list(source.batch.values()))
    return forward, _export_forward_backward(forward, joint_loss_index=0)


def tensor_table(source: Source, joint: ExportedProgram) -> dict[str, tuple[Tensor, bool]]:
    """What travels, in manifest order: name -> its value and whether it is a buffer."""
    parameters = {
        name: (value.detach(), False) for name, value in source.model.named_parameters() if value.requires_grad
    }
    changed = {
        (spec.target or "").removeprefix("model.")
        for spec in joint.graph_signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION
    }
    buffers = {
        name: (value.detach(), True)
        for name, value in source.model.named_buffers()
        if name in changed and value.is_floating_point()
    }
    return parameters | buffers


def train_program(source: Source, joint: ExportedProgram, values: dict[str, Tensor], step: LocalStep) -> Program:
    module = Step(joint, list(values), list(source.batch), step)
    arguments = [value.clone() for value in values.values()]
    if step.proximal:
        # Distinct tensors: one tensor in two places would be traced as one input.
        arguments += [value.clone() for value in values.values()]
    fixed = len(arguments)
    arguments += source.batch.values()
    arguments += [torch.tensor(0.5) for _ in hyper_names(step)]
    exported = _export(module, fixed, arguments, len(source.batch))
    outputs = [f"next.param.{name}" for name in values] + ["loss"] + [f"metric.{name}" for name in source.metrics]
    return Program(exported, module.inputs, outputs)


def eval_program(source: Source, values: dict[str, Tensor]) -> Program:
    """The model is in evaluation mode."""
    module = Called(EvalModule(source), list(values))
    exported = _export(module, len(values), [*(v.clone() for v in values.values()), *source.batch.values()])
    outputs = ["loss_sum", *(f"metric_sum.{name}" for name in source.metrics), "examples"]
    return Program(
        exported, [*(f"param.{name}" for name in values), *(f"batch.{name}" for name in source.batch)], outputs
    )


def infer_program(source: Source, values: dict[str, Tensor], outputs: list[str]) -> Program:
    """The model is in evaluation mode."""
    module = Called(InferModule(source), list(values))
    inputs = source.inputs()
    exported = _export(module, len(values), [*(v.clone() for v in values.values()), *inputs.values()])
    return Program(exported, [*(f"param.{name}" for name in values), *inputs], outputs)


def _export(module: nn.Module, fixed: int, arguments: list[Tensor], batch: int | None = None) -> ExportedProgram:
    """Export with a dynamic first axis for ``batch`` arguments (default: all) after the ``fixed`` first ones."""
    # PyTorch takes a size of 1 for a constant: trace with 2 or more. The graphs are checked with a batch of 1 later.
    rows = Dim("n", min=2)
    batch = len(arguments) - fixed if batch is None else batch
    shapes = [{0: rows} if fixed <= place < fixed + batch else None for place in range(len(arguments))]
    name = "batch" if isinstance(module, LossModule) else "inputs" if isinstance(module, InferModule) else "values"
    return torch.export.export(module, tuple(arguments), dynamic_shapes={name: tuple(shapes)}, strict=False)
