"""FedMD between real processes: three devices with models of three kinds, which never leave them,
learn from each other by class scores of public digits; whoever is killed meanwhile."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from distilling import distillation_bundle
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import DIGITS, Processes, free_port, service_file, wait_for
from torch import nn

pytestmark = pytest.mark.slow

CRASH = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
NAMES = ("cnn", "mlp", "linear")
PUBLIC = 200
ROUNDS = 4
COORDINATOR_DIES = {
    "tasks are recorded but not sent": 2,
    "an update is complete but not recorded": 5,
    "a small update is summed and counted": 4,
    "the new model is in its place but not recorded": 2,
    "a round is recorded and nobody told": 2,
}
"""Point -> which time it kills."""
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    DEVICE_DIES = list(runpy.run_path(str(CRASH_DEVICE))["POINTS"])


@pytest.fixture(scope="session")
def distillations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distillation bundles of ``family_bundles``'s models, and public digits."""
    folder = tmp_path_factory.mktemp("fedmd")
    x = DIGITS["data"]().x_train[:PUBLIC].reshape(-1, 64)
    models = {
        "cnn": nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
        "mlp": nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        "linear": nn.Linear(64, 10),
    }
    for name, model in models.items():
        distillation_bundle(model, torch.from_numpy(x[:4]), folder / f"{name}.bundle")
    np.savez(folder / "public.npz", x=x)
    return folder


@pytest.fixture(scope="session")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The digits of each device: of few classes, and none of the public ones."""
    folder, (x, y) = tmp_path_factory.mktemp("own"), DIGITS["data"]()[:2]
    x, y = x[PUBLIC:].reshape(-1, 64), y[PUBLIC:]
    found = {}
    for name, rows in zip(NAMES, DIGITS["dirichlet_shards"](y, 3, alpha=0.3, seed=1), strict=True):
        found[name] = folder / f"{name}.npz"
        np.savez(found[name], x=x[rows], y=y[rows])
    return found


def begin(
    run: Processes, files: Path, rounds: int = ROUNDS, more: str = "", **changes: object
) -> tuple[Path, str]:
    """Write the public bundle and the plan. Returns the plan and the coordinator's address."""
    bundle, plan = run.folder / "public.bundle", run.folder / "plan.toml"
    words = ("--classes", "10", "--metric", "accuracy", "--output", str(bundle))
    told = run.command("public-bundle", files / "public.npz", *words).stderr
    assert f"in each round a device fetches and sends {4 * PUBLIC * 10} bytes" in " ".join(
        told.split()
    )
    settings = {
        "local__lr": 0.1,
        "local__epochs": 2,
        "local__evaluate": True,
        "round__goal": 3,
        "round__minimum": 3,
        "round__over_selection": 1.0,
        "round__grace": 60.0,
        "round__deadline": 300.0,
        "stop__rounds": rounds,
        **changes,
    }
    plan.write_text(plan_text(bundle, run.folder / "run", "fedmd", **settings) + more)
    port = free_port()
    service_file(plan, port)
    return plan, f"ws://127.0.0.1:{port}"


def device(
    run: Processes, name: str, url: str, bundle: Path, files: Path, data: Path, *wrapper: str | Path
) -> None:
    options = ["--own-bundle", str(bundle), "--own-distillation", str(files / f"{name}.bundle")]
    options += ["--own-model", str(run.folder / f"{name}.onnx")]
    run.device(name, url, data, *wrapper, options=options)


