"""Ensemble distillation (FedDF): models learn what teachers say of examples without labels, in a
process that a coordinator starts, or in a simulation.

    python -m fleetlearn_device.distil DATA.npz BUNDLE [BUNDLE ...]

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning" (2020), arXiv
2006.07242, Algorithms 1 and 3: the mean is of the teachers' logits, each teacher counts the same,
and the learning rate falls to 0 as half a cosine. A job (``worker.py`` has its form) is a
``fleetlearn_protocol.distillation.DistillationJob`` with its models; the answer has a
``Distilled`` for each student, whose models follow it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.bundle import write_inference_model
from fleetlearn_protocol.distillation import (
    TEACHER,
    TEMPERATURE,
    DistillationJob,
    Distilled,
    read_unlabelled,
    student_inputs,
)
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.runtimes.sessions import session_options
from fleetlearn_device.training.shuffling import permutation
from fleetlearn_device.training.train import LARGEST, SEEDS, DivergedError
from fleetlearn_device.worker import DoJob, JobContent, serve_jobs

EXAMPLES_AT_A_TIME = 256
"""Examples whose logits are computed together: bounds memory."""
UNIT = 2.0**-24
"""Teachers' logits are added up as whole multiples of it, so that their order does not matter."""
LARGEST_LOGIT = 2.0**20
"""Larger ones count as this: a teacher that says so has decided already."""

Arrays = Mapping[str, NDArray[Any]]
Models = tuple[list[Distilled], list[Vector]]


