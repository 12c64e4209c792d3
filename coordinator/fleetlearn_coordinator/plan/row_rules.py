"""What of a plan cannot be where devices fetch and send some rows of tables alone, each with its
reason."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_protocol.manifest import Manifest
from msgspec import UNSET

from fleetlearn_coordinator.plan.plan_keys import PlanKeys
from fleetlearn_coordinator.plan.plan_rule import PlanRule, leaves_updates_out

TELLS = "which rows a device fetches and sends tells which items it has"


def _rule(breaks: Callable[[PlanKeys], object], text: Callable[[PlanKeys], str]) -> PlanRule:
    return PlanRule(breaks, text)


ROW_RULES = (
    _rule(
        lambda plan: plan.secure is not None,
        lambda plan: f"[secure] hides what a device's data are, and {TELLS}",
    ),
    _rule(
        lambda plan: plan.privacy is not None,
        lambda plan: (
            "[privacy] promises that a device's data cannot be told from what it sends, and "
            f"{TELLS}"
        ),
    ),
    _rule(
        leaves_updates_out,
        lambda plan: (
            f'aggregation.aggregator = "{plan.aggregation.aggregator}" compares whole updates, and '
            "most rows have those of few devices"
        ),
    ),
    _rule(
        lambda plan: (
            plan.aggregation.max_norm is not None
            or plan.aggregation.q is not None
            or plan.aggregation.weighing is not None
        ),
        lambda plan: (
            "aggregation.max_norm, q and weighing measure whole updates, whose length depends on "
            "how many rows a device has"
        ),
    ),
    _rule(
        lambda plan: plan.local.algorithm not in ("plain", "fedrep"),
        lambda plan: (
            f'local.algorithm = "{plan.local.algorithm}" keeps on the device, or sends beside the '
            'update, vectors of the whole model. local.algorithm = "plain" and "fedrep" do not'
        ),
    ),
    _rule(
        lambda plan: plan.encoding.leaves_residual,
        lambda plan: (
            f'encoding.up = "{plan.encoding.up}" adds what it left out to the device\'s next '
            "update, which may have other rows"
        ),
    ),
    _rule(
        lambda plan: plan.encoding.own is not None,
        lambda plan: (
            f'encoding.up = "{plan.encoding.up}": nobody has shown what an own encoding makes of '
            "updates of some rows. Use one of ours"
        ),
    ),
    _rule(
        lambda plan: plan.server.mix or plan.server.optimizer == "feddyn",
        lambda plan: "the server's rule moves the whole model, with rows that no device has",
    ),
    _rule(
        lambda plan: plan.is_family or plan.regions is not None,
        lambda plan: "several models in one run, and regions, have whole ones",
    ),
    _rule(
        lambda plan: plan.quality is not None or plan.distil is not None,
        lambda plan: "[quality] and [distil] work with whole updates",
    ),
)
"""Each with its reason. docs/algorithms/sparse-rows.md lists them for people."""


def row_misfit(plan: PlanKeys, manifest: Manifest) -> str | None:
    """Return why the plan and a bundle with sparse tables do not go together, and what to do. None:
    they do."""
    chosen = plan.aggregation.rows
    if manifest.sparse is UNSET:
        if chosen is None:
            return None
        return (
            f'aggregation.rows = "{chosen}", and bundle {manifest.name} has no sparse tables: '
            "export the model with sparse=, or leave the key out"
        )
    if chosen == "whole":
        return None
    for rule in ROW_RULES:
        if rule.breaks(plan):
            tables = ", ".join(manifest.sparse.tables)
            return (
                f"bundle {manifest.name} has sparse tables ({tables}), and {rule.text(plan)}. Set "
                'aggregation.rows = "whole": devices then fetch and send whole tables'
            )
    return None
