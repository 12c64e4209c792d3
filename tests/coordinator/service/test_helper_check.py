"""What is said of a plan's helper before rounds depend on it: by ``serve`` and by ``doctor``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service import helper_check
from fleetlearn_coordinator.service.checks import check_plan
from fleetlearn_coordinator.service.serve import running
from fleetlearn_protocol import open_bundle
from listening_helper import HelperFolder
from peers import PlanMaker

WRONG = {
    "another key": ({"secure__key": "9" * 64}, "has the key .*; 99999"),
    "another certificate": ({"secure__certificate": "c" * 64}, "shows a certificate with the SHA"),
    "fewer devices": ({"round__minimum": 3, "round__goal": 3}, "of 4 devices at least"),
}


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HelperFolder]:
    folder = HelperFolder(tmp_path_factory.mktemp("helper"), "ab", minimum=4)
    with folder.listening():
        yield folder


def four(helper: HelperFolder, **changed: Any) -> dict[str, Any]:
    return helper.plan_settings(round__goal=4, round__minimum=4) | changed


def serve_shortly(plan: Any) -> None:
    async def main() -> None:
        async with running(plan, ServiceSettings.read({"port": 0})):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("wrong", WRONG)
def test_a_helper_that_does_not_fit_ends_the_start_with_the_reason(
    make_plan: PlanMaker, helper: HelperFolder, wrong: str
) -> None:
    changed, text = WRONG[wrong]
    plan = make_plan(**four(helper, **changed))
    with pytest.raises(PlanError, match=text):
        serve_shortly(plan)
    assert not Path(plan.data_dir).exists()
    (check,) = [each for each in check_plan(plan, ServiceSettings()) if each.what == "helper"]
    assert check.state == "bad"


def test_a_helper_that_fits_lets_the_run_begin(make_plan: PlanMaker, helper: HelperFolder) -> None:
    plan = make_plan(**four(helper))
    serve_shortly(plan)
    (check,) = [each for each in check_plan(plan, ServiceSettings()) if each.what == "helper"]
    assert check.state == "good"


def test_a_helper_that_is_away_is_a_warning(
    make_plan: PlanMaker, helper: HelperFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    plan = make_plan(**four(helper, secure__helper=f"https://127.0.0.1:{port}"))
    serve_shortly(plan)
    assert f"https://127.0.0.1:{port} does not answer" in caplog.text
    (check,) = [each for each in check_plan(plan, ServiceSettings()) if each.what == "helper"]
    assert (check.state, check.what) == ("warning", "helper")


def test_a_model_that_is_too_large_for_the_helper_is_said(
    make_plan: PlanMaker, helper: HelperFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(**four(helper))
    assert plan.secure is not None
    words = plan.masked_words(open_bundle(plan.bundle).manifest)
    assert helper_check.why_not_this_helper(plan, plan.secure, words) == ""
    text = helper_check.why_not_this_helper(plan, plan.secure, 10**7 + 1)
    assert "adds masks of at most 10000000 elements" in text
