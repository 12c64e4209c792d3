"""The test kit: what a package with own algorithms calls from its tests. Each function makes the
checks that ours pass, and raises AssertionError with what was asked and what came.

from fleetlearn_coordinator.testing import check_selection
def test_my_strategy() -> None:
    check_selection(fewest_tasks())
"""

from fleetlearn_coordinator.testing.round_rules import check_selection, check_stop_rule
from fleetlearn_coordinator.testing.updates import (
    check_aggregator,
    check_optimizer,
    check_staleness,
    check_weighing,
)

__all__ = [
    "check_aggregator",
    "check_optimizer",
    "check_selection",
    "check_staleness",
    "check_stop_rule",
    "check_weighing",
]
