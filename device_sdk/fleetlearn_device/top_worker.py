"""Trains the top of a split model, in a process that a coordinator starts.

    python -m fleetlearn_device.top_worker BUNDLE THREADS

Jobs (``worker.py`` has their form) say what to ``do``. ``load``: go on from the vectors that
follow, or from the initial model, after ``step`` steps. ``step``: do that step with the arrays of
``rows`` rows that follow, in the order of the bundle's batch; the answer has loss, metrics and the
number of ``gradients``, which follow. ``part``: the vectors follow. A process that was told nothing
to load answers ``lost``: the one before it, which had the top, has died.
"""

from __future__ import annotations

import sys
from math import isfinite, prod
from typing import Any

import numpy as np
from fleetlearn_protocol.bundle import open_bundle

from fleetlearn_device.runtimes.split import Top
from fleetlearn_device.worker import DoJob, JobContent, serve_jobs


class TopJobs:
    """The top, and how many steps it has done."""

    def __init__(self, path: str, threads: int) -> None:
        self._bundle = open_bundle(path)
        self._top = Top(self._bundle, threads)
        self._step: int | None = None

    def do(self, job: dict[str, Any], content: JobContent) -> tuple[dict[str, Any], bytes]:
        """Do a job. Raises ValueError, StepError, DataError."""
        if job["do"] == "load":
            self._load(job, content)
            return {}, b""
        if self._step is None:  # the process that had the top has died between two jobs
            return {"lost": True}, b""
        if job["step"] != self._step:
            raise ValueError(f"{job['do']} of step {job['step']}; this process is at {self._step}")
        if job["do"] == "part":
            return {}, self._top.local.tobytes() + self._top.state.tobytes()
        return self._do_step(job, content)

    def _load(self, job: dict[str, Any], content: JobContent) -> None:
        if job["initial"]:
            self._top.resume(self._bundle.parameters(), self._bundle.state())
        else:
            vector = np.frombuffer(content.read(content.left), "<f4").astype(np.float32)
            size = self._bundle.manifest.local_size
            self._top.resume(vector[:size], vector[size:])
        self._step = job["step"]

    def _do_step(self, job: dict[str, Any], content: JobContent) -> tuple[dict[str, Any], bytes]:
        arrays = []
        for row in self._bundle.manifest.batch:
            dtype = np.dtype(row.dtype).newbyteorder("<")
            elements = job["rows"] * prod(row.shape)
            piece = content.read(elements * dtype.itemsize)
            arrays.append(np.frombuffer(piece, dtype).reshape(job["rows"], *row.shape))
        found = self._top.step(arrays, seed=job["seed"], **job["hyper"])
        if not isfinite(found.loss):
            raise ValueError(f"the loss of step {job['step']} is {found.loss}: try a smaller lr")
        assert self._step is not None
        self._step += 1
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
