"""Steps of MNN, ExecuTorch and onnxsim for _step_contender.py, in an environment that has them.

They need nothing of this project but the models. What they cannot train is said in
benchmarks/README.md.
"""

# MNN and ExecuTorch have no types.
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,misc,no-untyped-call"

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

WARM = 10
"""Steps whose loss is compared, as in _step_contender.py."""
Step = Callable[..., float]
Cost = Callable[[str], Any]


def mnn(file: str, lr: float, threads: int, cost: Cost) -> tuple[Step, str]:
    """Return a step of SGD on a chain of layers, which ``_models.write_layers`` wrote.

    The model is built of MNN's own layers: where its converter makes it from ONNX, layers before a
    Flatten have no gradient, and that is not said.
    """
    with cost("import"):
        import MNN
        from MNN import expr, nn, optim

    class Chain(nn.Module):
        def __init__(self, kinds: list[list[Any]], values: list[Any]) -> None:
            super().__init__()
            self.steps: list[Any] = []
            left = iter(values)
            for number, (kind, *arguments) in enumerate(kinds):
                if kind in ("conv", "linear"):
                    options = {"padding_mode": expr.Padding_Mode.CAFFE} if kind == "conv" else {}
                    layer = getattr(nn, kind)(*arguments, **options)
                    weight, bias = next(left), next(left)
                    for row, value in zip(layer.parameters, (bias, weight), strict=True):
                        row.write(value.reshape(row.shape).tolist())
                    setattr(self, f"layer{number}", layer)
                    self.steps.append((kind, layer))
                else:
                    self.steps.append((kind, arguments))

        def forward(self, x: Any) -> Any:
            for kind, what in self.steps:
                if kind == "conv":
                    x = what(expr.convert(x, expr.NC4HW4))
                elif kind == "linear":
                    x = what(x)
                elif kind == "relu":
                    x = expr.relu(x)
                elif kind == "pool":
                    x = expr.max_pool(x, *what)
                else:
                    x = expr.reshape(expr.convert(x, expr.NCHW), [0, -1])
            return x

    def constant(value: Any, kind: Any = None) -> Any:
        return expr.const(value.ctypes.data, list(value.shape), expr.NCHW, kind or expr.float)

    with cost("load"):
        expr.lazy_eval(True)  # without it there is no gradient, and step returns False
        expr.set_thread_number(threads)
        with np.load(file) as arrays:
            kinds, *values = arrays.values()
        model, classes, measured = Chain(json.loads(str(kinds)), values), len(values[-1]), WARM
        model.train(True)
        optimizer = optim.SGD(model, lr, 0.0)

    def loss_of(x: Any, y: Any) -> Any:
        expected = expr.one_hot(constant(y, expr.int), classes, 1.0, 0.0)
        return nn.loss.cross_entropy(expr.softmax(model.forward(constant(x)), 1), expected)

    def step(x: Any, y: Any) -> float:
        nonlocal measured
        x, y = np.ascontiguousarray(x), y.astype(np.int32)
        # A loss that was read has no gradient, and after the step it is the new weights'. So it is
        # computed apart.
        value = float(loss_of(x, y).read()) if measured > 0 else 0.0
        measured -= 1
        if not optimizer.step(loss_of(x, y)):
            raise RuntimeError("MNN did not compute the gradient")
        return value

    return step, f"MNN {MNN.version()}"


def executorch(name: str, lr: float, threads: int, cost: Cost) -> tuple[Step, str]:
    """Return a step of SGD on the joint graph of the loss and its gradients, with the kernels of
    the wheel."""
    with cost("import"):
        from importlib.metadata import version

        import _models
        import torch
        from executorch.exir import to_edge
        from executorch.extension.training import (
            _load_for_executorch_for_training_from_buffer,
            get_sgd_optimizer,
        )
        from torch.export import export
        from torch.export.experimental import _export_forward_backward

    class Objective(torch.nn.Module):
        def __init__(self, case: Any) -> None:
            super().__init__()
            self.module, self.loss, self.targets = case.module, case.loss, case.targets

        def forward(self, *batch: Any) -> Any:
            return self.loss(self.module(*batch[: -self.targets]), *batch[-self.targets :])

    with cost("load"):
        case = _models.make(name)
        joint = _export_forward_backward(
            export(Objective(case), case.batch(_models.BATCH), strict=True)
        )
        content = to_edge(joint).to_executorch().buffer  # the program reads it as long as it lives
        program, optimizer = _load_for_executorch_for_training_from_buffer(content), None

    def step(*batch: Any, content: bytes = content) -> float:
        nonlocal optimizer
        loss = program.forward_backward("forward", tuple(map(torch.from_numpy, batch)))[0]
        optimizer = optimizer or get_sgd_optimizer(program.named_parameters(), lr)
        optimizer.step(program.named_gradients())
        return float(loss)

    return step, f"ExecuTorch {version('executorch')}"


def onnxsim(name: str, lr: float, threads: int, cost: Cost) -> tuple[Step, str]:
    """Return a step of SGD of onnxsim, whose gradients are ONNX operators on stock ONNX Runtime.

    It refuses cross_entropy and log_softmax: the same loss is written with what it knows, Softmax
    and Log, and gets the labels as one-hot rows.
    """
    # Its sessions have as many threads as the process may use processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    with cost("import"):
        from importlib.metadata import version

        import _models
        import onnx
        import torch
        from onnxsim.compile_training import compile_training_loop
        from onnxsim.torch_training import export_torch_module_to_onnx, trace_torch_optimizer
    with cost("load"):
        case = _models.make(name)
        *_, labels = case.batch(_models.BATCH)
        classes = case.module(*case.batch(_models.BATCH)[:-1]).shape[-1]

    class Objective(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = case.module

        def forward(self, x: Any, chosen: Any) -> Any:
            # chosen: `classes` where the label is, else 0, so that the mean is over the examples
            return -(torch.log(torch.softmax(self.module(x), -1)) * chosen).mean()

    def one_hot(y: Any) -> Any:
        return (classes * np.eye(classes, dtype=np.float32))[y]

    with cost("load"):
        example = case.batch(_models.BATCH)[0], torch.from_numpy(one_hot(labels.numpy()))
        model = export_torch_module_to_onnx(Objective(), example)
        # It has no gradient of Constant, and reads an initializer's values.
        for node in [node for node in model.graph.node if node.op_type == "Constant"]:
            values = np.asarray(onnx.helper.get_node_attr_value(node, node.attribute[0].name))
            if node.attribute[0].name == "value":
                values = onnx.numpy_helper.to_array(node.attribute[0].t)
            model.graph.initializer.append(onnx.numpy_helper.from_array(values, node.output[0]))
            model.graph.node.remove(node)
        plain = trace_torch_optimizer(lambda value, by_it, rate: (value - rate * by_it,), 0)
        names = [f"module.{name}" for name, _ in case.module.named_parameters()]
        loop = compile_training_loop(model, "loss", names, optimizer=plain)

    def step(x: Any, y: Any) -> float:
        return float(loop({"x": x, "chosen": one_hot(y)}, lr=lr))

    return step, f"onnxsim {version('onnxsim')}"
