"""The files that [distil] names: which are refused, before a run is served and by doctor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.plan.distil_files import check_distillation
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.service.checks import check_plan
from fleetlearn_coordinator.service.serve import running
from fleetlearn_protocol import open_bundle, write_bundle
from fleetlearn_protocol.manifest import Input, Manifest
from peers import plan_text, write_test_bundle

LAST = Input("teacher", "float32", (3,)), Input("temperature", "float32", ())


def write(folder: Path, trained: Path, changes: Any = None) -> Path:
    """Write the bundle beside a trained one that distils its model. Returns the bundle."""
    bundle = open_bundle(trained)
    manifest = bundle.manifest
    batch = (*manifest.batch[:1], *LAST)
    manifest = msgspec.structs.replace(manifest, batch=batch, name="distil", **(changes or {}))
    contents = {name: bundle.read(name) for name in bundle.manifest.files}
    return write_bundle(folder / "distil.bundle", manifest, contents)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return write_test_bundle(tmp_path / "trained.bundle", 10)


def plan_of(folder: Path, trained: Path) -> Plan:
    files = {"data": "u.npz", "bundle": "distil.bundle"}
    text = plan_text(trained, "run", **{f"distil__{key}": name for key, name in files.items()})
    return Plan.parse(text, folder)


def manifests(trained: Path) -> dict[str, Manifest]:
    return {"": open_bundle(trained).manifest}


def examples(folder: Path, trained: Path, **changes: Any) -> None:
    row = open_bundle(trained).manifest.batch[0]
    np.savez(folder / "u.npz", **({row.name: np.zeros((5, *row.shape), row.dtype)} | changes))


def test_files_that_fit_are_taken(tmp_path: Path, trained: Path) -> None:
    write(tmp_path, trained)
    examples(tmp_path, trained)
    plan = plan_of(tmp_path, trained)
    (bundle,) = check_distillation(plan, manifests(trained))
    assert bundle.manifest.name == "distil"
    checks = {check.what: check for check in check_plan(plan, ServiceSettings())}
    assert checks["distil"].state == "good"


@pytest.mark.parametrize("wrong", ["bundle", "none", "data", "away"])
def test_what_does_not_fit_ends_the_start_with_the_reason(
    tmp_path: Path, trained: Path, wrong: str
) -> None:
    """There is no data directory then."""
    if wrong == "bundle":
        write_bundle_of_another_model = write_test_bundle(tmp_path / "other", 11)
        write(tmp_path, write_bundle_of_another_model)
    elif wrong != "none":
        write(tmp_path, trained)
    if wrong != "away":
        examples(tmp_path, trained, **({"x": np.zeros((5, 9))} if wrong == "data" else {}))
    text = {
        "bundle": "distil.bundle: bundle distil is of another model than bundle test",
        "none": "distil.bundle: ",
        "data": r"distil.data: .*u.npz: array x has shape \[5, 9\]",
        "away": "distil.data: .*u.npz does not exist",
    }[wrong]
    plan = plan_of(tmp_path, trained)

    async def serve() -> None:
        async with running(plan, ServiceSettings.read({"port": 0})):
            pass

    with pytest.raises(PlanError, match=text):
        asyncio.run(serve())
    assert not Path(plan.data_dir).exists()
    checks = {check.what: check for check in check_plan(plan, ServiceSettings())}
    assert checks["distil"].state == "bad"
