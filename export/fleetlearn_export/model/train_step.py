"""A local step with its named inputs and outputs, as train.onnx has them. PyTorch runs it and
traces it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch
from fleetlearn_protocol.manifest import GRADIENT, LocalStep, Reference, TensorName
from msgspec import structs
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.arguments import check_name, refuse_class
from fleetlearn_export.model.loss_scaling import initial_scale, with_loss_scaling
from fleetlearn_export.model.normalisation import normalisation_names
from fleetlearn_export.model.other_random import without_other_random
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.source_locations import as_export_error
from fleetlearn_export.model.stateless import call_with, functional_call, own_tensors_restored
from fleetlearn_export.model.steps import (
    OPTIMIZERS,
    REFERENCES,
    BatchEvaluation,
    Function,
    Objective,
    Tensors,
    built_in,
    detached,
    hyper_defaults,
    initial_state,
    keyword_needs,
    references,
)
from fleetlearn_export.model.user_model import LossModule, UserModel

NORMALISATION = "normalisation"
"""What stands for the parameters and buffers of all normalisation layers, where names are given
otherwise."""
MEAN = "mean."
"""The beginning of the names of what a step is made from: means over the batch."""
MAX_LISTED = 12
"""Most names that an error lists. Of more names it lists those that are nearest to the wrong
one."""


class RecordedObjective(Objective):
    """An objective that keeps its results."""

    def __init__(self, inner: Objective) -> None:
        vars(self).update(vars(inner))
        self.results: list[BatchEvaluation] = []

    def __call__(self, *args: Any, **kwargs: Any) -> BatchEvaluation:
        found = super().__call__(*args, **kwargs)
        self.results.append(
            found._replace(metrics=dict(found.metrics), gradients=dict(found.gradients))
        )
        return found


class TrainStep(NamedTuple):
    """A local step with all that it takes and returns."""

    function: Function
    """The user's own step, or the built-in one that ``rule`` describes."""
    needs: tuple[str, ...]
    """The keyword-only parameters that ``function`` is given."""
    rule: LocalStep
    objective: Objective
    values: Tensors
    """The parameter table's tensors in its order: the trained parameters, and copies of the buffers
    that training changes; those that travel first, then the personal ones. Nobody writes into them:
    parameters are the model's own memory."""
    personal: set[str]
    """Names of those ``values`` that stay on the device."""
    normalisation: set[str]
    """Names of those ``values`` that belong to normalisation layers."""
    state: Tensors
    """The initial state, in the order of the state table."""
    kept: set[str]
    """Names of that ``state`` which outlives a task."""
    hyper: dict[str, float | None]
    references: tuple[Reference, ...]
    batch: Tensors
    """The example."""
    random: bool = False
    """Whether the step draws random numbers."""

    @property
    def buffers(self) -> set[str]:
        return set(self.objective.buffers)

    @property
    def travelling(self) -> list[str]:
        return [name for name in self.values if name not in self.personal]

    def arguments(self) -> Tensors:
        """Return an example of each input, in the graph's order.

        Each is a copy: one tensor in two places would be traced as one input.
        """
        return {name: value.clone() for name, value in self.inputs().items()}

    def inputs(self) -> Tensors:
        """Return the same as ``arguments``, without copies: the tensors are the step's own."""
        given = {f"param.{name}": value for name, value in self.values.items()}
        for reference in self.references:
            given |= {f"{reference}.{name}": self.values[name] for name in self.travelling}
        given |= {f"state.{name}": value for name, value in self.state.items()}
        given |= {f"batch.{name}": value for name, value in self.batch.items()}
        # 0.5: no step divides by 0 then, and neither clipping nor decay makes everything 0.
        given |= {f"hyper.{name}": torch.tensor(0.5) for name in self.hyper}
        return given | ({"seed": torch.tensor(0)} if self.random else {})

    def means(self) -> list[str]:
        """Return the names of the means over the batch, as ``run_with_means`` has them."""
        metrics = [f"metric.{name}" for name in self.objective.metrics]
        return [
            MEAN + name
            for name in (*(f"gradient.{name}" for name in self.objective.trained), *metrics, "loss")
        ]

    def outputs(self) -> list[str]:
        """Return the names of the results, in the graph's order."""
        return [
            *(f"next.param.{name}" for name in self.values),
            *(f"next.state.{name}" for name in self.state),
            "loss",
            *(f"metric.{name}" for name in self.objective.metrics),
        ]

    def run(
        self, given: Tensors, dtype: torch.dtype = torch.float32, *, copies: bool = True
    ) -> Tensors:
        """Do the step with the graph's named inputs. Returns the graph's named outputs. Raises
        ExportError.

        dtype: what parameters, state and metrics must have. copies: whether the step gets copies of
        its inputs, into which it may write, and each output is a new tensor.
        """
        return self.run_counting_draws(given, dtype, copies=copies)[0]

    def run_counting_draws(
        self, given: Tensors, dtype: torch.dtype = torch.float32, *, copies: bool = True
    ) -> tuple[Tensors, int]:
        """Do the step. Returns its named outputs, and how many random operators drew from
        ``given["seed"]``."""

        def named(kind: str) -> Tensors:
            found = {name: value for name, value in given.items() if name.startswith(f"{kind}.")}
            return {
                name.partition(".")[2]: value.clone() if copies else value
                for name, value in found.items()
            }

        extra: dict[str, Any] = {
            name: self.objective if name == "objective" else named(name) for name in self.needs
        }
        seeded = Seeded(given["seed"]) if "seed" in given else nullcontext()
        with plain_kernels(), seeded, own_tensors_restored(self.objective.model):
            result = self.function(
                named("param"), named("state"), named("batch"), named("hyper"), **extra
            )
        outputs = {
            name: detached(value) for name, value in self._checked_outputs(result, dtype).items()
        }
        if copies:
            outputs = {name: value.clone() for name, value in outputs.items()}
        return outputs, getattr(seeded, "draws", 0)

    def run_with_means(self, given: Tensors, *, copies: bool = True) -> Tensors:
        """Do the step. Returns its outputs and, named ``mean.*``, the means over the batch that it
        is made from: loss, metrics and gradients, before the step works on them. Raises ExportError
        if the step asks for them twice.
        """
        objective = RecordedObjective(self.objective)
        outputs = self._replace(objective=objective).run(given, copies=copies)
        if len(objective.results) != 1:
            raise ExportError(f"the step asks for gradients {len(objective.results)} times")
        (results,) = objective.results
        gradients = {f"gradient.{name}": value for name, value in results.gradients.items()}
        metrics = {f"metric.{name}": value for name, value in results.metrics.items()}
        means = gradients | metrics | {"loss": results.loss}
        return outputs | {MEAN + name: value.detach() for name, value in means.items()}

    def run_with_gradients_of(
        self, arrays: Sequence[str], given: Tensors, *, copies: bool = True
    ) -> Tensors:
        """Do the step. Returns its outputs and, as ``gradient.NAME`` for each of these input
        arrays, the gradient of each row's own loss: the mean loss's, times the number of rows.
        Raises ExportError."""
        objective = RecordedObjective(self.objective)
        objective.differentiated = list(arrays)
        outputs = self._replace(objective=objective).run(given, copies=copies)
        (results,) = objective.results
        return outputs | {
            gradient_of(name): (gradient * gradient.shape[0]).detach()
            for name, gradient in results.of_inputs.items()
        }

    def activations(self, given: Tensors, *, copies: bool = True) -> Tensors:
        """Return what the model makes of a batch in training mode, as ``activations``: with the
        random numbers that the step draws from the same seed. Raises ExportError."""
        objective = self.objective
        own = {
            **{name: value.detach().clone() for name, value in objective.model.named_buffers()},
            **{name: given[f"param.{name}"].clone() for name in self.values},
        }
        arrays = tuple(given[f"batch.{name}"].clone() for name in objective.inputs)
        seeded = Seeded(given["seed"]) if "seed" in given else nullcontext()
        with plain_kernels(), seeded, torch.no_grad(), own_tensors_restored(objective.model):
            result = call_with(objective.model, own, lambda: objective.model(*arrays))
        return {"activations": result.clone() if copies else result}

    def _checked_outputs(self, result: Any, dtype: torch.dtype) -> Tensors:
        """Name the step's results as the graph's outputs. Raises ExportError if they are not what
        is expected."""
        if (
            not isinstance(result, tuple | list)
            or len(result) != 3
            or not all(isinstance(row, Mapping) for row in result)
        ):
            raise ExportError(
                f"the step returned a {type(result).__name__}; expected three dicts: params, "
                "state, metrics"
            )
        params, state, metrics = result
        outputs = {
            **{f"next.param.{name}": value for name, value in params.items()},
            **{f"next.state.{name}": value for name, value in state.items()},
            **{
                name if name == "loss" else f"metric.{name}": value
                for name, value in metrics.items()
            },
        }
        shapes = {f"next.param.{name}": value.shape for name, value in self.values.items()}
        shapes |= {f"next.state.{name}": value.shape for name, value in self.state.items()}
        for name in self.outputs():
            _check_result(name, outputs.get(name), shapes.get(name, torch.Size()), dtype)
        surplus = sorted(outputs.keys() - set(self.outputs()))
        if surplus:
            raise ExportError(
                f"the step returned {', '.join(surplus)}, which is not in the tables: parameters "
                "are the model's own, state is what export_bundle was given as `state`, metrics "
                "are `loss` and what it was given as `metrics`"
            )
        return {name: outputs[name] for name in self.outputs()}


