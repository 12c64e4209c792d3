"""Own algorithms that a program registers, and modules that it lists in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, PlanError, ServiceError, ServiceSettings, register, serve
from fleetlearn_coordinator.aggregation import optimizers
from fleetlearn_protocol import extensions
from fleetlearn_protocol.extensions import ExtensionError
from peers import plan_text, write_test_bundle


def parse(text: str) -> Plan:
    goal = "" if "[round]" in text else "[round]\ngoal = 5\n"
    lines = f'name = "a"\nbundle = "a.bundle"\n{text}{goal}'
    return Plan.parse(lines, Path("/nowhere"), file="my.toml")


def halves() -> Any:
    return lambda updates: updates.combination(np.full(len(updates), 0.5))


def test_a_registered_function_has_a_short_name() -> None:
    text = '[aggregation]\naggregator = "halves"\n'
    with extensions.apart():
        with pytest.raises(PlanError, match=r'"halves"|\'halves\' is not known'):
            parse(text)
        register("aggregator", "halves", halves)
        plan = parse(text)
        plan.check_served(ServiceSettings())
        assert plan.aggregator().keeps_updates
        with pytest.raises(ExtensionError, match="there is an aggregator halves already"):
            register("aggregator", "halves", lambda: halves())
        with pytest.raises(
            ExtensionError, match=r"'agregator' is no kind.* did you mean aggregator\?"
        ):
            register("agregator", "halves", halves)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[aggregation]\nparameters = {a = 1}\n", "are for an own aggregator"),
        (
            '[aggregation]\nweighing = "mine"\n',
            "it takes an own weighing rule: my_package:my_function, or a short name",
        ),
        ("[aggregation]\nweighing_parameters = {a = 1}\n", "need aggregation.weighing"),
        (
            '[aggregation]\naggregator = "median"\nweighing = "a:b"\n',
            'it needs aggregation.aggregator = "mean"',
        ),
        ('[aggregation]\naggregator = "a:b"\nhostile = 0.1\n', "a:b takes neither"),
        ('[aggregation]\naggregator = "a:b"\n[round]\ngoal = 5000\n', "at most 4096"),
        ('[server]\noptimizer = "a:b"\nlr = 1.0\n', "the optimizer a:b takes parameters"),
        ("[server]\nparameters = {lr = 1.0}\n", "server.parameters = {'lr': 1.0}"),
        ('[server]\noptimizer = "adan"\n', "did you mean adam"),
        (
            'recipe = "fedbuff"\n[staleness]\nfunction = "a:b"\na = 1.0\n',
            "staleness.a = 1.0: a:b takes parameters",
        ),
        (
            'recipe = "fedbuff"\n[staleness]\nparameters = {b = 1}\n',
            "staleness.parameters = {'b': 1}: polynomial takes a",
        ),
    ],
)
def test_a_mistake_is_named(text: str, says: str) -> None:
    with extensions.apart(), pytest.raises(PlanError) as caught:
        parse(text)
    assert says in caught.value.text


def not_one() -> Any:
    return lambda staleness: 0.5


def test_a_staleness_function_is_tried_before_the_run() -> None:
    with extensions.apart():
        register("staleness function", "not-one", not_one)
        register("server optimizer", "ours", optimizers.sgd)
        plan = parse('recipe = "fedbuff"\n[staleness]\nfunction = "not-one"\n')
        with pytest.raises(PlanError, match=r"my\.toml: .*returned 0\.5 for a staleness of 0"):
            plan.check_served(ServiceSettings())
        parse('[server]\noptimizer = "ours"\nparameters = {lr = 0.5}\n').check_served(
            ServiceSettings()
        )
        wrong = parse('[server]\noptimizer = "ours"\nparameters = {rate = 0.5}\n')
        with pytest.raises(PlanError, match="has no parameter rate; it takes lr"):
            wrong.check_served(ServiceSettings())


def test_serve_lists_modules_in_python(tmp_path: Path) -> None:
    bundle = write_test_bundle(tmp_path / "test.bundle")
    own = {"aggregation__aggregator": "no_such_package:mean"}
    plan = Plan.parse(plan_text(bundle, tmp_path / "run", "fedavg", **own), tmp_path)
    with extensions.apart():
        with pytest.raises(PlanError, match="no_such_package is not allowed here"):
            serve(plan)
        with pytest.raises(ServiceError, match="plugins: the module no_such_package is not there"):
            serve(plan, plugins=["no_such_package"])
        own = {"aggregation__aggregator": "fleetlearn_coordinator:mean"}
        plan = Plan.parse(plan_text(bundle, tmp_path / "run", "fedavg", **own), tmp_path)
        with pytest.raises(PlanError, match="has no function mean"):
            serve(plan, plugins=["fleetlearn_coordinator"])
    assert not (tmp_path / "run").exists()
