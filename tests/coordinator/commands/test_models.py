"""The commands about models, as a person types them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.rounds.commands import Finish
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, RoundClosed, RoundOpened
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle, write_inference_model
from fleetlearn_protocol.manifest import INFER, PARAMETERS
from fleetlearn_protocol.vector import digest
from peers import SIZE, plan_text, write_personal_bundle, write_test_bundle
from typer.testing import CliRunner, Result


@pytest.fixture
def plan(tmp_path: Path, bundle_path: Path) -> Path:
    """A run that stopped at version 3."""
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(bundle_path, tmp_path / "run"))
    store = open_store(tmp_path / "run", open_bundle(bundle_path).sha256)
    for version in range(4):
        vector = np.full(SIZE, version, np.float32)
        rows = store.write_model(
            ModelMade(version, digest(vector), version, 5.0),
            vector,
            {},
            [1] if version == 3 else [],
        )
        if version:
            store.write([RoundOpened(version, 0.0)])
            summary = {"change": 0.5, "metrics": {"accuracy": 0.5}, "behind": {"accuracy": 2}}
            rows = [*rows, RoundClosed(version, "committed", summary, 5.0)]
        store.write(rows)
    store.close()
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )


def test_models_lists_what_is_kept(plan: Path) -> None:
    shown = run("models", plan)
    assert shown.exit_code == 0
    lines = [re.sub(r"\s+", " ", line).strip() for line in shown.stdout.splitlines()]
    assert "0 initial initial 0.3 0.5" in lines
    assert any(line.startswith("3 round 3 newest 0.3") for line in lines)
    said = (
        "(round): measured by the devices of the round that began with it, on the devices' "
        "training examples"
    )
    assert said in shown.stdout
    rows = json.loads(run("models", plan, "--json").stdout)
    assert [row["version"] for row in rows] == [0, 2, 3]
    assert [
        row["version"] for row in json.loads(run("models", plan, "--json", "--all").stdout)
    ] == [0, 1, 2, 3]


def test_two_models_are_compared(plan: Path) -> None:
    shown = run("compare-models", plan, 2, 3)
    assert shown.exit_code == 0
    assert "cosine 1.000000" in shown.stdout
    assert "50.00%" in shown.stdout
    assert json.loads(run("compare-models", plan, 2, 3, "--json").stdout)[
        "distance"
    ] == pytest.approx(SIZE**0.5)
    assert "it keeps versions [0, 2, 3]" in re.sub(
        r"\s+", " ", run("compare-models", plan, 1, 3).stderr
    )


def test_roll_back_is_a_request(plan: Path) -> None:
    shown = run("roll-back", plan, 2)
    assert shown.exit_code == 0
    assert "when the plan is served again" in re.sub(r"\s+", " ", shown.stderr)
    request = find_storage(Plan.load(plan).data_dir).requests.roll_back()
    assert request is not None
    assert request[1:] == (2, "command")
    for version in (1, 3, 9):
        refused = run("roll-back", plan, version)
        assert refused.exit_code == 1
        assert (
            f"cannot be rolled back to version {version}; the newest is 3, and it keeps 0, 2"
            in re.sub(r"\s+", " ", refused.stderr)
        )


def finished_by_accuracy(plan: Path, *, version: int, target: float = 0.75) -> None:
    """Let the run be over, since the model of this version met the target. ``version`` 2 is not the
    newest, 3."""
    # its last table is [stop]
    plan.write_text(plan.read_text() + f'\nmetric = "accuracy"\ntarget = {target}\n')
    settings = Plan.load(plan)
    store = open_store(settings.data_dir, open_bundle(settings.bundle).sha256)
    for number, accuracy in ((1, 0.3), (2, 0.6), (3, 0.76)):  # of versions 0, 1 and 2
        summary = {"change": 0.5, "metrics": {"accuracy": accuracy}, "behind": {"accuracy": 2}}
        store.write([RoundClosed(number, "committed", summary, 5.0)])
    reason = (
        f"accuracy of model version {version} is 0.76 on the devices' training examples; the "
        f"target is {target}"
    )
    rule = Finish(reason, "metric", 0.76, target, "accuracy", version)
    store.write([Metadata("finished", reason), Metadata("finished_by", json.dumps(rule._asdict()))])
    store.close()


def exported(plan: Path, tmp_path: Path, *arguments: object) -> tuple[int, str]:
    """Return the version that ``export-model`` wrote, by its elements, and what the command
    said."""
    output = tmp_path / "infer.onnx"
    shown = run("export-model", plan, "--output", output, *arguments)
    assert shown.exit_code == 0, shown.stderr
    vector = np.frombuffer(
        output.read_bytes().removeprefix(b"head").removesuffix(b"tail"), np.float32
    )
    return int(vector[0]), re.sub(r"\s+", " ", shown.stderr)


def test_serve_says_once_how_the_run_ended(plan: Path, tmp_path: Path) -> None:
    finished_by_accuracy(plan, version=2)
    service = tmp_path / "service.toml"
    service.write_text("port = 0\n")
    shown = run("serve", plan, "--service", service)
    assert shown.exit_code == 0
    assert shown.stdout == ""
    assert shown.stderr.count("the newest model is version 3\n") == 1
    assert shown.stderr.count("INFO export-model writes version 2, which met the target\n") == 1


def test_a_run_whose_patience_ended_exports_the_best_model(plan: Path, tmp_path: Path) -> None:
    finished_by_accuracy(plan, version=2)
    text = plan.read_text().replace("target = 0.75", "patience = 1\nleast = 0.5\nrounds = 9")
    plan.write_text(re.sub(r"(?m)^rounds = (?!9).*$", "", text))
    service = tmp_path / "service.toml"
    service.write_text("port = 0\n")
    shown = run("serve", plan, "--service", service)
    assert shown.exit_code == 0
    assert shown.stderr.count("INFO export-model writes version 2, which is the best\n") == 1
    version, said = exported(plan, tmp_path)
    assert version == 2
    reason = (
        "accuracy on the devices' training examples is best, 0.76, at model version 2: 2 measured "
        "models have not improved it by more than 0.5"
    )
    assert f"wrote version 2 (the best that was measured: {reason})" in said


def test_a_run_that_stopped_at_its_target_exports_the_model_that_met_it(
    plan: Path, tmp_path: Path
) -> None:
    version, said = exported(plan, tmp_path)
    assert (version, "wrote version 3 (the newest)" in said) == (3, True)
    finished_by_accuracy(plan, version=2)
    version, said = exported(plan, tmp_path)
    assert version == 2
    reason = (
        "accuracy of model version 2 is 0.76 on the devices' training examples; the target is 0.75"
    )
    assert f"wrote version 2 (which met the target: {reason})" in said
    lines = [re.sub(r"\s+", " ", line).strip() for line in run("models", plan).stdout.splitlines()]
    assert any(line.startswith("2 round 2 target 0.3 0.5 0.76") for line in lines), lines


@pytest.mark.parametrize(
    ("wanted", "version", "why"),
    [
        ("newest", 3, "the newest"),
        ("3", 3, "as asked"),
        ("measured", 2, "which met the target"),
        ("best", 2, "the best: accuracy 0.76 on the devices' training examples"),
    ],
)
def test_a_version_is_chosen_by_what_it_is(
    plan: Path, tmp_path: Path, wanted: str, version: int, why: str
) -> None:
    finished_by_accuracy(plan, version=2)
    found, said = exported(plan, tmp_path, "--version", wanted)
    assert found == version
    assert why in said


def test_a_version_that_cannot_be_chosen_is_refused_with_the_reason(
    plan: Path, tmp_path: Path
) -> None:
    for wanted, text in {
        "best": "models.metric or stop.metric must name a metric",
        "newset": "version 'newset': a version is a number, or one of newest, measured, best",
        "1": "has no model of version 1",
    }.items():
        refused = run(
            "export-model", plan, "--output", tmp_path / "infer.onnx", "--version", wanted
        )
        assert refused.exit_code == 1
        assert text in re.sub(r"\s+", " ", refused.stderr)


@pytest.mark.parametrize("make", [write_test_bundle, write_personal_bundle])
def test_a_bundle_begins_a_new_run_with_the_model(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    """All else of the bundle stays: the graphs, and what is personal."""
    old = open_bundle(make(tmp_path / "old.bundle"))
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(old.path, tmp_path / "run"))
    model = np.random.default_rng(0).normal(size=old.manifest.size).astype(np.float32)
    store = open_store(tmp_path / "run", old.sha256)
    store.write(store.write_model(ModelMade(0, digest(model), 0, 5.0), model, {}))
    store.close()
    output = tmp_path / "onward.bundle"
    shown = run("export-model", plan, "--bundle", "--output", output)
    assert shown.exit_code == 0, shown.stderr
    said = re.sub(r"\s+", " ", shown.stderr)
    assert "wrote a bundle that begins with version 0 (the newest) to" in said
    new = open_bundle(output)
    assert new.sha256 != old.sha256
    assert np.array_equal(new.parameters()[: model.size], model)
    assert np.array_equal(new.parameters()[model.size :], old.parameters()[model.size :])
    assert msgspec.structs.replace(new.manifest, files={}) == msgspec.structs.replace(
        old.manifest, files={}
    )
    assert new.read(INFER) == write_inference_model(old, model)
    for file in old.manifest.files.keys() - {PARAMETERS, INFER}:
        assert new.read(file) == old.read(file)
    assert sorted(path.name for path in tmp_path.iterdir() if "onward" in path.name) == [
        "onward.bundle"
    ]
