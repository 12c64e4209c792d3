"""Own laws of availability and failure, named in a scenario: from the command line to the report,
what is refused, and what a resumed run says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import PastRound, PlanError
from fleetlearn_protocol import extensions, open_bundle
from fleetlearn_simulator import Options, Scenario, SimulatorError, simulate
from fleetlearn_simulator.__main__ import app
from fleetlearn_simulator.results.run_folder import read_json, read_rows
from own_formats import OURS_AS_OWN
from typer.testing import CliRunner
from virtual import write_scenario

PAGE = Path(__file__).parents[2] / "docs" / "start" / "your-own-algorithm.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
"""Name of a module -> its code, as the page has it."""
LAWS = (
    BLOCKS["commuters"]
    + """

def wrong_shape():
    return lambda tasks: np.zeros(3)


def before_now():
    class Law:
        def online(self, devices, t):
            return np.ones(len(devices), bool)

        def until(self, devices, t):
            return np.full(len(devices), t - 1.0)

        next_online = until

    return Law()


def raising():
    return lambda tasks: 1 / 0


def away():
    class Law:
        def online(self, devices, t):
            return {}["shift"]

        until = next_online = online

    return Law()


def a_number():
    return 7
"""
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with extensions.apart():
        yield


def scenario_file(folder: Path, line: Path, laws: str = "commuters", **settings: Any) -> Path:
    """Twenty devices, of which four are wanted in each round."""
    (folder / f"{laws}.py").write_text(LAWS)
    goal = {"goal": 4, "minimum": 1, "over_selection": 1.5, "deadline": 1000.0}
    return write_scenario(
        folder, line, 20, **{"plan__round": goal, "plan__stop__rounds": 3, **settings}
    )


OWN = {
    "availability": {
        "kind": "commuters:office_hours",
        "parameters": {"share": 0.8},
        "zones": [{"hours": 9.0}, {"hours": 12.0}],
    },
    "failures": {"law": "commuters:tunnels", "parameters": {"chance": 0.5}},
}


def run(path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["run", str(path), "--workers", "1", *arguments], env={"COLUMNS": "300"}
    )


def test_the_command_runs_own_laws(line: Path, tmp_path: Path) -> None:
    path = scenario_file(tmp_path, line, **OWN)
    refused = run(path)
    assert refused.exit_code == 1
    assert "the module commuters is not allowed here" in refused.stderr
    assert "--plugin commuters" in refused.stderr
    assert not (tmp_path / "scenario.sim").exists()
    done = run(path, "--plugin", "commuters")
    assert done.exit_code == 0, done.stderr
    folder = tmp_path / "scenario.sim"
    summary = read_json(folder / "summary.json")
    assert summary["rounds"] == 3
    assert summary["lost"]["train"] > 0
    assert {*summary["own"]} == {"availability.kind", "failures.law"}
    assert summary["own"]["failures.law"].startswith("commuters:tunnels ")
    law = summary["own"]["failures.law"].replace(" ", ", source ")  # it has no version
    assert "own failures.law" in done.stderr
    assert law in done.stderr
    assert f"own failures.law: {law}" in (folder / "report.html").read_text("utf-8")
    assert "offline" in summary["lost"] or summary["time"] < 86400.0
    lost = [row for row in read_rows(folder, "events.jsonl") if row.get("cause") == "train"]
    assert len(lost) == summary["lost"]["train"]


def test_the_scenario_itself_may_list_its_modules(line: Path, tmp_path: Path) -> None:
    path = scenario_file(tmp_path, line, service__plugins__modules=["commuters"], **OWN)
    found = Scenario.load(path)
    assert found.service.plugins is not None
    assert found.service.plugins.folder == tmp_path
    outcome = simulate(found, tmp_path / "a", Options(workers=1))
    with extensions.apart():  # another process, which gets the scenario pickled
        again = simulate(found, tmp_path / "b", Options(workers=1))
    assert outcome is not None
    assert again is not None
    assert (tmp_path / "a" / "events.jsonl").read_bytes() == (
        tmp_path / "b" / "events.jsonl"
    ).read_bytes()


@pytest.mark.slow
def test_a_sweep_over_own_parameters(line: Path, tmp_path: Path) -> None:
    path = scenario_file(
        tmp_path, line, **OWN, sweep={"failures": {"parameters": {"chance": [0.0, 1.0]}}}
    )
    done = CliRunner().invoke(app, ["run", str(path), "--workers", "2", "--plugin", "commuters"])
    assert done.exit_code == 0, done.stderr
    lost = [
        read_json(each)["lost"].get("train", 0)
        for each in sorted((tmp_path / "scenario.sim").glob("*/summary.json"))
    ]
    assert lost[0] == 0 < lost[1]


def test_a_resumed_run_says_that_its_law_is_another(line: Path, tmp_path: Path) -> None:
    path = scenario_file(
        tmp_path,
        line,
        "other_commuters",
        failures={"law": "other_commuters:tunnels", "parameters": {"chance": 0.5}},
    )
    found, folder = Scenario.load(path, plugins=["other_commuters"]), tmp_path / "run"
    assert simulate(found, folder, Options(workers=1), should_stop=lambda: True) is None
    resumed = CliRunner().invoke(app, ["resume", str(folder), "--workers", "1"])
    assert resumed.exit_code == 0, "its folder says where the module is"
    (folder / "summary.json").unlink()
    (tmp_path / "other_commuters.py").write_text(LAWS + "# another version\n")
    with pytest.raises(SimulatorError, match=r"this has changed: .*other_commuters:tunnels"):
        simulate(Scenario.load_of_run(folder / "scenario.toml"), folder, resume=True)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"failures": {"law": "hazard"}}, r'did you mean hazards\? It takes "hazards", or an own'),
        ({"failures": {"parameters": {"a": 1}}}, r"are for an own law"),
        (
            {"failures": {"law": "commuters:tunnels", "train": 0.1}},
            r'failures\.train = 0\.1 is a hazard of the law "hazards"',
        ),
        (
            {
                "failures": {"law": "commuters:tunnels"},
                "tiers": {"a": {"failures": {"upload": 0.1}}},
            },
            r"tiers\.a\.failures\.upload = 0\.1 is a hazard",
        ),
        (
            {"availability": {"kind": "commuters:office_hours", "slot": 60.0}},
            r'availability\.slot = 60\.0: kind "commuters:office_hours" takes parameters, zones',
        ),
        ({"failures": {"law": "commuters:tunnels"}}, r"needs the parameters chance too"),
        (
            {"failures": {"law": "commuters:tunnels", "parameters": {"chance": "much"}}},
            r"parameter chance = 'much' is refused",
        ),
        ({"failures": {"law": "commuters:bridges"}}, r"commuters\.py has no function bridges"),
        ({"failures": {"law": "commuters:a_number"}}, r"a failure law is a function"),
        (
            {"availability": {"kind": "commuters:a_number"}},
            r"returned a int; expected an object with the functions online, until and next_online",
        ),
        (
            {"failures": {"law": "commuters:wrong_shape"}},
            r"returned float64 of shape \(3,\) for 4 tasks; expected float64 of shape \(3, 4\)",
        ),
        (
            {"availability": {"kind": "commuters:before_now"}},
            r"until\(\) said -1\.0 for device \d+ at 0\.0 s",
        ),
        (
            {"failures": {"law": "commuters:raising"}},
            r'failures\.law = "commuters:raising" failed: ZeroDivisionError: .*commuters\.py',
        ),
        (
            {"availability": {"kind": "commuters:away"}},
            r"online\(\) failed: KeyError: 'shift' \(in online, commuters\.py line \d+\)",
        ),
    ],
)
def test_what_cannot_be_a_law_is_refused(
    settings: dict[str, Any], refusal: str, line: Path, tmp_path: Path
) -> None:
    path = scenario_file(tmp_path, line, **settings)
    with pytest.raises(SimulatorError, match=refusal):
        simulate(Scenario.load(path, plugins=["commuters"]), tmp_path / "run", Options(workers=1))


def test_the_command_shows_where_an_own_law_raised(line: Path, tmp_path: Path) -> None:
    path = scenario_file(tmp_path, line, failures={"law": "commuters:raising"})
    ended = run(path, "--plugin", "commuters")
    assert ended.exit_code == 1
    first, *below = ended.stderr.splitlines()
    assert first.startswith("fleetlearn-simulate: failures.law")
    assert below[0].strip() == "Traceback (most recent call last):"
    (place,) = [text for text in below if text.strip().startswith("File ")]
    assert '/commuters.py", line ' in place  # no frame of ours
    assert below[-1].strip() == "ZeroDivisionError: division by zero"


def test_a_module_that_is_not_there_is_named(line: Path, tmp_path: Path) -> None:
    path = scenario_file(tmp_path, line)
    with pytest.raises(SimulatorError, match=rf"no_such_commuters is not there.*{tmp_path}"):
        Scenario.load(path, plugins=["no_such_commuters"])


def test_a_registered_law_has_a_short_name(line: Path, tmp_path: Path) -> None:
    from fleetlearn_simulator.scenario.own_algorithms import FAILURE_LAW

    def half_vanish() -> Any:
        return lambda tasks: np.where(tasks.luck < 0.5, 0.0, np.inf)

    extensions.register(FAILURE_LAW, "half-vanish", half_vanish)
    path = scenario_file(tmp_path, line, failures={"law": "half-vanish"}, plan__stop__rounds=1)
    outcome = simulate(Scenario.load(path), tmp_path / "run", Options(workers=1))
    assert outcome is not None
    assert {"train"} <= {*outcome.summary["lost"]}
    assert outcome.summary["own"]["failures.law"].startswith("half-vanish ")


def test_the_page_s_strategy_and_stop_rule(line: Path, tmp_path: Path) -> None:
    """Those with the fewest tasks come first, and the run ends where the loss does not fall."""
    (tmp_path / "fair_rounds.py").write_text(BLOCKS["fair_rounds"])
    path = scenario_file(
        tmp_path,
        line,
        plan__selection={"strategy": "fair_rounds:fewest_tasks"},
        plan__local__evaluate=True,
        plan__stop={
            "rounds": 100,
            "rule": "fair_rounds:plateau",
            "parameters": {"rounds": 3, "least": 0.2},
        },
    )
    refused = run(path)
    assert "the module fair_rounds is not allowed here" in refused.stderr
    found, folder = Scenario.load(path, plugins=["fair_rounds"]), tmp_path / "run"
    outcome = simulate(found, folder, Options(workers=1))
    assert outcome is not None
    assert outcome.summary["reason"] == "loss fell by less than 0.2 in 3 rounds"
    own = outcome.summary["own"]
    assert {*own} == {"plan.selection.strategy", "plan.stop.rule"}
    given = [row for row in read_rows(folder, "events.jsonl") if row["event"] == "assigned"]
    first = [row["device"] for row in given][:20]
    assert len({*first}) == len(first), "nobody has two tasks while another had none"

    stopped = tmp_path / "stopped"
    assert (
        simulate(found, stopped, Options(workers=1, checkpoint=1), should_stop=lambda: True) is None
    )
    with extensions.apart():
        again = Scenario.load_of_run(stopped / "scenario.toml")
        resumed = simulate(again, stopped, Options(workers=1), resume=True)
    assert resumed is not None
    assert resumed.summary == outcome.summary
    assert (stopped / "events.jsonl").read_bytes() == (folder / "events.jsonl").read_bytes()


OURS = """

