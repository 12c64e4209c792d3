"""The settings of a coordinator's process, in a TOML file beside the plans. examples/service.toml shows every key.

What one training run is stays in its plan: a run can move to a process with other settings, and goes on there.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from fleetlearn_protocol.errors import Code, FleetError
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Positive, Section, read_tables, refuse_unknown

ORIGIN = r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
"""What browsers send as the header Origin (RFC 6454, section 6.1), "null" excepted: every page can have that."""


class ServiceError(FleetError):
    """A service file that cannot be used. ``text`` names the file, the key, what was given and what is allowed."""


class ServiceSettings(Section, frozen=True, kw_only=True):
    """Checked settings of a coordinator's process. ``ServiceSettings.load`` reads a file; each key has a default."""

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
    """Bytes per second; an upload or a download that moves less loses its place while others wait. Lower it where all
    devices are on slower links."""
    max_connections: Positive = 20_000
    """Devices connected at a time; more are told to come back."""
    origins: tuple[str, ...] = ()
    """Web pages that may connect, as browsers name them: "https://example.org". Devices that are no pages need none."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ServiceSettings:
        """Read a service file. Raises ServiceError."""
        path = Path(path).expanduser()
        try:
            raw = tomllib.loads(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ServiceError(Code.BAD_MESSAGE, f"{path}: the service file cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ServiceError(Code.BAD_MESSAGE, f"{path}: this is not TOML: {error}") from None
        return cls.read(raw, file=str(path))

    @classmethod
    def read(cls, raw: dict[str, Any], *, file: str = "service file") -> ServiceSettings:
        """Return the settings of a service file's keys. ``file`` is named in errors. Raises ServiceError."""
        try:
            if "durable" in raw:
                raise ValueError("durable is a key of the plan, beside data_dir: it is about a run's storage")
            refuse_unknown(raw, "service file", cls, {}, hidden=())
            settings = read_tables(raw, "service file", cls)
            for origin in settings.origins:
                if not re.fullmatch(ORIGIN, origin):
                    raise ValueError(
                        f"origins names {origin!r}; an origin is scheme://host or scheme://host:port in lower case, "
                        'without a path, as browsers send it: "https://example.org". Each page is named: there is no '
                        '"*"'
                    )
        except ValueError as error:
            raise ServiceError(Code.BAD_MESSAGE, f"{file}: {error}") from None
        return settings
