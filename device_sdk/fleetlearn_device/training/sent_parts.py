"""The parts of a report as bytes, and what of them is left for the device's next update (error
feedback)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.encodings import FLOAT32, RESIDUAL, find_encoding, leaves_residual
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.extensions import ExtensionError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import BUFFERS, UPDATE, Task
from fleetlearn_protocol.vector import Vector, scatter

from fleetlearn_device.training.algorithms import ALGORITHMS, UnsupportedError
from fleetlearn_device.training.clipping import encode_clipped
from fleetlearn_device.training.local_noise import add_noise
from fleetlearn_device.training.train import DivergedError, TrainingError
from fleetlearn_device.training.work import TaskOutcome


class SentParts(NamedTuple):
    """What a task sends."""

    contents: dict[str, memoryview]
    """Part -> its bytes."""
    tied: dict[str, Vector]
    """The residual, if the update's encoding leaves one: a tied vector."""
    clipped: bool | None = None
    """Whether the update was longer than the task allows. None: the task allows any."""


def residual_of(asked: Mapping[str, str]) -> tuple[str, ...]:
    """Return the name of the tied vector that a task leaves beside its algorithm's, if any.
    ``asked``: part -> encoding."""
    return (RESIDUAL,) if leaves_residual(asked[UPDATE]) else ()


def check_parts(asked: Mapping[str, str], manifest: Manifest) -> None:
    """Raise UnsupportedError unless a task asks for the values of buffers, uncompressed, exactly
    where the bundle has buffers that travel."""
    if (BUFFERS in asked) != bool(manifest.buffers):
        has, asks = ("has", "does not ask") if manifest.buffers else ("does not have", "asks")
        raise UnsupportedError(
            f"bundle {manifest.name} {has} buffers that travel, such as BatchNorm's statistics, "
            f"and the task {asks} for their values (the part {BUFFERS}). Coordinator and device "
            "are of different versions: update both"
        )
    if asked.get(BUFFERS, FLOAT32.name) != FLOAT32.name:
        raise UnsupportedError(
            f"the task asks for the part {BUFFERS} as {asked[BUFFERS]}; values travel as "
            f"{FLOAT32.name} alone"
        )


def tied_as_sent(
    task: Task,
    asked: Mapping[str, str],
    hyper: Mapping[str, float],
    outcome: TaskOutcome,
    contents: Mapping[str, Buffer],
    manifest: Manifest,
) -> dict[str, Vector]:
    """Return the algorithm's tied vectors after the task, as the coordinator counts the update.

    FedDyn's lambda_k must change by the update that the coordinator's h changes by, which is what
    its bytes mean. A lossy encoding rounds the update, a bound on its norm may make it shorter, and
    it may have noise: lambda_k must change by what is sent. ``asked``: part -> encoding, as
    ``encode_parts`` was given; ``hyper``: all of the bundle's values; ``contents``: as
    ``encode_parts`` made them."""
    tied, factors = dict(outcome.tied), ALGORITHMS[task.algorithm].per_update
    encoding = asked[UPDATE]
    as_it_is = encoding == FLOAT32.name and task.clip is None
    if not factors or as_it_is:
        return tied
    update = outcome.parts[UPDATE]
    rounding = find_encoding(encoding).decode(contents[UPDATE], len(update)) - update
    scatter(rounding, manifest.buffers, 0.0)
    for name, factor in factors.items():
        tied[name] = tied[name] + np.float32(factor(hyper)) * rounding
    return tied


def encode_parts(
    asked: Mapping[str, str],
    parts: Mapping[str, Vector],
    seed: int,
    tied: Mapping[str, Vector],
    clip: float | None = None,
    noise: float | None = None,
) -> SentParts:
    """Encode the parts as a task asks.

    tied: what it goes on from. clip: the greatest L2 norm that the update may have (clipping.py).
    noise: the standard deviation of what is added to each of its elements after the clipping
    (local_noise.py), from another secret in each call; with it comes a clip, and an encoding
    without a residual.

    With top-k, what did not travel of the device's earlier updates is added to this one, and what
    does not travel now is kept for the next (Stich, Cordonnier and Jaggi, "Sparsified SGD with
    Memory", arXiv 1809.07599, algorithm 1; here of whole updates). What clipping took away is not
    kept: it would grow with each task. An own encoding may leave a residual too. Raises
    DivergedError: an encoding cannot hold its part, or a clipped update is not finite;
    TrainingError: an own encoding fails.
    """
    contents, left = dict[str, memoryview](), dict[str, Vector]()
    clipped: bool | None = None
    try:
        for name, encoding in ((name, find_encoding(encoding)) for name, encoding in asked.items()):
            part = parts[name]
            if name == UPDATE and clip is not None:
                before = tied.get(RESIDUAL) if leaves_residual(encoding.name) else None
                exact = FLOAT32 if noise is not None else encoding
                sent = encode_clipped(exact, part, before, seed, clip)
                contents[name], clipped = sent.content, sent.clipped
                if leaves_residual(encoding.name):
                    left[RESIDUAL] = sent.whole - sent.meant
                if noise is not None:
                    contents[name] = encoding.encode(add_noise(sent.meant, noise), seed)
            elif name == UPDATE and leaves_residual(encoding.name):
                part = part + tied.get(RESIDUAL, np.float32(0))
                contents[name] = encoding.encode(part, seed)
                # What the bytes mean, not what was chosen: the values may be rounded too.
                left[RESIDUAL] = part - encoding.decode(contents[name], len(part))
            else:
                contents[name] = encoding.encode(part, seed)
    except ProtocolError as error:
        raise DivergedError(error.text) from error
    except ExtensionError as error:
        raise TrainingError(str(error)) from error
    return SentParts(contents, left, clipped)