def steps_of_ours(lr: float):
    from fleetlearn_coordinator.aggregation.optimizers import adam

    return adam(lr=lr)


def added_up():
    from fleetlearn_coordinator.aggregation.aggregators import MEAN

    return MEAN


def root(a: float):
    return lambda staleness: (1 + staleness) ** -a
"""


def last_model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_page_s_server(private_line: Path, tmp_path: Path) -> None:
    """Its clipped mean is our mean of updates that are clipped; each of them is in the summary."""
    (tmp_path / "steady_server.py").write_text(BLOCKS["steady_server"])
    norms = {"aggregator": "mean", "max_norm": 0.05}
    path = scenario_file(tmp_path, private_line, plan__aggregation=norms)
    theirs = simulate(Scenario.load(path), tmp_path / "theirs", Options(workers=1))
    own = {"aggregator": "steady_server:clipped_mean", "parameters": {"clip": 0.05}}
    path = scenario_file(tmp_path, private_line, plan__aggregation=own)
    ours = simulate(
        Scenario.load(path, plugins=["steady_server"]), tmp_path / "ours", Options(workers=1)
    )
    assert theirs is not None
    assert ours is not None
    assert {*ours.summary["own"]} == {"plan.aggregation.aggregator"}
    assert ours.summary["metrics"] == pytest.approx(theirs.summary["metrics"], rel=1e-5)


def test_a_researcher_s_three_ideas_by_the_command_line(private_line: Path, tmp_path: Path) -> None:
    """An own optimizer, aggregator and law of dropout in one scenario, with short names too."""
    (tmp_path / "steady_server.py").write_text(BLOCKS["steady_server"])
    path = scenario_file(
        tmp_path,
        private_line,
        failures={"law": "commuters:tunnels", "parameters": {"chance": 0.3}},
        plan__aggregation={"aggregator": "steady_server:clipped_mean"},
        plan__server={"optimizer": "steady_server:lion", "parameters": {"lr": 0.01}},
    )
    half = run(path, "--plugin", "commuters")
    assert half.exit_code == 1
    assert "the module steady_server is not allowed here" in half.stderr
    done = run(path, "--plugin", "commuters", "--plugin", "steady_server")
    assert done.exit_code == 0, done.stderr
    summary = read_json(tmp_path / "scenario.sim" / "summary.json")
    assert {*summary["own"]} == {
        "failures.law",
        "plan.aggregation.aggregator",
        "plan.server.optimizer",
    }
    assert summary["lost"]["train"] > 0


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        (
            {"plan__server": {"optimizer": "like_ours:steps_of_ours", "parameters": {"lr": 0.05}}},
            {"plan__server": {"optimizer": "adam", "lr": 0.05}},
        ),
        (
            {"plan__aggregation": {"aggregator": "like_ours:added_up"}},
            {"plan__aggregation": {"aggregator": "mean"}},
        ),
        (
            {"plan__staleness": {"function": "like_ours:root", "parameters": {"a": 0.7}}},
            {"plan__staleness": {"function": "polynomial", "a": 0.7}},
        ),
        (
            {
                "plan__server": {"optimizer": "steady_server:lion"},
                "plan__aggregation": {"weighing": "steady_server:by_work"},
                "plan__staleness": {"function": "steady_server:half_life"},
            },
            None,
        ),
    ],
)
def test_own_servers_are_as_ours_to_the_bit(
    private_line: Path, tmp_path: Path, own: dict[str, Any], ours: dict[str, Any] | None
) -> None:
    """Stopped in the middle and taken up again, too."""
    (tmp_path / "like_ours.py").write_text(OURS)
    (tmp_path / "steady_server.py").write_text(BLOCKS["steady_server"])
    rounds = {
        "plan__round": {"participation": "asynchronous", "goal": 3, "concurrency": 9},
        "plan__stop__rounds": 6,
    }

    def scenario(settings: dict[str, Any]) -> Scenario:
        path = scenario_file(tmp_path, private_line, **rounds, **settings)
        return Scenario.load(path, plugins=["like_ours", "steady_server"])

    outcome = simulate(scenario(own), tmp_path / "own", Options(workers=1))
    assert outcome is not None
    assert {*outcome.summary["own"]} == {
        f"plan.{section.removeprefix('plan__')}.{key}"
        for section, table in own.items()
        for key, value in table.items()
        if isinstance(value, str)
    }
    if ours is not None:
        simulate(scenario(ours), tmp_path / "ours", Options(workers=1))
        assert last_model(tmp_path / "own") == last_model(tmp_path / "ours")
    stopped = tmp_path / "stopped"
    options = Options(workers=1, checkpoint=1)
    assert simulate(scenario(own), stopped, options, should_stop=lambda: True) is None
    simulate(Scenario.load_of_run(stopped / "scenario.toml"), stopped, options, resume=True)
    assert last_model(stopped) == last_model(tmp_path / "own")


def summary_of(scenario: Scenario, folder: Path, workers: int) -> dict[str, Any]:
    outcome = simulate(scenario, folder, Options(workers=workers, backend="bundle"))
    assert outcome is not None
    return outcome.summary


def test_the_page_s_source_in_this_process_and_in_others(line: Path, tmp_path: Path) -> None:
    (tmp_path / "sensors.py").write_text(BLOCKS["sensors"])
    data = {"kind": "sensors:machines", "parameters": {"noise": 0.2}}
    path = scenario_file(tmp_path, line, data=data, plan__stop__rounds=1)
    found = Scenario.load(path, plugins=["sensors"])
    here = summary_of(found, tmp_path / "here", 1)
    assert here["reports"] == 4
    assert summary_of(found, tmp_path / "there", 2) == here
    assert here["own"]["data.kind"].startswith("sensors:machines ")
    made = read_json(tmp_path / "here" / "made_of.json")
    assert len(made["examples"]) == 3, "a few devices' examples tell of another file"
    other = Scenario.load(
        scenario_file(tmp_path, line, data=data | {"parameters": {"noise": 0.3}}), ["sensors"]
    )
    assert summary_of(other, tmp_path / "other", 1)["model"] != here["model"]


def test_the_page_s_partition(line: Path, tmp_path: Path) -> None:
    (tmp_path / "sensors.py").write_text(BLOCKS["sensors"])
    random = np.random.default_rng(3)
    x, y = (random.normal(size=size).astype(np.float32) for size in ((60, 3), 60))
    np.savez(tmp_path / "a.npz", x=x, y=y, kind=np.arange(60) % 4)
    data = {"partition": "sensors:one_label_each", "arrays": "a.npz", "label": "kind"}
    path = scenario_file(tmp_path, line, data=data, plan__stop__rounds=1)
    found = Scenario.load(path, plugins=["sensors"])
    assert found.data.kind == "partition"
    summary = summary_of(found, tmp_path / "run", 1)
    assert summary["reports"] == 4
    assert summary["own"]["data.partition"].startswith("sensors:one_label_each ")


WRONG_DATA = """
import numpy as np

