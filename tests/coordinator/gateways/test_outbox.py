"""What a device does again and again is one message of a batch."""

from __future__ import annotations

from fleetlearn_coordinator.gateways.outbox import GatewayOutbox
from fleetlearn_coordinator.gateways.wire import (
    BytesIn,
    BytesOut,
    DeviceGone,
    GatewayFigures,
    StepsOf,
)


def test_the_last_counts_and_bytes_add_up() -> None:
    outbox = GatewayOutbox()
    said = [
        StepsOf(1, "t", 1),
        BytesIn(1, "t", 100, 100),
        StepsOf(2, "u", 5),
        BytesIn(1, "t", 250, 150),
        StepsOf(1, "t", 3),
        BytesOut(1, "0", 10, 10),
        DeviceGone(2),
        BytesOut(1, "0", 30, 20),
        BytesIn(1, "v", 7, 7),
    ]
    for message in said:
        outbox.add(message)
    assert outbox
    assert outbox.take() == [
        StepsOf(1, "t", 3),
        BytesIn(1, "t", 250, 250),
        StepsOf(2, "u", 5),
        BytesOut(1, "0", 30, 30),
        DeviceGone(2),
        BytesIn(1, "v", 7, 7),
    ]
    assert not outbox
    outbox.add(StepsOf(1, "t", 4))
    assert outbox.take() == [StepsOf(1, "t", 4)], "the next batch is of its own"


def test_figures_replace_each_other() -> None:
    """They are said each second, also while nobody reads them. The greatest lag counts."""
    outbox = GatewayOutbox()
    outbox.add(GatewayFigures(1, 0, 0, {}, 0, 0, 0.5, None))
    outbox.add(DeviceGone(2))
    outbox.add(GatewayFigures(3, 4, 4, {"tls": 1}, 1, 1, 0.1, 9.0))
    assert len(outbox) == 2
    assert outbox.take() == [
        GatewayFigures(3, 4, 4, {"tls": 1}, 1, 1, 0.5, 9.0),
        DeviceGone(2),
    ]
