"""The gradient of a convolution's weight."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from fleetlearn_export.emission.emitter import Array, Emitter, Source, Value, fixed_sizes
from fleetlearn_export.emission.operators.layout import sliced, total
from fleetlearn_export.tracing.windows import FEW_CHANNELS, LONG_ROW, MANY_TAPS, Windows


def padded(graph: Emitter, x: Source, windows: Windows, first: int, rank: int) -> str:
    """Return ``x`` with zeros around the image, whose first axis is ``first``."""
    return graph.padded(
        x, rank, {axis: (pad, pad) for axis, pad in enumerate(windows.padding, first)}
    )


def shifted(graph: Emitter, x: Source, windows: Windows, first: int, tap: Sequence[int]) -> str:
    """Return the elements of the padded ``x`` that the tap multiplies, in the output's shape."""
    begins = windows.begins(tap)
    ends = [
        begin + (places - 1) * step + 1
        for begin, places, step in zip(begins, windows.places, windows.stride, strict=True)
    ]
    return sliced(graph, x, range(first, first + len(begins)), begins, ends, windows.stride)


def weight_gradient(
    graph: Emitter, grad: Value, x: Value, weight: Value, windows: Windows, groups: int
) -> str:
    """Return the gradient of the weight from ``grad``, the gradient of the output, and ``x``, the
    input.

    For each element of the output an element of the kernel (a tap) multiplies one element of the
    input. The tap's gradient is the sum of the products of these two over all elements and
    examples: a matrix product. Which arrangement of these products costs least depends on the sizes
    alone (docs/internals/performance.md).
    """
    sizes = fixed_sizes(weight)
    taps, channels = prod(windows.kernel), sizes[1]
    if groups == 1 and taps == 1 and not any(windows.padding):
        gradient = _products(graph, grad, sizes[0], _picked(graph, x, windows), channels, windows)
    elif windows.side_by_side and groups == 1:
        gradient = _products(
            graph,
            grad,
            sizes[0],
            _columns_side_by_side(graph, x, windows),
            channels * taps,
            windows,
        )
    elif taps > MANY_TAPS:
        return _by_convolution(graph, grad, x, windows, groups)
    elif channels == 1 and groups == sizes[0]:
        long = fixed_sizes(x, slice(2, None))[-1] > LONG_ROW * windows.kernel[-1]
        gradient = (_by_sums if long else _by_rows)(graph, grad, x, windows)
    elif channels < FEW_CHANNELS and groups == 1:
        # This way round, since a width that is a multiple of 16, as the number of outputs mostly
        # is, is quicker.
        gradient = _products(
            graph, _columns(graph, x, windows), channels * taps, grad, sizes[0], windows
        )
        gradient = graph.transposed(gradient, [1, 0])
    else:
        gradient = _tap_by_tap(graph, grad, x, windows, groups)
    return graph.reshaped(gradient, sizes)


def _products(
    graph: Emitter, a: Source, rows: int, b: Source, columns: int, windows: Windows
) -> str:
    """Multiply (n, rows, *places) and (n, columns, *places), summed over examples and places ->
    (rows, columns)."""
    places = prod(windows.places)
    if places == 1:
        flat = [
            graph.node("Reshape", x, graph.integers([-1, size]))
            for x, size in ((a, rows), (b, columns))
        ]
        return graph.node("Gemm", *flat, transA=1)
    a = graph.node("Reshape", a, graph.integers([-1, rows, places]))
    b = graph.node("Reshape", b, graph.integers([-1, columns, places]))
    b = graph.transposed(b, [0, 2, 1])
    if rows * columns < (rows + columns) * places:
        return total(graph, graph.node("MatMul", a, b), [0])
    # A product for each example would be larger than its factors.
    a = graph.node("Reshape", graph.transposed(a, [1, 0, 2]), graph.integers([rows, -1]))
    return graph.node("MatMul", a, graph.node("Reshape", b, graph.integers([-1, columns])))


