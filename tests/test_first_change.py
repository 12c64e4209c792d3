"""CONTRIBUTING.md, "A first change": its test and its change go together, and a plan takes what
they bring."""

from __future__ import annotations

import re
import textwrap
from math import exp
from pathlib import Path

import pytest
from fleetlearn_coordinator import Plan, PlanError
from fleetlearn_coordinator.aggregation.staleness import FUNCTIONS, Function, StalenessConstants

ROOT = Path(__file__).parents[1]
PAGE = (
    (ROOT / "CONTRIBUTING.md")
    .read_text("utf-8")
    .partition("## A first change")[2]
    .partition("\n## ")[0]
)
TEST, CHANGE = (
    textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
)


def factor(function: str, tau: int, a: float = 0.0, b: float = 0.0) -> float:
    return FUNCTIONS[function].of(tau, StalenessConstants(a, b))


def run_the_test() -> None:
    exec(TEST, {"exp": exp, "factor": factor, "pytest": pytest})


def plan() -> Plan:
    (recipe,) = re.findall(r"`(recipe = .*?)`", PAGE)
    (staleness,) = re.findall(r"`(staleness = \{.*?\})`", PAGE, re.DOTALL)
    lines = (
        'name = "digits"',
        'bundle = "digits.bundle"',
        recipe,
        "local = { lr = 0.1 }",
        staleness.replace("\n", " "),
    )
    return Plan.parse("\n".join(lines), ROOT)


def test_a_test_that_fails_a_change_and_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="exponential"):
        run_the_test()
    with pytest.raises(PlanError, match="exponential"):
        plan()
    names: dict[str, object] = {
        "exp": exp,
        "Function": Function,
        "StalenessConstants": StalenessConstants,
    }
    exec(CHANGE, names)
    (name, row) = re.findall(r'`"(\w+)": (Function\(.*?\))`', PAGE)[0]
    assert isinstance(FUNCTIONS, dict)
    monkeypatch.setitem(FUNCTIONS, name, eval(row, names))
    run_the_test()
    assert plan().staleness.a == 0.25


def test_where_it_goes_is_where_the_page_says() -> None:
    architecture = (ROOT / "docs" / "internals" / "architecture.md").read_text("utf-8")
    (feature,) = re.findall(r'"(another function of staleness)"', PAGE)
    assert re.search(
        rf"^\| {feature} \|.*`aggregation/staleness.py::FUNCTIONS`", architecture, re.MULTILINE
    )
    for file in re.findall(r"`((?:tests|coordinator)/[\w/]+\.py)`", PAGE):
        assert (ROOT / file).exists(), file
