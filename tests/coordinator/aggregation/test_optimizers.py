"""Server optimizers against their papers' lines, worked by hand."""

import math
from math import sqrt
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation import optimizers
from fleetlearn_coordinator.aggregation.optimizers import (
    BLOCK,
    OPTIMIZERS,
    Optimizer,
    State,
    defaults,
    make,
    own_optimizer,
)
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.manifest import Parameter
from fleetlearn_protocol.vector import Vector
from safetensors.numpy import load, save

ROUNDS = [[1.0, 0.5], [-0.5, 0.5], [2.0, -1.0]]
"""The mean updates of three rounds, for a model of two elements."""


def run(
    optimizer: Optimizer, start: list[float], rounds: list[list[float]]
) -> tuple[list[list[float]], State]:
    params = np.array(start, np.float32)
    state = optimizer.init(params)
    models = []
    for delta in rounds:
        state, params = optimizer.apply(state, np.array(delta), params)
        models.append(params.tolist())
    return models, state


def approximately(values: list[float]) -> object:
    # the model is rounded to float32 after each round
    return pytest.approx(values, rel=2e-7, abs=1e-9)


def test_sgd_by_hand() -> None:
    models, state = run(make("sgd", lr=0.5), [1.0, 2.0], ROUNDS)
    assert models == [[1.5, 2.25], [1.25, 2.5], [2.25, 2.0]]
    assert state == {}


def test_momentum_by_hand() -> None:
    """Hsu, Qi and Brown, section 4.2, with beta = 0.75 and eta = 0.5."""
    models, state = run(make("momentum", lr=0.5, momentum=0.75), [1.0, 2.0], ROUNDS)
    # round 1: v = 0.75 * 0 + 1 = 1                    x = 1 + 0.5 * 1 = 1.5
    #          v = 0.75 * 0 + 0.5 = 0.5                x = 2 + 0.5 * 0.5 = 2.25
    # round 2: v = 0.75 * 1 - 0.5 = 0.25               x = 1.5 + 0.5 * 0.25 = 1.625
    #          v = 0.75 * 0.5 + 0.5 = 0.875            x = 2.25 + 0.5 * 0.875 = 2.6875
    # round 3: v = 0.75 * 0.25 + 2 = 2.1875            x = 1.625 + 0.5 * 2.1875 = 2.71875
    #          v = 0.75 * 0.875 - 1 = -0.34375         x = 2.6875 - 0.5 * 0.34375 = 2.515625
    assert models == [[1.5, 2.25], [1.625, 2.6875], [2.71875, 2.515625]]
    assert state["v"].tolist() == [2.1875, -0.34375]


def test_fedadagrad_by_hand() -> None:
    """Reddi et al., Algorithm 2, with beta1 = 0, tau = 0.6 (v starts at 0.36) and eta = 0.1."""
    models, state = run(make("adagrad", lr=0.1, beta1=0.0, tau=0.6), [1.0], [[0.8], [0.75], [-3.0]])
    # round 1: v = 0.36 + 0.64 = 1.0          sqrt 1.0     x = 1 + 0.1 * 0.8 / 1.6
    # round 2: v = 1.0 + 0.5625 = 1.5625      sqrt 1.25    x = x + 0.1 * 0.75 / 1.85
    # round 3: v = 1.5625 + 9 = 10.5625       sqrt 3.25    x = x - 0.1 * 3 / 3.85
    x1 = 1.0 + 0.05
    x2 = x1 + 0.04054054054054054
    x3 = x2 - 0.07792207792207792
    assert [model[0] for model in models] == approximately([x1, x2, x3])
    assert state["v"].tolist() == approximately([10.5625])
    assert state["m"].tolist() == [-3.0]


