"""A bundle whose step teaches a model what several others say of unlabelled data (FedDF).

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning" (2020), arXiv
2006.07242, section 3 and Algorithm 1: after a round the student, which begins as the mean of the
devices' models, descends KL(softmax(mean_k f_k(x)) || softmax(f(x))) on unlabelled x: the mean is
of the teachers' logits, and each teacher counts the same. Hinton, Vinyals and Dean, arXiv
1503.02531, divide both sides' logits by a temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from fleetlearn_protocol.distillation import TEACHER, TEMPERATURE
from fleetlearn_protocol.manifest import LocalStep
from torch import Tensor, nn

from fleetlearn_export.bundle import export_bundle
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.user_model import evaluation_mode
from fleetlearn_export.written_bundle import Exported

KEPT = ("model", "train", "frozen", "memory", "batch", "compute", "progress")
"""Arguments of ``export_bundle`` that a distillation bundle of the same model has too."""


def distillation_loss(outputs: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """Return the mean over the batch of KL(softmax(teacher / T) || softmax(outputs / T)): a scalar,
    float32.

    ``outputs``: the student's logits, float32, shape (n, C). ``teacher``: the mean of the teachers'
    logits, the same shape. ``temperature``: T of each example, above 0, shape (n,). There is no
    factor T^2: the learning rate stands for it.
    """
    scale = temperature.unsqueeze(1)
    wanted = torch.log_softmax(teacher / scale, 1)
    found = torch.log_softmax(outputs / scale, 1)
    return (wanted.exp() * (wanted - found)).sum(1).mean()


def distillation_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``export_distillation`` for the model of ``export_bundle``'s
    ``arguments``, without path."""
    found = {name: value for name, value in arguments.items() if name in KEPT}
    if isinstance(arguments["example"], Mapping) or arguments.get("loss") is None:
        raise ExportError(
            "distillation takes a model that returns logits, loss= beside it, and an example that "
            "is a tuple such as (x, y); a model that returns its loss, or an example that is a "
            "dict, was given"
        )
    inputs = len(arguments["example"]) - arguments.get("targets", 1)
    found["example"] = arguments["example"][:inputs]
    if arguments.get("names") is not None:
        found["names"] = arguments["names"][:inputs]
    return found


def export_distillation(
    model: nn.Module,
    example: Sequence[Any],
    path: str | PathLike[str],
    *,
    step: LocalStep | None = None,
    names: Sequence[str] | None = None,
    **arguments: Any,
) -> Exported:
    """Write the step with which the coordinator distils ``model``, as a training bundle at
    ``path``.

    The plan's ``distil.bundle`` names it; the bundle that devices train comes from
    ``export_bundle`` with the same model, and both have the same parameters.

    Args:
        model: Returns logits, float32, (n, C).
        example: Arrays or tensors, the model's inputs alone, such as ``(x,)``: at least two rows.
        step: The optimizer; Adam unless given, as in the paper.
        names: Of the example's arrays; ``x`` unless given, numbered (``x0``, ``x1``) if several.
        arguments: Further arguments of ``export_bundle`` that say what of the model is trained and
            how it is stored: ``train``, ``frozen``, ``memory``, ``batch``, ``compute``, ``name``,
            ``progress``.

    Raises ExportError, as ``export_bundle`` does, and where the model returns something else.
    """
    inputs = [torch.as_tensor(array) for array in example]
    if names is None:
        names = ["x"] if len(inputs) == 1 else [f"x{place}" for place in range(len(inputs))]
    if len(names) != len(inputs):
        raise ExportError(f"{len(names)} names= are given for {len(inputs)} arrays of example=")
    with evaluation_mode(model), torch.no_grad():
        logits = model(*inputs)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.dtype != torch.float32:
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else "no"
        raise ExportError(
            f"the model returns {found if isinstance(logits, Tensor) else type(logits).__name__}; "
            "distillation takes one tensor of logits, float32 (n, classes), one row for each "
            "example"
        )
    return export_bundle(
        model,
        distillation_loss,
        (*inputs, logits + torch.linspace(-1, 1, logits.shape[1]), torch.ones(len(logits))),
        path,
        step=step or LocalStep("adam"),
        names=[*names, TEACHER, TEMPERATURE],
        targets=2,
        **arguments,
    )