def scores_of(run: Processes, name: str, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(run.folder / f"{name}.onnx")
    return np.asarray(session.run(None, {"x": x})[0])


def check(run: Processes, files: Path, rounds: int = ROUNDS) -> None:
    """The run is over, and the consensus is the mean of what the devices' own models say."""
    status = read_status(run.folder / "run")
    assert status.version == rounds
    assert [row.summary["reports"] for row in status.rounds[-rounds:]] == [3] * rounds
    x = np.load(files / "public.npz")["x"]
    expected = np.mean([scores_of(run, name, x) for name in NAMES], axis=0)
    found = read_model(run.folder / "run")[1].reshape(PUBLIC, 10)
    assert np.abs(found - expected).max() < 1e-4


def wait_for_all(run: Processes) -> None:
    for name in ("coordinator", *NAMES):
        assert run.wait(name, 240) == 0, run.log(name)


def test_each_device_is_better_than_alone(
    run: Processes,
    family_bundles: Mapping[str, Path],
    distillations: Path,
    own_data: Mapping[str, Path],
) -> None:
    rounds = 20
    more = "\n[local.hyper]\ndigest_lr = 0.01\ndigest_epochs = 10\n"
    plan, url = begin(run, distillations, rounds, more)
    run.coordinator(plan)
    for name in NAMES:
        device(run, name, url, family_bundles[name], distillations, own_data[name])
    wait_for_all(run)
    check(run, distillations, rounds)
    summary = read_status(run.folder / "run").rounds[-1].summary
    assert {"loss", "accuracy", "digest_loss"} <= {*summary["metrics"]}
    data = DIGITS["data"]()
    unseen, labels = data.x_test.reshape(-1, 64), data.y_test
    for name in NAMES:
        found = (scores_of(run, name, unseen).argmax(1) == labels).mean()
        # Alone it can know the digits that it has alone.
        classes, counts = np.unique(np.load(own_data[name])["y"], return_counts=True)
        most_alone = np.isin(labels, classes[counts > 5]).mean()
        assert found > most_alone + 0.1, (name, found, most_alone)
    refused = run.command("export-model", plan, "--output", "x.onnx", expected=1).stderr
    assert "the mean of their class scores" in " ".join(refused.split())
    refused = run.command("evaluate", plan, expected=1).stderr
    assert "is a run without a model" in " ".join(refused.split())
    consensus = run.folder / "consensus.npz"
    run.command("export-model", plan, "--output", consensus)
    with np.load(consensus) as written:
        assert written["scores"].shape == (PUBLIC, 10)
        right = written["scores"].argmax(1) == data.y_train[:PUBLIC]
    assert right.mean() > 0.8


@pytest.mark.parametrize("point", COORDINATOR_DIES)
def test_a_coordinator_that_is_killed_goes_on(
    point: str,
    run: Processes,
    family_bundles: Mapping[str, Path],
    distillations: Path,
    own_data: Mapping[str, Path],
) -> None:
    plan, url = begin(run, distillations)
    process = run.coordinator(plan, CRASH, point, str(COORDINATOR_DIES[point]), plan)
    for name in NAMES:
        device(run, name, url, family_bundles[name], distillations, own_data[name])
    assert process.wait(120) == -9, f"it was to die where {point}: {run.log('coordinator')}"
    run.coordinator(plan)
    wait_for_all(run)
    check(run, distillations)


@pytest.mark.parametrize("point", DEVICE_DIES)
def test_a_device_that_is_killed_goes_on_with_its_model(
    point: str,
    run: Processes,
    family_bundles: Mapping[str, Path],
    distillations: Path,
    own_data: Mapping[str, Path],
) -> None:
    plan, url = begin(run, distillations)
    run.coordinator(plan)
    for name in NAMES[1:]:
        device(run, name, url, family_bundles[name], distillations, own_data[name])
    name = NAMES[0]
    rest = (family_bundles[name], distillations, own_data[name])
    device(run, name, url, *rest, CRASH_DEVICE, point, "2")
    assert run.wait(name, 120) == -9, run.log(name)
    device(run, name, url, *rest)
    wait_for_all(run)
    check(run, distillations)


PRIVACY = "\n[privacy]\nnoise = 1.0\ndelta = 1e-6\npopulation = 1000\nclip = 5.0\n"
PAIRWISE = (
    '\n[secure]\nmode = "pairwise"\nclip = 5.0\nminimum = 3\nadversaries = 0.0\ndropouts = 0.0\n'
)


@pytest.mark.parametrize(
    ("more", "changes", "off"),
    [
        ("", {"encoding__up": "int8"}, 0.2),
        ("", {"encoding__up": "topk-0.5"}, None),
        ("", {"aggregation__aggregator": "median"}, None),
        (PRIVACY, {"local__evaluate": False}, None),
        (PAIRWISE, {"local__evaluate": False}, None),
    ],
    ids=["int8", "top-k", "median", "privacy", "secure"],
)
def test_what_a_mean_of_updates_can_do(
    run: Processes, family_bundles: Mapping[str, Path], distillations: Path,
    own_data: Mapping[str, Path], more: str, changes: dict[str, object], off: float | None,
) -> None:  # fmt: skip
    plan, url = begin(run, distillations, 3, more, **changes)
    run.coordinator(plan)
    for name in NAMES:
        device(run, name, url, family_bundles[name], distillations, own_data[name])
    wait_for_all(run)
    assert read_status(run.folder / "run").version == 3
    found = read_model(run.folder / "run")[1].reshape(PUBLIC, 10)
    assert np.isfinite(found).all()
    assert found.any()
    if off is not None:
        x = np.load(distillations / "public.npz")["x"]
        expected = np.mean([scores_of(run, name, x) for name in NAMES], axis=0)
        assert np.abs(found - expected).max() < off


def test_a_device_without_a_model_of_its_own_is_told_so(
    run: Processes, distillations: Path, own_data: Mapping[str, Path]
) -> None:
    plan, url = begin(run, distillations)
    run.coordinator(plan)
    run.device("plain", url, own_data["linear"])
    wait_for(lambda: "fedmd" in run.log("plain"), "the device to be told")
