"""What a private run shows: nothing of what its devices have and measure, wherever one looks.

Devices say numbers that can be recognised, and all that a person or a program can read of the run
is searched for them. The same search finds them in a run without [privacy], so that it can fail.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from computing import texts
from fleetlearn_coordinator import Plan, RunResults, read_status
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.aggregation import accepted_reports, open_round
from fleetlearn_coordinator.aggregation.round_summary import summarise
from fleetlearn_coordinator.results.points import points_of
from fleetlearn_coordinator.service.server import NOT_SHOWN, RunServer
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_device.computations.registry import sum_up
from fleetlearn_protocol.computations.private_sums import clip_sums
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import first_state, private_groups
from fleetlearn_protocol.encodings import INT64
from fleetlearn_protocol.formats.whole import sums_to_bytes
from fleetlearn_protocol.messages import Accepted, Evaluation, Failed, Grant, Refused
from peers import plan_text, report_of, update_of, write_test_bundle
from processes import wait_for
from statistics_bundle import statistics_bundle
from typer.testing import CliRunner
from watched import Browser, Watched

SIZE = 10
PRIVATE: dict[str, Any] = {
    "privacy__noise": 1.0,
    "privacy__delta": 1e-6,
    "privacy__population": 1000,
    "privacy__clip": 0.5,
}
NOISED = PRIVATE | {
    "privacy__metrics": "noised",
    "privacy__metrics_bounds": {"loss": [0.0, 1.0], "accuracy": [0.0, 1.0]},
}
PLANS = {
    "plain": ("fedavg", {}),
    "none": ("dp-fedavg", PRIVATE),
    "noised": ("dp-fedavg", NOISED),
    "several": ("dp-fedavg", PRIVATE),  # on a host of several runs
}
EXAMPLES = 7654321
PLANTED = {
    "the training loss": r"0\.123[45]",
    "a training metric": r"0\.876[54]",
    "an evaluation's loss": r"0\.234[56]",
    "an evaluation's metric": r"0\.765[43]",
    "the examples": r"7654321|15308642|1\.5308642e",
    "a failed device's words": r"0\.345[67]",
    "the norm of an update": r"31\.6[23]",
    "an element of a refused update": r"4\.56[78]",
}
"""What is searched for: as it is, and as it is rounded."""
FIELDS: dict[str, Any] = {
    "examples": EXAMPLES,
    "loss": 0.123456789,
    "metrics": {"accuracy": 0.876543219},
    "evaluation": Evaluation(EXAMPLES, EXAMPLES * 0.234567891, {"accuracy": EXAMPLES * 0.76543219}),
    "clipped": True,
}


def plan_of(folder: Path, recipe: str, settings: dict[str, Any]) -> Plan:
    bundle = write_test_bundle(folder / "test.bundle", SIZE)
    tables = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    text = plan_text(bundle, folder / "run", recipe, round__grace=60.0, **tables)
    for key, value in settings.items():
        if isinstance(value, dict):
            rows = ", ".join(f"{name} = {json.dumps(row)}" for name, row in value.items())
            text += f"\n{key.partition('__')[2]} = {{ {rows} }}"
    (folder / "plan.toml").write_text(text)
    return Plan.load(folder / "plan.toml")


async def refuse(peer: Any) -> None:
    """Report an update that cannot be added."""
    task, update = await peer.task(), update_of(4.56789e10, SIZE)
    await peer.send(report_of(task, update, **FIELDS))
    await peer.send_update(await peer.expect(Grant), update)
    await peer.expect(Refused)


async def fail(peer: Any) -> None:
    task = await peer.task()
    await peer.send(Failed(task.task, "diverged", "the loss was 0.345678912 and is nan now"))


async def train(peer: Any) -> None:
    task = await peer.task()
    assert isinstance(await peer.upload(task, update_of(10.0, SIZE), **FIELDS), Accepted)


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return str(answer.read().decode())


def shown_by(host: Watched, plan: Plan, log: pytest.LogCaptureFixture) -> Iterator[str]:
    """Yield all that can be read of the run, and of the devices in it."""
    browser = Browser(host.address)
    browser.sign_in(host.token("anna", "view"))
    for path in (
        "status", "runs", "runs/test", "runs/test/rounds", "runs/test/rounds/1", "runs/test/events",
        "runs/test/models", "devices", "devices/a", "devices/b", "canaries", "audit",
    ):  # fmt: skip
        response, content = browser.send("GET", f"/v1/{path}")
        assert response.status in (200, 404, 409), (path, content)
        yield f"{path}: {content.decode()}"
    with browser.look("host", "run/test") as look:
        look.until(lambda: len(look.values) == 2)
        yield f"live: {look.values} {look.lists}"
    for name in ("page", "metrics"):
        (address,) = {*re.findall(rf"{name}: (http[^ \n]*)", log.text)}
        for path in {"page": ("status.json", "page.json"), "metrics": ("metrics", "readyz")}[name]:
            place = address.rstrip("/").removesuffix("/metrics")
            yield f"{path}: {read(f'{place}/{path}')}"
    browser.sign_in(host.token("otto"))
    refused, answer = browser.ask("POST", "/v1/runs/test/evaluate", {})
    none = plan.privacy is not None or plan.algorithm.computes
    assert (refused == 400) == none, answer
    yield f"evaluate: {answer} {browser.ask('GET', '/v1/audit')}"
    results = RunResults.load(plan.data_dir)
    rows = [*results.rounds().rows, *results.evaluations().rows]
    yield f"results: {rows} {[[*points_of(row)] for row in rows]}"
    yield f"status: {read_status(plan.data_dir)}"
    views = LocalViews(plan=plan)
    yield f"views: {views.run(None)} {views.rounds(None)} {views.devices()}"
    commands = [["status"], ["status", "--json"], ["rounds"], ["models"]]
    if plan.algorithm.computes:
        commands += [["result"], ["result", "--json"]]
    for words in commands:
        yield f"{words}: {CliRunner().invoke(app, [*words, plan.file]).output}"
    for record in log.records:
        yield f"log: {record.getMessage()} {vars(record)}"


def outputs_of(
    plan: Plan,
    folder: Path,
    log: pytest.LogCaptureFixture,
    *,
    several: bool = False,
    train: Any = train,
    refuse: Any = refuse,
    **stated: Any,
) -> list[str]:
    """Let two devices do a round of the plan, and a task each that fails; return all that is shown
    then."""
    log.set_level("DEBUG", "fleetlearn")
    (folder / "page").mkdir()
    (folder / "page" / "index.html").write_text("")
    ports: dict[str, Any] = {"metrics": {"port": 0}, "page": {"port": 0, "folder": "page"}}
    if several:
        ports["page"]["run"] = "test"
        with closing(Runs(folder / "runs")) as runs:
            runs.add("test", Path(plan.file))
    events: list[Any] = []
    with Watched(folder, None if several else plan, heartbeat=3600.0, **ports) as host:
        if not several:
            host.server.run.observers.add(events.extend)
        a, b = host.join("a", **stated), host.join("b", **stated)
        host.do(train(a))
        host.do(train(b))
        wait_for(lambda: read_status(plan.data_dir).version == 1, "the first round")
        host.do(fail(a))
        host.do(refuse(b))
        views = LocalViews(plan=plan)
        wait_for(lambda: [row.failed for row in views.devices()] == [1, 1], "the ledger")
        return [*shown_by(host, plan, log), f"events: {events}"]


def planted_in(texts: list[str]) -> dict[str, list[str]]:
    """Return what was planted -> where it is shown."""
    return {
        what: [text for text in texts if re.search(pattern, text)]
        for what, pattern in PLANTED.items()
    }


@pytest.mark.parametrize("kind", PLANS)
def test_nothing_that_devices_have_or_measure_is_shown(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(tmp_path, *PLANS[kind])
    texts = outputs_of(plan, tmp_path, caplog, several=kind == "several")
    found = planted_in(texts)
    if kind == "plain":
        assert all(found.values()), "the search finds what is shown"
        return
    for what, there in found.items():
        assert not there, f"{what} is shown: {there[0][:2000]}"
    words = [text.partition(":")[0] for text in texts if NOT_SHOWN in text]
    assert {"log", "devices", "live"} <= {*words}, "they say why the words are not there"
    (row,) = read_status(plan.data_dir).rounds
    summary = row.summary
    assert (summary["train"], summary["behind"], summary["left_out"]) == ({}, {}, {})
    measured = {"accuracy", "loss"} if kind == "noised" else set()
    assert summary["metrics"].keys() == summary["evaluation"].keys() == measured
    assert all(0 <= value <= 1 for value in summary["metrics"].values())
    assert not [text for text in texts if re.search(r"\bnan\b", text, re.IGNORECASE)]


ASKED = Statistics(
    numbers=(NumberColumn("age", range=(0.0, 100.0)),),
    categories=(CategoryColumn("city", longest=8),),
    rounds=3,
)
ROWS, CLIP = 12345, 1e5
PLANTED_SUMS = {
    "all rows": r"24690|24,690|2\.469e",
    "a refused sum": r"4\.61169e|4611686018427387904",
    "the examples": PLANTED["the examples"],
}
"""Of both devices together, and of one that says too much."""


async def send_sums(peer: Any, first: int | None = None) -> Any:
    """Report sums as a device does. ``first``: in place of the first of them."""
    task, state = await peer.task(), first_state(ASKED)
    columns = {"age": np.full(ROWS, 33.0), "city": texts(["Bonn"] * ROWS, 8)}
    sums = sum_up(state, [columns], ASKED)
    if task.clip is not None:
        sums = clip_sums(sums, private_groups(ASKED, state), task.clip).sums
    if first is not None:
        sums[0] = first
    content = sums_to_bytes(sums)
    parts = (INT64.part("sums", content),)
    return await peer.upload(task, np.frombuffer(content, np.uint8), parts=parts, **FIELDS)


async def compute(peer: Any) -> None:
    assert isinstance(await send_sums(peer), Accepted)


async def overdo(peer: Any) -> None:
    assert isinstance(await send_sums(peer, 2**62), Refused)


@pytest.mark.parametrize("kind", ["plain", "private"])
def test_nothing_of_a_private_computation_is_shown(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = statistics_bundle(tmp_path, ASKED)
    text = (
        f'recipe = "statistics"\nname = "test"\nbundle = "{bundle.path}"\ndata_dir = "run"\n'
        "[round]\ngoal = 2\nminimum = 2\nover_selection = 1.0\ngrace = 60.0\n"
    )
    if kind == "private":
        text += f"[privacy]\nnoise = 2e-3\ndelta = 1e-6\npopulation = 1000\nclip = {CLIP}\n"
    (tmp_path / "plan.toml").write_text(text)
    plan = Plan.load(tmp_path / "plan.toml")
    knows = {"algorithms": ("statistics",), "encodings": ("float32", "int64")}
    shown = outputs_of(plan, tmp_path, caplog, train=compute, refuse=overdo, **knows)
    for what, pattern in PLANTED_SUMS.items():
        there = [text for text in shown if re.search(pattern, text)]
        assert bool(there) == (kind == "plain"), f"{what}: {there[:1]}"
    (found,) = [text for text in shown if text.startswith("['result', '--json']")]
    assert '"Bonn"' in found, "with and without noise"


MISTAKES: dict[str, tuple[Any, str, Any, set[str]]] = {
    "observers are told whole reports": (
        run, "without_measurements", lambda report: report,
        {"the training loss", "a training metric", "the examples"},
    ),
    "words are shown": (
        RunServer, "shown", lambda server, task, text: text,
        {"a failed device's words", "an element of a refused update"},
    ),
    "the summary has what was measured": (
        open_round, "measured",
        lambda accepted, rules: summarise(
            accepted_reports._training(accepted, rules),
            accepted_reports._evaluation(accepted, rules),
            {},
        ),
        {"the training loss", "a training metric", "an evaluation's loss",
         "an evaluation's metric"},
    ),
}  # fmt: skip
"""Owner, function, what takes its place, and what at least is shown then."""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(
    mistake: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, function, replacement, shown = MISTAKES[mistake]
    monkeypatch.setattr(owner, function, replacement)
    found = planted_in(outputs_of(plan_of(tmp_path, *PLANS["none"]), tmp_path, caplog))
    assert {what for what, there in found.items() if there} >= shown
