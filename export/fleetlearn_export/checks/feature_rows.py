"""Which values of a graph have a row for each example that depends on that example alone.

The graph tells no more than shapes, so it is tried: on examples together, and again in another
order, each time without one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args, get_type_hints

import numpy as np
import onnx
import torch
from fleetlearn_protocol.manifest import Input
from torch import Tensor

from fleetlearn_export.checks.comparison import Array, open_session
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.graphs.feature_split import values_part
from fleetlearn_export.model.user_model import UserModel

EXAMPLES = 3
"""How many are tried together."""
ALLOWED = 1e-4
"""Largest difference between two computations of a row, relative to the value's largest element."""
DTYPES = get_args(get_type_hints(Input)["dtype"])
Values = Mapping[str, Array]


class Tried(NamedTuple):
    """What a graph gave on the tried examples."""

    feed: Values
    """The graph's inputs, by name."""
    values: Values
    rows: dict[str, Input]
    """Value -> the dtype and shape of a row, where each row depends on its example alone."""
    mixing: set[str]
    """Values with a row for each example that depends on other examples too."""


def try_rows(
    user: UserModel,
    model: onnx.ModelProto,
    names: Sequence[str],
    constants: Constants | None = None,
) -> Tried:
    """Compute the values ``names``, which depend on the batch and on constants alone.

    constants: those that the graph has kept apart. Raises ExportError.
    """
    session = open_session(
        values_part(model, names).SerializeToString(), optimized=False, constants=constants
    )
    feed = {f"batch.{name}": value.numpy() for name, value in _noisy(user.batch).items()}
    together = session.run(feed)
    fitting = {
        name: Input(name, value.dtype.name, value.shape[1:])  # type: ignore[arg-type]
        for name, value in together.items()
        if value.shape[:1] == (EXAMPLES,) and value.dtype.name in DTYPES and 0 not in value.shape
    }
    mixing = set[str]()
    for left_out in range(EXAMPLES):
        order = [index for index in reversed(range(EXAMPLES)) if index != left_out]
        some = session.run({name: value[order] for name, value in feed.items()})
        for name in list(fitting):
            if some[name].shape != (len(order), *fitting[name].shape):
                del fitting[name]
            elif not _close(together[name][order], some[name]):
                mixing.add(name)
    return Tried(
        feed,
        together,
        {name: array for name, array in fitting.items() if name not in mixing},
        mixing,
    )


def find_again(
    model: onnx.ModelProto,
    names: Sequence[str],
    tried: Tried,
    wanted: Sequence[str],
    constants: Constants | None = None,
) -> dict[str, str]:
    """Return, for those of the tried values ``wanted`` that another graph computes too, the name
    there.

    names: the values of ``model`` to look at. Raises ExportError.
    """
    session = open_session(
        values_part(model, names).SerializeToString(), optimized=False, constants=constants
    )
    results = session.run(tried.feed)
    again = {}
    for name in wanted:
        value = tried.values[name]
        same = [
            other
            for other, row in results.items()
            if row.shape == value.shape and _close(value, row)
        ]
        if same:
            again[name] = same[0]
    return again


def _noisy(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return EXAMPLES rows of the example with noise, so that no two are equal; integers are
    exchanged."""
    random = torch.Generator().manual_seed(0)
    made = {}
    for name, value in batch.items():
        rows = value[torch.arange(EXAMPLES) % len(value)]
        if value.is_floating_point():
            rows = rows.nan_to_num(0.0, 0.0, 0.0)  # NaN would hide what depends on it
            scale = float(rows.std()) or 1.0
            made[name] = rows + 0.5 * scale * torch.randn(rows.shape, generator=random).to(
                rows.dtype
            )
        else:
            made[name] = rows.flatten()[torch.randperm(rows.numel(), generator=random)].reshape(
                rows.shape
            )
    return made


def _close(one: Array, other: Array) -> bool:
    if one.dtype.kind != "f":
        return bool((one == other).all())
    finite = np.abs(one[np.isfinite(one)])
    allowed = ALLOWED * float(finite.max(initial=0.0))
    return one.dtype == other.dtype and bool(
        np.isclose(one, other, rtol=0.0, atol=allowed, equal_nan=True).all()
    )
