"""What a device does in a task, by the name of the task's algorithm: training, and what goes with
it.

An algorithm works with float32 vectors of P elements, the travelling parameters in manifest order:
those that the task brings (``vectors``), those that it reports (``parts``), and *tied vectors*,
which stay on the device and agree with what the coordinator counted. In rows of the manifest that
are buffers, all are 0 except the model: what training left in these rows is reported as values, in
the part ``buffers``.

To add an algorithm, write its function, add it to ALGORITHMS here and to EXCHANGES in the protocol,
and describe it in section 4 of PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol.algorithms import EXCHANGES, FEDMD, OWN, of_step
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.computations.settings import FUNCTION, KIND_NAMES
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.manifest import LocalStep, Manifest
from fleetlearn_protocol.messages import BUFFERS, CONTROL, PLAIN, UPDATE
from fleetlearn_protocol.vector import Vector, check_finite, scatter

from fleetlearn_device.runtimes.checks import Batch, check_vector
from fleetlearn_device.runtimes.runtime import Kind, Runtime
from fleetlearn_device.training.data import Data, one_pass
from fleetlearn_device.training.kept_state import kept_state_size
from fleetlearn_device.training.personal import ditto, fedrep
from fleetlearn_device.training.progress import Progress
from fleetlearn_device.training.train import (
    EVALUATION_BATCH,
    SEEDS,
    DivergedError,
    StoppedError,
    TrainingError,
    TrainingResult,
)
from fleetlearn_device.training.two_models import MIXED, apfl, mixed_model, pfedme
from fleetlearn_device.training.work import Inputs, TaskOutcome, TaskSettings, TaskWork

DUAL = "dual"
"""FedDyn's lambda_k: the name of the tied vector."""
GRADIENT_LR = 1024.0
"""Learning rate of the step that measures a gradient, (x - y) / lr. The larger lr is, the smaller
is the rounding of x in float32 beside the gradient; a power of two adds no rounding of its own."""


class UnsupportedError(TrainingError):
    """The algorithm cannot be done with this bundle."""


class Algorithm(NamedTuple):
    """One way to do a task, and what it needs."""

    function: Callable[[TaskWork], TaskOutcome]
    tied: tuple[str, ...] = ()
    """Names of its tied vectors."""
    optimizer: str | None = None
    """The optimizer that the bundle's step must have; None: any."""
    switches: tuple[str, ...] = ()
    """What must be switched on in the bundle's LocalStep."""
    without: tuple[str, ...] = ()
    """What must not be switched on there."""
    per_update: Mapping[str, Callable[[Mapping[str, float]], float]] = {}
    """Tied vector that changes by a multiple of the update -> hyper-parameters -> that factor. The
    coordinator's sum has the update as its encoding sends it, so the vector must change by that
    (``sent_parts.tied_as_sent``)."""
    personal: Literal["parameters", "model"] | None = None
    """What of the device's own it trains in passes by itself. ``parameters``: the bundle's personal
    ones, which it must have. ``model``: a whole model; devices then must keep nothing else of the
    bundle from task to task."""
    keeps: tuple[int, int] = (1, 0)
    """What it keeps with a whole model: so many vectors of P elements, the model first, and so many
    numbers."""
    measured: Callable[[Vector, Vector, Manifest], Vector] = lambda personal, model, manifest: (
        personal[: manifest.size]
    )
    """(what is kept, the round's model, the bundle's manifest) -> the personal model as it is
    measured beside the round's."""


def run_algorithm(
    name: str,
    runtime: Runtime,
    bundle: Bundle,
    data: Data | Batch | Iterable[Batch],
    inputs: Inputs,
    settings: TaskSettings,
) -> TaskOutcome:
    """Do a task by the algorithm ``name``, a key of ALGORITHMS, and return what it leaves.

    ``runtime`` is of ``bundle``; whatever is loaded in it is replaced. Raises UnsupportedError (the
    bundle's step is not made for the algorithm), DivergedError (also where a part or a tied vector
    is not finite), BundleError (a damaged file of initial values), ValueError (a vector of another
    shape), and what ``train`` raises.
    """
    check_step(name, bundle.manifest)
    size = bundle.manifest.size
    own = {} if inputs.personal is None else {"personal model": inputs.personal[:size]}
    for what, vector in (*inputs.vectors.items(), *inputs.tied.items(), *own.items()):
        check_vector(vector, size, what=f"the {what}")
    hyper = of_step(name, settings.hyper, [each.name for each in bundle.manifest.hyper])
    numbers = _numbers(name, settings.hyper, hyper)
    settings = settings._replace(hyper=hyper)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
        progress = settings.progress or Progress()
        work = TaskWork(runtime, bundle, data, inputs, settings, progress, numbers)
        outcome = ALGORITHMS[name].function(work)
    if bundle.manifest.buffers:
        outcome = outcome._replace(parts={**outcome.parts, BUFFERS: outcome.result.buffers})
    for what, vector in (*outcome.parts.items(), *outcome.tied.items()):
        if what in (UPDATE, BUFFERS):
            continue  # ``train`` has checked them
        try:
            check_finite(vector)
        except ProtocolError as error:
            raise DivergedError(
                f"the {what} after training is not finite: {error.text}; a smaller lr may help"
            ) from None
    return outcome


