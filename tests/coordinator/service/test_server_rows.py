"""Reports of rows of tables that no device of ours sends: each is refused, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import Plan, read_model
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import FLOAT32, UINT32
from fleetlearn_protocol.frames import pack_chunk
from fleetlearn_protocol.messages import Accepted, Cancel, Grant, Refused, Task, Uploaded
from fleetlearn_protocol.sparse_rows import row_layout, select
from peers import Peer, fleet, plan_text, report_of
from sparse_fleet import FILMS, WIDTH, ratings_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ratings_bundle(tmp_path_factory.mktemp("ratings"))


async def report(peer: Peer, task: Task, contents: list[tuple[str, bytes]]) -> Any:
    """Send these parts, in this order; returns the coordinator's answer."""
    described = tuple(
        (UINT32 if name == "rows" else FLOAT32).part(name, content) for name, content in contents
    )
    await peer.send(report_of(task, np.zeros(1, np.float32), parts=described))
    answer = await peer.receive()
    if not isinstance(answer, Grant):
        return answer
    begin = 0
    for _, content in contents:
        await peer.send(pack_chunk(answer.transfer, begin, content))
        begin += len(content)
    await peer.send(Uploaded(task.task))
    return await peer.receive()


def plan_of(bundle: Path, folder: Path) -> Plan:
    settings = {"local__batch_size": 10, "local__lr": 0.5, "stop__rounds": 1, "round__minimum": 2}
    return Plan.parse(plan_text(bundle, folder / "run", **settings), folder)


ROWS = np.array([3, 7], np.uint32)
UPDATE = np.full(1 + 2 * (WIDTH + 1), 0.5, np.float32)


@pytest.mark.parametrize(
    ("rows", "update"),
    [
        (ROWS[::-1], UPDATE),
        (np.array([7, 7], np.uint32), UPDATE),
        (np.array([7, FILMS], np.uint32), UPDATE),
        (np.array([7, 2**32 - 1], np.uint32), UPDATE),
        (ROWS, UPDATE[:-1]),
        (np.arange(FILMS + 1).astype(np.uint32), np.zeros(1 + 7 * (FILMS + 1), np.float32)),
        (ROWS, np.full_like(UPDATE, np.nan)),
    ],
    ids=[
        "unsorted", "doubled", "beyond the table", "far beyond", "too short",
        "more than there are", "not finite",
    ],
)  # fmt: skip
def test_reports_of_rows_that_cannot_be(
    bundle: Path, tmp_path: Path, rows: np.ndarray, update: np.ndarray
) -> None:
    plan = plan_of(bundle, tmp_path)
    contents = [("rows", rows.tobytes()), ("update", update.tobytes())]

    async def test() -> None:
        async with asyncio.timeout(30), fleet(plan) as (coordinator, join):
            a, b = await join("a"), await join("b")
            task, other = await a.task(), await b.task()
            answer = await report(a, task, contents)
            assert isinstance(answer, Refused | Cancel), answer
            assert not coordinator.engine.accepted
            honest = [("rows", ROWS.tobytes()), ("update", UPDATE.tobytes())]
            assert isinstance(await report(b, other, honest), Accepted)
            assert not coordinator.done.done()

    asyncio.run(test())


def test_the_update_may_come_before_its_rows(bundle: Path, tmp_path: Path) -> None:
    """The order of parts is the device's: one that was taken for a whole model's ended the run."""
    plan = plan_of(bundle, tmp_path)
    contents = [("rows", ROWS.tobytes()), ("update", UPDATE.tobytes())]

    async def test() -> None:
        async with asyncio.timeout(30), fleet(plan) as (coordinator, join):
            a, b = await join("a"), await join("b")
            assert isinstance(await report(a, await a.task(), contents[::-1]), Accepted)
            assert isinstance(await report(b, await b.task(), contents), Accepted)
            assert await coordinator.done == "1 rounds done"

    asyncio.run(test())
    _, model = read_model(plan.data_dir)
    found, layout = open_bundle(bundle), row_layout(open_bundle(bundle).manifest)
    assert layout is not None
    moved = model - found.parameters()[: layout.size]
    np.testing.assert_allclose(select(moved, layout, ROWS.astype(np.int64)), UPDATE, rtol=1e-6)
    assert np.count_nonzero(moved) == len(UPDATE)