def _picked(graph: Emitter, x: Value, windows: Windows) -> Source:
    """Return the elements that a kernel of one element multiplies."""
    if all(step == 1 for step in windows.stride):
        return x
    return shifted(graph, x, windows, 2, [0] * len(windows.kernel))


def _columns(graph: Emitter, x: Value, windows: Windows) -> str:
    """Return the elements that each tap multiplies -> (n, channels, *kernel, *places).

    One axis after the other: elements that do not lie side by side are copied for few taps. With 7
    x 7 taps two apart on 20 x 3 x 64 x 64 the whole gradient takes 4.2 CPU-ms; tap by tap it took
    6.5.
    """
    columns = padded(graph, x, windows, 2, x.rank)
    for done, axis in enumerate(reversed(range(x.rank - 2))):
        along = Windows(*([values[axis]] for values in windows))
        seen = [shifted(graph, columns, along, 2 + done + axis, tap) for tap in along.taps]
        rows = [graph.node("Unsqueeze", piece, graph.integers([2])) for piece in seen]
        columns = rows[0] if len(rows) == 1 else graph.node("Concat", *rows, axis=2)
    return columns


def _columns_side_by_side(graph: Emitter, x: Value, windows: Windows) -> str:
    """Return the same for windows side by side, where no element is in two windows."""
    image: Source = x
    covered = [size * count for size, count in zip(windows.kernel, windows.places, strict=True)]
    if covered != fixed_sizes(x, slice(2, None)):
        axes = range(2, x.rank)
        image = sliced(graph, x, axes, [0] * len(covered), covered, [1] * len(covered))
    pairs = [size for pair in zip(windows.places, windows.kernel, strict=True) for size in pair]
    split = graph.node("Reshape", image, graph.integers([-1, fixed_sizes(x, [1])[0], *pairs]))
    kernel_axes = list(range(3, 2 + len(pairs), 2))
    return graph.transposed(split, [0, 1, *kernel_axes, *(axis - 1 for axis in kernel_axes)])


