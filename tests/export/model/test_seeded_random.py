"""Random numbers from a seed: the hash by another implementation, its quality, the same masks in
every runtime."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch._decomp.decompositions as torch_decompositions
from fleetlearn_export import export_bundle
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.conversion import serialised, to_onnx
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.train_step import plain_kernels
from fleetlearn_export.silence import silenced_python
from fleetlearn_export.tracing.trace import Program
from scipy import stats
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORD = 2**32 - 1


def seeded(number: int) -> Seeded:
    return Seeded(torch.tensor(number))


def drawn(number: int, function: Callable[[], Tensor]) -> Tensor:
    with seeded(number):
        return function()


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & WORD
    x ^= x >> 15
    x = x * 0xD35A2D97 & WORD
    return x ^ x >> 15


def by_hand(seed: int, draw: int, part: int, index: int) -> int:
    """24 random bits, in Python's integers of any size: a word's first ones, taken as a signed
    number and shifted."""
    spread = lowbias32(seed & WORD ^ 0x9E3779B1)
    before = lowbias32(spread ^ seed >> 32)
    between = lowbias32(spread ^ before)
    place = 4 * draw + 2 * part
    x = index * 0x9E3779B1 + (before ^ lowbias32(place)) & WORD
    x ^= x >> 16
    x = x * 0x21F0AAAD + (between ^ lowbias32(place + 1)) & WORD
    x ^= x >> 15
    return (x * 0xD35A2D97 & WORD ^ 2**31) >> 8


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 123456789012345, 2**53 - 1])
def test_uniform_numbers_are_the_hash(seed: int) -> None:
    mode = seeded(seed)
    mode.draws = 3
    for part in range(2):
        expected = [by_hand(seed, 3, part, index) / 2**24 for index in range(6)]
        assert mode.uniform((2, 3), part=part).flatten().tolist() == expected


def test_the_hash_stays_what_it_is() -> None:
    """Bundles of older releases and newer ones draw alike. The numbers came from a program in C
    with uint32_t."""
    mode = seeded(2**53 - 1)
    mode.draws = 3
    assert (mode.random_words((4,)) & WORD).tolist() == [
        1958297466,
        3860749886,
        1938718793,
        3175352819,
    ]


def test_no_product_leaves_63_bits() -> None:
    last = 2**31 - 1
    assert last * 0x9E3779B1 + WORD < 2**63
    assert WORD * 0x21F0AAAD + WORD < 2**63
    assert WORD * (0xD35A2D97 - 2**32) > -(2**63)


def along_elements() -> Tensor:
    return seeded(5).uniform((1024, 512))


def along_draws() -> Tensor:
    mode, rows = seeded(6), []
    for mode.draws in range(1024):
        rows.append(mode.uniform((512,)))
    return torch.stack(rows)


def along_seeds() -> Tensor:
    return torch.vmap(lambda seed: Seeded(seed).uniform((512,)))(torch.arange(10**6, 10**6 + 1024))


@pytest.fixture(scope="module", params=[along_elements, along_draws, along_seeds])
def square(request: pytest.FixtureRequest) -> np.ndarray:
    """Multiples of 2**-24 as integers: 1024 rows of neighbouring elements, neighbouring draws or
    neighbouring seeds."""
    return (request.param().double().numpy() * 2**24).astype(np.int64)


def test_bytes_are_uniform(square: np.ndarray) -> None:
    for shift in (0, 8, 16):
        assert (
            stats.chisquare(np.bincount((square >> shift & 255).ravel(), minlength=256)).pvalue
            > 1e-4
        )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_not_correlated(square: np.ndarray, axis: int, lag: int) -> None:
    u = (square - 2**23) / 2**24
    first, second = (u[:-lag], u[lag:]) if axis == 0 else (u[:, :-lag], u[:, lag:])
    # A product of two uniform numbers from -1/2 to 1/2 has variance 1/144.
    assert abs((first * second).sum()) < 4.5 * math.sqrt(first.size / 144)


@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_of_neighbours_fill_the_square(square: np.ndarray, axis: int) -> None:
    cells = square >> 20
    pairs = cells[:-1] * 16 + cells[1:] if axis == 0 else cells[:, :-1] * 16 + cells[:, 1:]
    assert stats.chisquare(np.bincount(pairs.ravel(), minlength=256)).pvalue > 1e-4


@pytest.mark.parametrize("axis", [0, 1])
def test_birthday_spacings(square: np.ndarray, axis: int) -> None:
    """G. Marsaglia's test: among 512 birthdays in a year of 2**24 days, equal spacings are Poisson,
    2 on average."""
    blocks = square if axis == 1 else square.T.reshape(-1, 512)
    spacings = np.sort(np.diff(np.sort(blocks, axis=1), axis=1), axis=1)
    found = int((np.diff(spacings, axis=1) == 0).sum())
    assert (
        stats.poisson(2 * len(blocks)).interval(1 - 1e-4)[0]
        < found
        < stats.poisson(2 * len(blocks)).interval(1 - 1e-4)[1]
    )


def test_each_bit_of_the_seed_changes_half_of_the_bits() -> None:
    base = torch.arange(2**40, 2**40 + 64)
    flipped = torch.stack([base ^ (1 << bit) for bit in range(53)])
    words = torch.vmap(torch.vmap(lambda seed: Seeded(seed).random_words((64,))))
    changed = (words(flipped) ^ words(base[None])).numpy()
    rates = np.array([(changed >> bit & 1).mean(axis=(1, 2)) for bit in range(8, 32)])
    assert rates.shape == (24, 53)
    assert abs(rates - 0.5).max() < 4.5 * 0.5 / math.sqrt(64 * 64)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_dropout_rate(p: float) -> None:
    x = torch.ones(400_000)
    for number in range(3):
        dropped = int((drawn(number, lambda: F.dropout(x, p)) == 0).sum())
        assert abs(dropped - p * len(x)) <= 4.5 * math.sqrt(len(x) * p * (1 - p))


DISTRIBUTIONS: dict[str, tuple[Callable[[], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "rand": (lambda: torch.rand(300, 400), stats.uniform().cdf),
    "rand_like": (lambda: torch.rand_like(torch.empty(300, 400)), stats.uniform().cdf),
    "uniform_": (lambda: torch.empty(120_000).uniform_(-2, 3), stats.uniform(-2, 5).cdf),
    "randn": (lambda: torch.randn(300, 400), stats.norm().cdf),
    "randn_like": (lambda: torch.randn_like(torch.empty(300, 400)), stats.norm().cdf),
    "normal_": (lambda: torch.empty(120_000).normal_(3, 2), stats.norm(3, 2).cdf),
    "normal": (lambda: torch.normal(3.0, 2.0, (300, 400)), stats.norm(3, 2).cdf),
    "normal of means": (
        lambda: torch.normal(torch.full((400, 300), 3.0), 2.0),
        stats.norm(3, 2).cdf,
    ),
    "normal of deviations": (
        lambda: torch.normal(3.0, torch.full((400, 300), 2.0)),
        stats.norm(3, 2).cdf,
    ),
    "normal of both": (
        lambda: torch.normal(torch.full((400, 1), 3.0), torch.full((300,), 2.0)),
        stats.norm(3, 2).cdf,
    ),
    "exponential_": (lambda: torch.empty(120_000).exponential_(2), stats.expon(scale=1 / 2).cdf),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name: str) -> None:
    draw, cdf = DISTRIBUTIONS[name]
    found = drawn(1, draw)
    assert found.numel() == 120_000
    assert found.dtype == torch.float32
    assert stats.kstest(found.flatten().numpy(), cdf).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_stay_below_1_in_every_dtype(dtype: torch.dtype) -> None:
    found = drawn(1, lambda: torch.rand(200_000, dtype=dtype))
    assert found.dtype == dtype
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(found.double().mean() - 0.5) < 0.005


@pytest.mark.parametrize(
    ("draw", "low", "high", "dtype"),
    [
        (lambda: torch.randint(7, (70_000,)), 0, 7, torch.int64),
        (lambda: torch.randint(-3, 4, (70_000,), dtype=torch.int32), -3, 4, torch.int32),
        (lambda: torch.randint_like(torch.empty(70_000), 7), 0, 7, torch.float32),
        (lambda: torch.randint_like(torch.empty(70_000), -3, 4), -3, 4, torch.float32),
        (lambda: torch.empty(70_000).random_(7), 0, 7, torch.float32),
        (lambda: torch.empty(70_000, dtype=torch.int64).random_(-3, to=4), -3, 4, torch.int64),
    ],
)
def test_integers(draw: Callable[[], Tensor], low: int, high: int, dtype: torch.dtype) -> None:
    found = drawn(1, draw)
    assert found.dtype == dtype
    values, counts = found.unique(return_counts=True)
    assert values.tolist() == list(range(low, high))
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_permutations_are_fair() -> None:
    places = torch.stack([drawn(number, lambda: torch.randperm(5)) for number in range(1000)])
    assert torch.equal(places.sort(1).values, torch.arange(5).expand(1000, 5))
    for place in range(5):
        assert stats.chisquare(torch.bincount(places[:, place], minlength=5).numpy()).pvalue > 1e-4


def test_bernoulli_of_a_tensor_of_probabilities() -> None:
    p = torch.tensor([0.0, 0.2, 0.7, 1.0]).repeat(40_000, 1)
    for draw in (lambda: torch.bernoulli(p), lambda: torch.empty_like(p).bernoulli_(p)):
        found = drawn(1, draw)
        assert set(found.unique().tolist()) == {0.0, 1.0}
        assert found.mean(0).tolist() == pytest.approx([0, 0.2, 0.7, 1], abs=4.5 * 0.5 / 200)
        assert found[:, 0].sum() == 0
        assert found[:, 3].sum() == 40_000


def test_rrelu() -> None:
    x = torch.randn(1000, requires_grad=True)
    with seeded(1):
        y = F.rrelu(x, 0.1, 0.4, training=True)
        (slopes,) = torch.autograd.grad(y.sum(), x)
    negative = x <= 0
    assert torch.equal(slopes[~negative], torch.ones_like(slopes[~negative]))
    assert torch.allclose(y, x * slopes)
    assert 0.1 <= slopes[negative].min() < 0.11
    assert 0.39 < slopes[negative].max() <= 0.4
    with seeded(1):
        assert torch.equal(F.rrelu_(x.detach().clone(), 0.1, 0.4, training=True), y.detach())


def test_dropout_is_the_same_by_each_of_its_operators() -> None:
    """Tracing takes native_dropout where running takes bernoulli_."""
    x = torch.randn(30, 40)
    y = drawn(1, lambda: F.dropout(x, 0.3))
    with seeded(1):
        fused, mask = torch.native_dropout(x, 0.3, True)
    assert torch.equal(y != 0, mask)
    torch.testing.assert_close(fused, y)
    with seeded(1):
        assert torch.equal(torch.native_dropout(x, 0.3, False)[0], x)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_dropout_is_drawn_whatever_autograd_does(
    context: Callable[[], torch.autograd.grad_mode.no_grad],
) -> None:
    x = torch.ones(4, 6, 5, 5)
    lstm = nn.LSTM(5, 4, 2, dropout=0.5, batch_first=True)
    before = torch.get_rng_state()
    for draw in (
        lambda: F.dropout(x, 0.5),
        lambda: F.dropout2d(x, 0.5),
        lambda: F.alpha_dropout(x, 0.5, training=True),
        lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda: lstm(x[0])[0],
    ):
        # Without autograd oneDNN's LSTM would be taken, which knows no dropout.
        with context(), plain_kernels():
            mode = seeded(1)
            with mode:
                first, second = draw(), draw()
            assert mode.draws == 2
            assert torch.equal(first, drawn(1, draw))
            assert not torch.equal(first, drawn(2, draw))
            assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_between_recurrent_layers_is_traced(
    kind: type[nn.RNNBase], bidirectional: bool
) -> None:
    """PyTorch's own decomposition forgets it."""
    layers = kind(5, 4, 3, dropout=0.5, batch_first=True, bidirectional=bidirectional)
    x, seed = torch.randn(2, 6, 5), torch.tensor(1)

    def run(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        mode = Seeded(seed)
        with mode:
            values, last = layers(x)
        assert mode.draws == 2
        return values, *(last if isinstance(last, tuple) else [last])

    before = torch_decompositions._rnn_helper
    with plain_kernels():
        graph = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x, seed)
        torch.testing.assert_close(graph(x, seed), run(x, seed), rtol=1e-5, atol=1e-6)
    assert torch_decompositions._rnn_helper is before


