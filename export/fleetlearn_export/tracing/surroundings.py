"""What is changed in PyTorch, and put back, while a user's code is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fleetlearn_export.model.source_locations import user_frames_recorded
from fleetlearn_export.silence import silenced_python
from fleetlearn_export.tracing.constant_ranges import ranges_known
from fleetlearn_export.tracing.distributions import distributions_unchecked
from fleetlearn_export.tracing.filled_tensors import numbers_from_tensors
from fleetlearn_export.tracing.formulas.recording import FORMULAS, Formulas, formulas_recorded
from fleetlearn_export.tracing.free_lengths import lengths_free
from fleetlearn_export.tracing.packed_sequences import packed_sequences_padded
from fleetlearn_export.tracing.stand_ins import kernels_chosen_freely, shapes_known
from fleetlearn_export.tracing.transformer_masks import masks_unread
from fleetlearn_export.tracing.value_checks import checks_passed


@contextmanager
def user_code_traced(formulas: Formulas = FORMULAS) -> Iterator[None]:
    """Let stand-ins without values run through a user's model and loss. formulas: as for
    ``formulas_recorded``."""
    with (
        silenced_python(),
        user_frames_recorded(),
        formulas_recorded(formulas),
        shapes_known(),
        kernels_chosen_freely(),
        distributions_unchecked(),
        packed_sequences_padded(),
        masks_unread(),
        checks_passed(),
        ranges_known(),
        numbers_from_tensors(),
        torch._dynamo.config.patch(error_on_nested_fx_trace=False),
        lengths_free(),
        _sizes_hashable(),
        _conversions_skipped(),
    ):
        yield


@contextmanager
def _conversions_skipped() -> Iterator[None]:
    """Let models convert a layer to the dtype and device that it has, as transformers' Switch does
    in each call.

    PyTorch would give the layer new parameters, which stand-ins do not allow.
    """
    original: Any = nn.Module._apply

    def convert(
        module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        values = [*module.parameters(recurse), *module.buffers(recurse)]
        same = all(
            (converted := function(value)).dtype == value.dtype and converted.device == value.device
            for value in values
        )
        return module if same else original(module, function, recurse)

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def _sizes_hashable() -> Iterator[None]:
    """Let models keep results in functools.cache by sizes of the batch, as transformers' DETR does.

    A size that stays free is never found again in such a cache: equal sizes have different hashes.
    """
    original = torch.SymInt.__hash__
    torch.SymInt.__hash__ = object.__hash__  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymInt.__hash__ = original  # type: ignore[method-assign]
