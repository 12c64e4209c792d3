"""FedMD: a device whose model never leaves it, and which tells class scores of public examples
alone.

Li and Wang 2019, "FedMD: Heterogenous Federated Learning via Model Distillation", arXiv 1910.03581,
algorithm 1. In a round the device *digests* the consensus, the mean of all devices' scores: its own
model learns them on the public examples. It *revisits* its own data, as in any training. Then it
scores the public examples. Both sides of the digest are softmax of scores divided by a temperature,
and its loss is KL(consensus || own), as in ``distil.py``; the paper leaves the loss open.

What travels: the consensus down, float32, shape (N C,), and the device's scores minus the consensus
up, as an update of it, so that the mean of the updates makes the mean of the scores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.bundle import Bundle, open_bundle, write_inference_model
from fleetlearn_protocol.distillation import TEACHER, TEMPERATURE, misfit, student_inputs
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN, Manifest
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.public_examples import (
    DIGEST_LOSS,
    LARGEST_SCORE,
    own_misfit,
    read_public_examples,
)
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import check_hyper
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import ProviderName
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.runtimes.sessions import session_options
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.data import Data
from fleetlearn_device.training.kept_state import kept_state_size, load_model
from fleetlearn_device.training.shuffling import permutation
from fleetlearn_device.training.train import (
    SEEDS,
    DivergedError,
    StoppedError,
    TrainingResult,
    train,
)
from fleetlearn_device.training.work import TaskSettings

AT_A_TIME = 256
"""Public examples that are computed together: bounds memory."""
AGREED = 1e-6
"""A consensus that the device's model is no farther from is not digested: the rest is rounding of
float32, which an adaptive step (Adam) would follow as if it were a gradient."""
Arrays = Mapping[str, NDArray[Any]]

log = logging.getLogger("fleetlearn.device")


class Exchanged(NamedTuple):
    """What a round leaves on the device and for the coordinator."""

    result: TrainingResult
    """Of the training on the device's own data."""
    scores: Vector
    """Of the public examples, row by row: float32, shape (N C,)."""
    model: Vector
    """The device's own: float32, shape (P,)."""


