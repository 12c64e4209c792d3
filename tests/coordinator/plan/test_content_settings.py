"""[contents] of a service file."""

from __future__ import annotations

from typing import Any

import pytest
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings

CDN = "https://cdn.example.org/fleet"


@pytest.mark.parametrize(
    ("service", "contents", "named"),
    [
        ({}, {}, "address"),
        ({}, {"address": "ftp://cdn.example.org"}, "address"),
        ({}, {"address": f"{CDN}?key=1"}, "address"),
        ({}, {"address": "https://name:password@cdn.example.org"}, "address"),
        ({}, {"address": "store"}, "needs blobs"),
        ({}, {"address": "http://cdn.example.org"}, "has no TLS"),
        ({}, {"address": CDN, "host": "0.0.0.0"}, "lets other machines connect"),
        ({}, {"address": CDN, "url_seconds": 1.0}, "url_seconds"),
    ],
)
def test_mistakes_are_named(service: dict[str, Any], contents: dict[str, Any], named: str) -> None:
    with pytest.raises(ServiceError, match=named):
        ServiceSettings.read(service | {"contents": contents})


@pytest.mark.parametrize(
    ("service", "contents"),
    [
        ({}, {"address": CDN}),
        ({}, {"address": "http://127.0.0.1:8080"}),
        ({"insecure": True}, {"address": "http://cdn.example.org", "host": "0.0.0.0"}),
        ({"blobs": "s3://bucket/fleet"}, {"address": "store"}),
        ({"bus": "nats://nats.example.org", "gateway": {"run": "digits"}}, {"address": "store"}),
    ],
)
def test_what_is_allowed(service: dict[str, Any], contents: dict[str, Any]) -> None:
    found = ServiceSettings.read(service | {"contents": contents}).contents
    assert found is not None
    assert found.in_store == (contents["address"] == "store")


def test_the_page_may_fetch_where_devices_are_sent() -> None:
    found = ServiceSettings.read({"contents": {"address": CDN}}).contents
    assert found is not None
    assert found.source == "https://cdn.example.org"
