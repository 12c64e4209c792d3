"""Which version of the protocol two sides speak."""

from __future__ import annotations

import pytest
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, CheckIn
from fleetlearn_protocol.versions import agreed_version, check_chosen

Versions = tuple[int, int | None]


def check_in(versions: Versions) -> CheckIn:
    return CheckIn(versions[0], "roof-7", 10, newest_protocol=versions[1])


@pytest.mark.parametrize(
    ("device", "coordinator", "agreed"),
    [
        ((1, None), (1, 1), 1),
        ((1, None), (1, 2), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((1, 5), (2, 4), 4),
        ((3, 9), (2, 4), 4),
        ((2, None), (2, 4), 2),
        ((4, 4), (2, 4), 4),
    ],
)
def test_it_is_the_newest_that_both_speak(
    device: Versions, coordinator: tuple[int, int], agreed: int
) -> None:
    assert agreed_version(check_in(device), *coordinator) == agreed


@pytest.mark.parametrize(
    ("device", "coordinator", "text"),
    [
        (
            (1, None),
            (2, 4),
            "the device speaks version 1 of the protocol, the coordinator versions 2 to 4; update "
            "the device's fleetlearn",
        ),
        (
            (5, 7),
            (2, 4),
            "the device speaks versions 5 to 7 of the protocol, the coordinator versions 2 to 4; "
            "update the coordinator's fleetlearn",
        ),
        (
            (2, 2),
            (1, 1),
            "the device speaks version 2 of the protocol, the coordinator version 1; update the "
            "coordinator's fleetlearn",
        ),
    ],
)
def test_the_older_side_is_named_where_they_share_none(
    device: Versions, coordinator: tuple[int, int], text: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        agreed_version(check_in(device), *coordinator)
    assert (caught.value.code, caught.value.text) == (Code.BAD_VERSION, text)


def test_a_range_that_ends_before_it_begins_is_no_range() -> None:
    with pytest.raises(ProtocolError, match=r"newest_protocol is 1; expected at least .* 2") as bad:
        agreed_version(check_in((2, 1)))
    assert bad.value.code is Code.BAD_MESSAGE


def test_this_release_speaks_the_last_ones_version() -> None:
    """A device of 0.1 says 1 and nothing more; a coordinator of 0.1 expects exactly that number."""
    assert agreed_version(CheckIn(1, "roof-7", 10)) == 1
    assert OLDEST_PROTOCOL_VERSION == 1


@pytest.mark.parametrize("version", [OLDEST_PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_device_does_not_go_on_in_a_version_that_it_does_not_speak(version: int) -> None:
    check_chosen(OLDEST_PROTOCOL_VERSION)
    check_chosen(PROTOCOL_VERSION)
    with pytest.raises(ProtocolError, match=f"chose version {version} .* versions 1 to 3"):
        check_chosen(version)