def _tap_by_tap(graph: Emitter, grad: Value, x: Value, windows: Windows, groups: int) -> str:
    """Multiply matrices for each tap, with the channels last: a tap then reads whole rows, which
    are cheap to copy.

    -> (outputs, inputs of a group, taps).
    """
    count = len(windows.kernel)
    inputs, outputs = (fixed_sizes(value, [1])[0] // groups for value in (x, grad))
    sizes, places = fixed_sizes(x, slice(2, None)), prod(windows.places)
    if groups == 1:
        first = 1
        image: Source = graph.transposed(x, [0, *range(2, x.rank), 1])
        image = padded(graph, image, windows, first, x.rank)
        rows = graph.transposed(graph.reshaped(grad, [grad.shape[0], outputs, places]), [1, 0, 2])
        rows = graph.node("Reshape", rows, graph.integers([outputs, -1]))
        flat = [-1, inputs]
    else:
        first = 2
        image = graph.node("Reshape", x, graph.integers([-1, groups, inputs, *sizes]))
        image = graph.transposed(image, [1, 0, *range(3, 3 + count), 2])
        image = padded(graph, image, windows, first, x.rank + 1)
        rows = graph.node("Reshape", grad, graph.integers([-1, groups, outputs, places]))
        rows = graph.node(
            "Reshape", graph.transposed(rows, [1, 2, 0, 3]), graph.integers([groups, outputs, -1])
        )
        flat = [groups, -1, inputs]
    products = []
    for tap in windows.taps:
        seen = graph.node(
            "Reshape", shifted(graph, image, windows, first, tap), graph.integers(flat)
        )
        products.append(graph.node("MatMul", rows, seen))
    whole = products[0] if len(products) == 1 else graph.node("Concat", *products, axis=0)
    whole = graph.node("Reshape", whole, graph.integers([len(products), groups, outputs, inputs]))
    return graph.transposed(whole, [1, 2, 3, 0])


def _by_rows(graph: Emitter, grad: Value, x: Value, windows: Windows) -> str:
    """Depthwise: multiply all pairs of elements of an output row and the matching input row, then
    add up each tap's.

    -> (channels, taps).
    """
    channels, *sizes = fixed_sizes(x, slice(1, None))
    rows = Windows(*(values[:-1] for values in windows))
    image = graph.transposed(x, [1, 0, *range(2, x.rank)])
    out = graph.transposed(grad, [1, *range(1), *range(2, x.rank)])
    out = graph.node("Reshape", out, graph.integers([channels, -1, windows.places[-1]]))
    out = graph.transposed(out, [0, 2, 1])
    padded_image = padded(graph, image, rows, 2, x.rank)
    pairs = []
    for tap in rows.taps:
        seen = shifted(graph, padded_image, rows, 2, tap) if tap else image
        seen = graph.node("Reshape", seen, graph.integers([channels, -1, sizes[-1]]))
        pairs.append(graph.node("Unsqueeze", graph.node("MatMul", out, seen), graph.integers([1])))
    together = pairs[0] if len(pairs) == 1 else graph.node("Concat", *pairs, axis=1)
    flat = graph.reshaped(together, [channels, len(pairs), windows.places[-1] * sizes[-1]])
    return graph.node("MatMul", flat, graph.array(_of_taps(windows, sizes[-1])))


def _of_taps(windows: Windows, size: int) -> Array:
    """Return 1 where a pair of indices in the last axes of output and input is a tap's -> (places *
    size, taps)."""
    a = np.arange(windows.places[-1]).reshape(-1, 1, 1)
    b = np.arange(size).reshape(1, -1, 1)
    tap = np.arange(windows.kernel[-1])
    meets = b == a * windows.stride[-1] - windows.padding[-1] + tap * windows.dilation[-1]
    matrix: Array = meets.reshape(-1, len(tap)).astype(np.float32)
    return matrix


def _by_sums(graph: Emitter, grad: Value, x: Value, windows: Windows) -> str:
    """Depthwise: compute a sum for each tap, with the channels last. -> (channels, taps)."""
    order = [0, *range(2, x.rank), 1]
    image = padded(graph, graph.transposed(x, order), windows, 1, x.rank)
    out = graph.transposed(grad, order)
    sums = []
    for tap in windows.taps:
        product = graph.node("Mul", shifted(graph, image, windows, 1, tap), out)
        sums.append(
            graph.node("Unsqueeze", total(graph, product, range(x.rank - 1)), graph.integers([1])),
        )
    return sums[0] if len(sums) == 1 else graph.node("Concat", *sums, axis=1)


def _by_convolution(graph: Emitter, grad: Value, x: Value, windows: Windows, groups: int) -> str:
    """Convolve the input with the output's gradient as the kernel -> (outputs, inputs of a group,
    ...).

    Examples and channels are exchanged, and so are stride and dilation. The result is cropped to
    the kernel's size.
    """
    channels, *sizes = fixed_sizes(x, slice(1, None))
    inputs = channels // groups
    # (n, groups * inputs, ...) -> (inputs, groups * n, ...): the convolution's groups are then the
    # channels' blocks.
    swapped = [1, 0, *range(2, x.rank)]
    if groups == 1:
        signal = graph.transposed(x, swapped)
    else:
        signal = graph.node("Reshape", x, graph.integers([-1, groups, inputs, *sizes]))
        signal = graph.transposed(signal, [2, 1, 0, *range(3, x.rank + 1)])
        signal = graph.node("Reshape", signal, graph.integers([inputs, -1, *sizes]))
    gradient = graph.node(
        "Conv",
        signal,
        graph.transposed(grad, swapped),
        kernel_shape=windows.places,
        strides=windows.dilation,
        dilations=windows.stride,
        pads=windows.padding * 2,
        group=groups,
    )
    axes = range(2, x.rank)
    cropped = sliced(graph, gradient, axes, [0] * len(sizes), windows.kernel, [1] * len(sizes))
    return graph.transposed(cropped, swapped)
