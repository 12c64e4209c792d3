"""Server optimizers: how the mean of a round's updates moves the model.

Each is a pair of functions over numpy vectors, ``init(params) -> state`` and
``apply(state, delta, params) -> (state, params)``, where delta is the weighted mean of (device's
model - round's model). It points downhill already: the model moves along it, not against it.

``sgd`` with lr 1 is Federated Averaging: McMahan et al., "Communication-Efficient Learning of Deep
Networks from Decentralized Data" (2016), arXiv 1602.05629, Algorithm 1.
``momentum`` is FedAvgM: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification" (2019), arXiv 1909.06335, section 4.2.
``adagrad``, ``adam`` and ``yogi`` are FedAdagrad, FedAdam and FedYogi: Reddi et al., "Adaptive
Federated Optimization" (2020), arXiv 2003.00295, Algorithm 2, in the version published at ICLR
2021: v follows the square of the round's mean Delta_t, and the model moves along the moving average
m_t. (The first version on arXiv called both Delta_t.) There is no bias correction; v starts at
tau^2 and m at 0. The mean is weighted by examples, as there.

``feddyn`` is FedDyn's server: Acar et al., "Federated Learning Based on Dynamic Regularization"
(2021), arXiv 2111.04263, Algorithm 1.

All of them move the trained parameters alone. Buffers (BatchNorm's running statistics) are measured
by the devices, not descended: ``commit.next_model`` gives them the mean of the devices' values.
Momentum would push a running variance below zero, and Adam would scale its change. Their elements
of the state keep their values.

State is float32, as the model is. Each block is worked in float64 with element-wise operations
alone (no BLAS), and rounded to float32 once: the same inputs give the same bits.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.manifest import Parameter
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.own_calls import call_own, real

State = dict[str, Vector]
"""Slot name -> float32, shape (P,)."""
Block = NDArray[np.float64]
Delta = NDArray[np.float64] | Vector

BLOCK = 32768
"""Elements at a time, so that the temporaries stay in the processor's cache."""


Step = Callable[[Block, dict[str, Block], float], Block]
"""delta, state of one block, share of the devices that took part -> the move. Replaces the state's
slots."""


class Optimizer(NamedTuple):
    """A server optimizer with its hyper-parameters filled in."""

    name: str
    initial: Mapping[str, float]
    """Slot of the state -> the value that its elements begin with."""
    step: Step
    """Its rule, for one block of trained parameters."""
    buffers: Sequence[slice] = ()
    """The elements that are no trained parameters: it leaves them as they are."""

    def init(self, params: Vector) -> State:
        """Return the state before the first round. ``params`` is float32, shape (P,)."""
        return {
            slot: np.full(params.shape, value, np.float32) for slot, value in self.initial.items()
        }

    def apply(
        self, state: State, delta: Delta, params: Vector, share: float = 1.0
    ) -> tuple[State, Vector]:
        """Return the next state and params, in new memory. ``delta`` is float64 or float32, shape
        (P,). ``share``: of all devices, those that took part; FedDyn needs it.

        Raises ValueError where shapes do not fit, FleetError (not-finite) where the model or the
        state would not stay finite in float32.
        """
        self._check_shapes(state, delta, params)
        after = {slot: np.empty_like(values) for slot, values in state.items()}
        moved = np.empty_like(params)
        # What overflows is found below, and said in words.
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, len(params), BLOCK):
                place = slice(start, start + BLOCK)
                block = {slot: values[place].astype(np.float64) for slot, values in state.items()}
                moved[place] = params[place] + self.step(
                    delta[place].astype(np.float64), block, share
                )
                for slot, values in block.items():
                    after[slot][place] = values
            for place in self.buffers:
                moved[place] = params[place]
                for slot, before in state.items():
                    after[slot][place] = before[place]
        for what, result in {
            "the model": moved,
            **{f"its state {slot}": after[slot] for slot in after},
        }.items():
            if not np.isfinite(result).all():
                place_of = int(np.flatnonzero(~np.isfinite(result))[0])
                raise FleetError(
                    Code.NOT_FINITE,
                    f"the server optimizer {self.name} would make element {place_of} of {what} "
                    f"{result[place_of]}. Training has diverged: lower the server's or the "
                    "devices' learning rate.",
                )
        return after, moved

    def _check_shapes(self, state: State, delta: Delta, params: Vector) -> None:
        shapes = {
            "delta": delta.shape,
            **{slot: state[slot].shape if slot in state else None for slot in self.initial},
        }
        if set(state) != set(self.initial) or set(shapes.values()) != {params.shape}:
            raise ValueError(
                f"{self.name} on a model of shape {params.shape} was given {shapes} and slots "
                f"{sorted(state)}"
            )


def sgd(lr: float = 1.0) -> Optimizer:
    """x += lr * delta. With lr 1 it is FedAvg."""
    _check("lr", lr, 0.0, 1e6)
    return Optimizer("sgd", {}, lambda delta, state, share: lr * delta)


def momentum(lr: float = 1.0, momentum: float = 0.9) -> Optimizer:
    """v = momentum * v + delta; x += lr * v. The steady step is lr / (1 - momentum) times delta."""
    _check("lr", lr, 0.0, 1e6)
    _check("momentum", momentum, 0.0, 1.0)

    def step(delta: Block, state: dict[str, Block], share: float) -> Block:
        state["v"] = momentum * state["v"] + delta
        return lr * state["v"]

    return Optimizer("momentum", {"v": 0.0}, step)


