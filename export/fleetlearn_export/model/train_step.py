"""One local step with all that it takes and gives, named as in train.onnx: PyTorch runs it, and traces it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from fleetlearn_protocol.manifest import LocalStep, Reference, TensorName
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.source_locations import explained
from fleetlearn_export.model.stateless import functional_call, untouched
from fleetlearn_export.model.steps import (
    OPTIMIZERS,
    REFERENCES,
    Function,
    Objective,
    Tensors,
    built_in,
    hyper_defaults,
    initial_state,
    named_needs,
    references,
)
from fleetlearn_export.model.user_model import Source, check_name


class TrainStep(NamedTuple):
    """A local step, checked by running it once."""

    function: Callable[[Tensors], Tensors]
    """Named inputs -> named outputs."""
    rule: LocalStep
    objective: Objective
    values: Tensors
    """What is in the parameter table, in its order: copies of the trained parameters and of the buffers that training
    changes; those that travel, then the personal ones."""
    personal: set[str]
    """Which of ``values`` stay on the device."""
    state: Tensors
    """Initial values, in the order of the state table."""
    kept: set[str]
    """Which of ``state`` outlive a task."""
    hyper: dict[str, float | None]
    references: tuple[Reference, ...]
    random: bool
    batch: Tensors
    """The example."""

    @property
    def buffers(self) -> set[str]:
        return set(self.objective.buffers)

    @property
    def travelling(self) -> list[str]:
        return [name for name in self.values if name not in self.personal]

    def arguments(self) -> Tensors:
        """An example of each input, in the graph's order: each its own memory, as one tensor in two places would be
        traced as one input."""
        given = {f"param.{name}": value for name, value in self.values.items()}
        for reference in self.references:
            given |= {f"{reference}.{name}": self.values[name] for name in self.travelling}
        given |= {f"state.{name}": value for name, value in self.state.items()}
        given |= {f"batch.{name}": value for name, value in self.batch.items()}
        # Values that no rule divides by, and no clip or decay makes vanish.
        given |= {f"hyper.{name}": torch.tensor(0.5) for name in self.hyper}
        given |= {"seed": torch.tensor(0)} if self.random else {}
        return {name: value.clone() for name, value in given.items()}

    def outputs(self) -> list[str]:
        """The names of the results, in the graph's order."""
        return [
            *(f"next.param.{name}" for name in self.values),
            *(f"next.state.{name}" for name in self.state),
            "loss",
            *(f"metric.{name}" for name in self.objective.metrics),
        ]


