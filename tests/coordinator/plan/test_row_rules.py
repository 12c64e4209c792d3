"""Which plans are refused for a bundle with sparse tables, each with its reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.row_rules import ROW_RULES, row_misfit
from fleetlearn_protocol.manifest import Input, LocalStep, Manifest, Parameter, SparseRows
from fleetlearn_protocol.messages import ROWS, UPDATE
from plans import PRIVATE, SECURE, SMALL, manifest

LR = "[local]\nlr = 0.1\n"
BROKEN = {
    "secure": (f"{SMALL}{SECURE}", "[secure] hides"),
    "privacy": (f"{SMALL}{PRIVATE}", "[privacy] promises"),
    "median": (f'{SMALL}[aggregation]\naggregator = "median"\n', "compares whole updates"),
    "norm": (f"{SMALL}[aggregation]\nmax_norm = 1.0\n", "measure whole updates"),
    "algorithm": (f'recipe = "ditto"\n{SMALL}', "vectors of the whole model"),
    "top-k": (f'{SMALL}[encoding]\nup = "topk-0.1"\n', "may have other rows"),
    "quality": (f"{SMALL}[quality]\nevery = 2\n", "work with whole updates"),
}


@pytest.fixture
def sparse() -> Manifest:
    table = (Parameter("items", (5, 2), 0), Parameter("b", (1,), 10))
    batch = (Input("item", "int64", (), 5),)
    return msgspec.structs.replace(
        manifest(step=LocalStep("sgd")),
        parameters=table,
        batch=batch,
        references=(),
        hyper=(),
        sparse=SparseRows(("items",), ("item",), 5),
    )


def load(text: str) -> Plan:
    return Plan.parse(text, Path("/plans"))


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_go_with_rows_is_refused(sparse: Manifest, name: str) -> None:
    text, reason = BROKEN[name]
    told = row_misfit(load(text), sparse)
    assert told is not None
    assert reason in told
    assert 'Set aggregation.rows = "whole"' in told
    whole = f'{text}[aggregation]\nrows = "whole"\n'
    if "[aggregation]" in text:
        whole = text.replace("[aggregation]", '[aggregation]\nrows = "whole"')
    assert row_misfit(load(whole), sparse) is None


def test_each_rule_has_a_reason() -> None:
    assert all(rule.text(load(SMALL)) for rule in ROW_RULES)


def test_a_key_for_tables_that_are_not_there() -> None:
    plan = load(f'{SMALL}[aggregation]\nrows = "touched"\n')
    with pytest.raises(PlanError, match="has no sparse tables"):
        plan.check_bundle(manifest())


def test_what_devices_are_asked_for(sparse: Manifest) -> None:
    plan = load(SMALL)
    assert row_misfit(plan, sparse) is None
    asked = plan.parts_of_rows(plan.parts(sparse), sparse)
    assert [*asked.items()] == [(ROWS, "uint32"), (UPDATE, "float32")]
    whole = load(f'{SMALL}[aggregation]\nrows = "whole"\n')
    assert [*whole.parts_of_rows(whole.parts(sparse), sparse)] == [UPDATE]
    assert [*plan.parts_of_rows(plan.parts(manifest()), manifest())] == [UPDATE]
