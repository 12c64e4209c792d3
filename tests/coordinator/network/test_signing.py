"""Signed tasks on real sockets: who gets which, and how devices come to trust another key."""

from __future__ import annotations

import asyncio
import stat
import time
from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fleetlearn_coordinator.network.signing import Signer, make_signing_key
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    CheckIn,
    Failed,
    FromCoordinator,
    Refused,
    Signed,
    Task,
    Trust,
    Welcome,
    decode_from_coordinator,
)
from fleetlearn_protocol.signing import signed_bytes
from peers import Peer, PlanMaker, fleet, serving, update_of
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

CHALLENGE = "c" * 64
PROTOCOL = Subprotocol(PROTOCOL_NAME)


def keys_in(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        make_signing_key(folder / name)
    return Signer([folder / name for name in names]).keys


async def check_in(peer: Peer, keys: tuple[str, ...], challenge: str | None = CHALLENGE) -> Welcome:
    await peer.send(CheckIn(1, peer.name, 10, trusts=keys, challenge=challenge))
    welcome: Welcome = await peer.expect(Welcome)
    return welcome


def opened(peer: Peer, signed: Signed) -> FromCoordinator:
    """The message, whose signature is checked."""
    content = signed_bytes(CHALLENGE, peer.name, signed.message)
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed.key)).verify(
        bytes.fromhex(signed.signature), content
    )
    return decode_from_coordinator(signed.message)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_tasks_are_signed_for_the_devices_that_ask(make_plan: PlanMaker, tmp_path: Path) -> None:
    keys = keys_in(tmp_path, "key.pem")

    async def test() -> None:
        files = [str(tmp_path / "key.pem")]
        async with fleet(make_plan(round__goal=2), signing_keys=files) as (coordinator, join):
            plain, peer = await join("plain"), await join("a", check_in=False)
            assert not (await check_in(peer, keys)).ineligible
            signed: Signed = await peer.expect(Signed)
            task = opened(peer, signed)
            assert isinstance(task, Task)
            await plain.do_round(update_of(1.0))
            await peer.upload(task, update_of(1.0))
            await peer.expect(Signed)
            assert coordinator.engine.version == 1

    run(test())


@pytest.mark.parametrize("case", ["no keys", "another key", "no challenge"])
def test_a_device_that_cannot_be_signed_for_gets_no_task_and_is_told(
    make_plan: PlanMaker, tmp_path: Path, case: str
) -> None:
    keys = keys_in(tmp_path, "key.pem")
    other = keys_in(tmp_path, "other.pem")
    service = {} if case == "no keys" else {"signing_keys": [str(tmp_path / "key.pem")]}

    async def test() -> None:
        async with fleet(make_plan(round__goal=1), **service) as (coordinator, join):
            peer = await join("a", check_in=False)
            given = keys if case == "no challenge" else other
            welcome = await check_in(peer, given, None if case == "no challenge" else CHALLENGE)
            assert (
                welcome.ineligible
                == f"the device does only tasks signed with {given[0]}, and this coordinator cannot"
            )
            await (await join("plain")).do_round(update_of(1.0))  # the round is not held up
            assert coordinator.engine.leases.keys() <= {"plain"}

    run(test())


def test_a_refused_check_in_has_nothing_signed_for_another_device(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    """Somebody between another device and the coordinator, who is a device himself, could use it
    there."""
    keys = keys_in(tmp_path, "key.pem")
    files, identities = [str(tmp_path / "key.pem")], tmp_path / "identities"
    secret = token_urlsafe(32)
    with closing(Identities(identities)) as operator:
        token = operator.make_token(1, time.time() + 100, [], time.time())
        operator.enrol("a", secret, token, time.time())

    async def test() -> None:
        plan = make_plan(round__goal=1)
        async with serving(plan, identities=str(identities), signing_keys=files) as coordinator:
            headers = {"Authorization": f"Bearer {secret}"}
            async with connect(
                coordinator.host.address, additional_headers=headers, subprotocols=[PROTOCOL]
            ) as socket:
                peer = Peer("a", socket)
                await peer.send(CheckIn(1, "b", 10, trusts=keys, challenge=CHALLENGE))
                await peer.expect(Refused)
                await peer.check_in()
                await peer.expect(Task)

    run(test())


def test_devices_come_to_trust_another_key(make_plan: PlanMaker, tmp_path: Path) -> None:
    old, both = keys_in(tmp_path, "old.pem"), keys_in(tmp_path, "new.pem", "old.pem")

    async def test() -> None:
        files = [str(tmp_path / "new.pem"), str(tmp_path / "old.pem")]
        async with fleet(make_plan(round__goal=2), signing_keys=files) as (_, join):
            peer = await join("a", check_in=False)
            await check_in(peer, old)
            signed: Signed = await peer.expect(Signed)
            assert signed.key == old[0]
            assert opened(peer, signed) == Trust(both)
            peer = await join("b", check_in=False)
            await check_in(peer, tuple(reversed(both)))
            signed = await peer.expect(Signed)
            assert signed.key == both[0], "the first of the coordinator's keys signs"
            task = opened(peer, signed)
            assert isinstance(task, Task)
            await peer.send(Failed(task.task, "untrusted", "a test"))

    run(test())


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    assert make_signing_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    assert not make_signing_key(file)
    assert file.read_bytes() == before


def test_what_cannot_sign_is_named(tmp_path: Path) -> None:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    another = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "ec.pem").write_bytes(
        another.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    )
    (tmp_path / "text.pem").write_text("hello")
    for name, words in (
        ("ec.pem", "of another kind than Ed25519"),
        ("text.pem", "cannot be used"),
        ("no.pem", "no.pem"),
    ):
        with pytest.raises(FleetError, match=words) as caught:
            Signer([tmp_path / name])
        assert "`fleetlearn-coordinator signing-key` makes it" in caught.value.text
    with pytest.raises(FleetError, match="a device trusts 8 at most"):
        Signer([tmp_path / "ec.pem"] * 9)
