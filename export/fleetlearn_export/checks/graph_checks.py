"""Before a bundle is published: its graphs on ONNX Runtime against the same steps in PyTorch, written by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.source_locations import explained
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function
from fleetlearn_export.model.train_step import TrainStep, plain_kernels
from fleetlearn_export.model.user_model import EvalModule, InferModule, Source, training

TOLERANCE = 1e-5
"""Largest difference of a tensor's elements after the check's steps; above magnitude 1, of its largest element."""
GRADIENT_TOLERANCE = 1e-3
"""Of a tensor's largest gradient."""
GRADIENT_FLOOR = 1e-5
"""Of the model's largest gradient: a bias before a normalisation has a gradient of rounding errors alone."""
PROBE = 2.0**20
"""A learning rate with which the step's result shows the gradient itself, and hardly the parameter."""
SEEDS = (1, 2, 3)
"""Two values nearly equal under a maximum, or one at ReLU's corner, may fall differently on two runtimes: seldom, and
by chance. What fails with all seeds is wrong."""

Array = NDArray[Any]
Tensors = dict[str, Tensor]
Result = TypeVar("Result")


class Session(NamedTuple):
    """A graph on ONNX Runtime, one thread."""

    inner: Any
    inputs: list[str]
    outputs: list[str]

    def run(self, feed: Mapping[str, Any]) -> dict[str, Array]:
        given = {name: np.asarray(feed[name]) for name in self.inputs}
        with explained("ONNX Runtime cannot run the exported graph"):
            return dict(zip(self.outputs, self.inner.run(self.outputs, given), strict=True))


def open_session(content: bytes) -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails raises
    with explained("ONNX Runtime cannot load the exported graph"):
        inner = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return Session(inner, [row.name for row in inner.get_inputs()], [row.name for row in inner.get_outputs()])


class HandStep(NamedTuple):
    """What a step by hand came to."""

    given: Tensors
    """The inputs of the next step: the parameters and state after it."""
    results: Tensors
    """Named as the graph's outputs."""
    gradients: Tensors
    """Of the penalised loss, before anything is done with them; empty for a step of the user's own."""