def feddyn() -> Optimizer:
    """FedDyn's server: h += share * delta; x += delta + h.

    In the paper's words h here is -h/alpha: with m devices, P of them in the round, its h moves by
    -alpha/m * sum(theta_k - theta), that is -alpha * |P|/m * delta, and the next model is
    mean(theta_k) - h/alpha."""

    def step(delta: Block, state: dict[str, Block], share: float) -> Block:
        state["h"] = state["h"] + share * delta
        return delta + state["h"]

    return Optimizer("feddyn", {"h": 0.0}, step)


def adagrad(lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3) -> Optimizer:
    """FedAdagrad. The paper's experiments have beta1 = 0."""

    def second_moment(v: Block, square: Block) -> Block:
        return v + square

    return _adaptive("adagrad", lr, beta1, tau, second_moment)


def adam(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Optimizer:
    """FedAdam."""
    _check("beta2", beta2, 0.0, 1.0)

    def second_moment(v: Block, square: Block) -> Block:
        return beta2 * v + (1 - beta2) * square

    return _adaptive("adam", lr, beta1, tau, second_moment)


def yogi(lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Optimizer:
    """FedYogi: as FedAdam, but v moves by the size of the square, not by its distance to it."""
    _check("beta2", beta2, 0.0, 1.0)

    def second_moment(v: Block, square: Block) -> Block:
        return v - (1 - beta2) * square * np.sign(v - square)

    return _adaptive("yogi", lr, beta1, tau, second_moment)


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adagrad": adagrad,
    "adam": adam,
    "yogi": yogi,
    "feddyn": feddyn,
}


def defaults(name: str) -> dict[str, float]:
    """The hyper-parameters that the optimizer takes, with their defaults. Raises ValueError on an
    unknown name."""
    if name not in OPTIMIZERS:
        raise ValueError(
            f"there is no server optimizer {name!r}; there are {', '.join(OPTIMIZERS)}"
        )
    return {
        key: parameter.default
        for key, parameter in inspect.signature(OPTIMIZERS[name]).parameters.items()
    }


def make(name: str, table: Iterable[Parameter] = (), **hyper: float) -> Optimizer:
    """Return the optimizer called ``name`` for a model with this parameter table, whose buffers it
    leaves alone.

    Without a table every element is a trained parameter. Raises ValueError on an unknown name, or a
    value that the optimizer does not take.
    """
    if surplus := sorted(set(hyper) - set(defaults(name))):
        raise ValueError(f"{name} takes {', '.join(defaults(name))}; not {', '.join(surplus)}")
    return OPTIMIZERS[name](**hyper)._replace(buffers=buffers_of(table))


def own_optimizer(name: str, made: Optimizer, table: Iterable[Parameter] = ()) -> Optimizer:
    """Return an optimizer of another package, for a model with this parameter table. ``name``: as
    the plan has it.

    Its step is asked as ours are: it must not change the delta, and must leave the state with the
    same slots. A step that fails raises FleetError."""

    def step(delta: Block, state: dict[str, Block], share: float) -> Block:
        delta.flags.writeable = False  # a copy of this step's: nobody else has it

        def checked_step() -> tuple[Block, dict[str, tuple[int, ...]]]:
            moved = real(made.step(delta, state, share))
            return moved, {slot: real(values).shape for slot, values in state.items()}

        moved, shapes = call_own("server.optimizer", checked_step)
        expected = dict.fromkeys(made.initial, delta.shape)
        if moved.shape != delta.shape or shapes != expected:
            raise FleetError(
                Code.BAD_MESSAGE,
                f"server.optimizer returned a move of shape {moved.shape} and a state of {shapes}; "
                f"expected {delta.shape} and {expected}",
            )
        return moved

    return made._replace(name=name, step=step, buffers=buffers_of(table))


def buffers_of(table: Iterable[Parameter]) -> list[slice]:
    """Return the places of a model's elements that are no trained parameters."""
    return [slice(row.offset, row.offset + prod(row.shape)) for row in table if row.buffer]


def change_norm(before: Vector, after: Vector) -> float:
    """The L2 norm of the model's change, in float64."""
    squares = []
    for start in range(0, len(before), BLOCK):
        change = np.subtract(
            after[start : start + BLOCK], before[start : start + BLOCK], dtype=np.float64
        )
        squares.append(float(np.add.reduce(change * change)))
    return math.sqrt(math.fsum(squares))


def _adaptive(
    name: str, lr: float, beta1: float, tau: float, second_moment: Callable[[Block, Block], Block]
) -> Optimizer:
    _check("lr", lr, 0.0, 1e6)
    _check("beta1", beta1, 0.0, 1.0)
    if not 1e-12 <= tau <= 1e6:
        raise ValueError(f"tau is {tau}; it takes 1e-12 to 1e6")

    def step(delta: Block, state: dict[str, Block], share: float) -> Block:
        # The last lines of Algorithm 2, in its order.
        state["m"] = beta1 * state["m"] + (1 - beta1) * delta
        state["v"] = second_moment(state["v"], delta * delta)
        return lr * state["m"] / (np.sqrt(state["v"]) + tau)

    return Optimizer(name, {"m": 0.0, "v": tau * tau}, step)


def _check(name: str, value: float, low: float, below: float) -> None:
    if not low <= value < below:
        raise ValueError(f"{name} is {value}; it takes {low:g} to below {below:g}")
