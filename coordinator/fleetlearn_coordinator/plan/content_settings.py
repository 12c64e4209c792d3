"""[contents] of a service file: where devices fetch by HTTP."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fleetlearn_protocol.addresses import is_loopback
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section


class ContentSettings(Section, frozen=True, kw_only=True):
    """[contents]: where devices fetch models and bundles by HTTP, docs/operate/downloads.md."""

    address: Annotated[str, Meta(pattern=r"^(https?://[^\s?#@]+|store)\Z")]
    """A URL that leads, through caches, to ``host`` and ``port``: devices ask for
    URL/contents/SHA256. Or "store": devices are told signed URLs of the run's object store."""
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on, for caches. With [tls] it has TLS, too."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8769
    """TCP port; 0: any that is free."""
    url_seconds: Annotated[float, Meta(ge=10, le=604800)] = 3600.0
    """For which a signed URL can be used."""

    @property
    def in_store(self) -> bool:
        """Whether devices fetch from the object store."""
        return self.address == "store"

    @property
    def source(self) -> str:
        """Where web pages fetch from, as a source of a Content Security Policy."""
        parts = urlsplit(self.address)
        return "https:" if self.in_store else f"{parts.scheme}://{parts.netloc}"

    def check(self, *, has_blobs: bool, may_listen: bool, insecure: bool) -> None:
        """Raise ValueError where these settings do not fit the service's. ``has_blobs``: runs are
        in an object store. ``may_listen``: other machines may connect to ``host``. ``insecure``:
        the network is trusted."""
        if self.in_store:
            if not has_blobs:
                raise ValueError(
                    'contents.address = "store" needs blobs, such as "s3://bucket/folder": the '
                    "object store from which devices fetch"
                )
            return
        host = urlsplit(self.address).hostname or ""
        if self.address.startswith("http://") and not insecure and not is_loopback(host):
            raise ValueError(
                f'contents.address = "{self.address}" has no TLS: whoever is on the way reads the '
                "models. Expected https://, or insecure = true where everybody on the network is "
                "trusted"
            )
        if not may_listen and not is_loopback(self.host):
            raise ValueError(
                f'contents.host = "{self.host}" lets other machines connect, and without TLS '
                "whoever is on the way reads the models. Give [tls] a certificate and a key, or "
                "listen on 127.0.0.1 with the cache on this machine"
            )
