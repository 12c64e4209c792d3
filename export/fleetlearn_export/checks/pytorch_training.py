"""Local steps written out in PyTorch, independently of ``model/steps.py``: penalties added to the loss, torch.optim."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fleetlearn_export.checks.comparison import largest
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.checks.one_example import right_for_one_example
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep, plain_kernels
from fleetlearn_export.model.user_model import UserModel, evaluation_mode


class PyTorchStep(NamedTuple):
    """What one step in PyTorch gave."""

    given: Tensors
    """The inputs of the next step: those of this one, with the new parameters and state."""
    results: Tensors
    """Named as the graph's outputs."""


class PyTorchTraining:
    """Training with autograd, clip_grad_norm_ and torch.optim. A step of the user's own is called as it is.

    It holds no parameters between two steps, only the optimizer's state.
    """

    def __init__(
        self, user: UserModel, step: TrainStep, features: Function | None, dtype: torch.dtype = torch.float32
    ) -> None:
        """``dtype``: float32, or float64 for all that the model and the step compute."""
        self.source, self.step, self.features, self.dtype = user, step, features, dtype
        self.sizes: dict[str, float] = {}
        """Of a built-in step: the largest element of each parameter's last gradient, neither clipped nor corrected."""
        self.leaves = {name: torch.empty(0, dtype=dtype, requires_grad=True) for name in step.objective.trained}
        rows = list(self.leaves.values())
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(rows, lr=1.0)
        if step.rule.optimizer in ("momentum", "nesterov"):
            self.optimizer = torch.optim.SGD(rows, lr=1.0, momentum=0.5, nesterov=step.rule.optimizer == "nesterov")
        elif step.rule.optimizer in ("adam", "adamw"):
            kind = torch.optim.Adam if step.rule.optimizer == "adam" else torch.optim.AdamW
            self.optimizer = kind(rows, lr=1.0, weight_decay=0.0)

    def __call__(self, given: Tensors) -> PyTorchStep:
        """Do one step from the graph's named inputs. The optimizer keeps its own state between steps.

        To take less memory, it changes the trained parameters in ``given`` in place if they have its dtype and are not
        the model's own.
        """
        with self._precision(), right_for_one_example(given):
            if self.step.rule.optimizer == "custom":
                rest = as_double(given) if self._double else given
                results = self.step.run(rest, self.dtype)
            else:
                rest = self._taken(given)
                results = self._differentiated(rest)
                self._update(rest)
                results |= {f"next.param.{name}": leaf.data for name, leaf in self.leaves.items()}
                self._release()
        after = {name.removeprefix("next."): value for name, value in results.items() if name.startswith("next.")}
        return PyTorchStep({name: after[name] if name in after else rest[name] for name in given}, results)

    def gradients(self, given: Tensors) -> tuple[Tensors, Tensors]:
        """Return the gradients of the loss with its penalties, neither clipped nor corrected, and the loss and metrics.

        Not for a step of the user's own. It changes nothing in ``given``.
        """
        with self._precision(), right_for_one_example(given):
            results = self._differentiated(self._taken(given))
            found = {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
            self._release()
        return found, results

    @property
    def _double(self) -> bool:
        return self.dtype == torch.float64

    def _precision(self) -> AbstractContextManager[Any]:
        return DoublePrecision() if self._double else nullcontext()

    def _taken(self, given: Tensors) -> Tensors:
        """Make the leaves of the trained parameters. Returns the inputs, other than these, in the dtype."""
        for name, leaf in self.leaves.items():
            value = given[f"param.{name}"]
            leaf.data = value.to(self.dtype, copy=value.data_ptr() == self.step.values[name].data_ptr())
        rest = {name: value for name, value in given.items() if name.removeprefix("param.") not in self.leaves}
        return as_double(rest) if self._double else rest

    def _release(self) -> None:
        self.optimizer.zero_grad()
        for leaf in self.leaves.values():
            leaf.data = torch.empty(0, dtype=self.dtype)

    def _differentiated(self, given: Tensors) -> Tensors:
        """Compute the gradients of the leaves. Returns the loss, the metrics and the buffers after the step."""
        rule, user = self.step.rule, self.source
        self.optimizer.zero_grad()
        buffers = {name: given[f"param.{name}"].clone() for name in self.step.objective.buffers}
        arrays = [given[f"batch.{name}"].clone() for name in user.batch]
        inputs, targets = arrays[: len(user.inputs())], arrays[len(user.inputs()) :]
        with plain_kernels(), Seeded(given["seed"]) if "seed" in given else nullcontext():
            # A buffer that the model replaces by another tensor is replaced in this dict.
            tensors = self._others() | buffers | self.leaves
            outputs = functional_call(user.model, tensors, tuple(inputs))
            loss = user.loss(outputs, *targets)
        target = loss
        if rule.proximal:
            target = loss + given["hyper.mu"].item() / 2 * sum(
                ((leaf - given[f"anchor.{name}"]) ** 2).sum()
                for name, leaf in self.leaves.items()
                if f"anchor.{name}" in given
            )
        elif rule.contrastive:
            similar = self._contrastive(given, outputs, given["hyper.temperature"].item())
            target = loss + given["hyper.mu"].item() * similar
        target.backward()
        self.sizes = {name: largest(leaf.grad) for name, leaf in self.leaves.items() if leaf.grad is not None}
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        metrics = {f"metric.{name}": function(outputs, *targets) for name, function in user.metrics.items()}
        results = {f"next.param.{name}": tensors[name].detach() for name in buffers}
        return results | {"loss": loss.detach()} | {name: v.float().mean() for name, v in metrics.items()}

    def _update(self, given: Tensors) -> None:
        """Change the leaves by their gradients."""
        hyper = {name: float(given[f"hyper.{name}"]) for name in self.step.hyper}
        if self.step.rule.clip:
            torch.nn.utils.clip_grad_norm_(self.leaves.values(), hyper["max_norm"])
        for name, leaf in self.leaves.items():
            if f"correction.{name}" in given and leaf.grad is not None:
                leaf.grad += given[f"correction.{name}"]
        group = self.optimizer.param_groups[0]
        group.update({key: hyper[key] for key in ("lr", "momentum", "weight_decay") if key in hyper})
        if "beta1" in hyper:
            group.update(betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["epsilon"])
        self.optimizer.step()

    def _others(self) -> Tensors:
        """Return the model's frozen parameters, and copies of its buffers, so that the step does not change them."""
        model = self.source.model
        others = {name: value.detach() for name, value in model.named_parameters() if name not in self.leaves}
        others |= {name: value.detach().clone() for name, value in model.named_buffers()}
        return as_double(others) if self._double else others

    def _contrastive(self, given: Tensors, outputs: Any, temperature: float) -> Tensor:
        """Return MOON's loss as equation 3 states it, on the features of the global and the previous model."""
        assert self.features is not None
        values = {name: given[f"param.{name}"] for name in self.step.objective.buffers}
        values |= {name: leaf.data for name, leaf in self.leaves.items()}
        similar = []
        for reference in ("anchor", "previous"):
            model = values | {name: given[f"{reference}.{name}"] for name in self.step.travelling}
            arrays = tuple(given[f"batch.{name}"].clone() for name in self.source.inputs())
            with evaluation_mode(self.source.model), torch.no_grad():
                tensors = self._others() | model
                other = self.features(functional_call(self.source.model, tensors, arrays)).flatten(1)
            current = self.features(outputs).flatten(1)
            lengths = current.norm(dim=1).clamp_min(1e-8) * other.norm(dim=1).clamp_min(1e-8)
            similar.append(torch.exp((current * other).sum(1) / lengths / temperature))
        return -torch.log(similar[0] / (similar[0] + similar[1])).mean()
