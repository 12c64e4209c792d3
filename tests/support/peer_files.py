"""The files of peers for tests: state directories, cards, an address book, data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_device.peers.certificate import card, own_certificate
from fleetlearn_device.peers.run_peer import PeerOptions
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.state_directory import device_in
from processes import free_port

Arrays = dict[str, np.ndarray[Any, Any]]


class PeerFiles(NamedTuple):
    """Peers in a folder."""

    folder: Path
    names: tuple[str, ...]
    ports: dict[str, int]
    bundle: Path
    book: Path

    def options(self, peer: str, steps: int, **changed: Any) -> PeerOptions:
        files = {"book": str(self.book), "bundle": str(self.bundle)}
        own = {"data": str(self.folder / f"{peer}.npz"), "state": str(self.folder / peer)}
        return PeerOptions(**{**files, **own, "steps": steps, **changed})  # type: ignore[arg-type]

    def write_book(self, settings: str, path: Path | None = None) -> Path:
        """Write an address book of these peers with other settings."""
        cards = [entry(self.folder / name, name, self.ports[name]) for name in self.names]
        path = path or self.book
        path.write_text("\n\n".join([settings, *cards]))
        return path


def entry(folder: Path, name: str, port: int) -> str:
    """Return a peer's entry, and make its state directory and key where there are none."""
    device = device_in(folder, name)
    certificate = own_certificate(folder, device, device_key(folder))
    return card(device, f"127.0.0.1:{port}", certificate)


def peer_files(folder: Path, bundle: Path, shares: Sequence[Arrays], settings: str) -> PeerFiles:
    """Make the files of peers a, b, c, ... with these data."""
    names = tuple("abcdefgh"[: len(shares)])
    ports = {name: free_port() for name in names}
    files = PeerFiles(folder, names, ports, bundle, folder / "peers.toml")
    for name, arrays in zip(names, shares, strict=True):
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    files.write_book(settings)
    return files
