"""Random numbers in a graph, made from a seed that is an input: the same in PyTorch and in every
ONNX Runtime.

A number is a hash of (seed, draw, element): a counter-based generator in the sense of Salmon et
al., Parallel random numbers: as easy as 1, 2, 3 (2011). It has no state, so a traced graph stays a
function and a step can be repeated. The hash is C. Wellons' ``lowbias32`` (the hash-prospector
project: A. Appleby's finaliser of MurmurHash3 with constants found by search) of a Weyl sequence,
index * golden ratio + key; a second key is added inside it, so that no two draws use the same
sequence. Its last shift, which changes low bits only, is left out. Without the Weyl sequence
neighbouring elements fail the birthday-spacings test.

It uses only operators that every ONNX Runtime has a CPU kernel for. An int64 holds a 32-bit word,
so that no product exceeds 63 bits; a right shift is a product with a power of two in float64, which
is exact below 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch._decomp.decompositions as torch_decompositions
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import location_of_running_line

aten = torch.ops.aten

_WORD = 2**32 - 1
_GOLDEN = 0x9E3779B1
"""The prime next to 2**32 times the golden ratio's fraction (D. E. Knuth, The Art of Computer
Programming, 6.4)."""
_FIRST = 0x21F0AAAD
_SECOND = 0xD35A2D97 - 2**32
"""lowbias32's multipliers. The second is taken modulo 2**32 as a negative number, so that its
products fit in int64."""
_Size = Sequence[Any]
_ONE_LAYER: Callable[..., Any] = torch_decompositions._rnn_helper


class Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, all random numbers that PyTorch makes come from ``seed`` and the number
    of the draw.

    That includes the backward pass's numbers. ``seed`` is an int64 scalar tensor, real or fake;
    0 <= seed < 2**53 (a graph cannot check it). The first random operator is draw 0, the next draw
    1; PyTorch's own generators, also those given as ``generator=``, are neither read nor advanced.
    Uniform numbers are multiples of 2**-24 in [0, 1); Bernoulli probabilities are rounded up to a
    multiple of 2**-32. A tensor may have up to 2**31 elements. vmap batches the seed of a traced
    graph; when the code itself runs under vmap, PyTorch refuses random operators.

    Raises ExportError on a random operator that it cannot replace, such as multinomial and poisson.
    """

    draws: int
    """The number of random operators that were replaced."""

    def __init__(self, seed: Tensor) -> None:
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise ExportError(
                f"the seed is {seed.dtype} of shape {tuple(seed.shape)}; it must be an int64 scalar"
            )
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = 0
        self._replaced: list[Any] = []
        low, high = seed & _WORD, _shift_right(seed, 32)
        # Each line is invertible, so no two seeds have the same pair of keys.
        spread = _mix(low ^ _GOLDEN)
        self._before = _mix(spread ^ high)
        self._between = _mix(spread ^ self._before)
        self.device = seed.device

    def __enter__(self) -> Self:
        self._replaced.append(
            (torch_decompositions._rnn_helper, torch.get_rng_state, torch.set_rng_state)
        )
        torch_decompositions._rnn_helper = _recurrent_layers
        # torch.utils.checkpoint computes a part again in the backward pass, and has it draw the
        # same numbers again.
        torch.get_rng_state = lambda: self.draws  # type: ignore[assignment, return-value]
        torch.set_rng_state = partial(setattr, self, "draws")
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch_decompositions._rnn_helper, torch.get_rng_state, torch.set_rng_state = (
            self._replaced.pop()
        )
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            kwargs.pop("generator", None)
            result = replacement(self, *args, **kwargs)
            self.draws += 1
            return args[0].copy_(result) if func in _IN_PLACE else result
        if func.namespace == "aten":
            with self:  # an operator made of others calls those, as it does when autograd records
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.Tag.nondeterministic_seeded in func.tags and _draws_numbers(func, args, kwargs):
            raise ExportError(
                f"random operator {func}{location_of_running_line()} cannot be drawn from the "
                "graph's seed. Draw with dropout, bernoulli, rand, randn, randint, randperm, "
                "uniform_, normal_ or exponential_, or give the random numbers as an input"
            )
        # in any order, each element would get another random number
        if func is torch.ops.aten.topk.default:
            args, kwargs = (
                args[:4],
                {name: value for name, value in kwargs.items() if name != "sorted"},
            )
        return func(*args, **kwargs)

    def random_words(self, size: _Size, part: int = 0) -> Tensor:
        """Return int64 of shape ``size`` whose low 32 bits are random; the highest of these 32 are
        the best.

        ``part`` (0 or 1) distinguishes the two tensors that one draw may need.
        """
        count: Any = 1
        for length in size:
            count = count * length
        counter = 4 * self.draws + 2 * part
        index = torch.arange(count, dtype=torch.int64, device=self.device)
        word = (index * _GOLDEN + (self._before ^ _mix_number(counter))) & _WORD
        word = word ^ _shift_right(word, 16)
        word = (word * _FIRST + (self._between ^ _mix_number(counter + 1))) & _WORD
        word = word ^ _shift_right(word, 15)
        return (word * _SECOND).reshape(tuple(size))

    def uniform(self, size: _Size, dtype: torch.dtype | None = None, part: int = 0) -> Tensor:
        """Return numbers of shape ``size`` in [0, 1): multiples of 2**-24, or of the spacing of
        ``dtype`` below 1."""
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise ExportError(
                f"uniform random numbers of {dtype} were asked for; they must be floating-point"
            )
        digits = min(24, 1 - round(math.log2(torch.finfo(dtype).eps)))
        signed = self.random_words(size, part).to(torch.int32) & -(1 << 32 - digits)
        # Not float16: 2**31 is beyond its range.
        return (
            signed.to(torch.float64 if dtype == torch.float64 else torch.float32) * 2.0**-32 + 0.5
        ).to(dtype)

    def normal(self, size: _Size, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers of shape ``size``, mean 0, variance 1: G. E. P. Box and M. E. Muller
        (1958), only the cosine.

        Runtimes round logarithms and cosines differently, so these are not bit-identical
        everywhere.
        """
        radius = torch.sqrt(-2 * torch.log(1 - self.uniform(size, dtype)))
        return radius * torch.cos(2 * math.pi * self.uniform(size, dtype, part=1))

    def bernoulli(self, size: _Size, p: float) -> Tensor:
        """Return bool of shape ``size``: True with probability ``p``."""
        if not 0 <= p <= 1:
            raise ExportError(f"a Bernoulli probability of {p}; it must be from 0 to 1")
        if p == 0:
            return torch.zeros(tuple(size), dtype=torch.bool, device=self.device)
        return self.random_words(size).to(torch.int32) <= math.ceil(p * 2**32) - 2**31 - 1

    def integers(self, low: Any, high: Any, size: _Size) -> Tensor:
        """Return float64 of shape ``size``: whole numbers from ``low`` to ``high - 1``, at most
        2**32 of them."""
        if high is None:
            raise ExportError(
                "random integers without an upper end were asked for; give `to` (up to 2**32 "
                "values)"
            )
        share = (self.random_words(size) & _WORD).to(torch.float64) * 2.0**-32
        values: Tensor = torch.floor(share * (high - low)) + low
        return values


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Shift an int64 in [0, 2**53) right. float64 does that exactly; ONNX's BitShift takes unsigned
    types only."""
    return (word.to(torch.float64) * 2.0**-bits).to(torch.int64)


def _mix(word: Tensor) -> Tensor:
    """Return lowbias32 of an int64 in [0, 2**32), in the same range."""
    word = word ^ _shift_right(word, 16)
    word = (word * _FIRST) & _WORD
    word = word ^ _shift_right(word, 15)
    word = (word * _SECOND) & _WORD
    return word ^ _shift_right(word, 15)


def _mix_number(number: int) -> int:
    """Return lowbias32 of a Python integer."""
    word = number & _WORD
    word = ((word ^ word >> 16) * _FIRST) & _WORD
    word = ((word ^ word >> 15) * _SECOND) & _WORD
    return word ^ word >> 15


def _draws_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator draws: attention and recurrent layers do so only if their dropout is
    above 0."""
    for index, row in enumerate(func._schema.arguments):
        if row.name in ("dropout_p", "dropout"):
            value = kwargs.get(row.name, args[index] if index < len(args) else row.default_value)
            return bool(value)
    return True


def _recurrent_layers(
    values: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer: Callable[..., Any],
) -> tuple[Tensor, list[Any]]:
    """Compute layers of LSTM, GRU or RNN one by one, as symbolic tracing does, with the dropout
    between them.

    PyTorch 2.13 leaves that dropout out silently: it compares ``num_layers < i - 1``.
    """
    values = values.transpose(0, 1) if batch_first else values
    last: list[Any] = []
    directions = 2 if bidirectional else 1
    for number in range(num_layers):
        own = slice(number * directions, (number + 1) * directions)
        values, ends = _ONE_LAYER(
            values, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
        )
        last += ends
        if dropout and train and number < num_layers - 1:
            values = torch.dropout(values, dropout, train)
    return values.transpose(0, 1) if batch_first else values, last


def _bernoulli(mode: Seeded, self: Tensor, p: Any = None) -> Tensor:
    if p is None:
        p = self
    if isinstance(p, Tensor):
        return (mode.uniform(self.shape, torch.float32) < p).to(self.dtype)
    return mode.bernoulli(self.shape, p).to(self.dtype)


def _bernoulli_in_place(mode: Seeded, self: Tensor, p: Any = 0.5) -> Tensor:
    return _bernoulli(mode, self, p)


def _native_dropout(
    mode: Seeded, self: Tensor, p: float, train: bool | None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    mask = mode.bernoulli(self.shape, 1 - p)
    return self * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _rand(mode: Seeded, size: _Size, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return mode.uniform(size, dtype)


def _rand_like(mode: Seeded, self: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return mode.uniform(self.shape, dtype or self.dtype)


def _uniform(mode: Seeded, self: Tensor, low: float = 0.0, to: float = 1.0) -> Tensor:
    return mode.uniform(self.shape, self.dtype) * (to - low) + low


def _randn(mode: Seeded, size: _Size, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return mode.normal(size, dtype)


def _randn_like(
    mode: Seeded, self: Tensor, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return mode.normal(self.shape, dtype or self.dtype)


def _normal_like(mode: Seeded, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mode.normal(self.shape, self.dtype) * std + mean


def _normal(mode: Seeded, mean: Any, std: Any = 1.0, size: _Size = (), **options: Any) -> Tensor:
    like = mean + std  # if one of the two is a tensor, this has the shape and dtype of the result
    noise = (
        mode.normal(like.shape, like.dtype)
        if isinstance(like, Tensor)
        else mode.normal(size, options.get("dtype"))
    )
    values: Tensor = noise * std + mean
    return values


def _exponential(mode: Seeded, self: Tensor, lambd: float = 1.0) -> Tensor:
    return -torch.log(1 - mode.uniform(self.shape, self.dtype)) / lambd


def _randint(mode: Seeded, high: Any, size: _Size, **options: Any) -> Tensor:
    return _randint_low(mode, 0, high, size, **options)


def _randint_low(
    mode: Seeded, low: Any, high: Any, size: _Size, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return mode.integers(low, high, size).to(dtype or torch.int64)


def _randint_like(mode: Seeded, self: Tensor, high: Any, **options: Any) -> Tensor:
    return _randint_like_low(mode, self, 0, high, **options)


def _randint_like_low(
    mode: Seeded, self: Tensor, low: Any, high: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return mode.integers(low, high, self.shape).to(dtype or self.dtype)


def _randperm(mode: Seeded, n: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    # The index is in the low bits, so no two keys are equal, and every sorting algorithm finds the
    # same order.
    index = torch.arange(n, dtype=torch.int64, device=mode.device)
    return torch.argsort((mode.random_words((n,)) & _WORD >> 1) * 2**31 + index).to(
        dtype or torch.int64
    )


def _rrelu(
    mode: Seeded,
    self: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output and the noise: the slope where the input is <= 0, else 1 (B. Xu et al.,
    arXiv 1505.00853)."""
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2), noise
    slopes = torch.where(self <= 0, _uniform(mode, self, lower, upper), 1.0)
    return self * slopes, slopes


