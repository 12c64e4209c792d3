"""What gateways cannot be combined with today, each with its reason."""

from __future__ import annotations

from collections.abc import Callable

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings

GATEWAY_RULES: tuple[tuple[Callable[[ServiceSettings], bool], str], ...] = (
    (
        lambda service: service.runs is not None,
        "runs: which of several runs a device serves is decided where its connection is. Leave "
        "gateways out, or serve one plan",
    ),
)
"""What applies -> the key of the service file, and why it does not go with gateways."""


def check_gateways(service: ServiceSettings) -> None:
    """Raise ServiceError where a service with gateways asks for what they cannot do."""
    for applies, why in GATEWAY_RULES:
        if applies(service):
            raise ServiceError(
                Code.BAD_MESSAGE, f"gateways = {service.gateways} does not go with {why}"
            )