class OwnModel:
    """The device's own model: how it is trained, and how it learns from the consensus."""

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        distillation: str | os.PathLike[str],
        threads: int = 1,
        provider: ProviderName = "cpu",
    ) -> None:
        """bundle: a training bundle. distillation: what ``export_distillation`` made of the same
        model. Raises BundleError where they are damaged or do not go together."""
        self.bundle = open_bundle(bundle, files=(TRAIN, EVAL, INFER))
        self.distillation = open_bundle(distillation, files=(TRAIN, EVAL))
        for each in (self.bundle, self.distillation):
            if not each.manifest.has_graphs:
                raise BundleError(
                    Code.UNKNOWN_CONTENT, f"bundle {each.manifest.name} has no model that trains"
                )
            try:
                _hyper(each.manifest, 1.0)
            except ValueError as error:
                raise BundleError(
                    Code.UNKNOWN_CONTENT,
                    f"bundle {each.manifest.name}: {error}. A run gives lr alone to a device's own "
                    "model: export it with defaults of the others (hyper=)",
                ) from None
        if (wrong := misfit(self.bundle.manifest, self.distillation.manifest)) is not None:
            raise BundleError(Code.UNKNOWN_CONTENT, wrong)
        self.inputs = student_inputs(self.distillation.manifest)
        self._threads: int = threads
        self._provider: ProviderName = provider
        self._runtimes: dict[str, Runtime] = {}

    @property
    def size(self) -> int:
        """P, the elements of the device's own model."""
        return self.bundle.manifest.size

    @property
    def kept_size(self) -> int:
        """The elements of what its step keeps from task to task."""
        return kept_state_size(self.bundle.manifest)

    def check(self, public: Manifest) -> None:
        """Raise UnsupportedError unless the model can score a run's public examples."""
        if (wrong := own_misfit(self.bundle.manifest, self.inputs, public)) is not None:
            raise UnsupportedError(wrong)

    def exchange(
        self,
        public: Bundle,
        consensus: Vector,
        model: Vector | None,
        kept_state: Vector | None,
        data: Data,
        settings: TaskSettings,
    ) -> Exchanged:
        """Digest the consensus, revisit the device's data, and score the public examples.

        consensus: float32, shape (N C,); zeros alone are none, before the first round. model: as
        the last task left it, shape (P,); None: the bundle's. kept_state: as ``load_model`` takes
        it. settings: the task's; ``hyper`` has FedMD's. Raises what ``train`` raises,
        DivergedError also on scores that are not finite, BundleError, ValueError.
        """
        began = settings.clock()
        numbers = settings.hyper
        examples = read_public_examples(public, self.inputs)
        if model is None:
            model = self.bundle.parameters()[: self.size]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found
            digested = None
            if consensus.any():
                model, digested = self._digest(examples, consensus, model, settings)
            runtime = self._runtime(self.bundle, model)
            load_model(runtime, self.bundle, model, kept_state)
            arguments = settings.train_arguments()
            arguments["hyper"] = _hyper(self.bundle.manifest, numbers["lr"])
            if settings.time_budget is not None:
                arguments["time_budget"] = settings.time_budget - (settings.clock() - began)
            result = train(runtime, data, **arguments)
            scores = self._scores(examples, runtime.local)
        told = _asked(result.metrics, public.manifest)
        if digested is not None:
            told[DIGEST_LOSS] = digested
        evaluation = result.evaluation
        if evaluation is not None:
            sums = _asked(evaluation.metric_sums, public.manifest)
            evaluation = Evaluation(evaluation.examples, evaluation.loss_sum, sums)
        result = result._replace(metrics=told, evaluation=evaluation)
        return Exchanged(result, scores, runtime.parameters.copy())

    def _digest(
        self,
        examples: Arrays,
        consensus: Vector,
        model: Vector,
        settings: TaskSettings,
    ) -> tuple[Vector, float]:
        """Return the model after it learnt the consensus, and how far it was from the consensus:
        the mean of KL(consensus || model) over the examples."""
        numbers = settings.hyper
        count = len(consensus) // self.bundle.manifest.outputs[0].shape[0]
        # One hostile device must not end the training of all others.
        taught_by = np.clip(consensus, -LARGEST_SCORE, LARGEST_SCORE)
        batch = {
            **examples,
            TEACHER: taught_by.reshape(count, -1),
            TEMPERATURE: np.full(count, numbers["temperature"], np.float32),
        }
        runtime = self._runtime(self.distillation, model)
        runtime.load(model)
        before, number = _mean_loss(runtime, batch), 0
        if before <= AGREED:
            return model, max(before, 0.0)
        size = settings.batch_size or count
        hyper = _hyper(self.distillation.manifest, numbers["digest_lr"])
        for epoch in range(int(numbers["digest_epochs"])):
            order = permutation(count, settings.seed, epoch)
            for begin in range(0, count, size):
                if settings.should_stop():
                    raise StoppedError("training was stopped while the consensus was digested")
                rows = order[begin : begin + size]
                step = {name: array[rows] for name, array in batch.items()}
                runtime.step(step, seed=(settings.seed + number) % SEEDS, **hyper)
                number += 1
                settings.on_evaluated()
        taught = runtime.parameters.copy()
        if not (np.isfinite(before) and np.isfinite(taught).all()):
            raise DivergedError(
                f"the digest of the consensus diverged: its loss was {before:g}; a smaller "
                "digest_lr may help"
            )
        log.info(
            "digested the consensus on %d public examples in %d steps: the loss was %.4g",
            count,
            number,
            before,
        )
        return taught, before

    def _scores(self, examples: Arrays, model: Vector) -> Vector:
        """Return the model's class scores, row by row. model: shape (local_size,)."""
        session = import_onnxruntime().InferenceSession(
            write_inference_model(self.bundle, model),
            session_options(self._threads),
            providers=["CPUExecutionProvider"],
        )
        output, parts = [self.bundle.manifest.outputs[0].name], []
        for begin in range(0, len(next(iter(examples.values()))), AT_A_TIME):
            feed = {name: array[begin : begin + AT_A_TIME] for name, array in examples.items()}
            parts.append(np.asarray(session.run(output, feed)[0], np.float32).reshape(-1))
        scores = np.concatenate(parts)
        if not np.isfinite(scores).all():
            raise DivergedError("the model's class scores of public examples are not finite")
        clipped: Vector = np.clip(scores, -LARGEST_SCORE, LARGEST_SCORE)
        return clipped

    def _runtime(self, bundle: Bundle, model: Vector) -> Runtime:
        if bundle.sha256 not in self._runtimes:
            self._runtimes[bundle.sha256] = open_runtime(
                bundle, "onnx", self._threads, provider=self._provider, model=model
            )
        return self._runtimes[bundle.sha256]


def _hyper(manifest: Manifest, lr: float) -> dict[str, float]:
    """Return a step's hyper-parameters: the bundle's defaults, and ``lr`` where the bundle has none
    for it. Raises ValueError where another one has none."""
    rows = manifest.hyper
    given = {"lr": lr} if any(row.name == "lr" and row.default is None for row in rows) else {}
    return check_hyper(given, rows)


def _asked(measured: Mapping[str, float], public: Manifest) -> dict[str, float]:
    """Return those of the measured metrics that the run asks for."""
    return {name: measured[name] for name in public.metrics if name in measured}


def _mean_loss(runtime: Runtime, batch: Arrays) -> float:
    count, total = len(batch[TEMPERATURE]), 0.0
    for begin in range(0, count, AT_A_TIME):
        part = {name: array[begin : begin + AT_A_TIME] for name, array in batch.items()}
        total += runtime.evaluate(part).loss_sum
    return total / count
