"""The loss as an ONNX graph of operators for which ONNX Runtime can build gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx.inliner
import onnx.parser
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.user_model import LossModule, UserModel
from fleetlearn_export.silence import silenced_python
from fleetlearn_export.tracing.missing_pooling import adaptive_averages

OPSET = 17
EXPANDED = "fleetlearn.expanded"
"""The domain of EXPANSIONS, functions that replace operators without a gradient there. All of them
are inlined."""
EXPANSIONS = [
    "Elu <alpha> (x) => (y) { a = Constant <value_float: float = @alpha> () one = Constant <value "
    "= float {1}> () above = Relu (x) below = Sub (x, above) e = Exp (below) f = Sub (e, one) g = "
    "Mul (a, f) y = Add (above, g) }",
    "HardSigmoid <alpha, beta> (x) => (y) { a = Constant <value_float: float = @alpha> () b = "
    "Constant <value_float: float = @beta> () one = Constant <value = float {1}> () ax = Mul (x, "
    "a) line = Add (ax, b) low = Relu (line) over = Sub (line, one) high = Relu (over) y = Sub "
    "(low, high) }",
    "HardSwish (x) => (y) { a = Constant <value = float {0.1666666667}> () b = Constant <value = "
    "float {0.5}> () one = Constant <value = float {1}> () ax = Mul (x, a) line = Add (ax, b) low "
    "= Relu (line) over = Sub (line, one) high = Relu (over) gate = Sub (low, high) y = Mul (x, "
    "gate) }",
    "InstanceNormalization <epsilon> (x, scale, bias) => (y) { e = Constant <value_float: float = "
    "@epsilon> () flat = Constant <value = int64[3] {0, 0, -1}> () column = Constant <value = "
    "int64[1] {1}> () rows = Reshape (x, flat) mean = ReduceMean <axes = [2]> (rows) d = Sub "
    "(rows, mean) dd = Mul (d, d) v = ReduceMean <axes = [2]> (dd) ve = Add (v, e) s = Sqrt (ve) n "
    "= Div (d, s) scales = Unsqueeze (scale, column) biases = Unsqueeze (bias, column) scaled = "
    "Mul (n, scales) whole = Add (scaled, biases) shape = Shape (x) y = Reshape (whole, shape) }",
    "PRelu (x, slope) => (y) { above = Relu (x) minus = Neg (x) below = Relu (minus) scaled = Mul "
    "(slope, below) y = Sub (above, scaled) }",
    "Softplus (x) => (y) { one = Constant <value = float {1}> () size = Abs (x) below = Neg (size) "
    "e = Exp (below) f = Add (e, one) l = Log (f) r = Relu (x) y = Add (l, r) }",
]
OPTIONAL = {"SoftmaxCrossEntropyLoss": 2, "LayerNormalization": 3}
"""Operators whose gradient needs their optional outputs -> how many outputs they have with
these."""


def l1_loss(
    x: Tensor,
    y: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    weight: None = None,
) -> Tensor | None:
    return _reduced((x - y).abs(), reduction) if weight is None else None


def huber_loss(
    x: Tensor, y: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor | None:
    """Return d^2 / 2 up to delta, and delta * (|d| - delta / 2) above it."""
    distance = (x - y).abs()
    near = distance.clamp(max=delta)
    return _reduced(near * (distance - near / 2), reduction) if weight is None else None


def smooth_l1_loss(
    x: Tensor,
    y: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor | None:
    """Return Huber's loss divided by beta."""
    if not beta:
        return l1_loss(x, y, reduction=reduction)
    huber = huber_loss(x, y, reduction, beta)
    return None if huber is None else huber / beta


