"""``torch.distributions`` while a step is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """While active, distributions do not check their arguments and samples, unless the user's code
    asks each to.

    The checks raise errors by the values of tensors, which no graph can do. They ran before, with
    the example.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