def gradient_of(array: str) -> str:
    """Return the name of the output with an input array's gradient."""
    return f"{GRADIENT}.{array}"


def make_train_step(
    user: UserModel,
    step: LocalStep | Function,
    *,
    features: Function | None = None,
    personal: Sequence[str] = (),
    state: Mapping[str, Any] | None = None,
    kept: Sequence[str] = (),
    hyper: Mapping[str, float | None] | None = None,
    scaled: bool = False,
) -> TrainStep:
    """Check the step and run it on the example. The model is in training mode. Raises ExportError.

    scaled: whether a built-in step scales its loss, for float16.
    """
    rule = _checked_rule(step, features)
    buffers = changed_buffers(user)
    trained = {name: value for name, value in user.model.named_parameters() if value.requires_grad}
    known = trained | {name: value for name, value in user.model.named_buffers() if name in buffers}
    norms = known.keys() & normalisation_names(user.model)
    stays = _personal_names(personal, list(known), norms)
    if not set(trained) - stays:
        raise ExportError(f"personal={personal!r} leaves no trained parameter that travels")
    values = {
        name: (value.clone() if name in buffers else value).detach().contiguous()
        for name, value in sorted(known.items(), key=lambda row: row[0] in stays)
    }
    objective = Objective(
        user.model,
        user.loss,
        user.metrics,
        list(user.inputs()),
        user.labels(),
        list(trained),
        [name for name in values if name in buffers],
    )
    if not isinstance(step, LocalStep):
        function, needs = step, keyword_needs(step)
        if objective.hooks and "objective" not in needs:
            raise ExportError(
                f"parameter {min(objective.hooks)} has a gradient hook (register_hook), which a "
                "step of your own calls only through `objective`: take the gradients from it, or "
                "remove the hook"
            )
        initial = _state_tensors(state or {})
        defaults = _checked_hyper(hyper or {}, None)
        names = tuple(name for name in REFERENCES if name in needs)
    else:
        if state or kept:
            raise ExportError(
                "state and kept are for a step of your own; a LocalStep's optimizer has its own "
                "state"
            )
        function, needs = built_in(rule, features), ("objective", *REFERENCES)
        initial = initial_state(rule, {name: values[name] for name in trained})
        if scaled:
            function, initial = with_loss_scaling(function), initial | initial_scale()
        defaults = _checked_hyper(hyper or {}, hyper_defaults(rule))
        names = references(rule)
    made = TrainStep(
        function,
        tuple(needs),
        rule,
        objective,
        values,
        stays,
        norms,
        initial,
        names_matching(kept, list(initial), "kept", "state of the step"),
        defaults,
        names,
        user.batch,
    )
    with as_export_error("on the example the step fails in PyTorch itself"):
        if rule.optimizer == "custom" or rule.contrastive:
            inputs = made.inputs() | {"seed": torch.tensor(0)}
            _, draws = without_other_random(partial(made.run_counting_draws, inputs), "the step")
        else:  # only the model, the loss and the metrics may draw
            draws = _draws(user)
    return made._replace(random=draws > 0)


