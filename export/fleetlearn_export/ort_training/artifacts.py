"""ONNX Runtime's own training artifacts: the same model and loss, differentiated by ONNX
Runtime."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx
from fleetlearn_protocol.manifest import ORT_TRAINING, LocalStep

from fleetlearn_export.checks.comparison import (
    batches,
    call_in_pytorch,
    compare,
    first_inputs,
    first_passing,
)
from fleetlearn_export.checks.pytorch_training import PyTorchTraining
from fleetlearn_export.model.source_locations import first_line
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel
from fleetlearn_export.ort_training.forward import forward_model
from fleetlearn_export.silence import silenced_process

IR_VERSION = 10
"""The newest that onnxruntime-training 1.19.2, the last release, reads. It writes its optimizer in
onnx's newest."""
LEARNING_RATE = 0.01


class Artifacts(NamedTuple):
    """The files of ``ort_training/`` by name, or the reason why there are none."""

    files: dict[str, bytes]
    reason: str | None


def make_artifacts(user: UserModel, step: TrainStep) -> Artifacts:
    """Generate the artifacts and compare a few steps with PyTorch. The model is in training mode.

    The graph given to ONNX Runtime ends in the user's own loss, so both runtimes train the same.
    Its inputs are ``batch.NAME``, its outputs ``loss`` and ``metric.NAME`` (means). Its parameters
    are named as in the manifest.
    """
    reason = _unsupported(step.rule)
    if reason:
        return Artifacts({}, reason)
    values = step.values
    if step.state:
        return Artifacts(
            {}, "the step scales its loss for float16, and ONNX Runtime's training steps do not"
        )
    if step.random:
        return Artifacts(
            {},
            "the step is random, and ONNX Runtime's training steps draw from another state",
        )
    if step.personal:
        return Artifacts({}, "personal parameters are kept apart in the bundle's graph alone")
    if step.buffers:
        listed = ", ".join(sorted(step.buffers))
        return Artifacts(
            {},
            f"training changes buffers, which ONNX Runtime's training steps do not write: {listed}",
        )
    try:
        from onnxruntime.training import artifacts
    except ImportError:
        return Artifacts(
            {},
            "they are made where onnxruntime-training-cpu is installed (fleetlearn[ort-training])",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="fleetlearn-") as folder:
            with silenced_process():
                artifacts.generate_artifacts(
                    forward_model(user, values, Path(folder)),
                    requires_grad=list(values),
                    optimizer=artifacts.OptimType.SGD,
                    artifact_directory=folder,
                )
            _make_repeatable(Path(folder, "optimizer_model.onnx"))
            with silenced_process():
                first_passing(lambda seed: _check(user, step, Path(folder), seed))
            return Artifacts(
                {f"ort_training/{name}": Path(folder, name).read_bytes() for name in ORT_TRAINING},
                None,
            )
    except Exception as error:
        # The old exporter and the builder of artifacts raise exceptions of many kinds for what they
        # cannot do.
        return Artifacts({}, _reason(error))


def _unsupported(rule: LocalStep) -> str | None:
    """Return why the artifacts cannot do the step, or None. They have SGD; the device can add a
    proximal term."""
    if msgspec.structs.replace(rule, proximal=False) == LocalStep():
        return None
    return (
        "they are made for plain SGD, with or without a proximal term; the bundle's step is another"
    )


def _make_repeatable(file: Path) -> None:
    """Give the optimizer an IR version that its runtime reads, and names without the process's
    running numbers."""
    model = onnx.load(file)
    model.ir_version = IR_VERSION
    for node in model.graph.node:
        node.name = node.name.rsplit("::", 1)[0]
        node.output[:] = [name.rsplit("::", 1)[0] for name in node.output]
    for output in model.graph.output:
        output.name = output.name.rsplit("::", 1)[0]
    onnx.save(model, file)


def _check(user: UserModel, step: TrainStep, folder: Path, seed: int) -> None:
    from onnxruntime.training import api

    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state)
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(LEARNING_RATE)
    reference = PyTorchTraining(user, step, None)
    inputs = first_inputs(
        step, {"lr": LEARNING_RATE} | ({"mu": 0.0} if step.rule.proximal else {}), seed
    )
    for batch in batches(user, seed):
        inputs |= {f"batch.{name}": value for name, value in batch.items()}
        expected = call_in_pytorch(partial(reference, inputs), batch)
        if expected is None:
            continue
        outputs: Any = module(*(value.numpy() for value in batch.values()))
        optimizer.step()
        module.lazy_reset_grad()
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        inputs = expected.given
        rows = {
            f"parameter {name}": (state.parameters[name].data, inputs[f"param.{name}"])
            for name in step.values
        }
        compare(
            rows | {"the loss": (loss, expected.results["loss"])},
            "training with ONNX Runtime's artifacts",
        )


def _reason(error: Exception) -> str:
    """Return the error's first line, without the C++ function that raised it."""
    line = re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : ", "", first_line(error))
    return re.sub(r"^.* was false\. (?=\S)", "", line)[:300]
