"""Local steps: one optimizer step on a device, as plain functions of dicts of tensors, compiled
into train.onnx.

A step is a function ``(params, state, batch, hyper, ...) -> params, state, metrics``, the user's
own or a built-in one:

    params      name -> tensor: the trained parameters, and the buffers that training changes
    state       name -> tensor: what one step passes to the next
    batch       name -> tensor, the examples on the first axis
    hyper       name -> scalar float32 tensor
    metrics     ``loss``, the mean over the batch before the update, and one entry for each metric
                of the bundle

A step asks for more by keyword-only parameters of these names: ``objective`` (the model with its
loss and gradients), and the references ``anchor``, ``correction`` and ``previous`` (name -> tensor,
without personal parameters).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from fleetlearn_protocol.manifest import LocalStep, Reference
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.gradient_hooks import gradient_hooks, hooked
from fleetlearn_export.model.stateless import call_with

Tensors = dict[str, Tensor]
Function = Callable[..., Any]
OptimizerStep = Callable[[Tensors, Tensors, Tensors, Mapping[str, Tensor]], tuple[Tensors, Tensors]]
REFERENCES: tuple[Reference, ...] = get_args(Reference)


def detached(value: Tensor) -> Tensor:
    """Return the tensor without its gradient's history. Where it has none, tracing records
    nothing."""
    return value.detach() if value.requires_grad else value


def read_past_the_model(name: str, location: str = "") -> ExportError:
    """Return the error that the user's code keeps a parameter, rather than read it from the
    model."""
    return ExportError(
        f"parameter {name} is read{location} from a list, another object or a variable that keeps "
        "it, not from the model. A graph cannot see that: it would keep the initial value for "
        f"ever. Read it from the model each time: self.{name} in forward, model.{name} or "
        "model.parameters() in the loss; or return it from forward"
    )


class BatchEvaluation(NamedTuple):
    """What ``Objective`` returns for a batch."""

    loss: Tensor
    """Scalar: the user's loss, without ``extra``."""
    metrics: Tensors
    """Scalars, means over the batch."""
    gradients: Tensors
    """The gradient of the loss plus ``extra`` for each trained parameter."""
    buffers: Tensors
    """The new values of the buffers that training changes."""
    of_inputs: Tensors
    """The gradient for each input array of ``Objective.differentiated``, of the input's shape."""


