"""Local steps written out in PyTorch, independently of ``model/steps.py``: penalties added to the
loss, torch.optim.

In float32 they train the user's own module: its parameters hold the values, with their hooks, and
``backward()`` puts the gradients into their ``.grad``. Whoever reads a parameter, from wherever,
sees the value that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.checks.comparison import largest
from fleetlearn_export.checks.double_precision import Doubled, DoublePrecision, as_double
from fleetlearn_export.checks.memory import LARGE, give_back_freed_memory
from fleetlearn_export.checks.one_example import right_for_one_example
from fleetlearn_export.model.gradient_hooks import register
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.stateless import call_with, holding
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep, plain_kernels
from fleetlearn_export.model.user_model import UserModel, evaluation_mode

ReceiveTensor = Callable[[str, Tensor], None]
"""What gets a tensor with its name as soon as the tensor is computed."""


class PyTorchStep(NamedTuple):
    """What one step in PyTorch gave."""

    given: Tensors
    """The inputs of the next step: this step's inputs, with the new parameters and state."""
    results: Tensors
    """Named as the graph's outputs."""


class PyTorchTraining:
    """Training with autograd, clip_grad_norm_ and torch.optim. A step of the user's own is called
    as it is.

    Between two steps the model has its own parameters and buffers; this holds only the optimizer's
    state.
    """

    def __init__(
        self,
        user: UserModel,
        step: TrainStep,
        features: Function | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``dtype``: float32, or float64 for all that the model and the step compute."""
        self.source, self.step, self.features, self.dtype = user, step, features, dtype
        self.sizes: dict[str, float] = {}
        """The largest element of each parameter's gradient, as ``gradients`` and ``plain_step``
        have computed them."""
        self.leaves = {
            name: torch.empty(0, dtype=dtype, requires_grad=True)
            if self._double
            else user.model.get_parameter(name)
            for name in step.objective.trained
        }
        if self._double:
            register(step.objective.hooks, self.leaves)
        rows = list(self.leaves.values())
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(rows, lr=1.0)
        if step.rule.optimizer in ("momentum", "nesterov"):
            self.optimizer = torch.optim.SGD(
                rows, lr=1.0, momentum=0.5, nesterov=step.rule.optimizer == "nesterov"
            )
        elif step.rule.optimizer in ("adam", "adamw"):
            kind = torch.optim.Adam if step.rule.optimizer == "adam" else torch.optim.AdamW
            self.optimizer = kind(rows, lr=1.0, weight_decay=0.0)

    def __call__(self, given: Tensors) -> PyTorchStep:
        """Do one step from the graph's named inputs. The optimizer keeps its own state between
        steps.

        To take less memory, it changes the trained parameters in ``given`` in place if they have
        its dtype and are not the model's own.
        """
        with self._precision(), right_for_one_example(given):
            if self.step.rule.optimizer == "custom":
                rest = as_double(given) if self._double else given
                results = self.step.run(rest, self.dtype)
            else:
                rest = self._without_leaves(given)
                with self._model_with(rest, self._taken(given)) as tensors:
                    results = self._differentiated(rest, tensors)
                    self._update(rest)
                    results |= {
                        f"next.param.{name}": leaf.data for name, leaf in self.leaves.items()
                    }
                self._release()
        after = {
            name.removeprefix("next."): value
            for name, value in results.items()
            if name.startswith("next.")
        }
        return PyTorchStep(
            {name: after[name] if name in after else rest[name] for name in given}, results
        )

    def gradients(self, given: Tensors, receive: ReceiveTensor) -> Tensors:
        """Compute the gradients of the loss with its penalties, neither clipped nor corrected, one
        after the other.

        receive: gets each with its parameter's name. A gradient that it does not keep is freed
        before the next is made. Returns the loss, the metrics and the buffers after the step. Not
        for a step of the user's own. It changes nothing in ``given``.
        """
        return self._each_gradient(given, lambda name, _, gradient: receive(name, gradient))

    def _each_gradient(
        self, given: Tensors, receive: Callable[[str, Tensor, Tensor], None]
    ) -> Tensors:
        """Do what ``gradients`` does. receive: gets each name, the parameter as the model leaves
        it, and the gradient."""

        def pass_on(name: str, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            if gradient.nbytes >= LARGE:
                give_back_freed_memory()
            self._add_penalty(name, leaf, gradient, given)
            self.sizes[name] = largest(gradient)
            receive(name, leaf.detach(), gradient)

        self.sizes = {}
        with self._precision(), right_for_one_example(given):
            leaves = {
                name: self._constant(given[f"param.{name}"]).requires_grad_()
                for name in self.leaves
            }
            register(self.step.objective.hooks if self._double else {}, leaves)
            rest = self._without_leaves(given)
            with self._model_with(rest, leaves) as tensors:
                handles = [
                    tensors[name].register_post_accumulate_grad_hook(partial(pass_on, name))  # type: ignore[no-untyped-call]
                    for name in self.leaves
                ]
                try:
                    return self._differentiated(rest, tensors)
                finally:
                    for handle in handles:
                        handle.remove()

    def plain_step(self, given: Tensors, receive: ReceiveTensor) -> Tensors:
        """Do a step of plain SGD on each parameter as soon as its gradient is there.

        receive: gets each new parameter with its name. Returns the same as ``gradients``.
        """

        # One optimizer for all: Python frees an optimizer, and what it refers to, long after its
        # last use.
        optimizer = torch.optim.SGD([torch.empty(0)], lr=float(given["hyper.lr"]))

        def move(name: str, after: Tensor, gradient: Tensor) -> None:
            value = after if self.source.writes else given[f"param.{name}"]
            leaf = nn.Parameter(value.to(self.dtype, copy=True))
            leaf.grad = gradient
            optimizer.param_groups[0]["params"] = [leaf]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []
            receive(name, leaf.detach())

        results = self._each_gradient(given, move)
        for name in self.leaves.keys() - self.sizes.keys():
            receive(name, given[f"param.{name}"].to(self.dtype))
        return results

    @property
    def _double(self) -> bool:
        return self.dtype == torch.float64

    def _precision(self) -> AbstractContextManager[Any]:
        return DoublePrecision() if self._double else nullcontext()

    def _taken(self, given: Tensors) -> Tensors:
        """Return the trained parameters in the dtype, in memory that a step may change; in float64
        as the leaves."""
        values = {name: given[f"param.{name}"] for name in self.leaves}
        own = self.step.values
        values = {
            name: value.to(self.dtype, copy=value.data_ptr() == own[name].data_ptr())
            for name, value in values.items()
        }
        if not self._double:
            return values
        for name, leaf in self.leaves.items():
            leaf.data = values[name]
        return self.leaves

    def _release(self) -> None:
        if self._double:
            self.optimizer.zero_grad()
            for leaf in self.leaves.values():
                leaf.data = torch.empty(0, dtype=self.dtype)

    def _constant(self, value: Tensor) -> Tensor:
        """Return the values as a tensor of the dtype, without new memory unless the model
        writes into it."""
        if self.source.writes or not value.is_floating_point():
            return value.detach().to(
                self.dtype if value.is_floating_point() else value.dtype, copy=True
            )
        if self._double and value.dtype != torch.float64:
            # of the value itself: under DoublePrecision detach() would copy it to float64
            return Doubled(value)
        return value.detach()

    def _without_leaves(self, given: Tensors) -> Tensors:
        rest = {
            name: value
            for name, value in given.items()
            if name.removeprefix("param.") not in self.leaves
        }
        return as_double(rest) if self._double else rest

    @contextmanager
    def _model_with(self, given: Tensors, trained: Tensors) -> Iterator[Tensors]:
        """Make all tensors of the model, by name: the trained ones, and copies of the buffers, into
        which it may write.

        In float32 they are the model's own parameters and buffers, which hold these values until
        the block ends.
        """
        model = self.source.model
        buffers = {name: given[f"param.{name}"].clone() for name in self.step.objective.buffers}
        tensors = self._others() | buffers | trained
        if self._double:
            yield tensors
            return
        with holding(model, tensors):
            yield {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def _differentiated(self, given: Tensors, tensors: Tensors) -> Tensors:
        """Compute the gradients of the trained tensors. Returns the loss, the metrics and the
        buffers after the step.

        tensors: those of the model. A buffer that the model replaces by another tensor is replaced
        here too.
        """
        rule, user = self.step.rule, self.source
        leaves = {name: tensors[name] for name in self.leaves}
        arrays = [given[f"batch.{name}"].clone() for name in user.batch]
        inputs, targets = user.divided(arrays)

        def evaluate() -> Tensors:
            outputs = user.model(*inputs)
            loss = user.loss(outputs, *targets)
            target = loss
            if rule.proximal:
                target = loss + given["hyper.mu"].item() / 2 * sum(
                    ((leaf - given[f"anchor.{name}"]) ** 2).sum()
                    for name, leaf in leaves.items()
                    if f"anchor.{name}" in given and name not in self.step.objective.hooks
                )
            elif rule.contrastive:
                similar = self._contrastive(
                    given, outputs, leaves, given["hyper.temperature"].item()
                )
                target = loss + given["hyper.mu"].item() * similar
            give_back_freed_memory()  # what lies between the results that the backward pass reads
            target.backward()
            outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
            metrics = {
                f"metric.{name}": function(outputs, *targets)
                for name, function in user.metrics.items()
            }
            return {"loss": loss.detach()} | {
                name: value.float().mean() for name, value in metrics.items()
            }

        with plain_kernels(), Seeded(given["seed"]) if "seed" in given else nullcontext():
            if self._double:
                results = call_with(user.model, tensors, evaluate)
            else:
                results = evaluate()
                tensors |= dict(user.model.named_buffers())
        return {
            f"next.param.{name}": tensors[name].detach() for name in self.step.objective.buffers
        } | results

    def _add_penalty(self, name: str, leaf: Tensor, gradient: Tensor, given: Tensors) -> None:
        """Add the proximal term's gradient where it is not in the loss: a hook gets the gradient of
        the loss alone."""
        if (
            self.step.rule.proximal
            and name in self.step.objective.hooks
            and f"anchor.{name}" in given
        ):
            gradient += given["hyper.mu"].item() * (leaf.detach() - given[f"anchor.{name}"])

    def _update(self, given: Tensors) -> None:
        """Change the leaves by their gradients."""
        hyper = {name: float(given[f"hyper.{name}"]) for name in self.step.hyper}
        for name, leaf in self.leaves.items():
            if leaf.grad is not None:
                self._add_penalty(name, leaf, leaf.grad, given)
        if self.step.rule.clip:
            torch.nn.utils.clip_grad_norm_(self.leaves.values(), hyper["max_norm"])
        for name, leaf in self.leaves.items():
            if f"correction.{name}" in given and leaf.grad is not None:
                leaf.grad += given[f"correction.{name}"]
        group = self.optimizer.param_groups[0]
        group.update(
            {key: hyper[key] for key in ("lr", "momentum", "weight_decay") if key in hyper}
        )
        if "beta1" in hyper:
            group.update(betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["epsilon"])
        self.optimizer.step()

    def _others(self) -> Tensors:
        """Return the model's frozen parameters, and copies of its buffers, so that the step does
        not change them."""
        model = self.source.model
        frozen = {
            name: value for name, value in model.named_parameters() if name not in self.leaves
        }
        buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        return {name: self._constant(value) for name, value in frozen.items()} | (
            as_double(buffers) if self._double else buffers
        )

    def _contrastive(
        self, given: Tensors, outputs: Any, leaves: Tensors, temperature: float
    ) -> Tensor:
        """Return MOON's loss as equation 3 states it, on the features of the global and the
        previous model."""
        assert self.features is not None
        values = {name: given[f"param.{name}"] for name in self.step.objective.buffers}
        values |= {name: leaf.detach() for name, leaf in leaves.items()}
        similar = []
        for reference in ("anchor", "previous"):
            model = values | {name: given[f"{reference}.{name}"] for name in self.step.travelling}
            arrays = tuple(given[f"batch.{name}"].clone() for name in self.source.inputs())
            with evaluation_mode(self.source.model), torch.no_grad():
                other = call_with(
                    self.source.model,
                    self._others() | model,
                    lambda arrays=arrays: self.features(self.source.model(*arrays)),  # type: ignore[misc]
                ).flatten(1)
            current = self.features(outputs).flatten(1)
            lengths = current.norm(dim=1).clamp_min(1e-8) * other.norm(dim=1).clamp_min(1e-8)
            similar.append(torch.exp((current * other).sum(1) / lengths / temperature))
        return -torch.log(similar[0] / (similar[0] + similar[1])).mean()
