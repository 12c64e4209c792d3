"""Who may connect: credentials, tokens and names in the handshake, over real sockets."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pytest
from fleetlearn_coordinator.network.gate import Offered, RefusalError, offered_by
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_protocol import Code
from fleetlearn_protocol.messages import PROTOCOL_NAME, Refused
from peers import Peer, PlanMaker, serving, update_of
from websockets.asyncio.client import ClientConnection, connect
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

SECRET, OTHER = token_urlsafe(32), token_urlsafe(32)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Identities]:
    """The identities, as an operator's commands open them."""
    with closing(Identities(tmp_path / "identities")) as found:
        yield found


def a_token(operator: Identities, tags: Sequence[str] = ()) -> str:
    return operator.make_token(9, time.time() + 100, tags, time.time())


async def open_as(
    coordinator: RunServer, secret: str, device: str, *, following: str = "", token: str = ""
) -> ClientConnection:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    headers |= {"Fleetlearn-Device": device} if device else {}
    headers |= {"Fleetlearn-Enrolment": token} if token else {}
    headers |= {"Fleetlearn-Next-Credential": following} if following else {}
    protocols = [Subprotocol(PROTOCOL_NAME)]
    return await connect(
        coordinator.host.address,
        additional_headers=headers,
        subprotocols=protocols,
        compression=None,
    )


async def joined(
    coordinator: RunServer, secret: str, device: str, **options: str
) -> tuple[Peer, ClientConnection]:
    connection = await open_as(coordinator, secret, device, **options)
    peer = Peer(device, connection)
    await peer.check_in()
    return peer, connection


