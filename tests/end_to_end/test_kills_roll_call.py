"""An exchange of three phases in real processes, through SIGKILL of the coordinator and of devices
in each phase: what was answered counts once, the phases are those of an undisturbed run, and a
device that does not come back is missing from then on."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file
from roll_call import closed_phases

CRASH = Path(__file__).with_name("crash_roll_call.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    _names = runpy.run_path(str(CRASH))
    COORDINATOR, DEVICE = list(_names["COORDINATOR"]), list(_names["DEVICE"])
NAMES = [f"device-{number}" for number in range(3)]
FIRST = dict(zip(NAMES, (1, 2, 3), strict=True))
"""Who sends what in the first phase. The sum is sent in the second, and the sum of those in the
third."""
CALM = [
    (1, True, FIRST, {}),
    (2, True, dict.fromkeys(NAMES, 6), {}),
    (3, True, dict.fromkeys(NAMES, 18), {}),
]
FAST = {
    ("a phase is recorded and nobody told", 2, "-"),
    ("an answer is recorded but not acknowledged", 3, "1"),
    ("the device has answered and told nobody", 2, "-"),
}


def train(
    run: Processes,
    bundle: Path,
    shards: list[Path],
    crash: str | None = None,
    phase: int = 1,
    *,
    minimum: int = 3,
    training: str = "-",
    **settings: Any,
) -> bytes:
    """Two rounds of three devices, with a roll call after each, or (``training``) one around the
    training of each. Returns the last model's bytes. A device that dies is the first one; it comes
    back unless a phase can do without it (``minimum``)."""
    comes_back = minimum == 3
    words = [str(phase), str(minimum), training]
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    rules = {
        "local__lr": 0.1,
        "local__epochs": 1,
        "round__goal": 3,
        "round__minimum": 3,
        "round__gather": 30.0,
        "round__grace": 30.0,
        "round__deadline": 600.0,
        "stop__rounds": 2,
    }
    plan.write_text(plan_text(bundle, data_dir, **(rules | settings)))
    service_file(plan, port)
    url = f"ws://127.0.0.1:{port}"

    def coordinator(point: str = "-") -> Any:
        return run.coordinator(plan, CRASH, point, *words, "serve", plan)

    def device(name: str, shard: Path, point: str = "-") -> None:
        run.device(name, url, shard, CRASH, point, *words)

    process = coordinator(crash if crash in COORDINATOR else "-")
    for name, shard in zip(NAMES, shards, strict=False):
        device(name, shard, crash if crash in DEVICE and name == NAMES[0] else "-")
    if crash in COORDINATOR:
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
        process = coordinator()
    elif crash is not None:
        assert run.wait(NAMES[0]) == -9, f"it was to die at {crash}: {run.log(NAMES[0])}"
        if comes_back:
            device(NAMES[0], shards[0])
    assert process.wait(60) == 0, run.log("coordinator")
    for name in NAMES if comes_back else NAMES[1:]:
        assert run.wait(name) == 0, run.log(name)
    rounds = read_status(data_dir).rounds
    assert {row.summary["reports"] for row in rounds} == {3}
    return read_model(data_dir)[1].tobytes()


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> bytes:
    with processes(tmp_path_factory.mktemp("called"), warm) as run:
        model = train(run, bundle_path, shards)
        assert closed_phases(run.folder / "run") == CALM * 2
    return model


def tried(points: list[str]) -> list[Any]:
    """Each point in each phase, after each round and around its training."""
    places = [(point, at, training) for point in points for at in (1, 2, 3) for training in "-1"]
    return [
        pytest.param(*place, marks=() if place in FAST else pytest.mark.slow) for place in places
    ]


@pytest.mark.parametrize(("point", "phase", "training"), tried(COORDINATOR))
def test_the_coordinator_dies_in_a_phase(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    undisturbed: bytes,
    point: str,
    phase: int,
    training: str,
) -> None:
    assert train(run, bundle_path, shards, point, phase, training=training) == undisturbed
    assert closed_phases(run.folder / "run") == CALM * 2


@pytest.mark.parametrize(("point", "phase", "training"), tried(DEVICE))
def test_a_device_dies_in_a_phase_and_comes_back(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    undisturbed: bytes,
    point: str,
    phase: int,
    training: str,
) -> None:
    assert train(run, bundle_path, shards, point, phase, training=training) == undisturbed
    assert closed_phases(run.folder / "run") == CALM * 2


@pytest.mark.parametrize(
    "phase", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_device_that_dies_for_good_is_missing_from_then_on(
    run: Processes, bundle_path: Path, shards: list[Path], phase: int
) -> None:
    """The others go on without it."""
    train(
        run, bundle_path, shards, "the device has to answer", phase,
        minimum=2, stop__rounds=1, round__grace=0.5,
    )  # fmt: skip
    last = NAMES[1:]
    expected, numbers = [], FIRST
    for number in (1, 2, 3):
        here = last if number >= phase else NAMES
        sent = FIRST if number == 1 else dict.fromkeys(NAMES, sum(numbers.values()))
        numbers = {name: sent[name] for name in here}
        expected.append((number, True, numbers, {"lost": 1} if number == phase else {}))
    assert closed_phases(run.folder / "run") == expected
