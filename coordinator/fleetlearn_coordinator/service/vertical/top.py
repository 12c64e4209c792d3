"""The top of a vertical run, in a process beside the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector
from fleetlearn_protocol.vertical.kept_part import KeptPart
from numpy.typing import NDArray

from fleetlearn_coordinator.service.worker_process import WorkerAnswer, WorkerProcess


class TopError(FleetError):
    """The top's process cannot do a step, and could not if it was asked again."""


class TopLostError(Exception):
    """The top's process died, with what it had. The next job starts another one."""


class TopStep(NamedTuple):
    """What a step of the top gave."""

    loss: float
    metrics: dict[str, float]
    gradients: tuple[NDArray[Any], ...]


class TopProcess:
    """The process. Each method raises TopLostError where it died: it has lost what it had."""

    def __init__(self, bundle: Path, manifest: Manifest, threads: int) -> None:
        self._manifest = manifest
        self._worker = WorkerProcess("fleetlearn_device.top_worker", str(bundle), str(threads))

    async def load(self, part: KeptPart | None, copy: str = "") -> None:
        """Go on from a checkpoint; None: from the initial model. ``copy``: of the top, of which
        each device of a split run has one."""
        content = () if part is None else (part.local.tobytes(), part.state.tobytes())
        job = {"do": "load", "initial": part is None, "step": 0 if part is None else part.step}
        await self._ask({**job, "copy": copy}, content)

    async def step(
        self,
        step: int,
        seed: int,
        hyper: Mapping[str, float],
        arrays: Sequence[NDArray[Any]],
        copy: str = "",
    ) -> TopStep:
        """Do a step. arrays: of the top's batch, in its order. Raises TopError."""
        content = [np.ascontiguousarray(array).tobytes() for array in arrays]
        job = {"do": "step", "step": step, "seed": seed, "rows": len(arrays[0])}
        answer = await self._ask({**job, "hyper": dict(hyper), "copy": copy}, content)
        place = 0
        gradients: list[NDArray[Any]] = []
        for array, row in zip(arrays, self._manifest.batch, strict=True):
            if len(gradients) == answer.fields["gradients"]:
                break
            size = 4 * array.size
            piece = answer.content[place : place + size]
            gradients.append(np.frombuffer(piece, "<f4").reshape(len(array), *row.shape))
            place += size
        return TopStep(answer.fields["loss"], answer.fields["metrics"], tuple(gradients))

    async def part(self, step: int, copy: str = "") -> KeptPart:
        """Return what the top is after this many steps. Raises TopError."""
        answer = await self._ask({"do": "part", "step": step, "copy": copy}, ())
        vector: Vector = np.frombuffer(answer.content, "<f4").astype(np.float32)
        size = self._manifest.local_size
        return KeptPart(step, vector[:size], vector[size:])

    async def _ask(self, job: Mapping[str, Any], content: Sequence[bytes]) -> WorkerAnswer:
        answer = await self._worker.ask_once(job, content)
        # `lost`: it died between two jobs, and this is another one.
        if answer is None or "lost" in answer.fields:
            raise TopLostError
        if "error" in answer.fields:
            raise TopError(Code.BAD_MESSAGE, f"the top cannot go on: {answer.fields['error']}")
        return answer

    async def close(self) -> None:
        """End the process."""
        await self._worker.close()
