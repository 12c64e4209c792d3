"""The settings of a coordinator's process, in a TOML file beside the plans. examples/service.toml
shows every key.

What one training run is stays in its plan: a run can move to a process with other settings, and
goes on there.
"""

from __future__ import annotations

import os
import re
import tomllib
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

from fleetlearn_protocol.addresses import is_loopback
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.messages import Identifier
from fleetlearn_protocol.paths import in_home
from msgspec import Meta
from msgspec.structs import replace

from fleetlearn_coordinator.plan.bus_settings import NatsSettings, check_bus
from fleetlearn_coordinator.plan.canary_settings import CanarySettings
from fleetlearn_coordinator.plan.content_settings import ContentSettings
from fleetlearn_coordinator.plan.gateway_settings import GatewaySettings
from fleetlearn_coordinator.plan.plugins_section import PluginsSection
from fleetlearn_coordinator.plan.toml_errors import (
    Positive,
    Section,
    paths_from,
    read_tables,
    refuse_unknown,
)

ORIGIN = r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
"""What browsers send as the header Origin (RFC 6454, section 6.1), "null" excepted: every page can
have that."""

RegionName = Annotated[str, Meta(pattern=r"^[A-Za-z][-A-Za-z_0-9]{0,31}\Z")]
"""Of a region: 1 to 32 letters, digits, ``_-``."""
OBJECT_STORES = r"(s3|gs|az)://[^\s@]+"
"""An object store's URL: without keys."""


class ServiceError(FleetError):
    """A service file that cannot be used. ``text`` names the file, the key, what was given and what
    is allowed."""


