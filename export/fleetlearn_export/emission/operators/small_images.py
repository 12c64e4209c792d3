"""Convolutions of small images as matrix products over all examples at once, for graphs with a
backward pass.

ONNX Runtime multiplies example by example, so a product has as few columns as an image has places.
The figures are CPU-ms on one thread of ONNX Runtime 1.31. Dense, 512 to 512 channels, 3 x 3 on 2 x
2, 4 and 16 examples: forward 2.0 to 0.85 and 8.0 to 2.4, the input's gradient 3.8 to 1.0 and 15.5
to 2.8, the weight's 2.8 to 0.65 and 4.1 to 1.9. On 8 x 8 both ways cost the same. Depthwise, 576
channels, 3 x 3 on 4 x 4, 16 examples: forward and input's gradient 3.0 to 0.50, the weight's 0.81
to 0.22; 192 channels on 8 x 8: 1.64 to 0.69, and 0.63 to 0.45.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from fleetlearn_export.emission.emitter import Array, Emitter, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import column
from fleetlearn_export.tracing.windows import Windows

SMALL_RESULT = 16
"""Dense convolutions whose result has at most this many places are computed here."""
FEW_PAIRS = 2**12
"""Depthwise convolutions are if image and result have at most this many pairs of places."""


def dense_fits(windows: Windows, groups: int) -> bool:
    # Col2Im of ONNX Runtime 1.31 is wrong for three axes, and for one axis with a dilation.
    return groups == 1 and len(windows.kernel) <= 2 and prod(windows.places) <= SMALL_RESULT


def depthwise_fits(windows: Windows, sizes: Sequence[int], weight: Value, groups: int) -> bool:
    outputs, inputs = fixed_sizes(weight, [0, 1])
    return inputs == 1 and outputs == groups and prod(sizes) * prod(windows.places) <= FEW_PAIRS


def _indices(windows: Windows, sizes: Sequence[int]) -> Array:
    """Return which element of the flat image each tap multiplies -> (places, taps); past the last:
    the padding."""
    indices, outside = np.zeros([1, 1], np.int64), np.zeros([1, 1], bool)
    for size, (taps, places, step, pad, gap) in zip(sizes, zip(*windows, strict=True), strict=True):
        along = np.arange(places)[:, None] * step - pad + np.arange(taps) * gap
        indices = indices[:, None, :, None] * size + along[None, :, None, :]
        outside = outside[:, None, :, None] | ((along < 0) | (along >= size))[None, :, None, :]
        rows = indices.shape[0] * indices.shape[1]
        indices, outside = indices.reshape(rows, -1), outside.reshape(rows, -1)
    return np.where(outside, prod(sizes), indices)


def _rows(graph: Emitter, x: Value) -> str:
    """Return (n, channels, ...) as (n, places, channels)."""
    channels, *sizes = fixed_sizes(x, slice(1, None))
    return graph.transposed(graph.reshaped(x, [x.shape[0], channels, prod(sizes)]), [0, 2, 1])


def _columns(graph: Emitter, x: Value, windows: Windows) -> str:
    """Return the elements that each tap multiplies -> (n * places, channels * taps)."""
    channels, *sizes = fixed_sizes(x, slice(1, None))
    taps, places, count = prod(windows.kernel), prod(windows.places), prod(sizes)
    flat = graph.integers([-1, channels * taps])
    indices = _indices(windows, sizes)
    if places == 1 and np.array_equal(indices[0], np.arange(count)):
        return graph.node("Reshape", x, flat)
    columns = _rows(graph, x)
    if indices.shape != (count, 1) or (indices[:, 0] != np.arange(count)).any():
        if (indices == count).any():
            columns = graph.node("Pad", columns, graph.integers([0, 0, 0, 0, 1, 0]))
        # (n, places, taps, channels)
        columns = graph.node("Gather", columns, graph.array(indices), axis=1)
        columns = graph.transposed(columns, [0, 1, 3, 2])
    return graph.node("Reshape", columns, flat)


def dense(graph: Emitter, x: Value, weight: Value, bias: Value | None, windows: Windows) -> str:
    """Multiply the weight with the columns: the other way round, ONNX Runtime would rearrange the
    weight, which is larger (512 to 512 channels on 2 x 2, 20 examples: 1.66 CPU-ms, not 1.95)."""
    outputs, inputs, *_ = fixed_sizes(weight)
    flat = graph.reshaped(weight, [outputs, inputs * prod(windows.kernel)])
    column_of_bias = None if bias is None else graph.reshaped(bias, [outputs, 1])
    product = graph.node("Gemm", flat, _columns(graph, x, windows), column_of_bias, transB=1)
    product = graph.node("Reshape", product, graph.integers([outputs, -1, prod(windows.places)]))
    return graph.node(
        "Reshape",
        graph.transposed(product, [1, 0, 2]),
        graph.integers([-1, outputs, *windows.places]),
    )


def dense_input_gradient(
    graph: Emitter, grad: Value, x: Value, weight: Value, windows: Windows
) -> str:
    outputs, inputs, *_ = fixed_sizes(weight)
    sizes = fixed_sizes(x, slice(2, None))
    taps, places = prod(windows.kernel), prod(windows.places)
    rows = graph.node("Reshape", _rows(graph, grad), graph.integers([-1, outputs]))
    shares = graph.node("MatMul", rows, graph.reshaped(weight, [outputs, inputs * taps]))
    shares = graph.node("Reshape", shares, graph.integers([-1, places, inputs * taps]))
    shares = graph.transposed(shares, [0, 2, 1])
    if np.array_equal(_indices(windows, sizes), np.arange(prod(sizes))[:, None]):
        return graph.node("Reshape", shares, graph.integers([-1, inputs, *sizes]))
    alone = len(sizes) == 1  # one axis becomes the second of two
    pads = [0] * alone + windows.padding
    image = graph.node(
        "Col2Im",
        shares,
        graph.integers([1] * alone + sizes),
        graph.integers([1] * alone + windows.kernel),
        strides=[1] * alone + windows.stride,
        pads=pads * 2,
        dilations=[1] * alone + windows.dilation,
    )
    return graph.node("Reshape", image, graph.integers([-1, inputs, *sizes])) if alone else image


def dense_weight_gradient(
    graph: Emitter, grad: Value, x: Value, weight: Value, windows: Windows
) -> str:
    """Multiply with the output's gradient transposed before: ONNX Runtime would do it again for
    each block of columns (512 to 512 channels on 2 x 2, 20 examples: 1.6 CPU-ms, not 1.95)."""
    sizes = fixed_sizes(weight)
    rows = graph.transposed(
        graph.reshaped(grad, [grad.shape[0], sizes[0], prod(windows.places)]), [1, 0, 2]
    )
    rows = graph.node("Reshape", rows, graph.integers([sizes[0], -1]))
    return graph.reshaped(graph.node("MatMul", rows, _columns(graph, x, windows)), sizes)


def _taps_of_pairs(graph: Emitter, windows: Windows, sizes: Sequence[int]) -> str:
    """Return 1 where a place in the image and one in the result are a tap's pair -> (image *
    result, taps).

    ONNX Runtime computes it once, from numbers that take a byte for each pair.
    """
    count, taps = prod(sizes), prod(windows.kernel)
    table = np.full([count + 1, prod(windows.places)], taps)
    indices = _indices(windows, sizes)
    for tap in range(taps):
        table[indices[:, tap], np.arange(len(indices))] = tap
    pairs = graph.cast_node(graph.array(table[:-1].reshape(-1).astype(np.uint8)), torch.int64)
    return graph.node("OneHot", pairs, graph.integers([taps]), graph.constant([0, 1]), axis=-1)


def _matrices(graph: Emitter, weight: Value, windows: Windows, sizes: Sequence[int]) -> str:
    """Return the matrix that each channel's image is multiplied with -> (channels, image,
    result)."""
    channels, taps = fixed_sizes(weight)[0], prod(windows.kernel)
    pairs = graph.transposed(_taps_of_pairs(graph, windows, sizes), [1, 0])
    spread = graph.node("MatMul", graph.reshaped(weight, [channels, taps]), pairs)
    return graph.node(
        "Reshape", spread, graph.integers([channels, prod(sizes), prod(windows.places)])
    )


def _by_channels(graph: Emitter, x: Value) -> str:
    """Return (n, channels, ...) as (channels, n, places)."""
    channels, *sizes = fixed_sizes(x, slice(1, None))
    return graph.transposed(graph.reshaped(x, [x.shape[0], channels, prod(sizes)]), [1, 0, 2])


def _by_examples(graph: Emitter, x: str, channels: int, sizes: Sequence[int]) -> str:
    """Return (channels, n, places) as (n, channels, ...)."""
    return graph.node(
        "Reshape", graph.transposed(x, [1, 0, 2]), graph.integers([-1, channels, *sizes])
    )


def depthwise(graph: Emitter, x: Value, weight: Value, bias: Value | None, windows: Windows) -> str:
    channels, *sizes = fixed_sizes(x, slice(1, None))
    found = graph.node("MatMul", _by_channels(graph, x), _matrices(graph, weight, windows, sizes))
    result = _by_examples(graph, found, channels, windows.places)
    return (
        result if bias is None else graph.node("Add", result, column(graph, bias, channels, x.rank))
    )


def depthwise_input_gradient(
    graph: Emitter, grad: Value, x: Value, weight: Value, windows: Windows
) -> str:
    channels, *sizes = fixed_sizes(x, slice(1, None))
    matrices = graph.transposed(_matrices(graph, weight, windows, sizes), [0, 2, 1])
    return _by_examples(
        graph, graph.node("MatMul", _by_channels(graph, grad), matrices), channels, sizes
    )


def depthwise_weight_gradient(
    graph: Emitter, grad: Value, x: Value, weight: Value, windows: Windows
) -> str:
    channels, *sizes = fixed_sizes(x, slice(1, None))
    image = graph.transposed(_by_channels(graph, x), [0, 2, 1])
    pairs = graph.node("MatMul", image, _by_channels(graph, grad))
    pairs = graph.node(
        "Reshape", pairs, graph.integers([channels, prod(sizes) * prod(windows.places)])
    )
    return graph.reshaped(
        graph.node("MatMul", pairs, _taps_of_pairs(graph, windows, sizes)), fixed_sizes(weight)
    )
