"""fleetlearn-coordinator vertical: which party has the labels is said, and must be one of the
run's."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_export import LocalStep
from split_models import exported_vertical, vertical
from typer.testing import CliRunner


@pytest.mark.slow
def test_the_party_with_the_labels_is_one_of_the_run(tmp_path: Path) -> None:
    exported_vertical(tmp_path / "parts", LocalStep("sgd"), vertical())
    top = str(tmp_path / "parts" / "top.bundle")
    typed = ["vertical", "init", str(tmp_path / "run"), top]
    wrong = CliRunner().invoke(app, [*typed, "--labels", "hospitl"])
    assert wrong.exit_code == 1
    assert "there is no party hospitl" in " ".join(wrong.output.split())
    assert not (tmp_path / "run").exists()
    right = CliRunner().invoke(app, typed)
    assert right.exit_code == 0, right.output
    assert "has the labels" in " ".join(right.output.split())
