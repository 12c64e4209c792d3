"""What gateways and the engine process say comes out as it went in."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from fleetlearn_coordinator.aggregation.partial_sum import (
    PartialSum,
    PartSums,
    PartToAdd,
    SumsToMake,
    UpdateToAdd,
)
from fleetlearn_coordinator.conversation.begun import BegunUpload
from fleetlearn_coordinator.gateways import wire
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import (
    Cancel,
    CheckIn,
    Held,
    Part,
    Question,
    Report,
    Task,
    VectorReference,
    Welcome,
)

CHECK_IN = CheckIn(1, "a", 10, held=Held("r-1-1", 1), tags=("north",))
PART = Part("update", "float32", 4, 7)
REPORT = Report("r-1-1", 1, (PART,), 10, 5, 1.0, True, 0.5)
BEGUN = BegunUpload("a", "r-1-1", (PART,), 3, 4, {"update": 7}, {"update": 0.5})
TASK = Task(
    "r-1-1", 1, "0" * 64, (VectorReference("model", "1" * 64, 8, "float32"),),
    {"update": "float32"}, {"lr": 0.1}, 1, 0, 7, 30.0,
)  # fmt: skip
FILE = wire.LentFile(3, 12345)
END = wire.AskEnd(8, "a", "r-1-1", "failed: bad-data", None)
TO_ENGINE: list[Any] = [
    wire.GatewayHello(
        1, 99, "fleetlearn 0", "ws://127.0.0.1:1", (FILE,), (), (END,),
        (wire.PresentDevice(5, CHECK_IN, "127.0.0.1", True),),
    ),
    wire.AskAdmission(1, 5, "127.0.0.1", CHECK_IN),
    wire.AskAnnounce(2, 5, "a", REPORT),
    wire.AskFactor(3, 5, "a", "r-1-1"),
    wire.AskSave(4, "a", REPORT, 3, {"update": 0.5}),
    wire.AskCounted(5, "a", "r-1-1"),
    END,
    wire.AskKeep(9, BEGUN),
    wire.DeviceGone(5),
    wire.DeviceRefused(5, Code.NOT_WANTED, "no"),
    wire.StepsOf(5, None, 7),
    wire.BytesIn(5, "r-1-1", 100, 50),
    wire.BytesOut(5, "1" * 64, 100, 50),
    wire.TurnOfEngine(5, False),
    wire.GatewayFigures(1, 2, 3, {"tls": 1}, 4, 5, 0.5, None),
    wire.AskKnown(1, "0" * 64, "a", "", "", ("a", 1.5)),
    wire.AskEnrolled(("a", "b")),
    wire.GatewayFailed("no space left on device"),
    wire.PartialSumMade(2**48, PartialSum(("r-1-1",), (("128", "<f8", 4),), 7), ""),
    wire.PartialSumMade(2**48, None, "no space left on device"),
]  # fmt: skip
TO_GATEWAY: list[Any] = [
    wire.Setup(("b",), "served", "run", (3,), None, "hidden", "partial_sums"),
    wire.Admission(1, Welcome("fleetlearn 0", 15.0, 4), 1, 2),
    wire.Announcement(2, True, {"update": 1}, BEGUN, 12345),
    wire.Answered(3, 0.25),
    wire.Answered(4, None),
    wire.Answered(5, True),
    wire.QuestionRefused(6, Code.STALE_ROUND, "late", False),
    wire.TellDevice(5, TASK, {"update": 1}),
    wire.TellDevice(5, Question("r-1-2", "fit", 3.0, content={"a": [1, {"b": None}]}), {}),
    wire.TellDevice(5, Cancel("r-1-1", Code.NOT_WANTED), {}),
    wire.ReplaceDevice(5, "127.0.0.1"),
    wire.PublishContents(("0" * 64,), ("1" * 64,)),
    wire.PublishOlder("1" * 64),
    wire.LendFiles((FILE,)),
    wire.TasksOver(),
    wire.PageMayConnect(80),
    wire.BeginSums(2**48, SumsToMake(4, (PartSums("update", "mean", ((1, 2),)),), b"1234")),
    wire.AddToSums(
        2**48, UpdateToAdd("r-1-1", 3, (PartToAdd(PART, 0, 1, 0.5),), 10, 0.25, b"1234", 1.0)
    ),
    wire.CollectSums(2**48),
    wire.ForgetSums(2**48),
    wire.EngineAlive(),
    wire.DeviceKnown(1, "a", ("north",), 1.5),
    wire.DeviceUnknown(1, 403, "this token is not known here", "credentials"),
    wire.EnrolmentsChanged(),
    wire.EnrolledNow(("a", "b"), {"a": 1.5}),
]


def test_a_batch_comes_out_as_it_went_in() -> None:
    assert wire.decode_for_engine(wire.encode_batch(TO_ENGINE)) == TO_ENGINE
    assert wire.decode_for_gateway(wire.encode_batch(TO_GATEWAY)) == TO_GATEWAY


def test_each_kind_has_a_tag_of_its_own() -> None:
    for union in (wire.ToEngine, wire.ToGateway):
        tags = [kind.__struct_config__.tag for kind in get_args(union)]
        assert sorted(tags) == sorted(set(tags))
    assert {type(each) for each in TO_ENGINE} >= {*get_args(wire.ToEngine)} - {wire.AskAnswered}


@pytest.mark.parametrize("batch", [b"", b"\x91\x92\x63\x00", b"\xc1", b"{}"])
def test_another_language_is_an_error(batch: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_for_engine(batch)
    with pytest.raises(msgspec.DecodeError):
        wire.decode_for_gateway(batch)
