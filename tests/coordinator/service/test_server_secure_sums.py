"""Devices whose sums are masked, over real connections: which of them have tasks, what of their
reports is refused, and what a helper makes of the rest."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_protocol.encodings import INT64, MASKED
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.formats.whole import sums_to_bytes
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import Accepted, CheckIn, Grant, Refused, Uploaded, Welcome
from masked_peers import CAN_MASK, SECURE, MaskedUpload, masked_sums, otherwise
from peers import Peer, fleet
from statistics_bundle import QUESTIONS, statistics_bundle

KNOWN: dict[str, Any] = {
    "privacy": CAN_MASK,
    "encodings": ("float32", "masked", "masked24", "masked64"),
    "algorithms": ("statistics",),
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    bundle = statistics_bundle(tmp_path, QUESTIONS)
    keys = ("mode", "helper", "key", "certificate")
    secure = "".join(f'{key} = "{SECURE[f"secure__{key}"]}"\n' for key in keys)
    return Plan.parse(
        f'recipe = "statistics"\nname = "a"\nbundle = "{bundle.path}"\ndata_dir = "run"\n[round]\n'
        f"goal = 3\nminimum = 2\nover_selection = 1.0\n[secure]\n{secure}",
        tmp_path,
    )


def run_async(test: Callable[[Plan], Awaitable[None]]) -> Callable[[Plan], None]:
    """Run an async test."""

    @functools.wraps(test)
    def run(plan: Plan) -> None:
        asyncio.run(test(plan))  # type: ignore[arg-type]

    return run


async def masking(join: Any, name: str) -> Peer:
    peer: Peer = await join(name, check_in=False)
    await peer.check_in(**KNOWN)
    return peer


async def send(peer: Peer, upload: MaskedUpload) -> Any:
    """Report and send it; returns the coordinator's answer."""
    await peer.send(upload.report)
    grant = await peer.receive()
    if not isinstance(grant, Grant):
        return grant
    for start in range(grant.offset, len(upload.content), 120_000):
        content = upload.content[start : start + 120_000]
        await peer.send(pack_chunk(grant.transfer, start, content))
    await peer.send(Uploaded(grant.task))
    return await peer.receive()


@run_async
async def test_devices_that_do_not_know_masked_sums_are_given_no_task(plan: Plan) -> None:
    async with fleet(plan) as (coordinator, join):
        for changes, told in (
            ({"encodings": ("float32", "masked", "masked24")}, "travel as masked64"),
            ({"privacy": ()}, "cannot mask"),
        ):
            old = await join("old", check_in=False)
            await old.send(CheckIn(1, "old", 10, **(KNOWN | changes)))
            assert told in (await old.expect(Welcome)).ineligible
        peers = [await masking(join, name) for name in "abc"]
        for peer in peers:
            task = await peer.task()
            assert task.parts == {"sums": "masked64"}
            assert task.secure is not None
            assert (task.secure.bits, task.secure.reports, task.clip) == (16, 3, None)
        assert {*coordinator.engine.leases} == {"a", "b", "c"}


@run_async
async def test_what_a_masked_report_must_not_be(plan: Plan) -> None:
    """Each ends the task: another length, other words, no mask, a number of rows, no seed."""
    wrong = {
        "another length": Code.WRONG_LENGTH,
        "zeros that are not sent": Code.WRONG_LENGTH,
        "words of an update": Code.WRONG_PARTS,
        "sums without a mask": Code.WRONG_PARTS,
        "rows": Code.BAD_MESSAGE,
        "no seed": Code.BAD_MESSAGE,
        "another round": Code.BAD_MESSAGE,
    }
    async with fleet(plan) as (coordinator, join):
        size = coordinator.run.bundle.manifest.elements_of("sums")
        peers = [await masking(join, f"d{number}") for number in range(len(wrong))]
        for peer, (name, code) in zip(peers, wrong.items(), strict=True):
            task = await peer.task()
            sums = np.zeros(size, np.int64)
            upload = masked_sums(task, peer.name, sums)
            part = upload.report.parts[0]
            plain = sums_to_bytes(sums)
            changed: dict[str, dict[str, Any]] = {
                "another length": {"parts": (msgspec.structs.replace(part, size=12 * size + 12),)},
                "zeros that are not sent": {"parts": (msgspec.structs.replace(part, size=12),)},
                "words of an update": {"parts": (MASKED.part("sums", upload.content),)},
                "sums without a mask": {"parts": (INT64.part("sums", plain),)},
                "rows": {"examples": 300},
                "no seed": {"sealed": None},
                "another round": {"round": 7},
            }
            refused = await send(peer, otherwise(upload, **changed[name]))
            assert isinstance(refused, Refused), name
            assert refused.code is code, (name, refused)
        assert not coordinator.run.reports.counted


@run_async
async def test_masked_sums_are_kept_over_a_restart_and_counted_once(plan: Plan) -> None:
    async with fleet(plan) as (coordinator, join):
        size = coordinator.run.bundle.manifest.elements_of("sums")
        peers = [await masking(join, name) for name in "abc"]
        tasks = [await peer.task() for peer in peers]
        sent = [
            masked_sums(task, name, np.full(size, row - 1, np.int64))
            for row, (task, name) in enumerate(zip(tasks, "ab", strict=False))
        ]
        for peer, upload in zip(peers, sent, strict=False):
            assert isinstance(await send(peer, upload), Accepted)
        assert isinstance(await send(peers[0], sent[0]), Accepted), "it is accepted, and not added"
    expected = sum(words_from_bytes(upload.content).astype(np.uint64) for upload in sent)
    async with fleet(plan) as (coordinator, _):
        tensors = coordinator.run.reports.round.sums.to_tensors()
        np.testing.assert_array_equal(tensors["sums.words"], expected.astype(np.uint32))
        assert tensors["sums.updates"].tolist() == [2]
        assert len(coordinator.run.reports.counted) == 2