class Objective:
    """The user's model and loss as functions of parameters that are given, not the model's own."""

    def __init__(
        self,
        model: nn.Module,
        loss: Function,
        metrics: Mapping[str, Function],
        inputs: Sequence[str],
        targets: Sequence[str],
        trained: Sequence[str],
        buffers: Sequence[str],
    ) -> None:
        self.model, self.loss, self.metrics = model, loss, metrics
        self.inputs, self.targets = list(inputs), list(targets)
        self.trained, self.buffers = list(trained), list(buffers)
        self.hooks = gradient_hooks(model)
        self.differentiated: list[str] = []
        """Input arrays whose gradients are asked for as well: those of a split model's top."""

    def __call__(
        self,
        params: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        extra: Callable[[Any], Tensor] | None = None,
        *,
        scale: Tensor | None = None,
    ) -> BatchEvaluation:
        """Return loss and gradients in training mode. ``extra(outputs)``, a scalar, is added before
        differentiating.

        scale: what is differentiated is multiplied by it, and the gradients are divided by it.
        """
        leaves = {name: params[name].detach().requires_grad_() for name in self.trained}
        # Copies: training changes buffers in place, and a model may change its inputs in place.
        tensors = {
            **{name: detached(value).clone() for name, value in self._buffers(params).items()},
            **leaves,
        }
        batch = {name: value.clone() for name, value in batch.items()}
        for name in self.differentiated:
            batch[name] = batch[name].detach().requires_grad_()
        leaves_of_batch = [batch[name] for name in self.differentiated]
        arrays, targets = self._split(batch)

        def evaluate() -> tuple[Tensor, Tensors, Tensors, Tensors]:
            with torch.enable_grad():
                outputs = self.model(*arrays)
                loss = self.loss(outputs, *targets)
                target = loss if extra is None else loss + extra(outputs)
                gradients = torch.autograd.grad(
                    target if scale is None else target * scale,
                    [*leaves.values(), *leaves_of_batch],
                    allow_unused=True,
                )
                gradients, of_batch = gradients[: len(leaves)], gradients[len(leaves) :]
                unused = next(
                    (
                        name
                        for name, gradient in zip(leaves, gradients, strict=True)
                        if gradient is None
                    ),
                    None,
                )
                if unused is not None:  # it takes a gradient where the model has its own parameters
                    raise read_past_the_model(unused)
                if scale is not None:
                    gradients = tuple(gradient * (1 / scale) for gradient in gradients)
            named = zip(leaves, gradients, strict=True)
            gradients_by_name = {
                name: hooked(gradient, self.hooks.get(name, ())) for name, gradient in named
            }
            outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
            with torch.no_grad():
                metrics = {
                    name: metric(outputs, *targets).float().mean()
                    for name, metric in self.metrics.items()
                }
            of_inputs = {
                name: torch.zeros_like(array) if gradient is None else gradient
                for name, array, gradient in zip(
                    self.differentiated, leaves_of_batch, of_batch, strict=True
                )
            }
            return loss.detach(), metrics, gradients_by_name, of_inputs

        # The loss and the backward pass may read the model too: they see these tensors, not the
        # model's own.
        loss, metrics, gradients, of_inputs = call_with(self.model, tensors, evaluate)
        buffers = {name: detached(tensors[name]) for name in self.buffers}
        return BatchEvaluation(loss, metrics, gradients, buffers, of_inputs)

    def outputs(
        self,
        params: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        then: Function | None = None,
    ) -> Any:
        """Return the model's outputs in evaluation mode, without gradient.

        then: what is called with the outputs, while the model has ``params``; its result is
        returned instead.
        """
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()

        def evaluate() -> Any:
            outputs = self.model(*self._split(batch)[0])
            return outputs if then is None else then(outputs)

        try:
            with torch.no_grad():
                tensors = {
                    name: params[name].detach().clone() for name in (*self.trained, *self.buffers)
                }
                return call_with(self.model, tensors, evaluate)
        finally:
            for module, training in modes.items():
                module.training = training

    def _buffers(self, params: Mapping[str, Tensor]) -> Tensors:
        """Return all buffers. Those that are not in ``params`` (counters) are included, so that
        they are copied too."""
        return {
            name: params[name] if name in self.buffers else value
            for name, value in self.model.named_buffers()
        }

    def _split(self, batch: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(batch[name] for name in self.inputs), tuple(
            batch[name] for name in self.targets
        )


def sgd(
    params: Tensors, gradients: Tensors, state: Tensors, hyper: Mapping[str, Tensor]
) -> tuple[Tensors, Tensors]:
    """w - lr * g."""
    return {
        name: params[name] - hyper["lr"] * gradient for name, gradient in gradients.items()
    }, state


def momentum(
    params: Tensors, gradients: Tensors, state: Tensors, hyper: Mapping[str, Tensor]
) -> tuple[Tensors, Tensors]:
    """Heavy ball: b <- momentum * b + g; w - lr * b.

    Polyak 1964, "Some methods of speeding up the convergence of iteration methods"; in the form of
    Sutskever, Martens, Dahl, Hinton 2013, "On the importance of initialization and momentum in deep
    learning", with lr outside of b as PyTorch has it.
    """
    after = {
        f"momentum.{name}": hyper["momentum"] * state[f"momentum.{name}"] + g
        for name, g in gradients.items()
    }
    return {
        name: params[name] - hyper["lr"] * after[f"momentum.{name}"] for name in gradients
    }, after


def nesterov(
    params: Tensors, gradients: Tensors, state: Tensors, hyper: Mapping[str, Tensor]
) -> tuple[Tensors, Tensors]:
    """Nesterov momentum: b <- momentum * b + g; w - lr * (g + momentum * b).

    Nesterov 1983, "A method of solving a convex programming problem with convergence rate
    O(1/k^2)", with the gradient at the point looked ahead to, as in Sutskever et al. 2013 and
    PyTorch.
    """
    _, after = momentum(params, gradients, state, hyper)
    ahead = {
        name: g + hyper["momentum"] * after[f"momentum.{name}"] for name, g in gradients.items()
    }
    return sgd(params, ahead, state, hyper)[0], after


def adam(
    params: Tensors, gradients: Tensors, state: Tensors, hyper: Mapping[str, Tensor]
) -> tuple[Tensors, Tensors]:
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; w - lr * m^ / (sqrt(v^) +
    epsilon).

    m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t). Kingma and Ba 2015, "Adam: A Method for
    Stochastic Optimization", arXiv 1412.6980, Algorithm 1.
    """
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    after, moved = {"t": state["t"] + 1}, {}
    # The two corrections are applied to lr and epsilon: that is less work than to each element of m
    # and v.
    root = torch.sqrt(1 - beta2 ** after["t"])
    rate, epsilon = hyper["lr"] * root / (1 - beta1 ** after["t"]), hyper["epsilon"] * root
    for name, gradient in gradients.items():
        m = after[f"m.{name}"] = beta1 * state[f"m.{name}"] + (1 - beta1) * gradient
        v = after[f"v.{name}"] = beta2 * state[f"v.{name}"] + (1 - beta2) * (gradient * gradient)
        moved[name] = params[name] - rate * m / (torch.sqrt(v) + epsilon)
    return moved, after


def adamw(
    params: Tensors, gradients: Tensors, state: Tensors, hyper: Mapping[str, Tensor]
) -> tuple[Tensors, Tensors]:
    """Adam on w - lr * weight_decay * w: the decay is decoupled from the gradient, and so from its
    scaling.

    Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv 1711.05101, Algorithm
    2, with lr for their eta_t * alpha, as in PyTorch.
    """
    decayed = params
    if "weight_decay" in hyper:
        shrink = 1 - hyper["lr"] * hyper["weight_decay"]
        decayed = params | {name: shrink * params[name] for name in gradients}
    return adam(decayed, gradients, state, hyper)


class LocalOptimizer(NamedTuple):
    """An optimizer's step, with the state and hyper-parameters that it needs."""

    step: OptimizerStep
    slots: tuple[str, ...] = ()
    """Names of its state; each holds one tensor for each trained parameter."""
    counts: bool = False
    """Whether it counts its steps, in the state ``t``."""
    hyper: Mapping[str, float] = {}
    """Its hyper-parameters except lr, with their defaults."""


