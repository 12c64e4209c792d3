"""A bundle whose step is written out in ONNX, with any of what a bundle may have; and the same step
in numpy.

The model is y = x @ w + h on three features; ``seen`` counts the examples and takes no gradient.
The loss is the mean of e^2 with e = x @ w + h - y, the metric the mean of \\|e\\|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx.parser
from fleetlearn_protocol import Bundle, open_bundle, write_bundle
from fleetlearn_protocol.manifest import (
    EVAL,
    FORMAT,
    FORMAT_VERSION,
    INFER,
    PARAMETERS,
    STATE,
    TRAIN,
    Hyper,
    Input,
    LocalStep,
    Manifest,
    Parameter,
    Reference,
    State,
)
from fleetlearn_protocol.vector import flatten
from numpy.typing import NDArray
from safetensors.numpy import save

Tensors = dict[str, NDArray[np.float32]]
INITIAL: Tensors = {
    "w": np.array([0.5, -0.25, 1.0], np.float32),
    "seen": np.array(7, np.float32),
    "h": np.array(0.125, np.float32),
}
INITIAL_STATE: Tensors = {
    "m.w": np.array([0.1, 0.2, 0.3], np.float32),
    "t": np.array(3, np.float32),
}


def write_line_bundle(
    folder: Path,
    *,
    personal: bool = False,
    state: bool = False,
    references: Sequence[Reference] = (),
    random: bool = False,
    needs: tuple[int, int] = (0, 0),
    optimizer: Literal["custom", "sgd"] = "custom",
    buffer: bool = True,
) -> Bundle:
    """``personal``: h stays on the device. ``buffer``: whether the model has ``seen``. ``state``:
    momentum of w, and a count of steps that outlives the task. ``needs``: float32 zeros that the
    step makes for each example, and zeros that are a constant of its graph. ``optimizer``: what the
    manifest says of the step; without state it is SGD's."""
    step = LocalStep(
        optimizer,
        proximal="anchor" in references,
        correction="correction" in references,
        contrastive={"anchor", "previous"} <= set(references),
    )
    parameters = (
        Parameter("w", (3,), 0, infer_offset=0),
        *((Parameter("seen", (), 3, buffer=True),) if buffer else ()),
        Parameter("h", (), 3 + buffer, personal=personal, infer_offset=0),
    )
    travelling = [row for row in parameters if not row.personal]
    states = (State("m.w", (3,), 0), State("t", (), 3, kept=True)) if state else ()
    rows = [*(f"param.{row.name}" for row in parameters), *(f"state.{row.name}" for row in states)]
    shapes = {f"param.{row.name}": row.shape for row in parameters} | {
        f"state.{row.name}": row.shape for row in states
    }
    read = {f"{reference}.{row.name}": row.shape for reference in references for row in travelling}
    terms = [
        ("anchor", "d = Sub(param.w, anchor.w) pull = Mul(hyper.mu, d)", "pull"),
        ("correction", "", "correction.w"),
        (
            "previous",
            (
                "p = Sub(param.w, previous.w) half = Constant<value = float {0.5}>() push = "
                "Mul(half, p)"
            ),
            "push",
        ),
    ]
    lines, gradient = [], "g"
    for reference, made, name in terms:
        if reference in references:
            lines += [made, f"with.{name} = Add({gradient}, {name})"]
            gradient = f"with.{name}"
    if random:
        lines += [
            (
                "draw = Cast<to = 1>(seed) milli = Constant<value = float {0.001}>() noise = "
                "Mul(draw, milli)"
            ),
            f"noisy = Add({gradient}, noise)",
        ]
        gradient = "noisy"
    if state:
        lines += [
            "beta = Constant<value = float {0.9}>() kept = Mul(beta, state.m.w)",
            f"next.state.m.w = Add(kept, {gradient})",
            "next.state.t = Add(state.t, one)",
        ]
        gradient = "next.state.m.w"
    each, fixed = needs
    if each:
        lines += [
            f"zeros.each = Constant<value_ints = [{each}]>() zeros.n = Shape(e)",
            (
                "zeros.shape = Concat<axis = 0>(zeros.n, zeros.each) zeros = "
                "ConstantOfShape(zeros.shape)"
            ),
            f"zeros.sum = ReduceSum<keepdims = 0>(zeros) with.zeros = Add({gradient}, zeros.sum)",
        ]
        gradient = "with.zeros"
    if fixed:
        lines += [
            f"zeros.sum = ReduceSum<keepdims = 0>(zeros) with.zeros = Add({gradient}, zeros.sum)"
        ]
        gradient = "with.zeros"
    train = _graph(
        {**shapes, **read, "hyper.lr": (), "hyper.mu": ()},
        {**{f"next.{name}": shapes[name] for name in rows}, "loss": (), "metric.error": ()},
        f"""
        one = Constant<value = float {{1.0}}>()
        two = Constant<value = float {{2.0}}>()
        {_ERROR}
        loss = ReduceMean<keepdims = 0>(square)
        metric.error = ReduceMean<keepdims = 0>(size)
        column = Unsqueeze(e, last)
        each = Mul(column, batch.x)
        mean = ReduceMean<keepdims = 0>(each, first)
        g = Mul(two, mean)
        e.mean = ReduceMean<keepdims = 0>(e)
        g.h = Mul(two, e.mean)
        {" ".join(lines)}
        move = Mul(hyper.lr, {gradient})
        next.param.w = Sub(param.w, move)
        move.h = Mul(hyper.lr, g.h)
        next.param.h = Sub(param.h, move.h)
        {_COUNT if buffer else ""}
        """,
        random,
        zeros=fixed,
    )
    evaluation = _graph(
        {f"param.{row.name}": row.shape for row in parameters},
        {"loss_sum": (), "metric_sum.error": ()},
        f"""
        {_ERROR}
        loss_sum = ReduceSum<keepdims = 0>(square)
        metric_sum.error = ReduceSum<keepdims = 0>(size)
        examples = Size(e)
        """,
        examples=True,
    )
    infer = b"".join((b"head", INITIAL["w"].tobytes(), INITIAL["h"].tobytes()))
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name="line",
        parameters=tuple(
            Parameter(
                row.name,
                row.shape,
                row.offset,
                row.buffer,
                row.personal,
                {"w": 4, "h": 16}.get(row.name),
            )
            for row in parameters
        ),
        batch=(Input("x", "float32", (3,)), Input("y", "float32", ())),
        outputs=(Input("output", "float32", ()),),
        hyper=(Hyper("lr"), Hyper("mu", 0.0)),
        step=step,
        metrics=("error",),
        files={},
        state=states,
        references=tuple(references),
        random=random,
    )
    initial = {row.name: INITIAL[row.name] for row in parameters}
    contents = {TRAIN: train, EVAL: evaluation, INFER: infer, PARAMETERS: save(initial)}
    if state:
        contents[STATE] = save(INITIAL_STATE)
    return open_bundle(write_bundle(folder, manifest, contents))