async def refusal(
    coordinator: RunServer, secret: str, device: str, **options: str
) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as caught:
        await open_as(coordinator, secret, device, **options)
    return caught.value.response.status_code, bytes(caught.value.response.body or b"").decode()


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_only_enrolled_devices_connect(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(
            make_plan(round__goal=1), identities=str(tmp_path / "identities")
        ) as coordinator:
            for secret, device, status, words in (
                ("", "", 401, "takes enrolled devices alone"),
                (SECRET, "a", 401, "not known here"),
                ("short", "a", 400, "the credential in the request"),
                (SECRET, "a b", 400, "the device in the request"),
            ):
                found = await refusal(coordinator, secret, device)
                assert found[0] == status
                assert words in found[1]
            assert await refusal(coordinator, SECRET, "a", token="x" * 43) == (
                403,
                "this token is not known here\n",
            )
            peer, connection = await joined(coordinator, SECRET, "a", token=a_token(operator))
            await peer.do_round(update_of(1.0))
            assert coordinator.engine.version == 1
            await connection.close()
            _, connection = await joined(coordinator, SECRET, "a")
            await connection.close()

    run(test())
    assert [row.what for row in operator.events()] == ["started", "token", "enrolled", "stopped"]


def test_nobody_speaks_for_another_device(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(make_plan(), identities=str(tmp_path / "identities")) as coordinator:
            token = a_token(operator)
            _, first = await joined(coordinator, SECRET, "a", token=token)
            thief = await open_as(coordinator, OTHER, "b", token=token)
            await thief.send('{"type": "check-in", "protocol": 1, "device": "a", "examples": 1}')
            answer = await Peer("b", thief).receive()
            assert isinstance(answer, Refused)
            assert answer.code is Code.BAD_MESSAGE
            assert "credential is of b, and a checked in" in answer.text
            assert [*coordinator.host.devices] == ["a"]
            assert (await refusal(coordinator, SECRET, "b"))[0] == 403
            assert (await refusal(coordinator, SECRET, "a", following=OTHER))[0] == 403
            status, text = await refusal(coordinator, token_urlsafe(32), "a", token=token)
            assert status == 403
            assert text.startswith("a device called a is enrolled already, with another credential")
            for connection in (first, thief):
                connection.transport.abort()

    run(test())


def test_the_token_s_tags_are_the_device_s(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path
) -> None:
    async def test() -> None:
        plan = make_plan(selection__once_in=2)
        async with serving(plan, identities=str(tmp_path / "identities")) as coordinator:
            connection = await open_as(coordinator, SECRET, "a", token=a_token(operator, ["roof"]))
            await Peer("a", connection).check_in(tags=("cellar",))
            assert coordinator.run.selection is not None
            assert coordinator.run.selection.selection.stated["a"].labels == {
                "tag:roof",
                "tag:cellar",
            }
            connection.transport.abort()

    run(test())


def test_a_revoked_device_is_out_at_once(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(make_plan(), identities=str(tmp_path / "identities")) as coordinator:
            token = a_token(operator)
            peer, _ = await joined(coordinator, SECRET, "a", token=token)
            _, other = await joined(coordinator, OTHER, "b", token=token)
            operator.revoke("a", time.time())
            assert await peer.closed() == 1008  # the coordinator looks once a second
            while "a" in coordinator.host.devices:
                await asyncio.sleep(0.01)
            assert [*coordinator.host.devices] == ["b"]
            assert (await refusal(coordinator, SECRET, "a"))[0] == 401
            other.transport.abort()

    run(test())


def test_a_credential_is_changed_without_losing_a_lease(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(
            make_plan(round__goal=1), identities=str(tmp_path / "identities")
        ) as coordinator:
            peer, first = await joined(coordinator, SECRET, "a", token=a_token(operator))
            task = await peer.task()
            _, second = await joined(coordinator, SECRET, "a", following=OTHER)
            peer, third = await joined(coordinator, OTHER, "a")
            assert (await peer.task()).task == task.task
            assert (await refusal(coordinator, SECRET, "a"))[0] == 401
            for connection in (first, second, third):
                connection.transport.abort()

    run(test())


def test_a_database_that_cannot_be_used_lets_nobody_in_and_says_so(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path
) -> None:
    async def test() -> None:
        async with serving(make_plan(), identities=str(tmp_path / "identities")) as coordinator:
            token = a_token(operator)
            with closing(sqlite3.connect(operator.path)) as database:
                # somebody holds it for longer than the coordinator waits
                database.execute("BEGIN EXCLUSIVE")
                status, text = await refusal(coordinator, SECRET, "a", token=token)
                assert (status, text) == (
                    503,
                    "the coordinator cannot look credentials up now; try again later\n",
                )
                database.execute("ROLLBACK")
            _, connection = await joined(coordinator, SECRET, "a", token=token)
            connection.transport.abort()

    run(test())


def test_a_page_offers_its_credential_as_a_subprotocol() -> None:
    headers = Headers()
    headers["Sec-WebSocket-Protocol"] = f"fleetlearn.v1, fleetlearn.credential.{SECRET}"
    headers["Sec-WebSocket-Protocol"] = f"fleetlearn.device.my.phone, fleetlearn.token.{OTHER}"
    assert offered_by(headers) == Offered(SECRET, "my.phone", OTHER)
    headers["Authorization"] = f"Bearer {SECRET}"
    with pytest.raises(RefusalError, match="or is there twice"):
        offered_by(headers)


def test_a_device_that_changes_its_credential_without_end_is_held_to_its_check_ins(
    make_plan: PlanMaker, operator: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is a row of the audit log, and milliseconds of the event loop."""
    monkeypatch.setattr("fleetlearn_coordinator.network.device_budgets.DEVICE_BURST", 3)

    async def test() -> None:
        limits, identities = {"device_check_ins": 0.01}, str(tmp_path / "identities")
        async with serving(make_plan(), identities=identities, limits=limits) as coordinator:
            secrets = [token_urlsafe(32) for _ in range(6)]
            await open_as(
                coordinator, secrets[0], "a", token=a_token(operator), following=secrets[1]
            )
            for number in (1, 2):
                await open_as(coordinator, secrets[number], "a", following=secrets[number + 1])
            before = operator.events()
            assert [row.what for row in before][-3:] == ["enrolled", "rotated", "rotated"]
            status, text = await refusal(coordinator, secrets[3], "a", following=secrets[4])
            assert (status, text.split(" ")[:2]) == (429, ["a", "connects"])
            assert (await refusal(coordinator, secrets[2], "a", following=secrets[5]))[0] == 429
            assert operator.events() == before
            known = operator.find(secrets[3], time.time())
            assert known is not None, "the change was announced, and is still to come"

    run(test())
