"""``public-bundle``: examples without labels become the bundle of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from fleetlearn_coordinator.__main__ import app
from fleetlearn_protocol import open_bundle
from typer.testing import CliRunner

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def test_a_file_becomes_a_bundle_without_its_labels(tmp_path: Path) -> None:
    data, bundle = tmp_path / "data.npz", tmp_path / "public.bundle"
    np.savez(data, x=X, y=np.arange(6))
    words = ["public-bundle", str(data), "--classes", "3", "--output", str(bundle)]
    done = CliRunner().invoke(app, [*words, "--metric", "accuracy"])
    assert done.exit_code == 0, done.output
    assert "wrote 6 public examples" in " ".join(done.stderr.split())
    assert "fetches and sends 72 bytes" in " ".join(done.stderr.split())
    manifest = open_bundle(bundle).manifest
    assert [row.name for row in manifest.batch] == ["x"]
    assert manifest.metrics == ("digest_loss", "accuracy")


def test_what_is_wrong_with_the_file_is_said(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, z=X)
    words = ["public-bundle", str(data), "--classes", "3", "-o", str(tmp_path / "p")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "has no array x. Name the arrays: --array NAME" in " ".join(done.stderr.split())
    done = CliRunner().invoke(app, [*words, "--array", "z", "--classes", "1"])
    assert "classes is 1; expected at least 2" in " ".join(done.stderr.split())
