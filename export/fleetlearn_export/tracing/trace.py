"""The training step, the evaluation and the model as programs over flat lists of tensors.

The training step is a function of tensors that calls PyTorch's automatic differentiation. Tracing
it records every operator of the forward pass, the backward pass and the update. The record is
exported as one program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import (
    as_export_error,
    fixed_size_error,
    is_without_cause,
    location_of_node,
    location_of_replaced_size,
)
from fleetlearn_export.model.stateless import attributes_restored, functional_call
from fleetlearn_export.model.steps import Tensors
from fleetlearn_export.model.train_step import TrainStep, gradient_of, plain_kernels
from fleetlearn_export.model.user_model import (
    EvalInferModule,
    EvalModule,
    InferModule,
    LossModule,
    UserModel,
)
from fleetlearn_export.silence import silenced_python
from fleetlearn_export.tracing.decompositions import Decompositions, tracing_decompositions
from fleetlearn_export.tracing.exporting_flag import model_told, traced_either_way
from fleetlearn_export.tracing.formulas.recording import FORMULAS, IN_EVALUATION, Formulas
from fleetlearn_export.tracing.missing_operators import reason_without_gradient
from fleetlearn_export.tracing.own_values import refuse_own_values
from fleetlearn_export.tracing.size_conditions import Recorded, other_cases
from fleetlearn_export.tracing.surroundings import user_code_traced

FREE_BATCH_SIZE = Dim("n", min=2)
"""The number of examples. PyTorch treats a size of 1 as a constant, so tracing uses 2 or more; the
checks try 1 too."""


TakeCases = Callable[[list[torch.fx.GraphModule] | None], object]
"""What gets the result of ``other_cases``."""


aten = torch.ops.aten
SQUEEZES = (aten.squeeze.default, aten.squeeze.dims)


class Program(NamedTuple):
    """An exported program, with the names of its inputs and outputs in order."""

    exported: ExportedProgram
    inputs: list[str]
    outputs: list[str]
    located: torch.fx.Graph
    """A graph of the user's loss whose operators have their locations in the user's code."""
    located_step: torch.fx.Graph | None = None
    """A graph of the whole step with such locations."""


class Traced(NamedTuple):
    """A traced graph, with its arguments and the names of its outputs."""

    module: torch.fx.GraphModule
    arguments: Tensors
    """An example of each argument, in order."""
    rows: dict[str, int]
    """Argument -> the axis whose size is the number of examples."""
    outputs: list[str]


class ParametersAsArguments(nn.Module):
    """``inner``, with its model's parameters as first arguments."""

    def __init__(self, inner: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        count = len(self.names)
        tensors = {
            f"model.{name}": value for name, value in zip(self.names, values[:count], strict=True)
        }
        result: tuple[Tensor, ...] = functional_call(self.inner, tensors, values[count:])
        return result


class FlatArguments(nn.Module):
    """A traced graph that takes its arguments as one tuple."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.inner = graph

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.inner(*values))


def export_loss(user: UserModel) -> torch.fx.Graph:
    """Export the loss alone: what cannot be exported is easiest to name there. The model is in
    training mode.

    Returns a graph whose operators have their locations in the user's code. Raises ExportError.
    """
    exported = _export(LossModule(user), 0, list(user.batch.values()))
    _refuse_unsupported_operators(exported.graph)
    graph: torch.fx.Graph = exported.graph
    return graph


def trace(
    function: Callable[[Tensors], Tensors],
    arguments: Tensors,
    rows: Mapping[str, int],
    table: Decompositions,
    formulas: Formulas = FORMULAS,
    take_cases: TakeCases | None = None,
) -> torch.fx.GraphModule:
    """Run the function on stand-ins without values, and record each operator of the forward and
    backward pass.

    rows: argument -> the axis whose size is the number of examples, which stays free. table:
        operator -> a function that is recorded in its place. formulas: the same for operators that
        PyTorch would not look up there. take_cases: gets what is recorded for other numbers of
        examples, if the code asks for that number. Raises ExportError.
    """

    def record(arguments: Tensors) -> Recorded:
        return _recorded(function, arguments, rows, table, formulas)

    recorded = record(arguments)
    if take_cases:
        take_cases(other_cases(recorded, arguments, rows, record))
    graph = recorded.graph
    for node in graph.graph.nodes:
        if node.target in SQUEEZES:
            _name_squeezed_axes(node)
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target), Tensor):
            # Plain attributes are not exported. Frozen parameters of the model arrive here as such.
            delattr(graph, node.target)
            graph.register_buffer(node.target, value.detach())
    return graph


def _name_squeezed_axes(node: torch.fx.Node) -> None:
    """Let squeeze() take away the axes that it takes away here.

    By itself it takes away the examples' axis as well where there is one example:
    ``output.squeeze()`` at the end of a binary classifier. The graph computes the same for any
    number of examples.
    """
    source, *named = node.args
    assert isinstance(source, torch.fx.Node)
    sizes = source.meta["val"].shape
    given: Any = named[0] if named else range(len(sizes))  # PyTorch records squeeze() either way
    axes = [axis for axis in given if isinstance(sizes[axis], int) and sizes[axis] == 1]
    node.target, node.args = aten.squeeze.dims, (source, axes)


def _recorded(
    function: Callable[[Tensors], Tensors],
    arguments: Tensors,
    rows: Mapping[str, int],
    table: Decompositions,
    formulas: Formulas,
) -> Recorded:
    shapes = ShapeEnv()
    # Real tensors may meet stand-ins: the user's own constants, and frozen parameters.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    stand_ins = []
    for name, value in arguments.items():
        if name not in rows:
            stand_ins.append(
                mode.from_tensor(value, source=ConstantSource(name), static_shapes=True)
            )
            continue
        axes = [
            # Equal sizes get one symbol: all arrays of a batch have as many examples.
            DimDynamic.DUCK if rows[name] == axis else DimDynamic.STATIC
            for axis in range(value.dim())
        ]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=axes)
        stand_ins.append(
            mode.from_tensor(value, source=ConstantSource(name), symbolic_context=context)
        )

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(dict(zip(arguments, values, strict=True))).values())

    with as_export_error("the training step cannot be traced"), user_code_traced(formulas):
        graph: torch.fx.GraphModule = make_fx(
            flat,
            decomposition_table=table,
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
            record_stack_traces=True,
        )(*stand_ins)
    sizes: list[Any] = [
        value.shape[rows[name]]
        for name, value in zip(arguments, stand_ins, strict=True)
        if name in rows
    ]
    if any(size.node.expr.is_number for size in sizes if isinstance(size, torch.SymInt)):
        # Such a graph may be wrong in a single place, such as a division by the number of examples.
        raise fixed_size_error(
            "the training step cannot be traced", location_of_replaced_size(shapes)
        )
    return Recorded(graph, shapes)


def export_traced(
    graph: torch.fx.GraphModule, arguments: Tensors, rows: Mapping[str, int]
) -> ExportedProgram:
    """Export a traced graph as a program in which nothing is changed in place. Raises
    ExportError."""
    shapes = tuple({rows[name]: FREE_BATCH_SIZE} if name in rows else None for name in arguments)
    with as_export_error("the traced step cannot be exported"), silenced_python():
        exported = torch.export.export(
            FlatArguments(graph), tuple(arguments.values()), dynamic_shapes=(shapes,), strict=False
        )
    _refuse_unsupported_operators(exported.graph)
    return exported


def trace_step(
    step: TrainStep,
    table: Decompositions,
    *,
    with_means: bool = False,
    copies: bool = False,
    take_cases: TakeCases | None = None,
    gradients_of: Sequence[str] = (),
) -> Traced:
    """Trace one local step: forward, backward and update. ``table`` and ``take_cases`` as for
    ``trace``.

    with_means: the outputs of ``step.run_with_means``, which has the step's means over the batch
        behind its own.
    copies: whether the graph copies its inputs, rather than write into them, and has a tensor for
        each output. The emission needs neither, and copies are a fifth of what tracing records of a
        network with batch norms.
    gradients_of: input arrays whose gradients are outputs behind the step's own, as
        ``step.run_with_gradients_of`` names them. Raises ExportError.
    """
    run: Callable[..., Tensors] = step.run
    outputs = step.outputs()
    if with_means:
        run, outputs = step.run_with_means, outputs + step.means()
    elif gradients_of:
        run = partial(step.run_with_gradients_of, gradients_of)
        outputs += [gradient_of(name) for name in gradients_of]
    return _traced(step, partial(run, copies=copies), step.inputs(), outputs, table, take_cases)


def trace_activations(step: TrainStep, table: Decompositions) -> Traced:
    """Trace the forward pass of a split model's bottom, in training mode. ``table`` as for
    ``trace``. Raises ExportError."""
    read = (*(f"param.{name}" for name in step.values), "seed")
    read += tuple(f"batch.{name}" for name in step.objective.inputs)
    arguments = {name: value for name, value in step.inputs().items() if name in read}
    run = partial(step.activations, copies=False)
    return _traced(step, run, arguments, ["activations"], table)


def _traced(
    step: TrainStep,
    run: Callable[[Tensors], Tensors],
    inputs: Tensors,
    outputs: list[str],
    table: Decompositions,
    take_cases: TakeCases | None = None,
) -> Traced:
    # Nobody reads the values, so parameters and all that is like them take no memory: empty
    # tensors, not written into.
    # Index arrays and sizes in a batch may be read while it is traced.
    real = ("batch.", "hyper.", "seed")
    arguments = {
        name: value.clone() if name.startswith(real) else torch.empty_like(value)
        for name, value in inputs.items()
    }
    rows = {name: 0 for name in arguments if name.startswith("batch.")}

    def traced(exporting: bool) -> torch.fx.GraphModule:
        with attributes_restored(step.objective.model), model_told(exporting):
            return trace(run, arguments, rows, table, take_cases=take_cases)

    module = traced_either_way(traced)
    _refuse_unsupported_operators(module.graph)
    return Traced(module, arguments, rows, outputs)


def trace_evaluation(
    user: UserModel,
    values: Tensors,
    outputs: list[str],
    table: Decompositions,
    *,
    take_cases: TakeCases | None = None,
) -> Traced:
    """Trace the sums over a batch, and the model's outputs of these names. The model is in
    evaluation mode.

    ``take_cases`` as for ``trace``. Raises ExportError.
    """
    module, names = EvalInferModule(user), [*user.sum_names(), *outputs]
    arguments = {f"param.{name}": value for name, value in values.items()}
    arguments |= {f"batch.{name}": value for name, value in user.batch.items()}

    def function(given: Tensors) -> Tensors:
        rows = list(given.values())
        own = {f"model.{name}": value for name, value in zip(values, rows, strict=False)}
        with torch.no_grad(), plain_kernels(), user.evaluation_draws():
            results = functional_call(module, own, tuple(rows[len(values) :]))
        return dict(zip(names, results, strict=True))

    rows = dict.fromkeys(list(arguments)[len(values) :], 0)

    def traced(exporting: bool) -> torch.fx.GraphModule:
        with attributes_restored(user.model), model_told(exporting):
            return trace(function, arguments, rows, table, IN_EVALUATION, take_cases)

    graph = traced_either_way(traced)
    _refuse_unsupported_operators(graph.graph)
    return Traced(graph, arguments, rows, names)


def train_program(step: TrainStep, located: torch.fx.Graph) -> Program:
    """Return the program of one local step: forward, backward and update. Raises ExportError."""
    traced = trace_step(step, tracing_decompositions(), copies=True)
    _refuse_complex_numbers(traced.module.graph)
    refuse_own_values(traced.module, step.objective.model, step.values)
    exported = export_traced(traced.module, traced.arguments, traced.rows)
    return Program(exported, list(traced.arguments), traced.outputs, located, traced.module.graph)


def eval_program(user: UserModel, values: dict[str, Tensor]) -> Program:
    """Return the program of sums over a batch. The model is in evaluation mode. Raises
    ExportError."""
    module = ParametersAsArguments(EvalModule(user), list(values))
    exported = _export(
        module, len(values), [*(v.clone() for v in values.values()), *user.batch.values()]
    )
    _refuse_random_evaluation(user)
    inputs = [*(f"param.{name}" for name in values), *(f"batch.{name}" for name in user.batch)]
    outputs = user.sum_names()
    return Program(exported, inputs, outputs, exported.graph)


def infer_program(user: UserModel, values: dict[str, Tensor], outputs: list[str]) -> Program:
    """Return the program of the model alone. The model is in evaluation mode. Raises
    ExportError."""
    module = ParametersAsArguments(InferModule(user), list(values))
    inputs = user.inputs()
    exported = _export(
        module, len(values), [*(v.clone() for v in values.values()), *inputs.values()]
    )
    return Program(
        exported, [*(f"param.{name}" for name in values), *inputs], outputs, exported.graph
    )


def _export(module: nn.Module, fixed: int, arguments: list[Tensor]) -> ExportedProgram:
    """Export with a free first axis for all arguments except the first ``fixed``. Raises
    ExportError."""
    return traced_either_way(partial(_exported, module, fixed, arguments))


def _exported(
    module: nn.Module,
    fixed: int,
    arguments: list[Tensor],
    exporting: bool,
    *,
    deferred: bool = False,
) -> ExportedProgram:
    """Do so once.

    exporting: whether the model is told. deferred: whether conditions on the number of examples
        become operators of the program that check them. Otherwise PyTorch refuses what it cannot
        prove for all numbers.
    """
    shapes = [{0: FREE_BATCH_SIZE} if index >= fixed else None for index in range(len(arguments))]
    name = "batch" if isinstance(module, LossModule) else "values"
    with (
        as_export_error("the model cannot be exported"),
        user_code_traced(),
        model_told(exporting),
        attributes_restored(module),
    ):
        try:
            return torch.export.export(
                module,
                tuple(arguments),
                dynamic_shapes={name: tuple(shapes)},
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=deferred,
            )
        except Exception as error:
            if deferred or not is_without_cause(error):
                raise
    return _exported(module, fixed, arguments, exporting, deferred=True)


def _refuse_unsupported_operators(graph: torch.fx.Graph) -> None:
    """Raise ExportError on operators that no bundle can hold. The conversion finds others that ONNX
    lacks."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        reason = reason_without_gradient(node)
        if reason:
            raise ExportError(f"operator {node.target}{location_of_node(node)} {reason}")


def _refuse_complex_numbers(graph: torch.fx.Graph) -> None:
    """Raise ExportError on complex numbers, where the emission could not replace them by pairs of
    real ones."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_complex():
            raise ExportError(
                f"operator {node.target}{location_of_node(node)} gives complex numbers, which ONNX "
                "does not compute with. Those of torch.fft and torch.stft, of a fixed length, can "
                "be exported where all that reads them are products, sums, conj, abs, angle, real "
                "and imag; write the rest with two real tensors"
            )


def _refuse_random_evaluation(user: UserModel) -> None:
    """Raise ExportError if the model draws random numbers in evaluation mode, where PyTorch's
    exporter writes it."""
    if user.random_evaluation:
        raise ExportError(
            "in evaluation mode the model draws random numbers, and has an operator that is not in "
            "our table: where PyTorch's ONNX exporter writes a model, there is no fixed seed. Let "
            "it draw in training only"
        )