class Data:
    def __init__(self, **changes):
        vars(self).update(changes)
    def examples(self, ids, seed):
        return np.full(len(ids), 5)
    def arrays(self, device, seed):
        return {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.float32)}
    def test(self, seed):
        return None

def too_few(): return Data()
def floats(): return Data(examples=lambda ids, seed: np.zeros(len(ids)))
def no_batch(): return Data(arrays=lambda device, seed: np.zeros(3))
def nothing(): return None
def missing(): return lambda labels, devices, random: [labels[:0]]
def outside(): return lambda labels, devices, random: [np.array([10**6])] * devices
def twice(): return lambda labels, devices, random: [np.array([0])] * devices
def fractions(): return lambda labels, devices, random: [np.array([0.5])] * devices
def raises(): return lambda labels, devices, random: 1 / 0
"""


@pytest.mark.parametrize(
    ("key", "name", "refusal"),
    [
        ("kind", "too_few", r"returned 4 examples, and its examples\(\) says 5"),
        ("kind", "floats", r"returned float64 of shape \(\d+,\); expected integers"),
        ("kind", "nothing", r"returned a NoneType; expected an object with the functions examples"),
        ("kind", "no_batch", r"arrays\(\d+, \d+\) returned what does not fit the bundle"),
        ("partition", "missing", r"returned 1 parts for 20 devices"),
        ("partition", "outside", r"gave the place 1000000; there are \d+ examples to train on"),
        ("partition", "twice", r"gave the example at 0 to several devices"),
        ("partition", "fractions", r"gave device 0 float64 of shape \(1,\)"),
        ("partition", "raises", r"failed: ZeroDivisionError"),
    ],
)
def test_wrong_data_are_refused(
    key: str, name: str, refusal: str, line: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong_data.py").write_text(WRONG_DATA)
    x, y = np.zeros((60, 3), np.float32), np.zeros(60, np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=y, kind=np.arange(60) % 4)
    beside = {"arrays": "a.npz", "label": "kind"} if key == "partition" else {}
    path = scenario_file(tmp_path, line, data={key: f"wrong_data:{name}", **beside})
    found = Scenario.load(path, plugins=["wrong_data"])
    with pytest.raises(SimulatorError, match=rf'data\.{key} = "wrong_data:{name}".*{refusal}'):
        simulate(found, tmp_path / "run", Options(workers=1))


def test_own_rules_go_on_where_the_coordinator_died(line: Path, tmp_path: Path) -> None:
    (tmp_path / "fair_rounds.py").write_text(BLOCKS["fair_rounds"])
    own = {
        "plan__selection": {"strategy": "fair_rounds:fewest_tasks"},
        "plan__stop": {
            "rounds": 60,
            "rule": "fair_rounds:plateau",
            "parameters": {"rounds": 2, "least": 0.5},
        },
        "plan__local__evaluate": True,
    }
    path = scenario_file(tmp_path, line, **own, coordinator={"crashes": [60.0, 350.0]})
    found = Scenario.load(path, plugins=["fair_rounds"])
    outcome = simulate(found, tmp_path / "run", Options(workers=1))
    assert outcome is not None
    events = read_rows(tmp_path / "run", "events.jsonl")
    assert sum(row["event"] == "crash" for row in events) == 2
    rounds = [
        row for row in read_rows(tmp_path / "run", "rounds.jsonl") if row["how"] == "committed"
    ]
    assert len(rounds) == stops_at(rounds) < 60
    assert outcome.summary["reason"].startswith("loss fell by less than")


def stops_at(rounds: list[dict[str, Any]]) -> int:
    """Return the version at which the page's rule stops, by the summaries alone."""
    made: dict[str, Any] = {}
    exec(BLOCKS["fair_rounds"], made)
    rule = made["plateau"](rounds=2, least=0.5)
    past = [
        PastRound(number, row["reports"], row["change"], row["metrics"])
        for number, row in enumerate(rounds, 1)
    ]
    return next(len(past[:end]) for end in range(1, len(past) + 1) if rule(past[:end]))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_own_local_algorithm_trains_here_and_in_other_processes(
    line: Path, tmp_path: Path, workers: int
) -> None:
    (tmp_path / "local_rules.py").write_text(BLOCKS["local_rules"])
    local = {"algorithm": "local_rules:short", "parameters": {"longest": 1e-3}}
    local |= {"epochs": 1, "batch_size": 10, "lr": 0.01, "evaluate": False}
    path = scenario_file(tmp_path, line, plan__local=local)
    refused = run(path)
    assert refused.exit_code == 1
    assert "plan.local.algorithm = 'local_rules:short': the module local_rules" in refused.stderr
    found = Scenario.load(path, plugins=["local_rules"])
    outcome = simulate(found, tmp_path / "a", Options(workers=workers))
    summary = read_json(tmp_path / "a" / "summary.json")
    assert summary["own"]["plan.local.algorithm"].startswith("local_rules:short ")
    assert summary["backend"] == "bundle"
    bundle = open_bundle(line)
    change = outcome.model - bundle.parameters()[: outcome.model.size]
    for places in bundle.manifest.buffers:
        change[places] = 0.0
    moved = float(np.linalg.norm(change))
    assert 0 < moved < 3.01e-3, "three rounds of updates of 0.001"


