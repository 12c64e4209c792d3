"""Tensors that wait on disk until they are needed, where they take no memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor


class OnDisk(Mapping[str, Tensor]):
    """Tensors by their names, each in a file. Each look-up reads the file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, tuple[Path, np.dtype[Any], tuple[int, ...]]] = {}

    def keep(self, name: str, value: Tensor) -> None:
        path = self._folder / str(len(self._kept))
        array = value.detach().numpy()
        array.tofile(path)
        self._kept[name] = path, array.dtype, array.shape

    def __getitem__(self, name: str) -> Tensor:
        path, dtype, shape = self._kept[name]
        return torch.from_numpy(np.fromfile(path, dtype).reshape(shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


@contextmanager
def on_disk() -> Iterator[OnDisk]:
    with TemporaryDirectory(prefix="fleetlearn-export-") as folder:
        yield OnDisk(Path(folder))
