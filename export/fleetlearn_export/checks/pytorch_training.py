"""Local steps written out in PyTorch, independently of ``model/steps.py``: penalties added to the loss, torch.optim."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.stateless import functional_call
from fleetlearn_export.model.steps import Function, Tensors
from fleetlearn_export.model.train_step import TrainStep, plain_kernels
from fleetlearn_export.model.user_model import UserModel, copy_of_state, evaluation_mode


class PyTorchStep(NamedTuple):
    """What one step in PyTorch gave."""

    given: Tensors
    """The inputs of the next step: those of this one, with the new parameters and state."""
    results: Tensors
    """Named as the graph's outputs."""
    gradients: Tensors
    """Of the loss with its penalties, neither clipped nor corrected; empty for a step of the user's own."""


class PyTorchTraining:
    """Training with autograd, clip_grad_norm_ and torch.optim. A step of the user's own is called as it is."""

    def __init__(
        self, user: UserModel, step: TrainStep, features: Function | None, dtype: torch.dtype = torch.float32
    ) -> None:
        """``dtype``: float32, or float64 for all that the model and the step compute."""
        self.source, self.step, self.features, self.dtype = user, step, features, dtype
        self.leaves = {name: step.values[name].to(dtype, copy=True).requires_grad_() for name in step.objective.trained}
        rows = list(self.leaves.values())
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(rows, lr=1.0)
        if step.rule.optimizer in ("momentum", "nesterov"):
            self.optimizer = torch.optim.SGD(rows, lr=1.0, momentum=0.5, nesterov=step.rule.optimizer == "nesterov")
        elif step.rule.optimizer in ("adam", "adamw"):
            kind = torch.optim.Adam if step.rule.optimizer == "adam" else torch.optim.AdamW
            self.optimizer = kind(rows, lr=1.0, weight_decay=0.0)

    def __call__(self, given: Tensors) -> PyTorchStep:
        """Do one step from the graph's named inputs. The optimizer keeps its own state between steps."""
        double = self.dtype == torch.float64
        with DoublePrecision() if double else nullcontext():
            given = as_double(given) if double else given
            if self.step.rule.optimizer == "custom":
                results = self.step.run(given, self.dtype)
                gradients: Tensors = {}
            else:
                results, gradients = self._built_in(given)
        after = {name.removeprefix("next."): value for name, value in results.items() if name.startswith("next.")}
        return PyTorchStep(given | after, results, gradients)

    def _built_in(self, given: Tensors) -> tuple[Tensors, Tensors]:
        rule, user = self.step.rule, self.source
        hyper = {name: float(given[f"hyper.{name}"]) for name in self.step.hyper}
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(given[f"param.{name}"])
        buffers = {name: given[f"param.{name}"].clone() for name in self.step.objective.buffers}
        arrays = [given[f"batch.{name}"].clone() for name in user.batch]
        inputs, targets = arrays[: len(user.inputs())], arrays[len(user.inputs()) :]
        with plain_kernels(), Seeded(given["seed"]) if "seed" in given else nullcontext():
            # A buffer that the model replaces by another tensor is replaced in this dict.
            tensors = self._copies() | buffers | self.leaves
            outputs = functional_call(user.model, tensors, tuple(inputs))
            loss = user.loss(outputs, *targets)
        target = loss
        if rule.proximal:
            target = loss + hyper["mu"] / 2 * sum(
                ((leaf - given[f"anchor.{name}"]) ** 2).sum()
                for name, leaf in self.leaves.items()
                if f"anchor.{name}" in given
            )
        elif rule.contrastive:
            target = loss + hyper["mu"] * self._contrastive(given, outputs, hyper["temperature"])
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
        self.optimizer.zero_grad()  # it frees as much memory as the parameters take
        results = {f"next.param.{name}": value.detach().clone() for name, value in self.leaves.items()}
        results |= {f"next.param.{name}": tensors[name].detach() for name in buffers}
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        metrics = {f"metric.{name}": function(outputs, *targets) for name, function in user.metrics.items()}
        return results | {"loss": loss.detach()} | {name: v.float().mean() for name, v in metrics.items()}, gradients

    def _copies(self) -> Tensors:
        """Return copies of all parameters and buffers, so that the step does not change the model's own."""
        copies = copy_of_state(self.source.model)
        return as_double(copies) if self.dtype == torch.float64 else copies

    def _contrastive(self, given: Tensors, outputs: Any, temperature: float) -> Tensor:
        """Return MOON's loss as equation 3 states it, on the features of the global and the previous model."""
        assert self.features is not None
        values = {name: given[f"param.{name}"] for name in self.step.values}
        similar = []
        for reference in ("anchor", "previous"):
            model = values | {name: given[f"{reference}.{name}"] for name in self.step.travelling}
            arrays = tuple(given[f"batch.{name}"].clone() for name in self.source.inputs())
            with evaluation_mode(self.source.model), torch.no_grad():
                tensors = self._copies() | model
                other = self.features(functional_call(self.source.model, tensors, arrays)).flatten(1)
            current = self.features(outputs).flatten(1)
            lengths = current.norm(dim=1).clamp_min(1e-8) * other.norm(dim=1).clamp_min(1e-8)
            similar.append(torch.exp((current * other).sum(1) / lengths / temperature))
        return -torch.log(similar[0] / (similar[0] + similar[1])).mean()
