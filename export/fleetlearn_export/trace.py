"""A model and its loss as programs over flat lists of tensors: one training step, evaluation, and use.

The training step goes through PyTorch's joint graph: the forward pass is exported, PyTorch's own automatic
differentiation adds the backward pass to it, the update rule is written on top, and the whole is exported once more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.experimental import _export_forward_backward
from torch.export.graph_signature import InputKind, OutputKind
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fleetlearn_export.errors import ExportError
from fleetlearn_export.places import explained, own_frames_recorded, place_of_node, place_of_operator
from fleetlearn_export.quiet import quiet
from fleetlearn_export.source import EvalModule, InferModule, LossModule, Source
from fleetlearn_export.update import hyper_names, update


class Joint(NamedTuple):
    """The loss with PyTorch's backward pass joined to it."""

    exported: ExportedProgram
    forward: torch.fx.Graph
    """Before the backward pass was added: its operators know their places in the user's code."""
    values: dict[str, Tensor]
    """What travels, in manifest order: copies of the trained parameters, then of the buffers that training changes."""
    buffers: set[str]
    """Which of ``values`` take no gradient."""


class Program(NamedTuple):
    """An exported program and the names of what goes in and comes out, in order."""

    exported: ExportedProgram
    inputs: list[str]
    outputs: list[str]
    origin: torch.fx.Graph
    """A graph whose operators know their places in the user's code."""


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

    def __init__(self, joint: Joint, batch: list[str], step: LocalStep) -> None:
        super().__init__()
        signature = joint.exported.graph_signature
        self.graph = joint.exported.graph_module
        self.rule = step
        self.names = list(joint.values)
        self.inputs = [f"param.{name}" for name in self.names]
        if step.proximal:
            self.inputs += [f"anchor.{name}" for name in self.names]
        self.inputs += [f"batch.{name}" for name in batch] + [f"hyper.{name}" for name in hyper_names(step)]

        arrays = iter(batch)
        self.places: list[str] = []
        """For each argument of the joint graph, the input or the constant that it takes."""
        for number, spec in enumerate(signature.input_specs):
            name = model_name(spec.target)
            if spec.kind is InputKind.USER_INPUT:
                self.places.append(f"batch.{next(arrays)}")
            elif name in self.names:
                self.places.append(f"param.{name}")
            else:
                self.places.append(f"constant_{number}")
                constants = joint.exported.constants | joint.exported.state_dict
                self.register_buffer(self.places[-1], constants[spec.target].detach().clone())

        outputs = list(enumerate(signature.output_specs))
        self.loss = next(place for place, spec in outputs if spec.kind is OutputKind.LOSS_OUTPUT)
        self.metrics = [place for place, spec in outputs if spec.kind is OutputKind.USER_OUTPUT]
        self.gradients, self.buffers_after = (
            {model_name(spec.target): place for place, spec in outputs if spec.kind is kind}
            for kind in (OutputKind.GRADIENT_TO_PARAMETER, OutputKind.BUFFER_MUTATION)
        )

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, values, strict=True))
        results = self.graph(*(given[place] if place in given else getattr(self, place) for place in self.places))
        hyper = {name: given[f"hyper.{name}"] for name in hyper_names(self.rule)}
        after = []
        for name in self.names:
            if name in self.gradients:
                parameter, anchor = given[f"param.{name}"], given.get(f"anchor.{name}")
                after.append(update(self.rule, parameter, results[self.gradients[name]], anchor, hyper))
            else:
                after.append(results[self.buffers_after[name]])
        return (*after, results[self.loss], *(results[place] for place in self.metrics))


def model_name(target: str | None) -> str:
    """A parameter's or buffer's name in the user's model, from its name in LossModule."""
    return (target or "").removeprefix("model.")