def share(places: int, gateways: int) -> int:
    """Return how many of a service's places each of its gateways has."""
    return -(-places // gateways)


def is_service_file(path: str | os.PathLike[str]) -> bool:
    """Return whether this file is a service file with several runs, and no plan. False where it
    cannot be read."""
    try:
        return "runs" in tomllib.loads(in_home(path).read_text("utf-8"))
    except (OSError, ValueError):  # no home folder, no UTF-8, no TOML
        return False


class Tls(Section, frozen=True, kw_only=True):
    """[tls]: the coordinator's own TLS. The files are read again when they change."""

    certificate: Path
    """PEM: the server's certificate, and those between it and its CA."""
    key: Path
    """PEM: its private key, without a password."""
    clients: Path | None = None
    """PEM: the CAs of devices' certificates, by which devices are known in place of credentials.
    Such a CA certifies devices of this coordinator and nobody else."""


Rate = Annotated[float, Meta(ge=0.001, le=1e12)]


class Limits(Section, frozen=True, kw_only=True):
    """[limits]: what one address may cost, which is an IPv4 address or an IPv6 /64 network, and one
    device. Many devices may share an address."""

    connections: Positive = 1000
    """Connections of an address at a time."""
    check_ins: Rate = 50.0
    """Connections that an address opens, per second."""
    messages: Rate = 5000.0
    """Frames that an address sends, per second."""
    bytes: Rate = 4194304.0
    """Bytes that an address sends beside the updates that its devices were asked for, per
    second."""
    device_check_ins: Rate = 1.0
    """Check-ins of one device, per second."""
    exempt: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Networks whose addresses are not limited one by one: this machine, unless others are
    named."""


class Admin(Section, frozen=True, kw_only=True):
    """[admin]: the port of administrators, docs/operate/administration.md. With [tls] it has TLS,
    too."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8766
    """TCP port; 0: any that is free."""


class MetricsPort(Section, frozen=True, kw_only=True):
    """[metrics]: the port of programs that watch the coordinator, docs/operate/monitoring.md:
    /metrics, /healthz and /readyz. With [tls] it has TLS, too. Whoever can connect may read it."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8768
    """TCP port; 0: any that is free."""


class TraceSettings(Section, frozen=True, kw_only=True):
    """[traces]: rounds as traces of OpenTelemetry, docs/operate/monitoring.md. Needs the extra
    ``traces``."""

    endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s]+\Z")] = (
        "http://127.0.0.1:4318/v1/traces"
    )
    """Where a collector takes spans by OTLP over HTTP. Spans of tasks name their device."""
    tasks: Annotated[int, Meta(ge=0, le=100_000)] = 100
    """Tasks of each round that have a span; further ones have none."""


LogFormat = Literal["text", "json"]
AlertName = Literal[
    "NoRound",
    "FewDevices",
    "RefusalsRise",
    "NotFinite",
    "LossRises",
    "DiskLow",
    "CertificateEnds",
    "RunFailed",
    "CanaryWentBack",
    "PrivacySpent",
]
Share = Annotated[float, Meta(ge=0, le=1)]


class AlertSettings(Section, frozen=True, kw_only=True):
    """[alerts]: who is told when something is wrong, and how much is: docs/operate/monitoring.md.
    An alert is told once, and once more when it is over."""

    webhook: Annotated[str, Meta(pattern=r"^https?://[^\s]+\Z")] | None = None
    """A URL to which each alert is posted as JSON."""
    webhook_ca: Path | None = None
    """PEM: the CA of an https:// webhook. Default: those that the system trusts."""
    command: tuple[str, ...] = ()
    """A program and its arguments, which is run for each alert with the JSON as its input."""
    off: tuple[AlertName, ...] = ()
    """Alerts that nobody is told of."""
    no_round: Annotated[float, Meta(gt=0, le=1e6)] = 30.0
    """Minutes without a committed round (NoRound)."""
    devices_share: Share = 0.5
    """Devices that are there over the most of the last hour (FewDevices: fewer)."""
    refused_share: Share = 0.2
    """Refused reports among those of the last 10 minutes (RefusalsRise: more)."""
    not_finite_share: Share = 0.1
    """Trainings that diverged among those of the last 10 minutes (NotFinite: more)."""
    loss_ratio: Annotated[float, Meta(ge=1, le=1e6)] = 1.5
    """The loss over the lowest of the last 20 rounds (LossRises: more)."""
    disk_free: Annotated[float, Meta(ge=0, le=1e6)] = 2.0
    """GiB on a data directory's disk (DiskLow: less)."""
    certificate_days: Annotated[float, Meta(ge=0, le=1e4)] = 14.0
    """Days until the coordinator's certificate ends (CertificateEnds: fewer)."""
    privacy_share: Share = 0.9
    """Epsilon spent over a private run's budget (PrivacySpent: more)."""


class Page(Section, frozen=True, kw_only=True):
    """[page]: the port of a page for people, by which their browsers become devices. With [tls] it
    has TLS, too."""

    folder: Path
    """The built page: any folder of files with an index.html. Whoever can connect may read all of
    it."""
    host: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    """Address to listen on. Default: the service's."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8767
    """TCP port; 0: any that is free."""
    address: Annotated[str, Meta(pattern=rf"^{ORIGIN}\Z")] | None = None
    """Where people find the page, "https://example.org": for links to it, and as an origin.
    Default: host and port."""
    coordinator: Annotated[str, Meta(pattern=r"^(wss?://[^\s]+|:[0-9]{1,5})\Z")] | None = None
    """Where the page's devices connect: a URL, or ":8765" for the page's own host. Default: the
    service's port."""
    run: Identifier | None = None
    """Which of the service's ``runs`` the page is about. One plan's own run needs no name."""
    title: Annotated[str, Meta(max_length=200)] = "Federated training"
    """What the page is headed."""
    about: Annotated[str, Meta(max_length=5000)] = ""
    """What is trained, in plain words, for the people who are asked to take part."""
    task: Annotated[str, Meta(max_length=64)] = ""
    """What the page's people do, if the page knows several things: for the built page "digits"."""


class ServiceSettings(Section, frozen=True, kw_only=True):
    """Checked settings of a coordinator's process. ``ServiceSettings.load`` reads a file; each key
    has a default."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on; "0.0.0.0" for all of IPv4."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8765
    """TCP port; 0: any that is free."""
    heartbeat: Annotated[float, Meta(ge=0.01, le=86400)] = 15.0
    """Seconds between a device's signs of life."""
    uploads: Positive = 16
    """Uploads granted at a time."""
    downloads: Positive = 64
    """Downloads served at a time."""
    least_rate: Annotated[float, Meta(ge=0, le=1e9)] = 16384.0
    """Bytes per second; an upload or a download that moves less loses its place while others wait.
    Lower it where all devices are on slower links."""
    max_connections: Positive = 20_000
    """Devices connected at a time; more are told to come back."""
    origins: tuple[str, ...] = ()
    """Web pages that may connect, as browsers name them: "https://example.org". Devices that are no
    pages need none."""
    insecure: bool = False
    """Whether other machines may connect without TLS: where a proxy in front has it, or everybody
    on the network is trusted."""
    identities: Path | None = None
    """Folder of the devices' identities: only enrolled devices connect. Default: whoever connects
    is a device, under whatever name it says."""
    open: bool = False
    """Whether other machines may connect as devices without being enrolled."""
    signing_keys: tuple[Path, ...] = ()
    """PEM: private keys that sign tasks, for devices that trust their public keys. Several while
    one is replaced."""
    proxies: tuple[str, ...] = ()
    """Networks of the proxies in front: which address a device has is believed from there alone
    (`Forwarded`, `X-Forwarded-For`). Each must set one of these headers."""
    gateways: Annotated[int, Meta(ge=0, le=64)] = 0
    """Processes that hold the devices' connections, for one that has the run,
    docs/operate/gateways.md. 0: the coordinator's one process has both."""
    region: RegionName | None = None
    """The region of the devices that connect to this process, or to the gateways that have this
    file, where a plan has regions (docs/operate/regions.md). Default: a device's tags and its name
    say where it is."""
    log_format: LogFormat = "text"
    """Of the log of ``fleetlearn-coordinator serve``: text for people, or a line of JSON for each
    record."""
    limits: Limits = Limits()
    ledger: str | None = None
    """URL of the database where runs that begin here keep their ledgers, without a password.
    Default: in their data directories. A run stays where it began."""
    blobs: str | None = None
    """URL in an object store, such as s3://BUCKET/FOLDER, where runs that begin here keep models
    and accepted updates. Default: in their data directories. A run stays where it began."""
    bus: str | None = None
    """Address of a NATS server, over which gateways on other machines reach the run,
    docs/operate/nats.md: nats://HOST:4222, or tls://. Several, with commas between them: the first
    that answers. Default: gateways of this machine alone."""
    runs: Path | None = None
    """Folder of the runs that this coordinator serves, which `fleetlearn-coordinator run` adds.
    Default: it serves the one plan that it is started with."""
    tls: Tls | None = None
    """Default: no TLS, for this machine alone."""
    admin: Admin | None = None
    """Default: no port for administrators. Needs ``identities``, where administrators and the audit
    log are kept."""
    page: Page | None = None
    """Default: no page for people."""
    metrics: MetricsPort | None = None
    """Default: no port for metrics and health."""
    contents: ContentSettings | None = None
    """Default: devices fetch by their WebSockets alone."""
    alerts: AlertSettings | None = None
    """Default: nobody is told."""
    traces: TraceSettings | None = None
    """Default: no traces."""
    nats: NatsSettings | None = None
    """As whom this process speaks on the bus. Default: as nobody in particular."""
    gateway: GatewaySettings | None = None
    """Default: this file is not for a gateway on another machine."""
    canary: CanarySettings | None = None
    """How canaries go, unless one is begun otherwise."""
    plugins: PluginsSection | None = None
    """The modules that may bring own algorithms. Default: none."""

    @property
    def own_origins(self) -> list[str]:
        """The web pages that may connect: ``origins``, and the page's ``address``."""
        own = self.page.address if self.page is not None else None
        return [*self.origins, *([own] if own is not None else [])]

    @property
    def upload_places(self) -> int:
        """Uploads for which there must be spool files: gateways share ``uploads``, and each has
        one more file than it needs."""
        if not self.gateways:
            return self.uploads
        return self.gateways * (share(self.uploads, self.gateways) + 1)

    def with_metrics_port(self, port: int | None) -> ServiceSettings:
        """Return these settings with another port of [metrics]; None: as they are."""
        if port is None:
            return self
        metrics = replace(self.metrics or MetricsPort(), port=port)
        return replace(self, metrics=metrics)

    def with_gateways(self, gateways: int | None) -> ServiceSettings:
        """Return these settings with this number of gateways; None: as they are."""
        return self if gateways is None else replace(self, gateways=gateways)

    def at_port(self, port: int) -> ServiceSettings:
        """Return these settings with another port for devices."""
        return replace(self, port=port)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ServiceSettings:
        """Read a service file. Raises ServiceError."""
        try:
            path = in_home(path)
            raw = tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ServiceError(Code.BAD_MESSAGE, f"{path}: this is not TOML: {error}") from None
        except (OSError, ValueError) as error:
            raise ServiceError(
                Code.BAD_MESSAGE, f"{path}: the service file cannot be read: {in_words(error)}"
            ) from None
        return cls.read(raw, path.absolute().parent, file=str(path))

    @classmethod
    def read(
        cls, raw: dict[str, Any], base: str | os.PathLike[str] = "", *, file: str = "service file"
    ) -> ServiceSettings:
        """Return the settings of a service file's keys. ``base`` is what its paths are relative to;
        ``file`` is named in errors. Raises ServiceError."""
        try:
            if "bundle" in raw:
                raise ValueError(
                    "this is a plan, and a service file is expected here: the file that says where "
                    "to listen and who may connect"
                )
            if "durable" in raw:
                raise ValueError(
                    "durable is a key of the plan, beside data_dir: it is about a run's storage"
                )
            tables: dict[str, type[Section]] = {
                "tls": Tls,
                "limits": Limits,
                "admin": Admin,
                "page": Page,
                "metrics": MetricsPort,
                "contents": ContentSettings,
                "alerts": AlertSettings,
                "traces": TraceSettings,
                "canary": CanarySettings,
                "nats": NatsSettings,
                "gateway": GatewaySettings,
                "plugins": PluginsSection,
            }
            refuse_unknown(raw, "service file", cls, tables, hidden=())
            settings = read_tables(raw, "service file", cls, paths_from(Path(base)))
            if settings.plugins is not None and settings.plugins.folder is None:
                plugins = replace(settings.plugins, folder=Path(base).absolute())
                settings = replace(settings, plugins=plugins)
            if settings.tls is None and not settings.insecure and not is_loopback(settings.host):
                raise ValueError(
                    f'host = "{settings.host}" lets other machines connect, and without TLS '
                    "whoever is on the way reads and changes all that is sent. Give [tls] a "
                    "certificate and a key (`fleetlearn-coordinator certificate` makes them), or "
                    "say insecure = true where a proxy in front has TLS, or everybody on the "
                    "network is trusted"
                )
            is_gateway = settings.gateway is not None
            may_be_open = settings.open or is_gateway or is_loopback(settings.host)
            if settings.identities is None and not may_be_open:
                raise ValueError(
                    f'host = "{settings.host}" lets other machines connect, and without identities '
                    "whoever does is a device, under any name. Name a folder for identities, and "
                    "enrol devices with tokens (`fleetlearn-coordinator enrol`), or say open = "
                    "true where everybody who can connect is trusted"
                )
            if settings.blobs is not None and not re.fullmatch(OBJECT_STORES, settings.blobs):
                raise ValueError(  # the address is not shown: it may have a key
                    "blobs takes an address of an object store, such as s3://bucket/folder, "
                    "gs://bucket/folder or az://container/folder. Keys and passwords do not go "
                    "into it: the environment has them, such as AWS_SECRET_ACCESS_KEY"
                )
            if is_gateway and settings.identities is not None:
                raise ValueError(
                    "identities: a gateway on another machine asks the engine process who may "
                    "connect, whose service file names them. Leave identities out here"
                )
            if settings.bus is not None and settings.runs is not None:
                raise ValueError(
                    "bus and runs do not go together: over the bus gateways on other machines "
                    "reach one plan's run, and runs names a folder of several. Leave bus out "
                    "(gateways = 2 has gateways on this machine for all runs), or leave runs out "
                    "and serve each plan by a process and a service file of its own"
                )
            check_bus(settings.bus, settings.nats, settings.blobs, is_gateway=is_gateway)
            if settings.admin is not None:
                _check_admin(settings, settings.admin)
            if settings.page is not None:
                _check_page(settings, settings.page)
            if settings.alerts is not None:
                _check_alerts(settings.alerts)
            if settings.canary is not None:
                settings.canary.check()
            if settings.metrics is not None:
                _check_metrics(settings, settings.metrics)
            if settings.contents is not None:
                tls = settings.tls is not None or settings.insecure
                settings.contents.check(
                    has_blobs=settings.blobs is not None or is_gateway,
                    may_listen=tls,
                    insecure=settings.insecure,
                )
            if settings.identities is not None and settings.open:
                raise ValueError(
                    "identities and open = true contradict each other: leave one of them out"
                )
            if (
                settings.tls is not None
                and settings.tls.clients is not None
                and settings.identities is None
                and not is_gateway
            ):
                raise ValueError(
                    "tls.clients lets devices in by their certificates, and who was revoked is "
                    "written down in the folder of identities, which is missing: add identities = "
                    '"identities"'
                )
            for origin in settings.origins:
                if not re.fullmatch(ORIGIN, origin):
                    raise ValueError(
                        f"origins names {origin!r}; an origin is scheme://host or "
                        "scheme://host:port in lower case, without a path, as browsers send it: "
                        '"https://example.org". Each page is named: there is no "*"'
                    )
            _check_networks("proxies", settings.proxies)
            _check_networks("limits.exempt", settings.limits.exempt)
        except ValueError as error:
            raise ServiceError(Code.BAD_MESSAGE, f"{file}: {error}") from None
        return settings


def _check_networks(key: str, networks: tuple[str, ...]) -> None:
    for text in networks:
        try:
            ip_network(text)
        except ValueError as error:
            raise ValueError(
                f'{key} names {text!r}: {error}. Expected networks such as "10.0.0.0/8", '
                '"192.0.2.7" or "2001:db8::/32"'
            ) from None


def _check_admin(settings: ServiceSettings, admin: Admin) -> None:
    if settings.identities is None:
        raise ValueError(
            "[admin] needs identities: administrators and the audit log are kept there. Name a "
            "folder for identities"
        )
    if settings.tls is None and not settings.insecure and not is_loopback(admin.host):
        raise ValueError(
            f'admin.host = "{admin.host}" lets other machines connect, and without TLS whoever is '
            "on the way reads administrators' tokens. Give [tls] a certificate and a key, or "
            "listen on 127.0.0.1"
        )


def _check_alerts(alerts: AlertSettings) -> None:
    if alerts.webhook is None and not alerts.command:
        raise ValueError(
            '[alerts] tells nobody: name a webhook = "https://..." or a command = ["program", '
            '"argument"]'
        )
    if alerts.webhook_ca is not None and not alerts.webhook_ca.is_file():
        raise ValueError(f"alerts.webhook_ca = {alerts.webhook_ca} is not a file")


def _check_metrics(settings: ServiceSettings, metrics: MetricsPort) -> None:
    if settings.tls is None and not settings.insecure and not is_loopback(metrics.host):
        raise ValueError(
            f'metrics.host = "{metrics.host}" lets other machines connect, and without TLS whoever '
            "is on the way reads and changes what they are told. Give [tls] a certificate and a "
            "key, listen on 127.0.0.1, or say insecure = true where everybody on the network is "
            "trusted"
        )


def _check_page(settings: ServiceSettings, page: Page) -> None:
    if (
        settings.tls is None
        and not settings.insecure
        and not is_loopback(page.host or settings.host)
    ):
        raise ValueError(
            f'page.host = "{page.host}" lets other machines connect, and without TLS whoever is on '
            "the way changes the page, and browsers do not let it train. Give [tls] a certificate "
            "and a key, or listen on 127.0.0.1"
        )
    if (page.run is None) != (settings.runs is None):
        raise ValueError(
            'page.run = "NAME" says which of several runs the page is about: it is needed with '
            "runs, and goes with nothing else"
        )
    tls = () if settings.tls is None else (settings.tls.key,)
    for secret in (settings.identities, settings.runs, *settings.signing_keys, *tls):
        if secret is not None and secret.resolve().is_relative_to(page.folder.resolve()):
            raise ValueError(
                f"page.folder = {page.folder} holds {secret}: whoever can connect could read that"
            )
