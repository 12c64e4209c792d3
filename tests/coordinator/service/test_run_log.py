"""Lines about one of several runs."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.service.run_log import RunLog


def test_lines_name_the_run_where_there_are_several(caplog: pytest.LogCaptureFixture) -> None:
    RunLog("digits").warning("round %d abandoned: %s", 3, "100 % lost")
    RunLog().warning("round %d abandoned", 4)
    assert caplog.messages == ["run digits: round 3 abandoned: 100 % lost", "round 4 abandoned"]
