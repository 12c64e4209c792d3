"""The population filter of a run: what devices state, and a share of them that is always the
same."""

from __future__ import annotations

import msgspec
import pytest
from fleetlearn_coordinator.service.several.population import EVERYBODY, place, why_not
from fleetlearn_coordinator.storage.identities import RUN
from fleetlearn_coordinator.storage.runs import Population
from fleetlearn_protocol import ProtocolError
from fleetlearn_protocol.messages import CheckIn, decode_from_device, encode

PHONE = CheckIn(1, "d", 10, runtime="onnx 1.2", tags=("eu", "roof"), tier="phone")


def test_each_key_is_compared_with_what_the_device_states() -> None:
    for population, word in (
        (Population(tags=("eu", "roof")), ""),
        (Population(tags=("eu", "us")), "tag us"),
        (Population(tiers=("tv", "phone")), ""),
        (Population(tiers=("tv",)), "tier tv"),
        (Population(runtimes=("onnx",)), ""),
        (Population(runtimes=("torch",)), "train with torch"),
        (EVERYBODY, ""),
    ):
        found = why_not(population, "a", PHONE)
        assert word in found
        assert bool(found) == bool(word)
    assert why_not(Population(tiers=("phone",)), "a", CheckIn(1, "d", 10))


def test_a_token_s_run_is_the_only_one_that_its_device_serves() -> None:
    bound = msgspec.structs.replace(PHONE, tags=(f"{RUN}a", f"{RUN}b", *PHONE.tags))
    assert not why_not(EVERYBODY, "a", bound)
    assert not why_not(Population(tags=("eu",)), "b", bound)
    assert why_not(EVERYBODY, "c", bound) == "the device's token was for a and b"
    with pytest.raises(ProtocolError, match="tags"):  # no device can state it itself
        decode_from_device(encode(bound))


def test_a_share_is_always_the_same_devices_and_another_run_s_are_others() -> None:
    names = [f"d{number}" for number in range(4000)]

    def chosen(run: str, share: float) -> set[str]:
        return {
            name
            for name in names
            if not why_not(Population(share=share), run, CheckIn(1, name, 10))
        }

    tenth, half = chosen("a", 0.1), chosen("a", 0.5)
    assert tenth < half
    assert abs(len(tenth) - 400) < 100
    assert abs(len(half & chosen("b", 0.5)) - 1000) < 150
    assert place("a", "d") == 0.5261623857036364, "it must not change: the devices would be others"
