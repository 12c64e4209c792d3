"""Bundles with another graph than they were exported with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
from fleetlearn_protocol import read_manifest, write_manifest
from fleetlearn_protocol.manifest import TRAIN, File
from fleetlearn_protocol.vector import digest


def changed(case: Any, path: Path, train: bytes) -> Path:
    """Return a copy of the bundle with another train.onnx, which its manifest describes."""
    shutil.copytree(case.path, path)
    manifest = read_manifest((path / "manifest.json").read_bytes())
    files = manifest.files | {TRAIN: File(digest(train), len(train))}
    (path / TRAIN).write_bytes(train)
    (path / "manifest.json").write_bytes(
        write_manifest(msgspec.structs.replace(manifest, files=files))
    )
    return path