_ADAM: Mapping[str, float] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
OPTIMIZERS: Mapping[str, LocalOptimizer] = {
    "sgd": LocalOptimizer(sgd),
    "momentum": LocalOptimizer(momentum, ("momentum",), hyper={"momentum": 0.9}),
    "nesterov": LocalOptimizer(nesterov, ("momentum",), hyper={"momentum": 0.9}),
    "adam": LocalOptimizer(adam, ("m", "v"), True, _ADAM),
    "adamw": LocalOptimizer(adamw, ("m", "v"), True, _ADAM),
}


def hyper_defaults(rule: LocalStep) -> dict[str, float | None]:
    """Return the built-in step's hyper-parameters with their defaults. None means that the plan
    must give a value."""
    values: dict[str, float | None] = {"lr": None}
    if rule.proximal or rule.contrastive:
        values["mu"] = 0.0 if rule.proximal else None
    if rule.contrastive:
        values["temperature"] = 0.5
    if rule.clip:
        values["max_norm"] = None
    if rule.weight_decay:
        values["weight_decay"] = 0.01 if rule.optimizer == "adamw" else None
    return {**values, **OPTIMIZERS[rule.optimizer].hyper}


def initial_state(rule: LocalStep, trained: Mapping[str, Tensor]) -> Tensors:
    """Return zeros for each state of the built-in step's optimizer."""
    optimizer = OPTIMIZERS[rule.optimizer]
    state = {
        f"{slot}.{name}": torch.zeros_like(value)
        for slot in optimizer.slots
        for name, value in trained.items()
    }
    return state | ({"t": torch.zeros(())} if optimizer.counts else {})


def references(rule: LocalStep) -> tuple[Reference, ...]:
    """Return the names of the vectors that the built-in step reads besides the model."""
    needed = {
        "anchor": rule.proximal or rule.contrastive,
        "correction": rule.correction,
        "previous": rule.contrastive,
    }
    return tuple(name for name in REFERENCES if needed[name])


