"""Which of a host's addresses is connected to, and what is said where none can be."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest
from fleetlearn_device.driver import addresses
from fleetlearn_device.driver.addresses import Place, UnreachableError, connect_first, find_places
from networks import black_hole, give_names
from processes import free_port

SECONDS = 5.0


def places(*given: tuple[str, int]) -> list[Place]:
    return [Place(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, place) for place in given]


def test_families_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    six, four = ["2001:db8::1", "2001:db8::2", "2001:db8::3"], ["192.0.2.1"]
    give_names(monkeypatch, {"a.test": [(address, None) for address in (*six, *four)]})
    found = asyncio.run(find_places("a.test", 8443, SECONDS))
    assert list(map(str, found)) == [
        "2001:db8::1 port 8443",
        "192.0.2.1 port 8443",
        "2001:db8::2 port 8443",
        "2001:db8::3 port 8443",
    ]


def test_a_name_of_this_machine_leads_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device speaks without TLS to localhost: DNS must not decide where that is."""
    names = {
        "a.localhost": [("192.0.2.1", None), ("127.0.0.1", None)],
        "b.localhost": [("192.0.2.1", None)],
    }
    give_names(monkeypatch, names)
    assert list(map(str, asyncio.run(find_places("a.localhost", 1, SECONDS)))) == [
        "127.0.0.1 port 1"
    ]
    with pytest.raises(
        UnreachableError, match=r"b\.localhost leads to another machine here; write 127\.0\.0\.1"
    ):
        asyncio.run(find_places("b.localhost", 1, SECONDS))


@pytest.mark.parametrize("name", ["nowhere.test", "nowhere.localhost"])
def test_a_name_that_is_not_found_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_names(monkeypatch, {})
    with pytest.raises(
        UnreachableError, match=f"the name {name} was not found .*: check its spelling, and this"
    ):
        asyncio.run(find_places(name, 1, SECONDS))


def test_dns_that_never_answers_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async def forever(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", forever)
        with pytest.raises(
            UnreachableError, match=r"no DNS server answered for the name fleet\.test in 0\.01 s"
        ):
            await find_places("fleet.test", 1, 0.01)

    asyncio.run(test())


@pytest.mark.parametrize("dead", ["::1", "127.0.0.2"])
def test_an_address_that_never_answers_does_not_keep_the_device_away(dead: str) -> None:
    """As IPv6 at home, where the name has an address and the network leads nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as server, black_hole(dead) as hole:
        connected, place = asyncio.run(
            connect_first(places((dead, hole), server.getsockname()), SECONDS)
        )
        with connected:
            assert connected.getpeername() == place.address == server.getsockname()


def test_a_refused_address_makes_way_for_the_next_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        both = places(("127.0.0.1", free_port()), server.getsockname())
        connected, place = asyncio.run(connect_first(both, SECONDS))
        connected.close()
        assert place.address == server.getsockname()


def test_each_address_and_what_became_of_it_is_said() -> None:
    port = free_port()
    with black_hole() as hole:
        both = places(("127.0.0.1", hole), ("127.0.0.1", port))
        with pytest.raises(UnreachableError) as caught:
            asyncio.run(connect_first(both, 0.5))
    assert str(caught.value) == (
        f"127.0.0.1 port {hole} gave no answer in 0.5 s, 127.0.0.1 port {port} refused the "
        "connection: check the address and the port; a firewall may be in between"
    )


def test_nothing_that_listens_is_said() -> None:
    port = free_port()
    with pytest.raises(
        UnreachableError,
        match="refused the connection: nothing listens there"
        r"\. Check the port, and that the coordinator runs on this machine",
    ):
        asyncio.run(connect_first(places(("127.0.0.1", port)), SECONDS))


def test_of_two_connections_at_the_same_moment_one_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []
    connect = addresses._connect

    async def test() -> None:
        begun, both = list[Place](), asyncio.Event()

        async def together(place: Place) -> socket.socket:
            begun.append(place)
            if len(begun) == 2:
                both.set()
            await both.wait()
            made.append(await connect(place))
            return made[-1]

        monkeypatch.setattr(addresses, "_connect", together)
        monkeypatch.setattr(addresses, "NEXT_AFTER", 0.0)
        with socket.create_server(("127.0.0.1", 0)) as server:
            connected, _ = await connect_first(
                places(server.getsockname(), server.getsockname()), SECONDS
            )
            await asyncio.sleep(0)  # the other one is closed in the loop's next turn
            connected.close()

    asyncio.run(test())
    assert [one.fileno() for one in made] == [-1, -1]


def test_a_connection_that_is_given_up_leaves_no_socket() -> None:
    """A socket that stays open warns when it is collected, and warnings are errors here."""

    async def test() -> None:
        with black_hole() as hole:
            connecting = asyncio.create_task(connect_first(places(("127.0.0.1", hole)), SECONDS))
            await asyncio.sleep(0)
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            assert connecting.cancelled()

    asyncio.run(test())
    gc.collect()
