"""Tensors that wait on disk until they are needed, where they take no memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor


class OnDisk(Mapping[str, Tensor]):
    """Tensors by their names, one after the other in a file. Each look-up maps the tensor's bytes
    into memory.

    A file for each tensor took 4 of 25 CPU-seconds of DenseNet-121's export, whose parameters are
    many and small.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._kept: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}

    def keep(self, name: str, value: Tensor) -> None:
        array = value.detach().numpy()
        self._kept[name] = self._file.seek(0, os.SEEK_END), array.dtype, array.shape
        array.tofile(self._file)

    def __getitem__(self, name: str) -> Tensor:
        offset, dtype, shape = self._kept[name]
        if 0 in shape:
            return torch.from_numpy(np.empty(shape, dtype))
        # what writes into it gets a copy
        return torch.from_numpy(np.memmap(self._file, dtype, "c", offset, shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


@contextmanager
def on_disk() -> Iterator[OnDisk]:
    with TemporaryFile(prefix="fleetlearn-export-") as file:
        yield OnDisk(file)
