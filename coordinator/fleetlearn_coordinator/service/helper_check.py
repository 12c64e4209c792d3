"""What the plan's helper says of itself, looked at before rounds depend on it: when a run is about
to be served, and by ``doctor``."""

from __future__ import annotations

import asyncio

from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.manifest import Manifest

from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.secure_section import SecureSection
from fleetlearn_coordinator.secure.helper_client import (
    HelperError,
    NoHelperError,
    ask_for_card,
)
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.mask_sum import helper_address
from fleetlearn_coordinator.service.views.records import CheckView

TIMEOUT = 5.0
"""Seconds for the helper's answer, which is a few bytes."""


async def look_at_helper(plan: Plan, manifest: Manifest, log: RunLog) -> None:
    """Ask the plan's helper, if it has one, what it is. ``manifest``: of the plan's bundle. Warns
    where it does not answer. Raises PlanError where it cannot add the plan's updates up."""
    if plan.secure is None or plan.secure.mode != "helper":
        return
    words = plan.masked_words(manifest)
    try:
        misfit = await asyncio.to_thread(why_not_this_helper, plan, plan.secure, words)
    except NoHelperError as error:
        log.warning("the run begins, and its rounds wait for their helper: %s", error.text)
        return
    if misfit:
        raise PlanError(Code.BAD_MESSAGE, f"{plan.file}: {misfit}")


def why_not_this_helper(plan: Plan, secure: SecureSection, words: int) -> str:
    """Ask the helper what it is. Returns why it cannot add the updates of the plan up, and what to
    do; empty if it can. ``words``: that a device masks. Raises NoHelperError."""
    address = helper_address(secure)
    try:
        card = ask_for_card(address, bytes.fromhex(secure.key), TIMEOUT)
    except NoHelperError:
        raise
    except HelperError as error:
        return (
            f"[secure] and the helper do not fit: {error.text}. `fleetlearn-coordinator helper "
            "status` says there what secure.key and secure.certificate must be"
        )
    if card.minimum > plan.round.minimum:
        return (
            f"round.minimum = {plan.round.minimum} with [secure]: {address.url} adds up the masks "
            f"of {card.minimum} devices at least, and rounds with fewer would be abandoned. Set "
            f"round.minimum and secure.minimum to {card.minimum} or more"
        )
    if words > card.most_elements:
        what = "sums are three words each" if plan.algorithm.computes else "one for the weight"
        return (
            f"a device masks {words} words ({what}), and {address.url} adds masks of at most "
            f"{card.most_elements} elements. Its operator can raise most_elements"
        )
    return ""


def check_helper(plan: Plan, words: int) -> CheckView | None:
    """Ask the plan's helper, for ``doctor``. ``words``: that a device masks. None: the plan has
    none."""
    secure = plan.secure
    if secure is None or secure.mode != "helper":
        return None
    try:
        misfit = why_not_this_helper(plan, secure, words)
    except NoHelperError as error:
        do = "ask the helper's operator: rounds wait until it answers"
        return CheckView("helper", "warning", error.text, do)
    if misfit:
        return CheckView("helper", "bad", misfit, "change the plan, or ask the helper's operator")
    found = f"{secure.helper} has the key and the certificate of the plan"
    return CheckView("helper", "good", found)