def make_train_step(
    source: Source,
    step: LocalStep | Function,
    *,
    features: Function | None = None,
    personal: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    kept: Sequence[str] = (),
    hyper: Mapping[str, float | None] | None = None,
) -> TrainStep:
    """Check the step and run it on the example. The model is in training mode. Raises ExportError."""
    rule = _checked_rule(step, features)
    buffers = changed_buffers(source)
    trained = {name: value for name, value in source.model.named_parameters() if value.requires_grad}
    known = trained | {name: value for name, value in source.model.named_buffers() if name in buffers}
    stays = matching(personal, list(known), "personal", "trained parameter or buffer that training changes")
    if not set(trained) - stays:
        raise ExportError(f"personal={list(personal)} leaves no trained parameter that travels")
    values = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in sorted(known.items(), key=lambda row: row[0] in stays)
    }
    objective = Objective(
        source.model,
        source.loss,
        source.metrics,
        list(source.inputs()),
        list(source.batch)[len(source.inputs()) :],
        list(trained),
        [name for name in values if name in buffers],
    )
    if not isinstance(step, LocalStep):
        function, needs = step, named_needs(step)
        initial = _state_tensors(state or {})
        defaults = _checked_hyper(hyper or {}, None)
        names = tuple(name for name in REFERENCES if name in needs)
    else:
        if state or kept:
            raise ExportError("state and kept are for a step of your own; a LocalStep's optimizer has its own state")
        function, needs = built_in(rule, features), ("objective", *REFERENCES)
        initial = initial_state(rule, {name: values[name] for name in trained})
        defaults = _checked_hyper(hyper or {}, hyper_defaults(rule))
        names = references(rule)
    made = TrainStep(
        lambda given: given,  # put in below: it needs the rest
        rule,
        objective,
        values,
        stays,
        initial,
        matching(kept, list(initial), "kept", "state of the step"),
        defaults,
        names,
        False,
        source.batch,
    )
    drawn: list[int] = []
    made = made._replace(function=lambda given: _run(made, function, needs, given, drawn))
    with explained("on the example the step fails in PyTorch itself"):
        made.function(made.arguments() | {"seed": torch.tensor(0)})
    return made._replace(random=any(drawn))


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention and recurrent layers in their plain form: nothing can translate the fused kernels' backward passes, and
    they draw their random numbers in another order."""
    mkldnn = torch.backends.mkldnn
    before: Any = mkldnn.enabled
    mkldnn.enabled = False  # type: ignore[assignment]  # a property, made in an unusual way
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mkldnn.enabled = before


def _run(made: TrainStep, function: Function, needs: Sequence[str], given: Tensors, drawn: list[int]) -> Tensors:
    """Call the step with the graph's inputs and name its results as the graph's outputs. Raises ExportError."""

    def part(kind: str) -> Tensors:
        # Copies: a step may write into what it is given.
        return {name.partition(".")[2]: value.clone() for name, value in given.items() if name.startswith(f"{kind}.")}

    extra: dict[str, Any] = {name: part(name) for name in needs if name != "objective"}
    if "objective" in needs:
        extra["objective"] = made.objective
    seeded = Seeded(given["seed"]) if "seed" in given else nullcontext()
    with plain_kernels(), seeded, untouched(made.objective.model):
        result = function(part("param"), part("state"), part("batch"), part("hyper"), **extra)
    drawn.append(getattr(seeded, "draws", 0))
    if not isinstance(result, tuple | list) or len(result) != 3 or not all(isinstance(row, Mapping) for row in result):
        raise ExportError(f"the step returned a {type(result).__name__}; expected three dicts: params, state, metrics")
    params, state, metrics = result
    named = {f"metric.{name}": value for name, value in metrics.items() if name != "loss"}
    found = {
        **{f"next.param.{name}": value for name, value in params.items()},
        **{f"next.state.{name}": value for name, value in state.items()},
        **({"loss": metrics["loss"]} if "loss" in metrics else {}),
        **named,
    }
    shapes = {f"next.param.{name}": value.shape for name, value in made.values.items()}
    shapes |= {f"next.state.{name}": value.shape for name, value in made.state.items()}
    for name in made.outputs():
        _check_result(name, found.get(name), shapes.get(name, torch.Size()))
    surplus = sorted(found.keys() - set(made.outputs()))
    if surplus:
        raise ExportError(
            f"the step returned {', '.join(surplus)}, which is not in the tables: parameters are the model's own, "
            "state is what export_bundle was given as `state`, metrics are `loss` and what it was given as `metrics`"
        )
    # Copies: a step may return one tensor in two places, and each output of a graph needs its own name.
    return {name: found[name].detach().clone() for name in made.outputs()}


def _check_result(name: str, value: object, shape: torch.Size) -> None:
    what = name.removeprefix("next.")
    if value is None:
        raise ExportError(f"the step did not return {what}")
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != torch.float32:
        given = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ExportError(f"the step returned {what} as {given}; expected a float32 tensor of shape {tuple(shape)}")


def _checked_rule(step: LocalStep | Function, features: Function | None) -> LocalStep:
    if not isinstance(step, LocalStep):
        if not callable(step):
            raise ExportError(f"the step is a {type(step).__name__}; expected a LocalStep or a function")
        needs = named_needs(step)
        if features is not None:
            raise ExportError("features are for LocalStep(contrastive=True); a step of your own takes its own")
        return LocalStep("custom", correction="correction" in needs)
    if step.optimizer not in OPTIMIZERS:
        raise ExportError(f"optimizer {step.optimizer!r}; a LocalStep has one of {', '.join(OPTIMIZERS)}")
    if step.proximal and step.contrastive:
        raise ExportError(
            "a step is proximal or contrastive, not both: each has its own mu; write the two as a function"
        )
    if step.contrastive != (features is not None):
        raise ExportError(
            "a contrastive step needs features(outputs), the tensor of features in what the model returns"
            if step.contrastive
            else "features are for a contrastive step: LocalStep(contrastive=True)"
        )
    return step


def _checked_hyper(
    given: Mapping[str, float | None], declared: Mapping[str, float | None] | None
) -> dict[str, float | None]:
    """The manifest's defaults. A step of the user's own declares what it takes by what is given."""
    for name, value in given.items():
        check_name("hyper-parameter", name)
        if name == "seed":
            raise ExportError("no hyper-parameter is named seed: that is the input of a random step's own numbers")
        number = value is None or (isinstance(value, int | float) and abs(value) <= 1e30)
        if not number or (declared is not None and (name not in declared or value is None)):
            known = "a step of your own takes" if declared is None else f"the step has {', '.join(declared)}, each"
            raise ExportError(f"hyper-parameter {name}={value}: {known} a finite number")
    return {**(declared or {}), **{name: None if value is None else float(value) for name, value in given.items()}}


def _state_tensors(state: Mapping[str, Any]) -> Tensors:
    values = {}
    for name, value in state.items():
        check_name("state", name, TensorName)
        with explained(f"state {name} cannot become a tensor"):
            values[name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
        if values[name].dtype != torch.float32 or not values[name].numel():
            raise ExportError(
                f"state {name} is {values[name].dtype} of shape {tuple(values[name].shape)}; expected float32, with "
                "at least one element"
            )
        if not bool(torch.isfinite(values[name]).all()):
            raise ExportError(f"state {name} holds NaN or infinity; every initial value must be finite")
    return values


def matching(patterns: Sequence[str], names: Sequence[str], argument: str, what: str) -> set[str]:
    """The names that fit the patterns: a name, one with wildcards (``head.*``), or a module's. Raises ExportError."""
    if isinstance(patterns, str):
        raise ExportError(f"{argument}={patterns!r}; expected a list of names")
    found: set[str] = set()
    for pattern in patterns:
        fits = {name for name in names if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")}
        if not fits:
            raise ExportError(f"{argument}: {pattern!r} is the name of no {what}; there are {', '.join(names)}")
        found |= fits
    return found


def changed_buffers(source: Source) -> set[str]:
    """The float32 buffers that a pass in training mode changes. The model itself stays.

    A counter such as BatchNorm's num_batches_tracked does not travel: nothing is averaged over it. Raises ExportError
    where the step depends on one.
    """
    model, inputs = source.model, tuple(value.clone() for value in source.inputs().values())

    def passed(shift: int) -> tuple[Any, Tensors, set[str]]:
        before = {name: value.detach().clone() for name, value in model.named_buffers()}
        for value in before.values():
            if not value.is_floating_point() and value.dtype != torch.bool:
                value += shift
        given = {name: value.clone() for name, value in before.items()}
        fresh = {name: (value, value._version) for name, value in given.items()}
        with torch.no_grad(), plain_kernels(), Seeded(torch.tensor(0)):
            outputs = functional_call(model, given, tuple(value.clone() for value in inputs))
        # Batch norm writes without counting it as a change; a change may leave these examples' values as they were.
        changed = {
            name
            for name, value in given.items()
            if value is not fresh[name][0] or value._version != fresh[name][1] or not torch.equal(value, before[name])
        }
        return outputs, given, changed

    with explained("the model fails in PyTorch itself"):
        outputs, after, changed = passed(0)
    counters = {name for name in changed if not after[name].is_floating_point()}
    if counters and not _same(
        (outputs, [after[name] for name in changed - counters]), _later(passed, changed - counters)
    ):
        raise ExportError(
            f"training depends on {', '.join(sorted(counters))}, a counter that does not travel (BatchNorm with "
            "momentum=None averages over all batches by it): give BatchNorm a momentum, or count in a float32 buffer"
        )
    wrong = [name for name in changed - counters if after[name].dtype != torch.float32]
    if wrong:
        raise ExportError(f"buffer {wrong[0]} changes in training and is {after[wrong[0]].dtype}; expected float32")
    return changed - counters


def _later(passed: Callable[[int], tuple[Any, Tensors, set[str]]], names: set[str]) -> tuple[Any, list[Tensor]]:
    outputs, after, _ = passed(7)
    return outputs, [after[name] for name in names]


def _same(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(not isinstance(a, Tensor) or torch.equal(a, b) for a, b in pairs)