def test_fedadagrad_with_a_moving_average_by_hand() -> None:
    """beta1 = 0.5: the model follows m, while v takes the square of the round's mean, not of m."""
    models, state = run(make("adagrad", lr=0.1, beta1=0.5, tau=0.6), [1.0], [[0.8], [0.75], [-3.0]])
    # m: 0.5 * 0 + 0.5 * 0.8 = 0.4, 0.5 * 0.4 + 0.5 * 0.75 = 0.575, 0.5 * 0.575 - 0.5 * 3 = -1.2125;
    # v as above
    x1 = 1.0 + 0.1 * 0.4 / (1.0 + 0.6)
    x2 = x1 + 0.1 * 0.575 / (1.25 + 0.6)
    x3 = x2 - 0.1 * 1.2125 / (3.25 + 0.6)
    assert [model[0] for model in models] == approximately([x1, x2, x3])
    assert state["v"].tolist() == approximately([10.5625])
    assert state["m"].tolist() == approximately([-1.2125])


def test_fedadam_by_hand() -> None:
    """Reddi et al., Algorithm 2, with beta1 = 0.5, beta2 = 0.75, tau = 0.5 (v starts at 0.25) and
    eta = 0.1."""
    models, state = run(make("adam", lr=0.1, beta1=0.5, beta2=0.75, tau=0.5), [1.0, 2.0], ROUNDS)
    # first element
    # round 1, 1.0:  m = 0.5 * 0 + 0.5 * 1 = 0.5    v = 0.75 * 0.25 + 0.25 * 1 = 0.4375
    # round 2, -0.5: m = 0.5 * 0.5 - 0.5 * 0.5 = 0  v = 0.75 * 0.4375 + 0.25 * 0.25 = 0.390625
    # round 3, 2.0:  m = 0.5 * 0 + 0.5 * 2 = 1      v = 0.75 * 0.390625 + 0.25 * 4 = 1.29296875
    a1 = 1.0 + 0.1 * 0.5 / (sqrt(0.4375) + 0.5)
    a2 = a1
    a3 = a2 + 0.1 * 1.0 / (sqrt(1.29296875) + 0.5)
    # second element
    # round 1, 0.5:  m = 0.25                             v = 0.75 * 0.25 + 0.25 * 0.25 = 0.25
    # round 2, 0.5:  m = 0.5 * 0.25 + 0.5 * 0.5 = 0.375   v = 0.25
    # round 3, -1.0: m = 0.5 * 0.375 - 0.5 * 1 = -0.3125  v = 0.75 * 0.25 + 0.25 * 1 = 0.4375
    b1 = 2.0 + 0.025
    b2 = b1 + 0.0375
    b3 = b2 - 0.1 * 0.3125 / (sqrt(0.4375) + 0.5)
    assert models == [approximately([a1, b1]), approximately([a2, b2]), approximately([a3, b3])]
    assert state["m"].tolist() == [1.0, -0.3125]
    assert state["v"].tolist() == [1.29296875, 0.4375]


def test_fedyogi_by_hand() -> None:
    """Reddi et al., Algorithm 2, with beta1 = 0.5, beta2 = 0.75, tau = 0.5 (v starts at 0.25) and
    eta = 0.1."""
    models, state = run(make("yogi", lr=0.1, beta1=0.5, beta2=0.75, tau=0.5), [1.0, 2.0], ROUNDS)
    # first element; m as for FedAdam: 0.5, 0, 1
    # round 1: v = 0.25 - 0.25 * 1 * sign(0.25 - 1) = 0.5
    # round 2: v = 0.5 - 0.25 * 0.25 * sign(0.5 - 0.25) = 0.4375
    # round 3: v = 0.4375 - 0.25 * 4 * sign(0.4375 - 4) = 1.4375
    a1 = 1.0 + 0.1 * 0.5 / (sqrt(0.5) + 0.5)
    a2 = a1
    a3 = a2 + 0.1 * 1.0 / (sqrt(1.4375) + 0.5)
    # second element; m: 0.25, 0.375, -0.3125
    # round 1: v = 0.25 - 0.25 * 0.25 * sign(0.25 - 0.25) = 0.25
    # round 2: v = 0.25
    # round 3: v = 0.25 - 0.25 * 1 * sign(0.25 - 1) = 0.5
    b1 = 2.0 + 0.1 * 0.25 / (0.5 + 0.5)
    b2 = b1 + 0.1 * 0.375 / (0.5 + 0.5)
    b3 = b2 - 0.1 * 0.3125 / (sqrt(0.5) + 0.5)
    assert models == [approximately([a1, b1]), approximately([a2, b2]), approximately([a3, b3])]
    assert state["m"].tolist() == [1.0, -0.3125]
    assert state["v"].tolist() == [1.4375, 0.5]