class Hand:
    """Training written out in PyTorch: penalties added to the loss, autograd, clip_grad_norm_, torch.optim.

    A step of the user's own is called as it is.
    """

    def __init__(self, source: Source, step: TrainStep, features: Function | None) -> None:
        self.source, self.step, self.features = source, step, features
        self.leaves = {name: step.values[name].clone().requires_grad_() for name in step.objective.trained}
        rows = list(self.leaves.values())
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(rows, lr=1.0)
        if step.rule.optimizer in ("momentum", "nesterov"):
            self.optimizer = torch.optim.SGD(rows, lr=1.0, momentum=0.5, nesterov=step.rule.optimizer == "nesterov")
        elif step.rule.optimizer in ("adam", "adamw"):
            kind = torch.optim.Adam if step.rule.optimizer == "adam" else torch.optim.AdamW
            self.optimizer = kind(rows, lr=1.0, weight_decay=0.0)

    def __call__(self, given: Tensors) -> HandStep:
        """One step from the graph's named inputs. The optimizer's own state goes on from its last step."""
        if self.step.rule.optimizer == "custom":
            results = self.step.function(given)
            gradients: Tensors = {}
        else:
            results, gradients = self._built_in(given)
        after = {name.removeprefix("next."): value for name, value in results.items() if name.startswith("next.")}
        return HandStep(given | after, results, gradients)

    def _built_in(self, given: Tensors) -> tuple[Tensors, Tensors]:
        rule, source = self.step.rule, self.source
        hyper = {name: float(given[f"hyper.{name}"]) for name in self.step.hyper}
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(given[f"param.{name}"])
        buffers = {name: given[f"param.{name}"].clone() for name in self.step.objective.buffers}
        arrays = [given[f"batch.{name}"].clone() for name in source.batch]
        inputs, targets = arrays[: len(source.inputs())], arrays[len(source.inputs()) :]
        with plain_kernels(), Seeded(given["seed"]) if "seed" in given else nullcontext():
            # Where the model gives a buffer another tensor, that takes its place in here.
            tensors = self._state() | buffers | self.leaves
            outputs = functional_call(source.model, tensors, tuple(inputs))
            loss = source.loss(outputs, *targets)
        target = loss
        if rule.proximal:
            target = loss + hyper["mu"] / 2 * sum(
                ((leaf - given[f"anchor.{name}"]) ** 2).sum()
                for name, leaf in self.leaves.items()
                if f"anchor.{name}" in given
            )
        elif rule.contrastive:
            target = loss + hyper["mu"] * self._contrastive(given, outputs, hyper["temperature"])
        self.optimizer.zero_grad()
        target.backward()
        gradients = {name: leaf.grad.clone() for name, leaf in self.leaves.items() if leaf.grad is not None}
        if rule.clip:
            torch.nn.utils.clip_grad_norm_(self.leaves.values(), hyper["max_norm"])
        for name, leaf in self.leaves.items():
            if f"correction.{name}" in given and leaf.grad is not None:
                leaf.grad += given[f"correction.{name}"]
        group = self.optimizer.param_groups[0]
        group.update({key: hyper[key] for key in ("lr", "momentum", "weight_decay") if key in hyper})
        if "beta1" in hyper:
            group.update(betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["epsilon"])
        self.optimizer.step()
        results = {f"next.param.{name}": value.detach().clone() for name, value in self.leaves.items()}
        results |= {f"next.param.{name}": tensors[name].detach() for name in buffers}
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        metrics = {f"metric.{name}": function(outputs, *targets) for name, function in source.metrics.items()}
        return results | {"loss": loss.detach()} | {name: v.float().mean() for name, v in metrics.items()}, gradients

    def _state(self) -> Tensors:
        """Copies of all buffers, that the model's own are not changed."""
        return {name: value.detach().clone() for name, value in self.source.model.named_buffers()}

    def _contrastive(self, given: Tensors, outputs: Any, temperature: float) -> Tensor:
        """MOON's loss in the words of its equation 3, on the features of the global and the previous model."""
        assert self.features is not None
        values = {name: given[f"param.{name}"] for name in self.step.values}
        similar = []
        for reference in ("anchor", "previous"):
            model = values | {name: given[f"{reference}.{name}"] for name in self.step.travelling}
            arrays = tuple(given[f"batch.{name}"].clone() for name in self.source.inputs())
            with training(self.source.model, mode=False), torch.no_grad():
                other = self.features(functional_call(self.source.model, self._state() | model, arrays)).flatten(1)
            current = self.features(outputs).flatten(1)
            lengths = current.norm(dim=1).clamp_min(1e-8) * other.norm(dim=1).clamp_min(1e-8)
            similar.append(torch.exp((current * other).sum(1) / lengths / temperature))
        return -torch.log(similar[0] / (similar[0] + similar[1])).mean()


def batches(source: Source, seed: int) -> Iterator[Tensors]:
    """Rows of the example in batches of its own size, of one more, and of one."""
    rows = len(next(iter(source.batch.values())))
    random = torch.Generator().manual_seed(seed)
    for size in (rows, rows + 1, rows, 1):
        chosen = torch.randint(rows, (size,), generator=random)
        yield {name: value[chosen].clone() for name, value in source.batch.items()}


class Trained(NamedTuple):
    """What checking the step found."""

    difference: float
    values: Tensors
    """The parameters and buffers after its steps."""
    batch_of_one: bool
    """Whether the model trains on a single example at all (BatchNorm may not)."""


def over_seeds(check: Callable[[int], Result]) -> Result:
    """What the check gives with the first seed that it passes. Raises ExportError where it passes with none."""
    for seed in SEEDS[:-1]:
        with suppress(ExportError):
            return check(seed)
    return check(SEEDS[-1])


def in_pytorch(call: Callable[[], Result], batch: Tensors) -> Result | None:
    """What the model gives; None where it takes no batch of one: BatchNorm fails in training, a deviation is NaN."""
    one = len(next(iter(batch.values()))) == 1
    try:
        with warnings.catch_warnings():
            if one:  # nobody asked for it
                warnings.simplefilter("ignore")
            result = call()
    except Exception:
        if not one:
            raise
        return None
    leaves = pytree.tree_leaves(result)
    return None if one and any(isinstance(row, Tensor) and bool(row.isnan().any()) for row in leaves) else result


