"""The command, as a person types it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.commands.status import _print
from fleetlearn_coordinator.service.views.records import EvaluationView, RoundView, RunView
from fleetlearn_coordinator.storage.ledger import ModelMade, RoundClosed, RoundOpened
from fleetlearn_coordinator.storage.store import open_store
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import digest
from peers import PERSONAL, SIZE, plan_text, write_personal_bundle
from processes import Processes, processes, service_file, status_of, wait_for

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path, warm: Path) -> Command:
    return Processes(tmp_path, warm).command


@pytest.fixture
def plan(tmp_path: Path, bundle_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(bundle_path, tmp_path / "run"))
    return path


@pytest.fixture
def run(tmp_path: Path, warm: Path, plan: Path) -> Processes:  # type: ignore[misc]
    with processes(tmp_path, warm) as running:
        running.coordinator(plan)
        wait_for(
            lambda: (status := status_of(tmp_path / "run")) is not None and status.running,
            "the coordinator",
        )
        yield running  # type: ignore[misc]


def test_status_of_a_running_and_of_a_stopped_coordinator(
    command: Command, run: Processes, plan: Path, tmp_path: Path
) -> None:
    shown = command("status", plan)
    assert "not finished; running at ws://127.0.0.1:" in shown.stdout
    found = json.loads(command("status", plan, "--json").stdout)
    assert found["running"]
    assert found["live"]["phase"] == "gathering"
    assert found["version"] == 0
    run.running["coordinator"].send_signal(signal.SIGTERM)
    assert run.wait("coordinator") == 0
    said = "INFO stopped by SIGTERM; the newest model is version 0\n"
    assert run.log("coordinator").count(said.removeprefix("INFO ")) == 1
    assert said in run.log("coordinator")
    shown = command("status", plan, expected=3).stdout
    assert "not finished; not running; model version 0" in shown
    assert re.search(
        r"the coordinator was stopped at 20..-..-.. ..:..:..Z; `fleetlearn-coordinator serve` goes "
        r"on",
        shown,
    )


def test_status_counts_who_cannot_do_its_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    live = {"phase": "gathering", "unable": 2}
    _print(RunView(name="r", state="running", running=True, live=live), 10)
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 devices cannot do this run's tasks, as their own logs say" in shown


def test_status_counts_by_rule_who_is_not_eligible(capsys: pytest.CaptureFixture[str]) -> None:
    causes = {"selection.tiers": 2, "selection.charging": 40}
    live = {"phase": "gathering", "ineligible": 40, "ineligible_by": causes, "barred": 3}
    _print(RunView(name="r", state="running", running=True, live=live), 10)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "40 devices are not eligible (40 by selection.charging, 2 by selection.tiers); 3 took part "
        "lately"
    ) in shown


def test_status_says_whose_examples_each_number_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    means = {"accuracy": 1.0}
    common = {"reports": 4, "dropped": {}, "change": 0.1, "seconds": 1.0, "metrics": means}
    row = RoundView(
        number=1, outcome="committed", opened=0.0, closed=1.0, seconds=1.0, reports=4, partial=0,
        lost={}, refused={}, surplus=0, loss=None, metrics=means, norm=0.1, bytes_up=0,
        bytes_down=0, summary={},
    )  # fmt: skip
    evaluated = {"devices": 9, "examples": 90, "dropped": {}, "metrics": means}
    evaluations = [EvaluationView(1, 3, "valid", 2.0, evaluated)]
    held_out = {3: {"examples": 50, "metrics": {"accuracy": 0.939}}}
    for own, said in (
        (
            {"evaluation": means},
            "of the model that a round began with, on the training examples of the round's own "
            "devices, before they trained",
        ),
        (
            {"evaluation": {}},
            "on the training examples of the round's own devices, while they trained",
        ),
    ):
        rounds = [msgspec.structs.replace(row, summary=common | own)]
        finished = RunView(
            name="r", state="finished", version=3, finished="3 rounds done", rounds=rounds,
            evaluations=evaluations, held_out=held_out,
        )  # fmt: skip
        _print(finished, 10)
        shown = " ".join(capsys.readouterr().out.split())
        assert f"accuracy: {said}" in shown
        assert "evaluations on devices, of their own training examples" in shown
        assert "version 3 on held-out data: accuracy 0.939" in shown


def test_a_killed_coordinator_is_seen_to_be_gone(
    command: Command, run: Processes, plan: Path
) -> None:
    run.kill("coordinator")
    shown = command("status", plan, expected=3).stdout
    assert "not finished; not running; model version 0" in shown
    assert re.search(r"the coordinator died: it was killed, .* after 20..-..-.. ..:..:..Z", shown)
    assert (
        json.loads(command("status", plan, "--json", expected=3).stdout)["live"]["pid"] is not None
    )


def test_export_model_writes_the_parameters_into_the_graph(
    command: Command, run: Processes, plan: Path, tmp_path: Path
) -> None:
    output = tmp_path / "infer.onnx"
    command("export-model", plan, "-o", output)
    content = output.read_bytes()
    assert content[:4] == b"head"
    assert content[-4:] == b"tail"
    version, model = read_model(tmp_path / "run")
    assert version == 0
    np.testing.assert_array_equal(np.frombuffer(content[4:-4], np.float32), model)
    assert model.shape == (SIZE,)
    nowhere = command("export-model", plan, "-o", tmp_path / "no" / "infer.onnx", expected=1).stderr
    assert nowhere == f"error: {tmp_path / 'no' / 'infer.onnx'}: no such file or directory\n"
    missing = command("export-model", plan, "-o", output, "--version", "3", expected=1)
    assert "has no model of version 3; it keeps versions [0]" in re.sub(r"\s+", " ", missing.stderr)


def test_an_exported_model_has_the_bundle_s_own_personal_part(
    command: Command, tmp_path: Path
) -> None:
    path = write_personal_bundle(tmp_path / "personal.bundle")
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(path, tmp_path / "run"))
    settings, bundle = Plan.load(plan), open_bundle(path)
    vector = np.full(SIZE - PERSONAL, 0.5, np.float32)
    store = open_store(settings.data_dir, bundle.sha256)
    store.write(store.write_model(ModelMade(1, digest(vector), 1, 0.0), vector, {}))
    store.close()
    shown = command("export-model", plan, "-o", tmp_path / "infer.onnx")
    said = re.sub(r"\s+", " ", shown.stderr)
    assert (
        "1000 personal parameters have the bundle's initial values: the trained are on the devices"
        in said
    )
    content = np.frombuffer((tmp_path / "infer.onnx").read_bytes()[4:-4], np.float32)
    np.testing.assert_array_equal(
        content, np.concatenate([vector, bundle.parameters()[-PERSONAL:]])
    )


def test_a_second_coordinator_on_the_same_data_is_refused(
    command: Command, run: Processes, plan: Path
) -> None:
    second = command("serve", plan, "--service", service_file(plan), expected=1)
    assert "is in use by another coordinator" in re.sub(r"\s+", " ", second.stderr)


def test_a_port_in_use_is_an_error(
    command: Command, run: Processes, plan: Path, tmp_path: Path, bundle_path: Path
) -> None:
    port = int(str(read_status(tmp_path / "run").address).rsplit(":", 1)[1])
    other = tmp_path / "other.toml"
    other.write_text(plan_text(bundle_path, tmp_path / "other"))
    second = command("serve", other, "--service", service_file(other, port), expected=1)
    assert (
        f"error: cannot listen on 127.0.0.1, port {port}: another program listens there"
        in second.stderr
    )
    assert "Errno" not in second.stderr


def test_errors_are_one_line_and_a_status(command: Command, tmp_path: Path, plan: Path) -> None:
    missing = command("serve", tmp_path / "nowhere.toml", expected=1)
    assert (
        missing.stderr
        == f"error: {tmp_path}/nowhere.toml: the plan cannot be read: no such file or directory\n"
    )
    assert "Traceback" not in missing.stderr
    none = command("status", plan, expected=1)
    assert "is not a coordinator's data directory" in re.sub(r"\s+", " ", none.stderr)
    command("serve", plan, "--log-level", "loud", expected=2)


def test_a_folder_of_runs_beside_a_plan_is_refused(
    command: Command, tmp_path: Path, plan: Path
) -> None:
    service = tmp_path / "service.toml"
    service.write_text('port = 0\nruns = "runs"\n')
    refused = command("serve", plan, "--service", service, expected=1).stderr
    assert f"a plan was given ({plan}), and runs = {tmp_path}/runs in the service file" in refused


def test_the_finished_run_says_so(command: Command, tmp_path: Path, plan: Path) -> None:
    plan.write_text(plan.read_text() + "\nepsilon = 0.2\n")
    settings = Plan.load(plan)
    store = open_store(settings.data_dir, open_bundle(settings.bundle).sha256)
    store.write(
        [RoundOpened(1, 0.0), RoundClosed(1, "committed", {"change": 0.1, "metrics": {}}, 1.0)]
    )
    store.close()
    served = command("serve", plan, "--service", service_file(plan))
    assert "is below 0.2" in served.stderr
    assert "is below 0.2" in json.loads(command("status", plan, "--json").stdout)["finished"]


def test_a_damaged_database_is_an_error(command: Command, tmp_path: Path, plan: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "coordinator.sqlite3").write_bytes(b"not a database" * 100)
    for verb in ("serve", "status"):
        shown = command(verb, plan, expected=1)  # before it would listen
        assert "coordinator.sqlite3: file is not a database; it is damaged: put it back" in re.sub(
            r"\s+", " ", shown.stderr
        )
        assert "Traceback" not in shown.stderr


def test_an_error_is_one_line_also_where_it_is_long(tmp_path: Path) -> None:
    missing = tmp_path / ("a-rather-long-name-" * 8 + ".toml")
    shown = Processes(tmp_path).command("status", missing, expected=1)  # with imports of its own
    assert shown.stderr.startswith(f"error: {missing}: the plan cannot be read")
    assert shown.stderr.count("\n") == 1
