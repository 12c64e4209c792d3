"""The report of a run: its figures against numbers worked out by hand, and in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from browser import ask, charts_of
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results import html_page as page
from fleetlearn_simulator.results.html_page import span
from fleetlearn_simulator.results.run_report import write_report
from runs_folder import SCENARIO, row, write_rows, write_run

ROWS = [
    row(
        1,
        reports=3,
        partial=1,
        connected=9,
        test={"loss": 2.0},
        train={"loss": 1.5},
        causes={"train": 3, "surplus": 1},
        dropped={"lost": 3, "surplus": 1},
        assigned={"0": 5, "1": 2},
        accepted={"0": 3},
        device_seconds={"useful": 90.0, "wasted": 30.0},
        bytes={"down": 3_000_000, "up": 1_000_000},
        change=0.5,
    ),
    row(
        2,
        how="abandoned",
        reports=1,
        causes={"offline": 2},
        assigned={"0": 1, "1": 2},
        device_seconds={"wasted": 60.0},
    ),
    row(
        3,
        reports=4,
        connected=8,
        test={"loss": 1.0},
        train={"loss": 0.5},
        causes={"train": 1},
        assigned={"0": 2, "1": 3},
        accepted={"0": 3, "1": 2},
        device_seconds={"useful": 180.0},
        bytes={"down": 3_000_000, "up": 2_000_000},
        change=0.25,
    ),
]
TEXT = SCENARIO.format(name="small", seed=7, goal=4, connected=9)


def written(folder: Path, rows: list[dict[str, Any]], **more: Any) -> tuple[str, dict[str, Any]]:
    """The page's own text, without Plotly's, and its charts."""
    path = write_report(write_rows(folder / "run", rows, **more))
    assert path == folder / "run" / "report.html"
    text = path.read_text("utf-8")
    return text[: text.index("<script>")], charts_of(path)


def bars(chart: dict[str, Any]) -> dict[str, list[float]]:
    return {trace["name"]: trace["y"] for trace in chart["data"]}


def test_figures_by_hand(tmp_path: Path) -> None:
    text, charts = written(tmp_path, ROWS, scenario=TEXT)
    test, train = charts["loss"]["data"]
    assert (test["name"], test["y"]) == ("on the data kept back", [2, 1])
    assert test["meta"] == {"rounds": [1, 3], "time": [1, 3], "bytes": [4, 9]}
    assert train["y"] == [1.5, 0.5]
    assert charts["loss"]["layout"]["meta"] == {
        "rounds": "round",
        "time": "virtual time (minutes)",
        "bytes": "bytes sent (MB)",
    }
    assert charts["Change of the model in a round"]["data"][0]["y"] == [0.5, 0.25]
    assert bars(charts["By round"]) == {
        "train": [3, 0, 1],
        "offline": [0, 2, 0],
        "surplus": [1, 0, 0],
    }
    total = charts["In all"]["data"][0]
    assert (total["y"], total["x"]) == (["train", "offline", "surplus"], [4, 2, 1])
    assert total["text"] == ["26.7 %", "13.3 %", "6.67 %"]  # of 15 tasks
    assert bars(charts["Device time, useful and wasted"]) == {
        "useful": [1.5, 0, 3],
        "wasted": [0.5, 1, 0],
    }
    assert bars(charts["Participation by tier"]) == {
        "of the population": [75, 25],
        "of the tasks": [53.3333, 46.6667],  # 8 and 7 of 15
        "of the accepted reports": [75, 25],  # 6 and 2 of 8
    }
    assert bars(charts["Reports"]) == {
        "complete": [2, 0, 4],
        "partial": [1, 0, 0],
        "of an abandoned round": [0, 1, 0],
    }
    assert charts["Devices online and connected"]["data"][0]["y"] == [9, 0, 8]
    assert "As the coordinator saw it: 3 lost, 1 surplus." in text
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)<", text))
    assert tiles == {
        "rounds": "2",
        "virtual time": "3 min",
        "reports": "7",
        "tasks lost": "46.7 %",
        "device time wasted": "25 %",
        "bytes sent": "9 MB",
        "loss": "1",
    }
    assert "seed 7 · 1,000,000 devices · tiers phone, board" in text
    assert "not finished: as far as round 3" in text


def test_online_devices_are_those_of_the_scenario(tmp_path: Path, line: Path) -> None:
    """Two of three devices leave after 100 seconds."""
    (tmp_path / "trace.csv").write_text("device,on,off\n0,0,1000\n1,0,100\n2,0,100\n")
    scenario = f"""
      population = {{ size = 3, connected = 2 }}
      availability = {{ kind = "trace", file = "{tmp_path}/trace.csv" }}
      plan = {{ name = "p", bundle = "{line}", round = {{ goal = 2 }} }}
      """
    _, charts = written(tmp_path, ROWS, scenario=scenario)
    connected, online = charts["Devices online and connected"]["data"]
    assert connected["name"] == "connected"
    assert (online["x"][0], online["x"][-1]) == (0, 3)
    for minute, count in zip(online["x"], online["y"], strict=True):
        assert count == (3 if 60 * minute < 100 else 1)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"round": 1}],
        [row(1, how="abandoned")],
        [row(1, train={"loss": None}, change=None)],
        ROWS[:1],
    ],
    ids=["none", "bare", "abandoned", "not a number", "one"],
)
def test_little_is_enough(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    text, charts = written(tmp_path, rows)
    assert ("No round has ended yet" in text) == (not rows)
    assert ("Reports" in charts) == bool(rows)


def test_no_charts_where_nothing_was_lost(tmp_path: Path) -> None:
    text, charts = written(tmp_path, [row(1)])
    assert "In the simulation itself, no task was lost." in text
    assert not {"By round", "In all"} & set(charts)


def test_of_an_abandoned_round_all_is_wasted(tmp_path: Path) -> None:
    spent = {"useful": 60.0, "wasted": 30.0}
    rows = [row(1, device_seconds=spent), row(2, how="abandoned", device_seconds=spent)]
    text, charts = written(tmp_path, rows)
    assert bars(charts["Device time, useful and wasted"]) == {"useful": [60, 0], "wasted": [30, 90]}
    assert "<dt>device time wasted</dt><dd>66.7 %<small>of 3 min</small>" in text


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    name = "</script><b>&"
    rows = [row(1, causes={name: 1}, assigned={"0": 1}, train={name: 1.0}, test={name: 1.0})]
    text, charts = written(tmp_path, rows, summary={"reason": name})
    assert name not in text
    assert charts["In all"]["data"][0]["y"] == [name]
    assert charts[name]["data"][0]["y"] == [1]


def test_plotly_takes_every_figure_and_nothing_is_fetched(tmp_path: Path) -> None:
    import plotly.graph_objects as go

    path = write_report(write_run(tmp_path / "run", 30))
    assert len(charts_of(path)) == 10
    for chart in charts_of(path).values():
        go.Figure(chart)  # refuses what it does not know
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=", path.read_text("utf-8"))


def test_many_rounds_are_few_points(tmp_path: Path) -> None:
    charts = charts_of(write_report(write_run(tmp_path / "run", 5000)))
    assert max(len(trace["y"]) for chart in charts.values() for trace in chart["data"]) <= 1000
    lost = charts["By round"]["data"]
    assert [len(trace["y"]) for trace in lost] == [120] * 3  # 42 rounds each
    assert lost[-1]["name"] == "late"
    assert set(lost[-1]["y"]) == {5}


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="cannot be read as a run's folder"):
        write_report(tmp_path / "nowhere")
    run = write_rows(tmp_path / "run", ROWS)
    with pytest.raises(SimulatorError, match="cannot be written"):
        write_report(run, tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (86399, "24 h"),
        (90000, "1 d 1 h"),
        (864000, "10 d"),
    ],
)
def test_spans(seconds: float, words: str) -> None:
    assert span(seconds) == words


def test_units() -> None:
    assert page.size(0) == "0 bytes"
    assert page.size(999) == "999 bytes"
    assert page.size(1_500_000) == "1.5 MB"
    assert page.time_unit(179) == (1.0, "seconds")
    assert page.time_unit(180) == (60.0, "minutes")
    assert page.numbers([1.0, 1 / 3, float("nan"), float("inf")]) == [1, 0.333333, None, None]


def test_in_a_browser(tmp_path: Path) -> None:
    """All figures are drawn, in their places; the switch moves the metrics' axes; paper has its own
    width."""
    path = write_report(write_run(tmp_path / "run", 300))
    script = """
      const seen = () => [...document.querySelectorAll(".chart")].map(div => ({
        traces: div.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length,
        title: div.querySelector(".xtitle")?.textContent ?? "",
        width: div.querySelector(".main-svg").getBoundingClientRect().width,
        room: div.getBoundingClientRect().width,
        x: div.data[0].x.slice(-1)[0],
        scale: div.layout.yaxis.type ?? "linear",
      }));
      const before = seen();
      document.querySelector("input[value=bytes]").click();
      document.getElementById("logarithmic").click();
      const after = seen();
      dispatchEvent(new Event("beforeprint"));
      const paper = seen();
      dispatchEvent(new Event("afterprint"));
      return { before, after, paper, again: seen(), wide: document.documentElement.scrollWidth };
      """
    found = ask(path, script, tmp_path)
    charts = charts_of(path)
    for chart, drawn in zip(charts.values(), found["before"], strict=True):
        assert drawn["traces"] == len(chart["data"])
        assert (
            drawn["title"] == chart["layout"]["xaxis"]["title"]["text"] or drawn["title"] == "round"
        )
        assert abs(drawn["width"] - drawn["room"]) <= 1
    for chart, drawn, switched in zip(
        charts.values(), found["before"], found["after"], strict=True
    ):
        if "meta" in chart["layout"]:
            assert switched["title"] == "bytes sent (GB)"
            assert switched["x"] == chart["data"][0]["meta"]["bytes"][-1]
            assert switched["scale"] == "log"
        else:
            assert switched == drawn
    assert {drawn["width"] for drawn in found["paper"]} == {340}
    assert [drawn["width"] for drawn in found["again"]] == [
        drawn["width"] for drawn in found["before"]
    ]
    assert found["wide"] <= 1280