def _draws(user: UserModel) -> int:
    """Return how many random operators draw when the loss and the metrics are computed. The model
    does not change."""
    buffers = {name: value.detach().clone() for name, value in user.model.named_buffers()}
    tensors = {f"model.{name}": value for name, value in (buffers | user.written()).items()}
    with plain_kernels(), Seeded(torch.tensor(0)) as seeded:
        functional_call(LossModule(user), tensors, tuple(user.small_batch().values()))
    return seeded.draws


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Let PyTorch compute attention and recurrent layers with plain operators instead of fused
    kernels.

    The fused kernels' backward passes cannot be translated, and they draw their random numbers in
    another order. A model that asks for them with ``sdpa_kernel`` does not get them.
    """
    mkldnn = torch.backends.mkldnn
    before: Any = mkldnn.enabled
    mkldnn.enabled = False  # type: ignore[assignment]  # a property, made in an unusual way
    try:
        with sdpa_kernel(SDPBackend.MATH):
            chosen = attention._sdpa_kernel
            attention._sdpa_kernel = lambda *_: None
            try:
                yield
            finally:
                attention._sdpa_kernel = chosen
    finally:
        mkldnn.enabled = before


def _check_result(name: str, value: object, shape: torch.Size, dtype: torch.dtype) -> None:
    what = name.removeprefix("next.")
    if value is None:
        raise ExportError(f"the step did not return {what}")
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
        got = (
            f"{value.dtype} {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise ExportError(
            f"the step returned {what} as {got}; expected a float32 tensor of shape {tuple(shape)}"
        )


def _refuse_other_kinds(step: object) -> None:
    """Raise ExportError if the step is neither a LocalStep nor a function, such as a torch.optim
    class."""
    kind = step if isinstance(step, type) else type(step)
    if issubclass(kind, torch.optim.Optimizer):
        known = kind.__name__.lower()
        instead = (
            f'LocalStep("{known}")'
            if known in OPTIMIZERS
            else f"LocalStep, of {', '.join(OPTIMIZERS)}"
        )
        raise ExportError(
            f"the step is torch.optim's {kind.__name__}; expected {instead}: a device has no "
            "PyTorch, so the bundle holds the optimizer's own step"
        )
    if isinstance(step, str) and step in OPTIMIZERS:
        raise ExportError(f"the step is the text {step!r}; expected LocalStep({step!r})")
    refuse_class("the step", step)
    if not callable(step):
        raise ExportError(
            f"the step is a {type(step).__name__}; expected a LocalStep or a function"
        )


def _checked_rule(step: LocalStep | Function, features: Function | None) -> LocalStep:
    if not isinstance(step, LocalStep):
        _refuse_other_kinds(step)
        needs = keyword_needs(step)
        if features is not None:
            raise ExportError(
                "features are for LocalStep(contrastive=True); a step of your own takes its own"
            )
        return LocalStep("custom", correction="correction" in needs)
    if step.optimizer not in OPTIMIZERS:
        raise ExportError(
            f"optimizer {step.optimizer!r}; a LocalStep has one of {', '.join(OPTIMIZERS)}"
        )
    if step.proximal and step.contrastive:
        raise ExportError(
            "a step is proximal or contrastive, not both: each has its own mu; write the two as a "
            "function"
        )
    if step.contrastive != (features is not None):
        raise ExportError(
            (
                "a contrastive step needs features(outputs), the tensor of features in what the "
                "model returns"
            )
            if step.contrastive
            else "features are for a contrastive step: LocalStep(contrastive=True)"
        )
    # torch.optim.AdamW decays unless told otherwise. Without decay AdamW is Adam.
    return structs.replace(step, weight_decay=True) if step.optimizer == "adamw" else step


def _checked_hyper(
    given: Mapping[str, float | None], declared: Mapping[str, float | None] | None
) -> dict[str, float | None]:
    """Return the manifest's defaults. A step of the user's own (``declared`` is None) has what is
    given."""
    for name, value in given.items():
        check_name("hyper-parameter", name)
        if name == "seed":
            raise ExportError(
                "no hyper-parameter is named seed: that is the input of a random step's own numbers"
            )
        number = value is None or (isinstance(value, int | float) and abs(value) <= 1e30)
        if not number or (declared is not None and (name not in declared or value is None)):
            known = (
                "a step of your own takes"
                if declared is None
                else f"the step has {', '.join(declared)}, each"
            )
            raise ExportError(f"hyper-parameter {name}={value!r}: {known} a finite number")
    return {
        **(declared or {}),
        **{name: None if value is None else float(value) for name, value in given.items()},
    }


def _state_tensors(state: Mapping[str, Any]) -> Tensors:
    values = {}
    for name, value in state.items():
        check_name("state", name, TensorName)
        with as_export_error(f"state {name} cannot become a tensor"):
            values[name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
        if values[name].dtype != torch.float32 or not values[name].numel():
            raise ExportError(
                f"state {name} is {values[name].dtype} of shape {tuple(values[name].shape)}; "
                "expected float32, with at least one element"
            )
        if not bool(torch.isfinite(values[name]).all()):
            raise ExportError(
                f"state {name} holds NaN or infinity; every initial value must be finite"
            )
    return values


def _personal_names(personal: Sequence[str], names: Sequence[str], norms: set[str]) -> set[str]:
    """Return the names that stay on the device. ``norms``: those of normalisation layers. Raises
    ExportError."""
    if personal == NORMALISATION:
        if not norms:
            raise ExportError(
                f"personal={personal!r}: the model has no normalisation layer of PyTorch's with "
                "trained parameters or with buffers that training changes. For layers of your own "
                "give a list of their names"
            )
        return norms
    if isinstance(personal, str):
        raise ExportError(f"personal={personal!r}; expected a list of names, or {NORMALISATION!r}")
    return names_matching(
        personal, names, "personal", "trained parameter or buffer that training changes"
    )


def names_matching(
    patterns: Sequence[str], names: Sequence[str], argument: str, what: str
) -> set[str]:
    """Return the names that match a pattern: a name, one with wildcards (``head.*``), or a
    module's.

    Raises ExportError if a pattern matches none.
    """
    if isinstance(patterns, str):
        raise ExportError(f"{argument}={patterns!r}; expected a list of names")
    found: set[str] = set()
    for pattern in patterns:
        fits = {
            name
            for name in names
            if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
        }
        if not fits:
            listed = (
                names
                if len(names) <= MAX_LISTED
                else get_close_matches(pattern, names, MAX_LISTED, cutoff=0.0)
            )
            among = "there are" if len(names) <= MAX_LISTED else f"of {len(names)} the nearest are"
            raise ExportError(
                f"{argument}: {pattern!r} is the name of no {what}; {among} {', '.join(listed)}"
            )
        found |= fits
    return found


def changed_buffers(user: UserModel) -> set[str]:
    """Return the names of the float32 buffers that a pass in training mode changes. The model
    itself does not change.

    Counters such as BatchNorm's num_batches_tracked do not travel: a mean of them has no use.
    Neither do buffers that no state_dict holds and that change their shape: what a layer keeps of
    one batch. Raises ExportError if training depends on a counter.
    """
    model, few = user.model, user.small_batch()
    inputs = tuple(few[name] for name in user.inputs())
    if not any(True for _ in model.buffers()):
        return set()

    def forward_pass(shifted: set[str]) -> tuple[Any, Tensors, set[str]]:
        """Return the outputs, the buffers afterwards and the names of those that changed, with
        these ones shifted."""
        before = {name: value.detach().clone() for name, value in model.named_buffers()}
        for name in shifted:
            before[name] += 7
        own_tensors = {name: value.clone() for name, value in before.items()}
        tensors = own_tensors | user.written()
        fresh = {name: (value, value._version) for name, value in own_tensors.items()}
        with torch.no_grad(), plain_kernels(), Seeded(torch.tensor(0)):
            outputs = functional_call(model, tensors, tuple(value.clone() for value in inputs))
        own_tensors = {name: tensors[name] for name in own_tensors}
        # Batch norm's write does not raise the version; another write may leave the values as they
        # were.
        changed = {
            name
            for name, value in own_tensors.items()
            if value is not fresh[name][0]
            or value._version != fresh[name][1]
            or not torch.equal(value, before[name])
        }
        return outputs, own_tensors, changed

    with as_export_error("the model fails in PyTorch itself"):
        outputs, after, changed = forward_pass(set())
    # Integers that do not change are indices.
    counters = {name for name in changed if not after[name].is_floating_point()}
    saved, shapes = (
        model.state_dict().keys(),
        {name: value.shape for name, value in model.named_buffers()},
    )
    resized = {name for name in changed if after[name].shape != shapes[name]}
    travelling = sorted(changed - counters - (resized - saved))
    if counters:
        shifted_outputs, shifted, _ = forward_pass(
            {row for row in counters if after[row].dtype != torch.bool}
        )
        one, other = ([buffers[name] for name in travelling] for buffers in (after, shifted))
        if not _equal([outputs, one], [shifted_outputs, other]):
            raise ExportError(
                f"training depends on {', '.join(sorted(counters))}, a counter that does not "
                "travel (BatchNorm with momentum=None averages over all batches by it): give "
                "BatchNorm a momentum, or count in a float32 buffer"
            )
    wrong = [name for name in travelling if after[name].dtype != torch.float32]
    if wrong:
        raise ExportError(
            f"buffer {wrong[0]} changes in training and is {after[wrong[0]].dtype}; expected "
            "float32"
        )
    if resized & set(travelling):
        name = min(resized & set(travelling))
        raise ExportError(
            f"buffer {name} of shape {tuple(shapes[name])} has shape {tuple(after[name].shape)} "
            "after a training pass; a buffer that travels keeps its shape. If it only keeps "
            "something of one batch, register it with persistent=False"
        )
    return set(travelling)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(not isinstance(a, Tensor) or torch.equal(a, b) for a, b in pairs)