_COUNT = """
        n = Size(e)
        count = Cast<to = 1>(n)
        next.param.seen = Add(param.seen, count)
"""
_ERROR = """
        first = Constant<value_ints = [0]>()
        last = Constant<value_ints = [1]>()
        product = MatMul(batch.x, param.w)
        line = Add(product, param.h)
        e = Sub(line, batch.y)
        square = Mul(e, e)
        size = Abs(e)
"""


def _graph(
    inputs: Mapping[str, tuple[int, ...]],
    outputs: Mapping[str, tuple[int, ...]],
    body: str,
    random: bool = False,
    examples: bool = False,
    zeros: int = 0,
) -> bytes:
    """The parser's names have no dots, so that they stand as ``DOT`` while it reads."""

    def declared(rows: Mapping[str, tuple[int, ...]]) -> list[str]:
        return [
            f"float[{','.join(map(str, shape))}] {name}" if shape else f"float {name}"
            for name, shape in rows.items()
        ]

    given = [
        *declared(inputs),
        "float[N,3] batch.x",
        "float[N] batch.y",
        *(["int64 seed"] if random else []),
    ]
    given += [f"float[{zeros}] zeros"] if zeros else []
    made = [*declared(outputs), *(["int64 examples"] if examples else [])]
    text = f"line ({', '.join(given)}) => ({', '.join(made)}) {{ {body} }}"
    text = "".join(
        "DOT" if here == "." and not text[place + 1].isdigit() else here
        for place, here in enumerate(text)
    )
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}')
    for row in (*model.graph.input, *model.graph.output):
        row.name = row.name.replace("DOT", ".")
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("DOT", ".") for name in names]
    if zeros:
        model.graph.input.pop()
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(np.zeros(zeros, np.float32), "zeros")
        )
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def line_step(
    now: Mapping[str, Any],
    state: Mapping[str, Any],
    batch: tuple[Any, Any],
    lr: float,
    mu: float = 0.0,
    seed: int | None = None,
    **references: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The step in float64: the parameters and the state after it, and the loss. No ``seed``: not a
    random bundle."""
    x, y = (np.asarray(array, np.float64) for array in batch)
    e = x @ now["w"] + now["h"] - y
    gradient = 2 * (e[:, None] * x).mean(0)
    if "anchor" in references:
        gradient = gradient + mu * (now["w"] - references["anchor"]["w"])
    if "correction" in references:
        gradient = gradient + references["correction"]["w"]
    if "previous" in references:
        gradient = gradient + 0.5 * (now["w"] - references["previous"]["w"])
    if seed is not None:
        gradient = gradient + seed / 1000
    after = dict(state)
    if state:
        gradient = after["m.w"] = 0.9 * state["m.w"] + gradient
        after["t"] = state["t"] + 1
    moved = {
        "w": now["w"] - lr * gradient,
        "seen": now["seen"] + len(y),
        "h": now["h"] - lr * 2 * e.mean(),
    }
    return moved, after, float((e**2).mean())


def line_data(examples: int, seed: int = 5) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((examples, 3)).astype(np.float32)
    return x, (
        x @ np.array([1.0, 2.0, -1.0]) + 0.5 + 0.1 * random.standard_normal(examples)
    ).astype(np.float32)


def flat(tensors: Mapping[str, Any], table: Sequence[Parameter | State]) -> NDArray[np.float32]:
    """The tensors of the table's rows as one float32 vector from the first row on."""
    size = sum(prod(row.shape) for row in table)
    if not size:
        return np.zeros(0, np.float32)
    moved = [row.__class__(row.name, row.shape, row.offset - table[0].offset) for row in table]
    return flatten({row.name: np.asarray(tensors[row.name]) for row in table}, moved)
