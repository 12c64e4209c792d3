"""Where a run's contents are for HTTP, as the service file says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fleetlearn_protocol import Bundle

from fleetlearn_coordinator.network.peer_log import logger
from fleetlearn_coordinator.network.transfers.elsewhere import NOWHERE, Elsewhere
from fleetlearn_coordinator.network.transfers.store_publisher import StorePublisher
from fleetlearn_coordinator.plan.content_settings import ContentSettings
from fleetlearn_coordinator.storage.served_objects import ServedObjects


class BehindCaches(Elsewhere):
    """Contents that HTTP caches ask for at this coordinator's own port (content_port.py)."""

    def __init__(self, address: str) -> None:
        """``address``: where devices find the caches, as a URL."""
        super().__init__()
        self._address = address.rstrip("/")

    def url(self, sha256: str) -> str:
        return f"{self._address}/contents/{sha256}"


def elsewhere_of(
    settings: ContentSettings | None,
    served: ServedObjects | None,
    bundles: Iterable[Bundle],
    changed: Callable[[Mapping[str, str]], object] = lambda urls: None,
) -> Elsewhere:
    """Return where a run's contents are, within a running event loop. ``served``: the run's, where
    it is in an object store. ``changed``: as for ``StorePublisher``."""
    if settings is None:
        return NOWHERE
    if not settings.in_store:
        return BehindCaches(settings.address)
    if served is None:
        logger.warning(
            'contents.address = "store", and this run began in its data directory, without an '
            "object store: its devices fetch by their WebSockets"
        )
        return NOWHERE
    return StorePublisher(served, bundles, settings.url_seconds, changed)