def cross_entropy(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss with smoothed labels: a part of each label is spread over all classes.

    Szegedy et al. 2015, arXiv 1512.00567, section 7.
    """
    if (
        not label_smoothing
        or weight is not None
        or ignore_index != -100
        or reduction != "mean"
        or y.dim() != 1
    ):
        return None
    all_classes = -functional.log_softmax(x, 1).mean(1).mean()
    return (1 - label_smoothing) * functional.cross_entropy(x, y) + label_smoothing * all_classes


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    products = (a[..., :, None] * b[..., None, :]).flatten(-2)
    return functional.linear(products, weight.flatten(1), bias)


def embedding_bag(
    words: Tensor, weight: Tensor, *given: Any, mode: str = "mean", **options: Any
) -> Tensor | None:
    """Return sums or means of bags of one size, (n, words)."""
    if (
        words.dim() != 2
        or mode == "max"
        or any(value is not None for value in given)
        or _any_option_given(options)
    ):
        return None
    rows = functional.embedding(words, weight)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """Return the convolution with padding="same" as numbers, which ONNX Runtime's gradient of Conv
    needs."""
    if padding != "same":
        return None
    count = weight.dim() - 2
    steps = [dilation] * count if isinstance(dilation, int) else dilation
    reaches = [d * (int(k) - 1) for d, k in zip(steps, weight.shape[2:], strict=True)]
    ends = [n for reach in reversed(reaches) for n in (reach // 2, reach - reach // 2)]
    return _convolve(functional.pad(x, ends), weight, bias, stride, 0, dilation, groups)


def avg_pool(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    """Return a convolution with equal weights: ONNX Runtime's gradient of AveragePool divides by 0
    and crashes."""
    count = x.dim() - 2
    padded = any([padding] if isinstance(padding, int) else padding)
    if ceil_mode or divisor_override or (padded and not count_include_pad):
        return None
    kernel = (
        [kernel_size] * count
        if isinstance(kernel_size, int)
        else list(kernel_size) * (count // len(kernel_size))
    )
    weight = torch.full([1, 1, *kernel], 1 / prod(kernel))
    alone = x.reshape(-1, 1, *map(int, x.shape[2:]))
    out = _convolve(alone, weight, None, kernel if stride is None else stride, padding)
    return out.reshape(-1, int(x.shape[1]), *map(int, out.shape[2:]))


def adaptive_avg_pool(x: Tensor, output_size: int | Sequence[int | None] | None) -> Tensor | None:
    sizes = [int(size) for size in x.shape[2:]]
    wanted = (
        [output_size] * len(sizes)
        if output_size is None or isinstance(output_size, int)
        else list(output_size)
    )
    outs = [size if out is None else out for size, out in zip(sizes, wanted, strict=True)]
    return None if set(outs) == {1} else adaptive_averages(x, outs)


def _any_option_given(options: Mapping[str, Any]) -> bool:
    """Whether any option is set. The norm's type does not count: it is always given."""
    return any(
        value is not None and value is not False
        for name, value in options.items()
        if name != "norm_type"
    )


def _reduced(values: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.mean()


def _convolve(x: Tensor, *given: Any) -> Tensor:
    """Call conv1d, conv2d or conv3d, whichever fits the image."""
    functions: tuple[Callable[..., Any], ...] = (
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
    )
    out: Tensor = functions[x.dim() - 3](x, *given)
    return out


REPLACEMENTS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    functional.l1_loss: l1_loss,
    functional.huber_loss: huber_loss,
    functional.smooth_l1_loss: smooth_l1_loss,
    functional.cross_entropy: cross_entropy,
    functional.bilinear: bilinear,
    functional.embedding_bag: embedding_bag,
    functional.conv1d: convolution,
    functional.conv2d: convolution,
    functional.conv3d: convolution,
    functional.avg_pool1d: avg_pool,
    functional.avg_pool2d: avg_pool,
    functional.avg_pool3d: avg_pool,
    functional.adaptive_avg_pool1d: adaptive_avg_pool,
    functional.adaptive_avg_pool2d: adaptive_avg_pool,
    functional.adaptive_avg_pool3d: adaptive_avg_pool,
}


class ReplacedFunctions(TorchFunctionMode):
    """Calls the function in REPLACEMENTS for what the exporter cannot translate. If that returns
    None, it does not support these arguments, and the original function is called."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        given: tuple[Any, ...] = (),
        options: Any = None,
    ) -> Any:
        replacement = REPLACEMENTS.get(function)
        result = replacement(*given, **(options or {})) if replacement else None
        return function(*given, **(options or {})) if result is None else result


def forward_model(user: UserModel, values: Mapping[str, Tensor], folder: Path) -> onnx.ModelProto:
    """Return the graph from ``batch.NAME`` to the mean loss and metrics, with parameters named as
    in the manifest.

    The older of PyTorch's two exporters makes it: ONNX Runtime's gradient builder understands its
    graphs. Raises ExportError.
    """
    names = [f"batch.{name}" for name in user.batch]
    file = folder / "forward.onnx"
    with silenced_python(), ReplacedFunctions():
        torch.onnx.export(
            LossModule(user),
            tuple(value.clone() for value in user.batch.values()),
            str(file),
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=OPSET,
            input_names=names,
            output_names=["loss", *(f"metric.{name}" for name in user.metrics)],
            dynamic_axes={name: {0: "n"} for name in names},
        )
    model = _expanded(onnx.load(file))
    renamed = {f"model.{name}": name for name in values}
    for tensor in model.graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    for node in _nodes(model.graph):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        for number in range(len(node.output), OPTIONAL.get(node.op_type, 0)):
            node.output.append(f"{node.output[0]}.{number}")
        if node.op_type == "AveragePool":
            raise ExportError("ONNX Runtime's gradient of AveragePool divides by 0")
    missing = values.keys() - {tensor.name for tensor in model.graph.initializer}
    if missing:
        raise ExportError(
            f"the exported loss does not have the parameters {', '.join(sorted(missing))}"
        )
    return model


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the operators of EXPANSIONS replaced."""
    head = f'<domain: "{EXPANDED}", opset_import: ["": {OPSET}]>\n'
    functions = {row.split(" ", 1)[0]: head + row for row in EXPANSIONS}
    used = {node.op_type for node in _nodes(model.graph)} & functions.keys()
    if not used:
        return model
    for node in _nodes(model.graph):
        if node.op_type in used:
            node.domain = EXPANDED
            stated = {attribute.name for attribute in node.attribute}
            schema = onnx.defs.get_schema(node.op_type, OPSET, "")
            # Inlining does not apply the schema's defaults.
            node.attribute.extend(
                attribute.default_value
                for name, attribute in schema.attributes.items()
                if attribute.default_value.name and name not in stated
            )
    model.functions.extend(onnx.parser.parse_function(functions[name]) for name in sorted(used))
    model.opset_import.add(domain=EXPANDED, version=1)
    return onnx.inliner.inline_local_functions(model)
