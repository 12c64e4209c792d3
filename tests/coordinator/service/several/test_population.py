"""The population filter of a run: what devices state, and a share of them that is always the
same."""

from __future__ import annotations

import msgspec
import pytest
from fleetlearn_coordinator.service.several.population import (
    EVERYBODY,
    describe,
    has_canary,
    place,
    why_not,
)
from fleetlearn_coordinator.storage.canaries import Split
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


SPLIT = Split("canary 2", "a", 0.3, (), (), is_canary=True)


def test_each_device_serves_one_of_a_canary_and_its_old_run() -> None:
    devices = [msgspec.structs.replace(PHONE, device=f"d{number}") for number in range(500)]
    for split in (SPLIT, SPLIT._replace(tags=("eu",)), SPLIT._replace(tags=("us",))):
        old = split._replace(is_canary=False)
        inside = [not why_not(EVERYBODY, "a.canary", each, split) for each in devices]
        outside = [not why_not(EVERYBODY, "a", each, old) for each in devices]
        assert inside == [not each for each in outside]
        assert sum(inside) == (0 if split.tags == ("us",) else sum(inside))
        wider = [not why_not(EVERYBODY, "c", each, split._replace(share=0.6)) for each in devices]
        assert all(after or not before for before, after in zip(inside, wider, strict=True))
    named = SPLIT._replace(devices=("d1", "d2"), share=1e-9)
    assert [each.device for each in devices if has_canary(named, each)] == ["d1", "d2"]
    assert 120 < sum(not why_not(EVERYBODY, "c", each, SPLIT) for each in devices) < 180


def test_a_canary_is_for_the_old_runs_devices_alone() -> None:
    all_ = SPLIT._replace(share=1.0)
    assert not why_not(EVERYBODY, "a.canary", PHONE, all_)
    assert "tag us" in why_not(Population(tags=("us",)), "a.canary", PHONE, all_)
    bound = msgspec.structs.replace(PHONE, tags=(f"{RUN}a",))
    assert not why_not(EVERYBODY, "a.canary", bound, all_), "the token is for the run a"
    other = msgspec.structs.replace(PHONE, tags=(f"{RUN}a.canary",))
    assert why_not(EVERYBODY, "a.canary", other, all_)


def test_what_people_read_of_it() -> None:
    assert describe(EVERYBODY, SPLIT) == "canary of a: 30 %"
    old = SPLIT._replace(is_canary=False)
    assert describe(EVERYBODY, old) == "all but the canary's 30 %"
    assert describe(Population(tags=("eu",)), old._replace(share=1.0)) == (
        "tag eu; none: all have the canary"
    )
    assert (
        why_not(EVERYBODY, "a", PHONE, old._replace(share=1.0)) == "the device has the canary of a"
    )
    tagged = SPLIT._replace(tags=("us",))
    assert why_not(EVERYBODY, "a.canary", PHONE, tagged) == (
        "the run is the canary of a, for some of its devices with the tag us"
    )