def _rrelu_with_noise(
    mode: Seeded, self: Tensor, noise: Tensor, *args: Any, **options: Any
) -> Tensor:
    output, slopes = _rrelu(mode, self, noise, *args, **options)
    if slopes is not noise:
        noise.copy_(slopes)
    return output


_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    aten.bernoulli_.float: _bernoulli_in_place,
    aten.bernoulli_.Tensor: _bernoulli_in_place,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal_like,
    aten.exponential_.default: _exponential,
    aten.random_.to: _randint_like,
    getattr(aten.random_, "from"): _randint_like_low,
    aten.rrelu_with_noise_.default: _rrelu_with_noise,
}
"""Operators that write their result into the first argument."""
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **_IN_PLACE,
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.rand.default: _rand,
    aten.rand.generator: _rand,
    aten.rand_like.default: _rand_like,
    aten.rand_like.generator: _rand_like,
    aten.uniform.default: _uniform,
    aten.randn.default: _randn,
    aten.randn.generator: _randn,
    aten.randn_like.default: _randn_like,
    aten.randn_like.generator: _randn_like,
    aten.normal_functional.default: _normal_like,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.float_float: _normal,
    aten.exponential.default: _exponential,
    aten.randint.default: _randint,
    aten.randint.generator: _randint,
    aten.randint.low: _randint_low,
    aten.randint.low_generator: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.generator: _randint_like,
    aten.randint_like.Tensor: _randint_like,
    aten.randint_like.Tensor_generator: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.randint_like.low_generator_dtype: _randint_like_low,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.rrelu_with_noise.default: _rrelu_with_noise,
    aten.rrelu_with_noise_functional.default: _rrelu,
}
