"""Two coordinators on one data directory, two on one folder of identities, two devices on one state
directory."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_coordinator.storage.identities import Identities
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for


def test_two_coordinators_on_one_data_directory(run: Processes, bundle_path: Path) -> None:
    plan = run.folder / "plan.toml"
    plan.write_text(plan_text(bundle_path, run.folder / "run", local__lr=0.1))
    first = run.coordinator(plan)
    wait_for(lambda: "listening" in run.log("coordinator"), "the first coordinator")
    second = run.start("second", "python", "-m", "fleetlearn_coordinator", "serve", plan)
    assert second.wait(60) == 1
    assert run.log("second") == (
        f"error: {run.folder / 'run'} is in use by another coordinator; stop that one first\n"
    )
    assert first.poll() is None
    first.terminate()
    assert first.wait(60) == 0


def test_two_coordinators_on_one_folder_of_identities(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """They may: an enrolled device is known to both, and the audit log stays whole."""
    urls = []
    identities = Identities(run.folder / "identities")
    token = identities.make_token(1, 1e12, [], 0.0)
    identities.close()
    for name in ("one", "two"):
        (run.folder / name).mkdir()
        plan, port = run.folder / name / "plan.toml", free_port()
        plan.write_text(
            plan_text(
                bundle_path, run.folder / name / "run", round__goal=1, stop__rounds=2, local__lr=0.1
            )
        )
        service = run.folder / name / "service.toml"
        service.write_text(f'port = {port}\nidentities = "../identities"\n')
        run.start(
            name, "python", "-m", "fleetlearn_coordinator", "serve", plan, "--service", service
        )
        urls.append(f"ws://127.0.0.1:{port}")
    for url, name in zip(urls, ("one", "two"), strict=True):
        run.device("a", url, shards[0], "-m", "fleetlearn_device", env={"FLEETLEARN_TOKEN": token})
        assert run.wait("a") == 0, run.log("a")
        assert run.wait(name) == 0, run.log(name)
        found = status_of(run.folder / name / "run")
        assert found is not None
        assert found.version == 2
    identities = Identities(run.folder / "identities")
    assert identities.broken_at() is None
    assert sorted(event.what for event in identities.events()) == [
        "enrolled", "started", "started", "stopped", "stopped", "token",
    ]  # fmt: skip
    identities.close()


def test_two_devices_on_one_state_directory(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    plan, port = run.folder / "plan.toml", free_port()
    plan.write_text(
        plan_text(bundle_path, run.folder / "run", round__goal=2, round__minimum=2, local__lr=0.1)
    )
    (run.folder / "service.toml").write_text(f"port = {port}\n")
    run.coordinator(plan)
    first = run.device("a", f"ws://127.0.0.1:{port}", shards[0])
    wait_for(lambda: "connected to" in run.log("a"), "the first device")
    second = run.start(
        "second",
        "python",
        "-m",
        "fleetlearn_device",
        "run",
        "--coordinator",
        f"ws://127.0.0.1:{port}",
        "--data",
        shards[0],
        "--state",
        run.folder / "a.state",
    )
    assert second.wait(60) == 1
    assert run.log("second").splitlines()[-1] == (
        f"fleetlearn-device: the state directory {run.folder / 'a.state'} is in use by another "
        "process: each device needs one of its own"
    )
    assert first.poll() is None
