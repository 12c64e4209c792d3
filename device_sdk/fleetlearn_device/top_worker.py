"""Trains the top of a split model, in a process that a coordinator starts.

    python -m fleetlearn_device.top_worker BUNDLE THREADS

Jobs (``worker.py`` has their form) say what to ``do``. ``load``: go on from the vectors that
follow, or from the initial model, after ``step`` steps. ``step``: do that step with the arrays of
``rows`` rows that follow, in the order of the bundle's batch; the answer has loss, metrics and the
number of ``gradients``, which follow. ``part``: the vectors follow. Each job names the ``copy`` of
the top that it is about: in a split run each device trains one of its own. A process that was told
nothing to load for a copy answers ``lost``: the one before it, which had the copy, has died.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.vector import Vector
from fleetlearn_protocol.vertical.messages import MOST_LOSS

from fleetlearn_device.runtimes.split import Top
from fleetlearn_device.worker import DoJob, JobContent, serve_jobs


class TopCopy(NamedTuple):
    """One copy of the top."""

    step: int
    """Steps that it has done."""
    local: Vector
    state: Vector


class TopJobs:
    """The copies of the top, which share one session."""

    def __init__(self, path: str, threads: int) -> None:
        self._bundle = open_bundle(path)
        self._top = Top(self._bundle, threads)
        self._copies: dict[str, TopCopy] = {}

    def do(self, job: dict[str, Any], content: JobContent) -> tuple[dict[str, Any], bytes]:
        """Do a job. Raises ValueError, StepError, DataError."""
        name = job["copy"]
        if job["do"] == "load":
            self._copies[name] = self._loaded(job, content)
            return {}, b""
        copy = self._copies.get(name)
        if copy is None:  # the process that had it has died between two jobs
            return {"lost": True}, b""
        if job["step"] != copy.step:
            raise ValueError(f"{job['do']} of step {job['step']}; this process is at {copy.step}")
        if job["do"] == "part":
            return {}, copy.local.tobytes() + copy.state.tobytes()
        self._top.resume(copy.local, copy.state)
        answer = self._do_step(job, content)
        # What a step makes is in arrays of its own: no copy of them is needed.
        self._copies[name] = TopCopy(copy.step + 1, self._top.local, self._top.state)
        return answer

    def _loaded(self, job: dict[str, Any], content: JobContent) -> TopCopy:
        if job["initial"]:
            return TopCopy(job["step"], self._bundle.parameters(), self._bundle.state())
        vector = np.frombuffer(content.read(content.left), "<f4").astype(np.float32)
        size = self._bundle.manifest.local_size
        return TopCopy(job["step"], vector[:size], vector[size:])

    def _do_step(self, job: dict[str, Any], content: JobContent) -> tuple[dict[str, Any], bytes]:
        arrays = []
        for row in self._bundle.manifest.batch:
            dtype = np.dtype(row.dtype).newbyteorder("<")
            elements = job["rows"] * prod(row.shape)
            piece = content.read(elements * dtype.itemsize)
            arrays.append(np.frombuffer(piece, dtype).reshape(job["rows"], *row.shape))
        found = self._top.step(arrays, seed=job["seed"], **job["hyper"])
        if not abs(found.loss) <= MOST_LOSS:  # NaN too
            raise ValueError(f"the loss of step {job['step']} is {found.loss}: try a smaller lr")
        answer = {"loss": found.loss, "metrics": found.metrics, "gradients": len(found.gradients)}
        return answer, b"".join(gradient.tobytes() for gradient in found.gradients)


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    path, threads = arguments

    def prepare() -> DoJob:
        return TopJobs(path, int(threads)).do

    return serve_jobs(prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