def joint_program(source: Source) -> Joint:
    """Differentiate the loss. The model is in training mode. Raises ExportError."""
    exported = _export(LossModule(source), 0, list(source.batch.values()))
    _check_operators(exported.graph, exported.graph)
    # Attention in its plain form: the fused kernels have backward passes that nothing can translate.
    with explained("PyTorch cannot differentiate the exported model"), quiet(), sdpa_kernel(SDPBackend.MATH):
        joint = _export_forward_backward(exported, joint_loss_index=0)
    _check_operators(joint.graph, exported.graph)
    changed = {
        model_name(spec.target)
        for spec in joint.graph_signature.output_specs
        if spec.kind is OutputKind.BUFFER_MUTATION
    }
    parameters = {name: value for name, value in source.model.named_parameters() if value.requires_grad}
    buffers = {
        name: value
        for name, value in source.model.named_buffers()
        # A counter such as BatchNorm's num_batches_tracked does not travel: nothing is averaged over it.
        if name in changed and value.is_floating_point()
    }
    values = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in (parameters | buffers).items()
    }
    return Joint(joint, exported.graph, values, set(buffers))


def train_program(source: Source, joint: Joint, step: LocalStep) -> Program:
    """The joint graph with the update rule on top."""
    module = Step(joint, list(source.batch), step)
    arguments = [value.clone() for value in joint.values.values()]
    if step.proximal:
        # Distinct tensors: one tensor in two places would be traced as one input.
        arguments += [value.clone() for value in joint.values.values()]
    fixed = len(arguments)
    arguments += source.batch.values()
    arguments += [torch.tensor(0.5) for _ in hyper_names(step)]
    exported = _export(module, fixed, arguments, len(source.batch))
    outputs = [f"next.param.{name}" for name in joint.values] + ["loss"]
    return Program(exported, module.inputs, [*outputs, *(f"metric.{name}" for name in source.metrics)], joint.forward)


def eval_program(source: Source, values: dict[str, Tensor]) -> Program:
    """Sums over a batch. The model is in evaluation mode."""
    module = Called(EvalModule(source), list(values))
    exported = _export(module, len(values), [*(v.clone() for v in values.values()), *source.batch.values()])
    inputs = [*(f"param.{name}" for name in values), *(f"batch.{name}" for name in source.batch)]
    outputs = ["loss_sum", *(f"metric_sum.{name}" for name in source.metrics), "examples"]
    return Program(exported, inputs, outputs, exported.graph)


def infer_program(source: Source, values: dict[str, Tensor], outputs: list[str]) -> Program:
    """The model alone. The model is in evaluation mode."""
    module = Called(InferModule(source), list(values))
    inputs = source.inputs()
    exported = _export(module, len(values), [*(v.clone() for v in values.values()), *inputs.values()])
    return Program(exported, [*(f"param.{name}" for name in values), *inputs], outputs, exported.graph)


def _export(module: nn.Module, fixed: int, arguments: list[Tensor], batch: int | None = None) -> ExportedProgram:
    """Export with a dynamic first axis for ``batch`` arguments (default: all) after the ``fixed`` first ones."""
    # PyTorch takes a size of 1 for a constant: trace with 2 or more. The graphs are checked with a batch of 1 later.
    rows = Dim("n", min=2)
    batch = len(arguments) - fixed if batch is None else batch
    shapes = [{0: rows} if fixed <= place < fixed + batch else None for place in range(len(arguments))]
    name = "batch" if isinstance(module, LossModule) else "values"
    with explained("the model cannot be exported"), quiet(), own_frames_recorded():
        return torch.export.export(module, tuple(arguments), dynamic_shapes={name: tuple(shapes)}, strict=False)


def _check_operators(graph: torch.fx.Graph, origin: torch.fx.Graph) -> None:
    """Refuse what no bundle can hold; the rest of what ONNX lacks shows when the graph is converted."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        differentiated = graph is not origin
        place = place_of_operator(str(node.target), origin) if differentiated else place_of_node(node)
        # Before decomposition an operator may be random by name alone: attention and GRU have a dropout, maybe of 0.
        if differentiated and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise ExportError(
                f"operator {node.target}{place} is random; a training step of this version is not. Leave it "
                "out, or set its probability to 0"
            )
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_complex():
            raise ExportError(f"operator {node.target}{place} gives complex numbers, which ONNX does not compute with")