def some_run(size: int) -> tuple[Vector, list[np.ndarray]]:
    random = np.random.default_rng(2)
    return random.standard_normal(size).astype(np.float32), [
        random.standard_normal(size) * 0.1 for _ in range(4)
    ]


def test_sgd_with_lr_1_is_fedavg_rounded_once() -> None:
    params, deltas = some_run(BLOCK + 100)
    _, moved = make("sgd").apply({}, deltas[0], params)
    assert moved.dtype == np.float32
    assert moved.tobytes() == (params.astype(np.float64) + deltas[0]).astype(np.float32).tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inputs_are_left_alone_and_blocks_do_not_show(name: str) -> None:
    optimizer = make(name)
    params, deltas = some_run(100)
    repeats = 2 * BLOCK // 100 + 1
    long = np.tile(params, repeats)
    state, long_state = optimizer.init(params), optimizer.init(long)
    for delta in deltas:
        given = [*state.values(), delta, params]
        copies = [array.copy() for array in given]
        after, moved = optimizer.apply(state, delta, params)
        assert all(np.array_equal(array, copy) for array, copy in zip(given, copies, strict=True))
        long_state, long = optimizer.apply(long_state, np.tile(delta, repeats), long)
        assert long.tobytes() == np.tile(moved, repeats).tobytes()
        for slot, values in after.items():
            assert values.dtype == np.float32
            assert long_state[slot].tobytes() == np.tile(values, repeats).tobytes()
        state, params = after, moved


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_through_safetensors_to_the_same_bits(name: str) -> None:
    optimizer = make(name)
    params, deltas = some_run(200)
    state = optimizer.init(params)
    restored_params = params
    restored = load(save(state))
    for delta in deltas:
        state, params = optimizer.apply(state, delta, params)
        restored, restored_params = optimizer.apply(load(save(restored)), delta, restored_params)
        assert restored_params.tobytes() == params.tobytes()
    assert {slot: values.tobytes() for slot, values in restored.items()} == {
        slot: values.tobytes() for slot, values in state.items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_update_of_a_fresh_optimizer_moves_nothing(name: str) -> None:
    optimizer = make(name)
    params, _ = some_run(10)
    _, moved = optimizer.apply(optimizer.init(params), np.zeros(10), params)
    assert np.array_equal(moved, params)


def test_a_model_that_would_overflow_is_an_error() -> None:
    params = np.array([0.0, 3e38], np.float32)
    with pytest.raises(
        FleetError, match=r"sgd would make element 1 of the model inf.*learning rate"
    ) as refused:
        make("sgd").apply({}, np.array([0.0, 1e38]), params)
    assert refused.value.code is Code.NOT_FINITE


def test_a_state_that_would_overflow_is_an_error() -> None:
    optimizer = make("adagrad")
    params = np.zeros(3, np.float32)
    with pytest.raises(FleetError, match="adagrad would make element 2 of its state v inf"):
        optimizer.apply(optimizer.init(params), np.array([0.0, 1.0, 1e20]), params)


def test_shapes_and_slots_that_do_not_fit_are_errors() -> None:
    optimizer = make("adam")
    params = np.zeros(3, np.float32)
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"model of shape \(3,\)"):
        optimizer.apply(state, np.zeros(4), params)
    with pytest.raises(ValueError, match=r"slots \['m'\]"):
        optimizer.apply({"m": state["m"]}, np.zeros(3), params)
    with pytest.raises(ValueError, match=r"slots \['m', 'v'\]"):
        make("sgd").apply(state, np.zeros(3), params)