def test_ours_as_an_own_encoding_gives_ours_to_the_bit(line: Path, tmp_path: Path) -> None:
    (tmp_path / "ours_as_own.py").write_text(OURS_AS_OWN)

    def ran(name: str, **encoding: Any) -> Any:
        path = scenario_file(tmp_path, line, plan__encoding=encoding)
        found = Scenario.load(path, plugins=["ours_as_own"])
        return simulate(found, tmp_path / name, Options(workers=1))

    own = {"up": "ours_as_own:top_k", "parameters": {"percent": 25}, "residual": True}
    for name, ours, same in [("a", "int8", {"up": "ours_as_own:int8"}), ("b", "topk-0.25", own)]:
        first, second = ran(f"{name}1", up=ours), ran(f"{name}2", **same)
        assert first.model.tobytes() == second.model.tobytes()
        rounds = [
            [row["bytes"]["up"] for row in read_rows(tmp_path / each, "rounds.jsonl")]
            for each in (f"{name}1", f"{name}2")
        ]
        assert rounds[0] == rounds[1]
        assert sum(rounds[0]) > 0
    summary = read_json(tmp_path / "b2" / "summary.json")
    assert summary["own"]["plan.encoding.up"].startswith("ours_as_own:top_k ")


WRONG_FORMATS = """
from dataclasses import replace

from ours_as_own import int8


def fails():
    return replace(int8(), encode=lambda rows, fractions: 1 // 0)


def unread():
    return replace(int8(), decode=lambda content, n: None)


def number():
    return 3
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails", r"encode failed: ZeroDivisionError"),
        ("unread", r"an update cannot be decoded: .*decode returned a NoneType"),
        ("number", r"number\(\) returned a int; an encoding is BlockFormat"),
        ("none", r"has no function none"),
    ],
)
def test_what_an_own_encoding_does_wrong_ends_the_simulation(
    line: Path, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "ours_as_own.py").write_text(OURS_AS_OWN)
    (tmp_path / "wrong_formats.py").write_text(WRONG_FORMATS)
    path = scenario_file(tmp_path, line, plan__encoding={"up": f"wrong_formats:{name}"})
    found = Scenario.load(path, plugins=["wrong_formats", "ours_as_own"])
    with pytest.raises((SimulatorError, PlanError), match=text):
        simulate(found, tmp_path / "run", Options(workers=1))


def test_a_local_algorithm_that_raises_is_shown(line: Path, tmp_path: Path) -> None:
    (tmp_path / "lost_rules.py").write_text("def lost(work):\n    return work.trian()\n")
    local = {"algorithm": "lost_rules:lost", "lr": 0.01, "evaluate": False}
    path = scenario_file(tmp_path, line, plan__local=local)
    for workers in ("1", "2"):  # an error of another process has lost its traceback
        folder = str(tmp_path / f"with-{workers}")
        ended = run(path, "--plugin", "lost_rules", "--workers", workers, "--output", folder)
        assert ended.exit_code == 1
        first, *below = ended.stderr.splitlines()
        assert "the function lost_rules:lost failed: AttributeError: " in first
        assert [text.strip() for text in below if "File " in text] == [
            f'File "{tmp_path}/lost_rules.py", line 2, in lost'
        ]
        assert "return work.trian()" in "".join(below)