def _numbers(
    name: str, hyper: Mapping[str, float], of_step: Mapping[str, float]
) -> dict[str, float]:
    """Return the hyper-parameters of the algorithm itself. ``of_step``: those of the bundle's step.
    Raises ValueError."""
    if name == OWN:
        return {number: value for number, value in hyper.items() if number not in of_step}
    missing = sorted(set(EXCHANGES[name].hyper) - set(hyper))
    if missing:
        raise ValueError(f"the algorithm {name} needs the hyper-parameters {missing} too")
    return {number: hyper[number] for number in EXCHANGES[name].hyper}


def personal_size(name: str, manifest: Manifest) -> int:
    """Return how many float32 elements an algorithm with a personal model keeps; 0 for others."""
    if ALGORITHMS[name].personal != "model":
        return 0
    vectors, numbers = ALGORITHMS[name].keeps
    return vectors * manifest.size + numbers


def check_step(name: str, manifest: Manifest) -> None:
    """Raise UnsupportedError unless the bundle's step is made for the algorithm. The text says what
    to export."""
    algorithm = ALGORITHMS[name]
    step = manifest.step
    wrong = []
    if algorithm.optimizer not in (None, step.optimizer):
        wrong.append(
            f"the optimizer {algorithm.optimizer}, since it takes a model's change for a sum of "
            "gradients"
        )
    wrong += [f"{switch}=True" for switch in algorithm.switches if not getattr(step, switch)]
    wrong += [f"{switch}=False" for switch in algorithm.without if getattr(step, switch)]
    if wrong:
        export = ", ".join(
            [
                repr(algorithm.optimizer or step.optimizer),
                *(f"{row}=True" for row in algorithm.switches),
            ]
        )
        raise UnsupportedError(
            f"the algorithm {name} needs a step with {' and '.join(wrong)}; the step of bundle "
            f"{manifest.name} is {_described(step)}. Export the model again with "
            f"step=LocalStep({export})"
        )
    if algorithm.personal == "parameters" and manifest.local_size == manifest.size:
        raise UnsupportedError(
            f"the algorithm {name} needs personal parameters, and bundle {manifest.name} has none. "
            'Export the model again with personal=["head"], where "head" is the name of the last '
            "layer"
        )
    if algorithm.personal == "model" and kept_state_size(manifest):
        raise UnsupportedError(
            f"the algorithm {name} has a whole model for each device, and of bundle "
            f"{manifest.name} devices keep parts from task to task. Export the model again without "
            "personal= and kept="
        )
    if algorithm.optimizer is not None and manifest.compute is not msgspec.UNSET:
        raise UnsupportedError(
            f"the algorithm {name} needs the gradient of every step; bundle {manifest.name} "
            f"computes in {manifest.compute}, where a step whose gradient overflows changes "
            "nothing. Export the model again without compute="
        )


def plain(work: TaskWork) -> TaskOutcome:
    """Train, and report the update (McMahan et al. 2017, arXiv 1602.05629, algorithm 1,
    ClientUpdate)."""
    work.load()
    result = work.train()
    return TaskOutcome(result, {UPDATE: result.update})


def scaffold(work: TaskWork) -> TaskOutcome:
    """Train with c - c_k added to each gradient; c_k becomes the mean of the steps' gradients
    (option II).

    Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    arXiv 1910.06378, algorithm 1: c_k+ = c_k - c + (x - y) / (K lr), with the K steps that were
    done, if the time was too short for all. With a schedule K lr is the sum of their learning
    rates, and the mean counts each gradient with its own.
    """
    server, own = work.inputs.vectors[CONTROL], work.tied(CONTROL)
    lr = _positive_lr(work)
    work.load(_without_buffers(server - own, work))
    result = work.train()
    return _with_control(work, result, -server - result.update / np.float32(result.factors * lr))


def scaffold_gradient(work: TaskWork) -> TaskOutcome:
    """Train as ``scaffold`` does; c_k becomes the gradient of all the device's data at the round's
    model (option I)."""
    server, own = work.inputs.vectors[CONTROL], work.tied(CONTROL)
    correction = _without_buffers(server - own, work)

    def measure(data: Data) -> None:
        # Kept with checkpoints: a training that goes on does not measure again.
        work.progress.kept["gradient"] = _gradient(work, data)
        work.load(correction)

    work.load(correction)
    result = work.train(before_steps=measure)
    return _with_control(work, result, work.progress.kept["gradient"] - own)


