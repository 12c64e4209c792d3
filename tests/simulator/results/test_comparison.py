"""Runs side by side: groups, means and spreads worked out by hand; in a terminal and in a real
browser."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from browser import ask, charts_of
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.results.comparison import comparison_tables, write_comparison
from fleetlearn_simulator.results.run_groups import read_groups
from fleetlearn_simulator.results.run_statistics import Target
from rich.console import Console
from runs_folder import SCENARIO, row, write_rows, write_run


def printed(folders: list[Path], target: Target | None = None) -> str:
    console = Console(width=250, record=True, file=StringIO())
    for table in comparison_tables(folders, target):
        console.print(table)
    return " ".join(console.export_text().split())  # captions wrap


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Goals of 2 and 4, two seeds each: the loss of seed s in round r is goal + s / r."""
    for goal in (2, 4):
        for seed in (1, 3):
            rows = [
                row(
                    number,
                    test={"loss": goal + seed / number},
                    time=100.0 * seed * number,
                    assigned={"0": 4},
                    accepted={"0": 3, "1": goal - 1} if number < 4 else {},
                    causes={"train": seed},
                    device_seconds={"useful": 3.0, "wasted": 1.0},
                    bytes={"down": 1000 * goal, "up": 0},
                )
                for number in range(1, 4 + seed)
            ]
            text = SCENARIO.format(
                name=f"s-goal-{goal}-seed-{seed}", seed=seed, goal=goal, connected=9 * goal
            )
            write_rows(
                tmp_path / "sweep" / f"goal-{goal}-seed-{seed}",
                rows,
                scenario=text,
                summary={"reason": "done"},
            )
    return tmp_path / "sweep"


def test_a_sweep_is_a_line_for_each_setting(sweep: Path, tmp_path: Path) -> None:
    assert "(test): on the data kept back." in printed([sweep])
    groups = read_groups([sweep])
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("goal = 2", 2),
        ("goal = 4", 2),
    ]
    charts = charts_of(write_comparison([sweep], tmp_path / "page.html"))
    *bands, mean, _ = charts["loss"]["data"]
    assert len(bands) == 2
    # The shorter run has four rounds; the losses of seeds 1 and 3 are 2 + 1 / r and 2 + 3 / r.
    rounds = np.arange(1, 5)
    assert mean["name"] == "goal = 2"
    np.testing.assert_allclose(mean["y"], 2 + 2 / rounds, rtol=1e-5)
    np.testing.assert_allclose(mean["meta"]["rounds"], rounds)
    np.testing.assert_allclose(mean["meta"]["time"], 200 * rounds / 60, rtol=1e-5)
    np.testing.assert_allclose(mean["meta"]["bytes"], 2 * rounds, rtol=1e-5)
    upper, lower = np.split(np.array(bands[0]["y"]), 2)
    np.testing.assert_allclose(upper, 2 + (2 + sqrt(2)) / rounds, rtol=1e-5)
    np.testing.assert_allclose(lower[::-1], 2 + (2 - sqrt(2)) / rounds, rtol=1e-5)
    lost = charts["Tasks lost"]["data"][0]
    assert (lost["y"], lost["x"]) == (["goal = 2", "goal = 4"], [50, 50])  # 25 and 75 per cent
    assert lost["error_x"]["array"] == pytest.approx([sqrt(1250)] * 2, rel=1e-5)


def test_the_table_has_means_and_spreads(sweep: Path) -> None:
    text = printed([sweep])
    # The last losses of goal 2: 2 + 1 / 4 and 2 + 3 / 6.
    assert "2.375 ± 0.18" in text
    assert "50 ± 35 %" in text
    assert "loss (test)" in text
    assert "all: seeds 2, rounds 5, abandoned 0" in text  # four and six rounds


def test_when_the_target_was_reached(sweep: Path, tmp_path: Path) -> None:
    """Losses are goal + seed / round: with goal 2, at most 2.5 in round 2 of seed 1 and in round 6
    of seed 3."""
    text = printed([sweep], Target("loss", 2.5, below=True))
    cells = [line.split() for line in text.split("│")]
    assert "Until loss <= 2.5" in text
    # Medians of 2 and 6 rounds; of 200 and 1800 seconds; of 4 and 12 kB; of 8 and 24
    # device-seconds.
    start = cells.index(["2", "of", "2"])
    shown = [["4"], ["16", "min", "40", "s"], ["8", "kB"], ["16", "s"], ["4", "s"]]
    assert cells[start + 1 : start + 6] == shown
    start = cells.index(["0", "of", "2"])
    assert cells[start + 1 : start + 6] == [["never"]] * 5
    # Seed 1 of goal 4 gets there in round 3, seed 3 never does: the median is never.
    assert "1 of 2 │ never" in " ".join(printed([sweep], Target("loss", 4.4, below=True)).split())
    page = write_comparison([sweep], tmp_path / "page.html", Target("loss", 2.5, below=True))
    assert "<h2>Until loss &lt;= 2.5</h2>" in page.read_text("utf-8")
    (level,) = charts_of(page)["loss"]["layout"]["shapes"]
    assert level["y0"] == level["y1"] == 2.5


def test_the_target_of_one_run(tmp_path: Path) -> None:
    """Without seeds nothing is said of how many got there; measured is what the table of metrics
    shows."""
    run = write_rows(
        tmp_path / "run", [row(1, evaluation={"loss": 2.0}), row(2, evaluation={"loss": 1.0})]
    )
    text = printed([run], Target("loss", 1.5, below=True))
    assert "reached" not in text
    assert "2 min" in text