def check_train(source: Source, step: TrainStep, content: bytes, features: Function | None = None) -> Trained:
    """Compare gradients and a few steps. The model is in training mode. Raises ExportError, naming the worst."""
    session = open_session(content)
    return over_seeds(lambda seed: _check_steps(source, step, session, features, seed))


def start(step: TrainStep, hyper: Mapping[str, float], seed: int) -> Tensors:
    """Inputs for a first step: references near the model, the optimizer's state as it is at first, no batch."""
    random = torch.Generator().manual_seed(seed)
    given = step.arguments()
    for reference in step.references:
        for name in step.travelling:
            noise = 0.05 * torch.randn(step.values[name].shape, generator=random)
            # Variances may not become negative.
            given[f"{reference}.{name}"] = noise if reference == "correction" else step.values[name] + noise.abs()
    return given | {f"hyper.{name}": torch.tensor(value) for name, value in hyper.items()}


def _check_steps(source: Source, step: TrainStep, session: Session, features: Function | None, seed: int) -> Trained:
    rule = step.rule
    usual = {"mu": 0.25, "max_norm": 0.5, "weight_decay": 0.1, "temperature": 0.5, "momentum": 0.8}
    # A large epsilon: a gradient that is rounding errors alone would make a whole step of lr under Adam.
    usual |= {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-2}
    hyper = {name: 0.5 if default is None else default for name, default in step.hyper.items()}
    hyper |= {name: usual[name] for name in hyper if rule.optimizer != "custom" and name in usual}
    rate = 0.01
    if rule.optimizer != "custom":
        rate = _compare_gradients(source, step, session, features, seed)
    if "lr" in hyper:
        hyper["lr"] = rate

    hand = Hand(source, step, features)
    given = start(step, hyper, seed)
    mine = dict(given)
    worst, batch_of_one = 0.0, True
    for number, batch in enumerate(batches(source, seed)):
        for row in (given, mine):
            row |= {f"batch.{name}": value for name, value in batch.items()}
            row |= {"seed": torch.tensor(seed + number)} if step.random else {}
        expected = in_pytorch(partial(hand, given), batch)
        if expected is None:
            batch_of_one = False
            continue
        got = session.run({name: value.numpy() for name, value in mine.items()})
        given = expected.given
        mine |= {name.removeprefix("next."): torch.from_numpy(v) for name, v in got.items() if name.startswith("next.")}
        rows = {_in_words(name): (got[name], value) for name, value in expected.results.items()}
        worst = max(worst, compare(rows, f"the exported step, on a batch of {len(next(iter(batch.values())))},"))
    return Trained(worst, {name: given[f"param.{name}"] for name in step.values}, batch_of_one)


def _in_words(name: str) -> str:
    kind, _, rest = name.removeprefix("next.").partition(".")
    return {"param": "parameter", "loss": "the loss"}.get(kind, kind) + (f" {rest}" if rest else "")


def _compare_gradients(
    source: Source, step: TrainStep, session: Session, features: Function | None, seed: int
) -> float:
    """Compare the gradients of a first step. Returns a learning rate that suits them. Raises ExportError.

    They show where nothing hides them: in what a huge learning rate makes of the parameters, or in a state that is
    the gradient itself with these hyper-parameters.
    """
    hyper = dict.fromkeys(step.hyper, 0.0) | {"lr": PROBE, "max_norm": 1e30, "temperature": 0.5, "mu": 0.25}
    hyper = {name: value for name, value in hyper.items() if name in step.hyper}
    given = start(step, hyper | ({"epsilon": 1.0} if "epsilon" in hyper else {}), seed)
    given = {name: torch.zeros_like(v) if name.startswith("correction.") else v for name, v in given.items()}
    given |= {f"batch.{name}": value for name, value in next(batches(source, seed)).items()}
    got = session.run({name: value.numpy() for name, value in given.items()})
    gradients = Hand(source, step, features)(given).gradients
    sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
    largest = max(sizes.values())
    excess = {}
    for name, gradient in gradients.items():
        slot = next((f"next.state.{row}.{name}" for row in ("momentum", "m") if f"state.{row}.{name}" in given), None)
        moved = given[f"param.{name}"].numpy().astype(np.float64) - got[f"next.param.{name}"]
        difference = _largest_difference(got[slot] if slot else moved / PROBE, gradient.numpy())
        excess[name] = difference / (GRADIENT_TOLERANCE * sizes[name] + GRADIENT_FLOOR * largest + 1e-30)
    # NaN is greater than nothing, so it is looked for by what it is not.
    bad = [name for name, value in excess.items() if not value <= 1]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(excess[row], nan=np.inf))
        raise ExportError(
            f"the exported step has another gradient than PyTorch for parameter {name} (and {len(bad) - 1} more): "
            f"a difference of {100 * excess[name] * GRADIENT_TOLERANCE:.3g} % of the largest"
        )
    return min(0.1, 0.1 / max(largest, 1e-30))


