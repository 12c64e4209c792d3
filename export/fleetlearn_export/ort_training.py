"""ONNX Runtime's own training artifacts: the same model and loss through a second automatic differentiation."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx
from fleetlearn_protocol.manifest import ORT_TRAINING, LocalStep

from fleetlearn_export.check import Hand, batches, compare, in_pytorch, over_seeds, start
from fleetlearn_export.ort_forward import forward_model
from fleetlearn_export.places import first_line
from fleetlearn_export.quiet import quiet_process
from fleetlearn_export.source import Source
from fleetlearn_export.train_step import TrainStep

IR_VERSION = 10
"""The newest that onnxruntime-training 1.19.2, the last one, reads; it writes its optimizer in onnx's newest."""
LEARNING_RATE = 0.01


class Artifacts(NamedTuple):
    """The files of ``ort_training/``, or the reason why there are none."""

    files: dict[str, bytes]
    reason: str | None


def make_artifacts(source: Source, step: TrainStep) -> Artifacts:
    """Generate the artifacts and train a few steps with them against PyTorch. The model is in training mode.

    The model handed to ONNX Runtime ends in the user's own loss, so both runtimes train the same thing. Its inputs
    are ``batch.NAME``, its outputs ``loss`` and ``metric.NAME`` (means), its parameters named as in the manifest.
    """
    reason = _unsupported(step.rule)
    if reason:
        return Artifacts({}, reason)
    values = step.values
    if step.random:
        return Artifacts({}, "the step is random, and ONNX Runtime's training steps draw from a state of their own")
    if step.personal:
        return Artifacts({}, "personal parameters are kept apart in the bundle's graph alone")
    if step.buffers:
        listed = ", ".join(sorted(step.buffers))
        return Artifacts({}, f"training changes buffers, which ONNX Runtime's training steps do not write: {listed}")
    try:
        from onnxruntime.training import artifacts
    except ImportError:
        return Artifacts({}, "they are made where onnxruntime-training-cpu is installed (fleetlearn[ort-training])")
    try:
        with tempfile.TemporaryDirectory(prefix="fleetlearn-") as folder:
            with quiet_process():
                artifacts.generate_artifacts(
                    forward_model(source, values, Path(folder)),
                    requires_grad=list(values),
                    optimizer=artifacts.OptimType.SGD,
                    artifact_directory=folder,
                )
            _settle_optimizer(Path(folder, "optimizer_model.onnx"))
            with quiet_process():
                over_seeds(lambda seed: _check(source, step, Path(folder), seed))
            return Artifacts({f"ort_training/{name}": Path(folder, name).read_bytes() for name in ORT_TRAINING}, None)
    except Exception as error:
        # Whatever the old exporter and the artifacts' builder cannot do, they say with exceptions of many kinds.
        return Artifacts({}, _reason(error))


def _unsupported(rule: LocalStep) -> str | None:
    """Why a step cannot be done with them: they have SGD, to which a proximal term can be added from outside."""
    if msgspec.structs.replace(rule, proximal=False) == LocalStep():
        return None
    return "they are made for plain SGD, with or without a proximal term; the bundle's step is another"


def _settle_optimizer(file: Path) -> None:
    """Give it an IR version that its own runtime reads, and names without the process's running numbers."""
    model = onnx.load(file)
    model.ir_version = IR_VERSION
    for node in model.graph.node:
        node.name = node.name.rsplit("::", 1)[0]
        node.output[:] = [name.rsplit("::", 1)[0] for name in node.output]
    for row in model.graph.output:
        row.name = row.name.rsplit("::", 1)[0]
    onnx.save(model, file)


def _check(source: Source, step: TrainStep, folder: Path, seed: int) -> None:
    from onnxruntime.training import api

    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state)
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(LEARNING_RATE)
    hand = Hand(source, step, None)
    given = start(step, {"lr": LEARNING_RATE} | ({"mu": 0.0} if step.rule.proximal else {}), seed)
    for batch in batches(source, seed):
        given |= {f"batch.{name}": value for name, value in batch.items()}
        expected = in_pytorch(partial(hand, given), batch)
        if expected is None:
            continue
        outputs: Any = module(*(value.numpy() for value in batch.values()))
        optimizer.step()
        module.lazy_reset_grad()
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        given = expected.given
        rows = {f"parameter {name}": (state.parameters[name].data, given[f"param.{name}"]) for name in step.values}
        compare(rows | {"the loss": (loss, expected.results["loss"])}, "training with ONNX Runtime's artifacts")


def _reason(error: Exception) -> str:
    """The error's first line, without the C++ function that it came from."""
    line = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : ", "", first_line(error))
    return re.sub(r"^.* was false\. (?=\S)", "", line)[:300]