@pytest.mark.parametrize(
    ("name", "hyper", "text"),
    [
        ("adamw", {}, "no server optimizer 'adamw'; there are sgd, momentum, adagrad, adam, yogi"),
        ("sgd", {"momentum": 0.9}, "sgd takes lr; not momentum"),
        ("momentum", {"momentum": 1.0}, "momentum is 1.0"),
        ("sgd", {"lr": -1.0}, "lr is -1.0"),
        ("sgd", {"lr": math.nan}, "lr is nan"),
        ("adam", {"beta1": 1.5}, "beta1 is 1.5"),
        ("adam", {"beta2": 1.0}, "beta2 is 1.0"),
        ("yogi", {"beta2": -0.1}, "beta2 is -0.1"),
        ("adagrad", {"tau": 0.0}, "tau is 0.0"),
    ],
)
def test_bad_hyper_parameters_are_errors(name: str, hyper: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(name, **hyper)


def test_the_norm_of_a_change() -> None:
    before = np.zeros(3 * BLOCK, np.float32)
    after = before.copy()
    after[[0, BLOCK, 3 * BLOCK - 1]] = [2.0, -3.0, 6.0]
    assert optimizers.change_norm(before, after) == 7.0
    assert optimizers.change_norm(after, after) == 0.0
    assert optimizers.change_norm(
        np.zeros(2, np.float32), np.array([3e30, 4e30], np.float32)
    ) == pytest.approx(5e30)


TABLE = (Parameter("w", (1,), 0), Parameter("mean", (2,), 1, buffer=True), Parameter("h", (), 3))
DELTAS = [0.25, -2.0, 8.0, 0.25], [0.5, 1e25, -7.5, 0.5]
"""A round's mean update of w, what stands in the places of two statistics, h; and the next
round's."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buffers_and_their_state_stay_as_they_are(name: str) -> None:
    """``commit.next_model`` gives them the devices' values. What updates have in their places is
    not used."""
    own = {
        key: value for key, value in {"lr": 0.5, "momentum": 0.9}.items() if key in defaults(name)
    }
    start = np.array([1.0, 3.0, 0.0, 1.0], np.float32)
    ours, alone = make(name, TABLE, **own), make(name, **own)
    state, before = ours.init(start), alone.init(start[:1])
    params, trained = start, start[:1]
    for delta in DELTAS:
        state, params = ours.apply(state, np.array(delta), params)
        before, trained = alone.apply(before, np.array(delta[:1]), trained)
        assert params[1:3].tolist() == [3.0, 0.0]
        assert params[[0, 3]].tolist() == [float(trained[0])] * 2, (
            "what is trained moves as if it were alone"
        )
    for slot, values in state.items():
        assert values[1:3].tolist() == ours.init(start)[slot][1:3].tolist()


@pytest.mark.parametrize("values", [np.full(3, "x"), np.full(3, 1j), np.full(3, None)])
def test_an_own_optimizers_numbers_are_real(values: Any) -> None:
    """NumPy drops imaginary parts with a warning, and says of text no more than that it is none."""

    def moves(delta: Any, state: Any, share: float) -> Any:
        return values

    def keeps(delta: Any, state: Any, share: float) -> Any:
        state["m"] = values
        return delta

    for step in (moves, keeps):
        own = own_optimizer("mine", Optimizer("mine", {"m": 0.0}, step))
        with pytest.raises(FleetError, match=r"server\.optimizer failed: TypeError: an array of"):
            own.step(np.zeros(3), {"m": np.zeros(3)}, 1.0)