def feddyn(work: TaskWork) -> TaskOutcome:
    """Train on loss - <lambda_k, w> + mu/2 ||w - x||^2; then lambda_k moves against the update.

    Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263,
    algorithm 1 and equation 1, where mu is the paper's alpha and lambda_k the gradient of the
    device's loss at its last model.
    """
    own = work.tied(DUAL)
    work.load(_without_buffers(-own, work))
    result = work.train()
    change = np.float32(_dual_per_update(work.hyper)) * result.update
    return TaskOutcome(
        result, {UPDATE: result.update}, {DUAL: own + _without_buffers(change, work)}
    )


def own_scores(work: TaskWork) -> TaskOutcome:
    """Refuse: FedMD trains no model of the task's bundle (``own_scores.py``)."""
    raise UnsupportedError(
        f"the algorithm {FEDMD} trains a model of the device's own, and bundle "
        f"{work.bundle.manifest.name} was opened as one that is trained"
    )


def own_algorithm(work: TaskWork) -> TaskOutcome:
    """Train by the function of the device's owner (``own_algorithm.py``)."""
    if work.settings.own is None:
        raise UnsupportedError("the device's owner allows no function that could train")
    return work.settings.own(work)


def _dual_per_update(hyper: Mapping[str, float]) -> float:
    return -hyper["mu"]


ALGORITHMS = {
    PLAIN: Algorithm(plain),
    "scaffold": Algorithm(scaffold, (CONTROL,), "sgd", ("correction",)),
    "scaffold-gradient": Algorithm(scaffold_gradient, (CONTROL,), "sgd", ("correction",)),
    "feddyn": Algorithm(
        feddyn, (DUAL,), None, ("correction", "proximal"), per_update={DUAL: _dual_per_update}
    ),
    "ditto": Algorithm(ditto, switches=("proximal",), personal="model"),
    "fedrep": Algorithm(fedrep, without=("clip", "contrastive"), personal="parameters"),
    "pfedme": Algorithm(pfedme, switches=("proximal",), personal="model"),
    FEDMD: Algorithm(own_scores),
    OWN: Algorithm(own_algorithm),
    "apfl": Algorithm(apfl, (), "sgd", personal="model", keeps=MIXED, measured=mixed_model),
}
"""By the name in ``Task.algorithm``."""


def known_algorithms(kind: Kind, *, own: bool = False, functions: bool = False) -> tuple[str, ...]:
    """Return the names of the algorithms that a runtime of this kind can do beside ``plain``.
    Computations need no runtime. own: whether the device has a model of its own. functions: whether
    its owner allows any function."""
    without = {PLAIN, *(() if own else (FEDMD,)), *(() if functions else (OWN,))}
    trained = () if kind == "ort-training" else [name for name in ALGORITHMS if name not in without]
    computed = [name for name in KIND_NAMES if functions or name != FUNCTION]
    return (*trained, *computed)


def _with_control(work: TaskWork, result: TrainingResult, change: Vector) -> TaskOutcome:
    """Return what SCAFFOLD leaves, where c_k changes by ``change``: the device keeps the sum of
    what it reports."""
    change = _without_buffers(change, work)
    return TaskOutcome(
        result, {UPDATE: result.update, CONTROL: change}, {CONTROL: work.tied(CONTROL) + change}
    )


def _positive_lr(work: TaskWork) -> float:
    lr = work.hyper["lr"]
    if not lr > 0:
        raise ValueError(
            f"hyper-parameter lr is {lr}; the algorithm scaffold divides by it: expected more than "
            "0"
        )
    return lr


def _gradient(work: TaskWork, data: Data) -> Vector:
    """Return the mean over all examples of the gradient at the round's model: float32, shape (P,).

    The gradient is the one that the step makes, without correction. Raises what ``train`` raises.
    """
    runtime, settings = work.runtime, work.settings
    total, seen = np.zeros_like(work.inputs.model), 0
    size = min(settings.batch_size or EVALUATION_BATCH, EVALUATION_BATCH)
    passed = one_pass(data, data.batches(size, None), runtime.manifest.batch)
    for number, arrays in enumerate(passed):
        if settings.should_stop():
            raise StoppedError("training was stopped before its first step")
        work.load()
        runtime.step(
            arrays, seed=(settings.seed + number) % SEEDS, **(work.hyper | {"lr": GRADIENT_LR})
        )
        total += np.float32(len(arrays[0]) / GRADIENT_LR) * (runtime.anchor - runtime.parameters)
        seen += len(arrays[0])
        settings.on_evaluated()
    return total / np.float32(max(seen, 1))  # ``train`` refuses a pass without batches


def _without_buffers(vector: Vector, work: TaskWork) -> Vector:
    """Set the elements of the manifest's buffers, which take no gradient, to 0. Returns
    ``vector``."""
    scatter(vector, work.bundle.manifest.buffers, 0.0)
    return vector


def _described(step: LocalStep) -> str:
    switches = [
        f"{name}=True"
        for name in ("proximal", "correction", "contrastive", "clip")
        if getattr(step, name)
    ]
    return f"LocalStep({', '.join([repr(step.optimizer), *switches])})"
