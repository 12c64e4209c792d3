"""What a person types about a run with several models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from answering import NOW, Fleet, leases
from family_plans import LARGE, RAM, SMALL, family_text
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.service.backup import back_up, restore
from fleetlearn_protocol import open_bundle, write_inference_model
from peers import update_of
from typer.testing import CliRunner, Result


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A run of one round: the large model has moved by 1, the small one by 2."""
    path = tmp_path / "plan.toml"
    settings = {"round__goal": 2, "round__minimum": 2, "stop__rounds": 1}
    path.write_text(family_text(tmp_path, **settings))
    fleet = Fleet(Plan.load(path), {"a": RAM, "b": 0})
    fleet.run.resume(NOW)
    for lease in leases(fleet.check_in("a", "b")):
        value, size = (1.0, LARGE) if lease.device == "a" else (2.0, SMALL)
        fleet.report(lease, update_of(value, size))
    assert fleet.run.finished is not None
    fleet.store.close()
    return path


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def test_a_member_is_exported_by_its_name(plan: Path) -> None:
    for member, moved in (("large", 1), ("small", 2)):
        out = plan.with_name(f"{member}.onnx")
        done = run("export-model", plan, "--member", member, "--output", out)
        assert done.exit_code == 0, done.output
        assert f"wrote {member} of version 1" in done.output
        bundle = open_bundle(plan.with_name(f"{member}.bundle"))
        model = bundle.parameters() + np.float32(moved)
        assert out.read_bytes() == write_inference_model(bundle, model)


def test_a_member_as_a_bundle_begins_with_its_model(plan: Path) -> None:
    out = plan.with_name("onward.bundle")
    done = run("export-model", plan, "--member", "small", "--bundle", "--output", out)
    assert done.exit_code == 0, done.output
    initial = open_bundle(plan.with_name("small.bundle")).parameters()
    assert open_bundle(out).parameters().tobytes() == (initial + np.float32(2)).tobytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "the run has several models. Take --member with large, small"),
        (["--member", "tiny"], "there is no member 'tiny'. Take --member with large, small"),
    ],
)
def test_which_member_must_be_said(plan: Path, options: list[str], said: str) -> None:
    done = run("export-model", plan, *options, "--output", plan.with_name("x.onnx"))
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


def test_a_run_with_one_model_has_no_members(plan: Path) -> None:
    text = plan.read_text().partition("[family")[0]
    other = plan.with_name("one.toml")
    other.write_text(text)
    done = run("export-model", other, "--member", "large", "--output", plan.with_name("x.onnx"))
    assert done.exit_code == 1
    assert "the run has one model. Leave --member out" in " ".join(done.output.split())


def test_versions_are_compared_parameter_by_parameter_of_each_member(plan: Path) -> None:
    found = json.loads(run("compare-models", plan, 0, 1, "--json").stdout)
    changes = {row["name"]: row["change"] for row in found["parameters"]}
    expected = {"large/w": LARGE**0.5, "small/w": 2 * SMALL**0.5}
    assert changes == pytest.approx(expected)
    assert found["distance"] == pytest.approx((LARGE + 4 * SMALL) ** 0.5)


def test_status_and_rounds_say_what_each_member_did(plan: Path) -> None:
    shown = " ".join(run("status", plan).output.split())
    assert "large in round 1: 1 report, loss 0.7, accuracy 0.5, change 26.5" in shown
    assert "small in round 1: 1 report" in shown
    (row,) = json.loads(run("status", plan, "--json").stdout)["rounds"]
    assert row["summary"]["members"]["small"]["reports"] == 1


def test_the_tasks_of_a_round_name_their_members(plan: Path) -> None:
    shown = run("rounds", plan, "--round", "1")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["device", "model", "task", "state"] in lines
    assert {(line[0], line[1]) for line in lines if line[-1:] == ["accepted"]} == {
        ("a", "large"),
        ("b", "small"),
    }


def test_the_doctor_looks_at_each_bundle(plan: Path) -> None:
    shown = " ".join(run("doctor", plan).output.split())
    assert f"large.bundle: {LARGE} parameters, whole" in shown
    assert f"small.bundle: {SMALL} parameters, whole" in shown
    (plan.with_name("small.bundle") / "eval.onnx").write_bytes(b"other")
    assert "small.bundle" in run("doctor", plan).output


def test_a_backup_has_every_member_s_bundle(plan: Path, tmp_path: Path) -> None:
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    back_up(plan, backup)
    restore(backup, restored)
    (found,) = restored.rglob("plan.toml")
    again = Plan.load(found)
    for path in again.members.values():
        assert path.is_relative_to(restored)
        open_bundle(path)
    assert (
        read_model(again.data_dir)[1].tobytes() == read_model(Plan.load(plan).data_dir)[1].tobytes()
    )
