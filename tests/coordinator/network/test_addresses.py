"""What an address has spent, and how long that is remembered: no sockets, and a clock that the test
turns."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.conversation import limits
from fleetlearn_coordinator.network import addresses
from fleetlearn_coordinator.network.addresses import (
    NOTHING,
    AddressBook,
    AddressUse,
    Networks,
    read_address,
)
from fleetlearn_coordinator.plan.service_settings import Limits


def use_of(book: AddressBook, text: str, now: float = 0.0) -> AddressUse | None:
    address = read_address(text)
    assert address is not None
    return book.find(address, now)


def entered(book: AddressBook, text: str) -> AddressUse:
    use = use_of(book, text)
    assert use is not None
    book.enter(use)
    return use


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.7", "::ffff:192.0.2.7", True),
        ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_an_ipv6_network_counts_as_one_address(one: str, other: str, same: bool) -> None:
    book = AddressBook(Limits())
    use = entered(book, one)
    assert (use_of(book, other) is use) == same


def test_exempt_networks_have_no_limits() -> None:
    assert (
        use_of(AddressBook(Limits()), "127.0.0.1") is use_of(AddressBook(Limits()), "::1") is None
    )
    assert use_of(AddressBook(Limits(exempt=())), "127.0.0.1") is not None
    assert use_of(AddressBook(Limits(exempt=("10.0.0.0/8",))), "10.1.2.3") is None
    assert read_address("nowhere") is None
    assert read_address("::1") not in Networks(["0.0.0.0/0"])


def test_what_was_spent_is_remembered_after_the_last_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a bounded number of addresses; those that are connected are never forgotten."""
    monkeypatch.setattr(addresses, "ADDRESSES_KEPT", 100)
    book = AddressBook(Limits())
    here = entered(book, "192.0.2.1")
    gone = entered(book, "192.0.2.2")
    gone.short_lives.tokens = 0.0
    book.leave(gone, newcomer=True)
    assert use_of(book, "192.0.2.2") is gone
    for number in range(10_000):
        book.leave(entered(book, f"10.0.{number // 256}.{number % 256}"), newcomer=True)
    assert len(book) == 101
    assert use_of(book, "192.0.2.1") is here
    again = use_of(book, "192.0.2.2")
    assert again is not gone


def test_an_address_takes_half_of_the_free_places_of_newcomers() -> None:
    book, places = AddressBook(Limits()), 64
    taken = 0
    for text, most in (("192.0.2.1", 32), ("192.0.2.2", 16), ("192.0.2.3", 8)):
        while True:
            use = use_of(book, text)
            assert use is not None
            if use.floods(0.0, places - taken):
                break
            book.enter(use)
            taken += 1
        assert use.newcomers == most
    assert taken < places
    book.leave(use, newcomer=True)
    assert not use.floods(0.0, places - taken + 1)


def test_connections_and_their_rate_are_bounded() -> None:
    book = AddressBook(Limits(connections=2, check_ins=1.0))
    use = entered(book, "192.0.2.1")
    assert [bool(use.refusal(0.0)) for _ in range(6)] == [False] * int(limits.ADDRESS_BURST) + [
        True,
        True,
    ]
    assert "more than 1 connections per second" in use.refusal(0.0)
    assert not use.refusal(1.0)
    for _ in range(2):
        book.enter(use)
    assert (
        use.refusal(100.0)
        == "192.0.2.1 has 2 connections, as many as one address may have at a time"
    )


def test_connections_that_wait_for_their_address_have_turns_one_after_the_other() -> None:
    use = AddressUse("192.0.2.1", Limits(messages=80.0, bytes=limits.TURN_BYTES), 0.0)
    assert use.wait(0.0) == (0.0, NOTHING)
    use.messages.tokens = -0.001
    frames = limits.FRAMES_PER_TURN
    turns = [use.wait(0.0) for _ in range(5)]
    assert [turn[1] for turn in turns] == 5 * [(frames, 0)]
    assert [round(turn[0], 2) for turn in turns] == [
        round((n + 1) * frames / 80.0, 2) for n in range(5)
    ]
    use.bytes.tokens = -1.0
    assert use.wait(0.0)[1] == (frames, limits.TURN_BYTES)
    assert use.wait(1000.0) == (0.0, NOTHING)