def test_what_does_not_draw_is_left_alone() -> None:
    x = torch.ones(2, 2, 4, 4)
    mode = seeded(1)
    with mode:
        F.scaled_dot_product_attention(x, x, x)
        F.dropout(x, 0.5, training=False)
        nn.LSTM(4, 4)(x[0])  # draws its own parameters
    assert mode.draws == 4


def test_the_largest_are_in_order_so_that_each_gets_its_own_number() -> None:
    x = torch.randn(50, 20)
    assert not torch.equal(torch.topk(x, 12, sorted=False)[0], torch.topk(x, 12)[0]), (
        "the case that is tested"
    )
    with Seeded(torch.tensor(1)):
        found, places = torch.topk(x, 12, sorted=False)
    assert torch.equal(found, torch.topk(x, 12)[0])
    assert torch.equal(x.gather(1, places), found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_the_same_again(reentrant: bool) -> None:
    """Checkpointing, which saves memory, computes parts of the forward pass again in the backward
    pass."""

    def part(x: Tensor) -> Tensor:
        return F.dropout(x.tanh(), 0.5)

    def gradient(checkpointed: bool) -> tuple[Tensor, int]:
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        with Seeded(torch.tensor(5)) as seeded:
            y = (
                checkpoint(part, F.dropout(x, 0.5), use_reentrant=reentrant)
                if checkpointed
                else part(F.dropout(x, 0.5))
            )
            y.square().sum().backward()
        assert x.grad is not None
        return x.grad, seeded.draws

    found, draws = gradient(checkpointed=True)
    expected, plain = gradient(checkpointed=False)
    assert torch.equal(found, expected)
    assert draws == plain == 2


def test_the_backward_pass_may_draw(tmp_path: Path) -> None:
    """As Shake-Shake's does (Gastaldi 2017, arXiv 1705.07485)."""

    class Shaken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * torch.rand(len(x), 1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.rand(len(gradient), 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Shaken.apply(self.first(x)) if self.training else self.first(x))

    batch = torch.randn(4, 5), torch.tensor([0, 1, 2, 1])
    assert export_bundle(Net(), F.cross_entropy, batch, tmp_path / "b").difference < 1e-6


def test_a_generator_is_not_advanced() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    found = drawn(1, lambda: torch.rand(5, generator=generator))
    assert torch.equal(found, drawn(1, lambda: torch.rand(5)))
    assert torch.equal(generator.get_state(), before)


def mixture(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Each kind of draw once: the last two are computed with functions that runtimes round
    differently."""
    with Seeded(seed):
        return (
            F.dropout(x, 0.3),
            F.dropout2d(x[:, :, None, None].expand(-1, -1, 2, 2), 0.3),
            torch.bernoulli(x.abs().clamp(max=1)),
            torch.rand_like(x),
            torch.rand(x.shape[0], 2) * 3,
            torch.randint(1000, (x.shape[0], 2)),
            torch.randperm(x.shape[0]),
            torch.empty_like(x).uniform_(-1, 1),
            F.rrelu(x, training=True),
            torch.empty_like(x).exponential_(),
            torch.randn_like(x),
        )


def onnx_of(graph: torch.fx.GraphModule, x: Tensor, outputs: int) -> onnxruntime.InferenceSession:
    arguments = (x, torch.tensor(0))
    with silenced_python():
        exported = torch.export.export(
            graph, arguments, dynamic_shapes=({0: Dim("n", min=2)}, None)
        )
        exported = exported.run_decompositions({})
    program = Program(
        exported, ["x", "seed"], [f"y{place}" for place in range(outputs)], graph.graph
    )
    return onnxruntime.InferenceSession(
        serialised(to_onnx(program, {})), providers=["CPUExecutionProvider"]
    )


@pytest.mark.slow
def test_the_graph_draws_what_pytorch_draws() -> None:
    x = torch.randn(5, 7)
    graph = make_fx(mixture, tracing_mode="symbolic")(x, torch.tensor(0))
    session = onnx_of(graph, x, 11)
    for rows in (5, 1, 64):
        x = torch.randn(rows, 7)
        for number in (0, 2**53 - 1):
            seed = torch.tensor(number)
            expected = mixture(x, seed)
            found = session.run(None, {"x": x.numpy(), "seed": seed.numpy()})
            for place, (traced, run, wanted) in enumerate(
                zip(graph(x, seed), found, expected, strict=True)
            ):
                assert torch.equal(traced, wanted) or place in (0, 1)
                torch.testing.assert_close(traced, wanted)
                tolerance = 1e-5 if place >= 9 else 1e-6 if place in (0, 1, 8) else 0
                np.testing.assert_allclose(
                    run, wanted.numpy(), rtol=tolerance, atol=tolerance, strict=True
                )
                if place in (0, 1):
                    assert np.array_equal(run == 0, wanted.numpy() == 0)


def test_a_training_step_in_the_graph() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(6, 16, requires_grad=True), torch.randn(16, 3, requires_grad=True)

    def step(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        with Seeded(seed):
            hidden = F.dropout(F.relu(x @ first), 0.4)
            return torch.autograd.grad(
                (F.dropout(hidden, 0.2) @ second).square().mean(), (first, second)
            )

    x = torch.randn(5, 6)
    session = onnx_of(
        make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x, torch.tensor(0)),
        x,
        2,
    )
    x = torch.randn(8, 6)
    results = []
    for number in (7, 7, 8):
        seed = torch.tensor(number)
        found = session.run(None, {"x": x.numpy(), "seed": seed.numpy()})
        for run, wanted in zip(found, step(x, seed), strict=True):
            np.testing.assert_allclose(run, wanted.numpy(), rtol=1e-5, atol=1e-6)
        results.append(found[0])
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_devices_side_by_side_draw_from_their_own_seeds() -> None:
    xs, seeds = torch.randn(3, 5, 7), torch.tensor([1, 2, 2**52])
    graph = make_fx(mixture)(xs[0], seeds[0])
    together = torch.func.vmap(graph)(xs, seeds)
    for place in range(3):
        for found, wanted in zip(together, mixture(xs[place], seeds[place]), strict=True):
            torch.testing.assert_close(found[place], wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("draw", "operator"),
    [
        (lambda: torch.multinomial(torch.ones(3), 2), "aten.multinomial.default"),
        (lambda: torch.poisson(torch.ones(3)), "aten.poisson.default"),
        (lambda: torch.empty(3).cauchy_(), "aten.cauchy_.default"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(draw: Callable[[], Tensor], operator: str) -> None:
    with pytest.raises(
        ExportError, match=rf"{operator} cannot be drawn from the graph's seed\. Draw with dropout"
    ):
        drawn(1, draw)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ExportError, match=r"the seed is torch.float32 of shape \(2,\); it must be an int64 scalar"
    ):
        Seeded(torch.zeros(2))
    with pytest.raises(
        ExportError, match=r"a Bernoulli probability of 1.5; it must be from 0 to 1"
    ):
        drawn(1, lambda: torch.empty(3).bernoulli_(1.5))
    with pytest.raises(ExportError, match=r"random integers without an upper end .* give `to`"):
        drawn(1, lambda: torch.empty(3).random_(0, None))
    with pytest.raises(ExportError, match=r"uniform random numbers of torch.int64"):
        drawn(1, lambda: torch.rand_like(torch.ones(3, dtype=torch.int64)))