def check_eval(source: Source, content: bytes, values: Tensors) -> float:
    """The largest difference found. The model is in evaluation mode. Raises ExportError."""
    names = ["loss_sum", *(f"metric_sum.{name}" for name in source.metrics), "examples"]
    feed = {f"param.{name}": value.numpy() for name, value in values.items()}
    return _check_outputs(source, EvalModule(source), list(source.batch), content, values, feed, "batch.", names)


def check_infer(source: Source, content: bytes, values: Tensors) -> float:
    """The largest difference found; ``values`` are what ``content`` holds. The model is in evaluation mode."""
    inputs = list(source.inputs())
    return _check_outputs(source, InferModule(source), inputs, content, values, {}, "", None)


def _check_outputs(
    source: Source,
    module: nn.Module,
    inputs: list[str],
    content: bytes,
    values: Tensors,
    feed: Mapping[str, Array],
    prefix: str,
    names: list[str] | None,
) -> float:
    session = open_session(content)
    given = {f"model.{name}": value for name, value in values.items()}

    def check(seed: int) -> float:
        worst = 0.0
        for batch in batches(source, seed):
            arrays = tuple(batch[name].clone() for name in inputs)
            with torch.no_grad():
                expected = in_pytorch(partial(functional_call, module, given, arrays), batch)
            if expected is not None:
                got = session.run({**feed, **{prefix + name: batch[name].numpy() for name in inputs}})
                rows = {
                    name: (got[name], value) for name, value in zip(names or session.outputs, expected, strict=True)
                }
                worst = max(worst, compare(rows, f"the exported {'evaluation' if names else 'model'}"))
        return worst

    return over_seeds(check)


def compare(rows: Mapping[str, tuple[Array, Tensor]], what: str) -> float:
    """The largest difference, above magnitude 1 relative. Raises ExportError above TOLERANCE, naming the worst."""
    found = {}
    for name, (got, tensor) in rows.items():
        expected = tensor.numpy()
        if got.shape != expected.shape:
            raise ExportError(f"{what} gives {name} with shape {got.shape} where PyTorch has {expected.shape}")
        if np.isnan(expected).any():
            raise ExportError(
                f"{what} cannot be compared: PyTorch itself gives NaN in {name}, on random rows of the example. "
                "Give an example with which training gives numbers"
            )
        finite = np.abs(expected[np.isfinite(expected)])
        found[name] = _largest_difference(got, expected) / max(1.0, float(finite.max(initial=0)))
    bad = [name for name, value in found.items() if not value <= TOLERANCE]
    if bad:
        name = max(bad, key=lambda row: np.nan_to_num(found[row], nan=np.inf))
        raise ExportError(
            f"{what} differs from PyTorch in {name} by {found[name]:.3g} (and in {len(bad) - 1} more), where "
            f"{TOLERANCE:.0e} is allowed"
        )
    return max(found.values())


def _largest_difference(got: Array, expected: Array) -> float:
    with np.errstate(invalid="ignore"):  # infinity less infinity
        difference = np.abs(np.subtract(got, expected, dtype=np.float64))
    return float(np.where(got == expected, 0.0, difference).max(initial=0.0))