def test_a_target_that_no_run_measured_is_an_error(sweep: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SimulatorError,
        match=r"accuracy >= 0\.9: no run has the metric accuracy; the runs have loss",
    ):
        comparison_tables([sweep], Target("accuracy", 0.9, below=False))
    with pytest.raises(SimulatorError, match="no metric yet"):
        comparison_tables([write_rows(tmp_path / "none", [])], Target("accuracy", 0.9, below=False))


def test_participation_by_tier(sweep: Path, tmp_path: Path) -> None:
    """Of the population 3/4 are phones; of the reports 3 of 4 with goal 2, 3 of 6 with goal 4."""
    assert "goal = 2 │ 1 ± 0 │ 1 ± 0 │ 1 ± 0 │" in printed([sweep])
    assert "goal = 4 │ 0.667 ± 0 │ 2 ± 0 │ 0.333 ± 0 │" in printed([sweep])
    phone, board = charts_of(write_comparison([sweep], tmp_path / "page.html"))[
        "Participation by tier"
    ]["data"]
    assert (phone["name"], phone["x"]) == ("phone", [1, 0.666667])
    assert (board["name"], board["x"]) == ("board", [1, 2])


def test_runs_without_tiers_have_no_table_of_them(tmp_path: Path) -> None:
    bare = write_rows(tmp_path / "bare", [row(1, test={"loss": 1.0})])
    assert len(comparison_tables([bare])) == 1
    assert "Participation by tier" not in charts_of(
        write_comparison([bare], tmp_path / "page.html")
    )
    # Beside a run with tiers it has a line without figures.
    assert "bare │ - │ - │ - │" in printed([bare, write_run(tmp_path / "run", 5)])


def test_runs_given_one_by_one_keep_their_names(sweep: Path, tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", 5), write_run(tmp_path / "two", 5, seed=2)
    assert [group.label for group in read_groups([one, two])] == ["one", "two"]
    assert [group.label for group in read_groups([one, sweep])] == [
        "one",
        "sweep: goal = 2",
        "sweep: goal = 4",
    ]
    assert "seeds" not in printed([one, two])
    labels = [group.label for group in read_groups([one, one])]
    assert all(label.startswith("one (") for label in labels)


def test_kinds_of_metrics_are_not_mixed(tmp_path: Path) -> None:
    """One run was tested on the data kept back, the other was not: both are shown as the devices
    measured them."""
    one = write_rows(tmp_path / "one", [row(1, test={"loss": 9.0}, evaluation={"loss": 2.0})])
    two = write_rows(tmp_path / "two", [row(1, evaluation={"loss": 3.0})])
    charts = charts_of(write_comparison([one, two], tmp_path / "page.html"))
    assert [trace["y"] for trace in charts["loss"]["data"]] == [[2], [3]]
    assert "loss (evaluation)" in printed([one, two])


def test_a_run_without_rounds_stands_beside_the_others(tmp_path: Path) -> None:
    none, some = write_rows(tmp_path / "none", []), write_run(tmp_path / "some", 3)
    charts = charts_of(write_comparison([none, some], tmp_path / "page.html"))
    assert [trace["name"] for trace in charts["loss"]["data"]] == ["some"]
    assert "not finished" in printed([none, some])


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SimulatorError, match="holds no run"):
        comparison_tables([tmp_path])
    with pytest.raises(SimulatorError, match="holds no run"):
        write_comparison([tmp_path / "nowhere"], tmp_path / "page.html")


def test_the_command(sweep: Path, tmp_path: Path) -> None:
    """With a target that runs have, one they have not, and what is no target."""
    command = [
        sys.executable,
        "-m",
        "fleetlearn_simulator",
        "compare",
        str(sweep),
        "--output",
        str(tmp_path / "page.html"),
    ]

    def run(target: str) -> subprocess.CompletedProcess[str]:
        wide = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(
            [*command, "--target", target], capture_output=True, text=True, env=wide, timeout=60
        )

    done = run("loss=2.5")
    assert done.returncode == 0, done.stderr
    assert "Until loss <= 2.5" in done.stdout
    assert "Until loss &lt;= 2.5" in (tmp_path / "page.html").read_text("utf-8")
    for target, words in (
        ("accuracy=0.9", "the runs have loss"),
        ("loss", "expected a metric and a number"),
    ):
        failed = run(target)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert words in failed.stderr


def test_plotly_takes_every_figure(sweep: Path, tmp_path: Path) -> None:
    import plotly.graph_objects as go

    charts = charts_of(
        write_comparison([sweep, write_run(tmp_path / "one", 9)], tmp_path / "page.html")
    )
    for chart in charts.values():
        go.Figure(chart)


def test_in_a_browser(sweep: Path, tmp_path: Path) -> None:
    path = write_comparison([sweep], tmp_path / "page.html")
    script = """
      document.querySelector("input[value=time]").click();
      return [...document.querySelectorAll(".chart")].map(div => [
        div.querySelector(".xtitle").textContent,
        div.querySelectorAll(".scatterlayer .trace, .barlayer .trace").length,
      ]);
      """
    assert ask(path, script, tmp_path) == [
        ["virtual time (minutes)", 4],
        ["per cent of the tasks", 1],
        ["per cent of the time", 1],
        ["minutes", 1],
        ["kB", 1],
        ["share of the accepted reports / share of the population", 2],
    ]


@pytest.mark.parametrize("private", [False, True])
def test_runs_of_which_nothing_was_measured_have_a_sentence_in_place_of_charts(
    tmp_path: Path, private: bool
) -> None:
    spent = {"privacy": {"release": 1, "epsilon": 0.5, "delta": 1e-6, "clip": 1.0}}
    bare = write_rows(tmp_path / "run", [row(1, **(spent if private else {}))])
    text = write_comparison([bare], tmp_path / "page.html").read_text("utf-8")
    assert "Nothing was measured." in text
    assert ("A private run shows nothing of what its devices measure." in text) == private
