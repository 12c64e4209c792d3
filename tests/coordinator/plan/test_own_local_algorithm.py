"""local.algorithm = "my_package:my_algorithm": what the plan says of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.service.allowed_functions import why_no_function
from fleetlearn_protocol.messages import CheckIn
from line_bundle import write_line_bundle

HEAD = 'name = "a"\nbundle = "a.bundle"\n'
OWN = '[local]\nlr = 0.1\nalgorithm = "mine:train"\n'
SECURE = '[secure]\nmode = "pairwise"\nclip = 1.0\n'
PRIVACY = "[privacy]\npopulation = 100000\ndelta = 1e-6\nclip = 1.0\nnoise = 1.0\n"


def plan(text: str) -> Plan:
    return Plan.parse(f"{HEAD}{text}[round]\ngoal = 5\n", Path())


def test_its_parameters_go_with_the_steps(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "a.bundle", references=["anchor"])
    found = plan(f"{OWN}parameters = {{ scale = 0.5 }}\n")
    found.check_bundle(bundle.manifest)
    assert (found.local.algorithm, found.local.function) == ("own", "mine:train")
    assert found.parts(bundle.manifest)["update"] == "float32"
    hyper = found.hyper(bundle.manifest)
    assert (hyper["scale"], hyper["lr"]) == (0.5, 0.1)
    with pytest.raises(PlanError, match="a value lr of its own, and so has the step"):
        plan(f"{OWN}parameters = {{ lr = 0.5 }}\n").check_bundle(bundle.manifest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{OWN}parameters = {{ scale = 'a' }}\n", "parameters"),
        (f"{OWN}{SECURE}", 'local.algorithm = "mine:train" with [secure]: nobody has shown'),
        (f"{OWN}{PRIVACY}", 'local.algorithm = "mine:train" with [privacy]: nobody has shown'),
        (f"{OWN}[aggregation]\nnormalise = true\n", "an update is no sum of gradients"),
        (f"{OWN}adaptive_mu = true\n", "local.adaptive_mu = true is for"),
        ('[local]\nalgorithm = "own"\n', "an own algorithm is named by local.algorithm alone"),
        ('[local]\nfunction = "a:b"\n', "an own algorithm is named by local.algorithm alone"),
        ("[local]\nparameters = { a = 1 }\n", "are for an own algorithm"),
        (
            '[local]\nalgorithm = "shortened"\nparameters = { a = 1 }\n',
            "or an own local algorithm: my_package:my_function, or a short name that an installed",
        ),
        ('[local]\nalgorithm = "a b:c"\n', "local.function"),
    ],
)
def test_what_is_refused(text: str, expected: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan(text)
    assert expected in refused.value.text


@pytest.mark.parametrize(
    ("check_in", "text"),
    [
        ({}, "this run trains by the function mine:train; the device's owner allows none. "),
        ({"functions": ("a:b",), "algorithms": ("own",)}, "owner allows a:b. Where the function"),
        (
            {"functions": ("mine:train",), "software": "fleetlearn-web 1.0"},
            "the device's software is fleetlearn-web 1.0, and it has no own algorithms",
        ),
        ({"functions": ("mine:train",), "algorithms": ("own",)}, ""),
    ],
)
def test_the_owner_is_told(tmp_path: Path, check_in: dict[str, Any], text: str) -> None:
    manifest = write_line_bundle(tmp_path / "a.bundle").manifest
    why = why_no_function(manifest, CheckIn(2, "a", 5, **check_in), "mine:train")
    assert text in why
    assert bool(why) == bool(text)