def built_in(rule: LocalStep, features: Function | None) -> Function:
    """Return the step that ``rule`` describes: w <- optimizer(w, clipped(g + mu * (w - anchor)) +
    correction)."""

    def step(
        params: Tensors,
        state: Tensors,
        batch: Tensors,
        hyper: Mapping[str, Tensor],
        *,
        objective: Objective,
        anchor: Tensors,
        correction: Tensors,
        previous: Tensors,
    ) -> tuple[Tensors, Tensors, Tensors]:
        extra = None
        if rule.contrastive:
            assert features is not None
            # The other models have no personal parameters: they take this model's.
            near, far = (
                objective.outputs(params | model, batch, features) for model in (anchor, previous)
            )

            def extra(outputs: Any) -> Tensor:
                return hyper["mu"] * contrastive_loss(
                    features(outputs), near, far, hyper["temperature"]
                )

        results = objective(params, batch, extra)
        gradients = results.gradients
        if rule.proximal:
            gradients = proximal(params, gradients, anchor, hyper["mu"])
        if rule.clip:
            gradients = clipped(gradients, hyper["max_norm"])
        if rule.correction:
            gradients = {
                name: g + correction[name] if name in correction else g
                for name, g in gradients.items()
            }
        if rule.weight_decay and rule.optimizer != "adamw":
            gradients = {
                name: g + hyper["weight_decay"] * params[name] for name, g in gradients.items()
            }
        moved, state = OPTIMIZERS[rule.optimizer].step(params, gradients, state, hyper)
        return (
            {**params, **results.buffers, **moved},
            state,
            {"loss": results.loss, **results.metrics},
        )

    return step


def proximal(params: Tensors, gradients: Tensors, anchor: Tensors, mu: Tensor) -> Tensors:
    """Return g + mu * (w - anchor): the gradient with the penalty mu/2 * ||w - anchor||^2 added to
    the loss.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated Optimization in Heterogeneous
    Networks" (FedProx), arXiv 1812.06127, equation 2, where ``anchor`` is the round's global model
    w^t. With a device's own model as w it is the step of Li, Hu, Beirami, Smith 2021, "Ditto: Fair
    and Robust Federated Learning Through Personalization", arXiv 2012.04221, Algorithm 1 (mu is
    their lambda). Personal parameters have no anchor: their gradients stay as they are.
    """
    return {
        name: g + mu * (params[name] - anchor[name]) if name in anchor else g
        for name, g in gradients.items()
    }


def clipped(gradients: Tensors, max_norm: Tensor) -> Tensors:
    """Scale all gradients by one factor, so that their common L2 norm is at most ``max_norm``.

    Pascanu, Mikolov, Bengio 2013, "On the difficulty of training recurrent neural networks", arXiv
    1211.5063, Algorithm 1; with the 1e-6 that torch.nn.utils.clip_grad_norm_ adds to the norm.
    """
    norm = torch.sqrt(
        torch.stack([(gradient * gradient).sum() for gradient in gradients.values()]).sum()
    )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


def contrastive_loss(
    current: Tensor, anchor: Tensor, previous: Tensor, temperature: Tensor
) -> Tensor:
    """-log(exp(sim(z, z_glob) / t) / (exp(sim(z, z_glob) / t) + exp(sim(z, z_prev) / t))), the mean
    over the batch.

    sim is the cosine; the features z are (n, ...), flattened. Li, He, Song 2021, "Model-Contrastive
    Federated Learning" (MOON), arXiv 2103.16257, equation 3.
    """
    flat = current.flatten(1)
    near, far = (
        torch.nn.functional.cosine_similarity(flat, z.flatten(1), dim=1) for z in (anchor, previous)
    )
    return torch.nn.functional.softplus((far - near) / temperature).mean()


def keyword_needs(step: Function) -> tuple[str, ...]:
    """Return the keyword-only parameters of the user's step that the exporter provides. Raises
    ExportError."""
    known = ("objective", *REFERENCES)
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError) as error:
        raise ExportError(f"the step's parameters cannot be read: {error}") from None
    extra = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    plain = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    wrong = [
        parameter.name
        for parameter in extra
        if parameter.name not in known and parameter.default is parameter.empty
    ]
    if (
        len([parameter for parameter in plain if parameter.default is parameter.empty]) > 4
        or len(plain) < 4
        or wrong
    ):
        raise ExportError(
            f"the step takes ({', '.join(map(str, parameters))}); expected (params, state, batch, "
            f"hyper), and behind a * any of {', '.join(known)}"
        )
    return tuple(name for name in known if name in {parameter.name for parameter in extra})