class Distiller:
    """Bundles and examples, ready to distil."""

    def __init__(self, bundles: Sequence[Bundle], path: str) -> None:
        """``bundles``: distillation bundles, whose models take the same arrays and say the same
        number of logits. ``path``: the examples, an .npz file. Raises BundleError, NpzError,
        ValueError."""
        self.bundles = bundles
        inputs = [student_inputs(bundle.manifest) for bundle in bundles]
        logits = [bundle.manifest.outputs[0].shape for bundle in bundles]
        for place, bundle in enumerate(bundles):
            if inputs[place] != inputs[0] or logits[place] != logits[0]:
                first = bundles[0].manifest.name
                raise ValueError(
                    f"the models of bundles {first} and {bundle.manifest.name} take other arrays "
                    "or say another number of logits, so that neither can teach the other"
                )
        self.arrays: Arrays = read_unlabelled(path, inputs[0])
        self.examples = len(next(iter(self.arrays.values())))
        (self.classes,) = logits[0]
        self._runtimes: dict[int, Runtime] = {}

    def distil(self, job: DistillationJob, read: Callable[[int], Vector]) -> Models:
        """Return what came of the students, and their models.

        ``read``: returns the next model, float32; called with its number of elements, for students
        first, then for teachers. Raises DivergedError (a loss or a model is not finite),
        ValueError, StepError."""
        sizes = [bundle.manifest.size for bundle in self.bundles]
        models = [read(sizes[place]) for place in job.students]
        steps = [*self._steps(job)]
        seen = np.unique(np.concatenate(steps))
        teachers = ((place, read(sizes[place])) for place in job.teachers)
        batch = {name: array[seen] for name, array in self.arrays.items()}
        batch[TEACHER] = self.mean_logits(teachers, batch)
        batch[TEMPERATURE] = np.full(len(seen), job.temperature, np.float32)
        places = [np.searchsorted(seen, step) for step in steps]
        found = [
            self._teach(place, model, batch, places, job)
            for place, model in zip(job.students, models, strict=True)
        ]
        return [row[0] for row in found], [row[1] for row in found]

    def _steps(self, job: DistillationJob) -> Iterator[NDArray[np.int64]]:
        """Yield which examples are in each step: passes over all of them, each in another order."""
        done = 0
        for epoch in range(job.steps):
            order = permutation(self.examples, job.seed, epoch)
            for begin in range(0, self.examples, job.batch_size):
                if done == job.steps:
                    return
                done += 1
                yield order[begin : begin + job.batch_size]

    def mean_logits(self, teachers: Iterator[tuple[int, Vector]], batch: Arrays) -> Vector:
        """Return the mean of the teachers' logits, float32, shape (n, C). Each teacher is the place
        of its bundle, and its model. The mean does not depend on their order, to the last bit.
        Raises ValueError without teachers, DivergedError (logits that are not finite)."""
        examples, count = len(next(iter(batch.values()))), 0
        total = np.zeros((examples, self.classes), np.int64)
        for place, model in teachers:
            count += 1
            if not np.isfinite(model).all():  # a device's update of 3e38, added to a large model
                raise DivergedError(f"the model of teacher {count} is not finite")
            infer = self._inference(place, model)
            for begin in range(0, examples, EXAMPLES_AT_A_TIME):
                part = slice(begin, begin + EXAMPLES_AT_A_TIME)
                logits = infer({name: batch[name][part] for name in self.arrays})
                if not np.isfinite(logits).all():
                    raise DivergedError(f"the logits of teacher {count} are not finite")
                clipped = np.clip(logits.astype(np.float64), -LARGEST_LOGIT, LARGEST_LOGIT)
                total[part] += np.rint(clipped / UNIT).astype(np.int64)
        if not count:
            raise ValueError("there are no teachers")
        mean: Vector = (total / count * UNIT).astype(np.float32)
        return mean

    def _inference(self, place: int, model: Vector) -> Callable[[Arrays], NDArray[np.float32]]:
        """Return what computes the logits of a model of one of the bundles."""
        bundle = self.bundles[place]
        session = import_onnxruntime().InferenceSession(
            write_inference_model(bundle, model),
            session_options(1),
            providers=["CPUExecutionProvider"],
        )
        output = [bundle.manifest.outputs[0].name]
        return lambda feed: np.asarray(session.run(output, dict(feed))[0])

    def _teach(
        self,
        place: int,
        model: Vector,
        batch: Arrays,
        places: Sequence[NDArray[np.int64]],
        job: DistillationJob,
    ) -> tuple[Distilled, Vector]:
        if place not in self._runtimes:
            self._runtimes[place] = open_runtime(self.bundles[place], kind="onnx", model=model)
        runtime = self._runtimes[place]
        runtime.load(model)
        before = _mean_loss(runtime, batch)
        for number, rows in enumerate(places):
            lr = job.lr * (1 + math.cos(math.pi * number / len(places))) / 2
            step = {name: array[rows] for name, array in batch.items()}
            runtime.step(step, seed=(job.seed + number) % SEEDS, lr=lr)
        taught = runtime.parameters.copy()
        after = _mean_loss(runtime, batch)
        # written so that NaN, which is neither above nor below, fails too
        fine = before <= LARGEST and after <= LARGEST and np.isfinite(taught).all()
        if not fine:
            raise DivergedError(
                f"distillation diverged: its loss was {before:g} and is {after:g} after "
                f"{len(places)} steps; a smaller lr may help"
            )
        return Distilled(loss_before=before, loss_after=after), taught


def _mean_loss(runtime: Runtime, batch: Arrays) -> float:
    examples = len(batch[TEMPERATURE])
    found = list[Evaluation]()
    for begin in range(0, examples, EXAMPLES_AT_A_TIME):
        part = slice(begin, begin + EXAMPLES_AT_A_TIME)
        found.append(runtime.evaluate({name: array[part] for name, array in batch.items()}))
    return sum(part.loss_sum for part in found) / examples


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    data, *paths = arguments

    def prepare() -> DoJob:
        bundles = [open_bundle(path, files=(TRAIN, EVAL, INFER)) for path in paths]
        distiller = Distiller(bundles, data)

        def do_job(fields: dict[str, Any], content: JobContent) -> tuple[dict[str, Any], bytes]:
            job = msgspec.convert(fields, DistillationJob)
            try:
                found, models = distiller.distil(
                    job, lambda size: np.frombuffer(content.read(4 * size), "<f4")
                )
            except DivergedError as error:
                return {"diverged": str(error)}, b""
            told = [msgspec.to_builtins(row) for row in found]
            return {"students": told}, b"".join(model.astype("<f4").tobytes() for model in models)

        return do_job

    return serve_jobs(prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
