"""The settings of a helper's process, in a TOML file that ``fleetlearn-coordinator helper init``
writes."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated

from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.messages import MOST_REPORTS
from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.secure.helper_messages import MOST_ELEMENTS
from msgspec import Meta

from fleetlearn_coordinator.plan.service_settings import LogFormat, Tls
from fleetlearn_coordinator.plan.toml_errors import (
    Section,
    paths_from,
    read_tables,
    refuse_unknown,
)

KIND = "helper file"


class HelperFileError(FleetError):
    """A helper file that cannot be used. ``text`` names the file, the key, what was given and what
    is allowed."""


class HelperSettings(Section, frozen=True, kw_only=True):
    """Checked settings of a helper. ``HelperSettings.load`` reads a file."""

    tls: Tls
    """The helper's own certificate. It answers over HTTPS alone."""
    minimum: Annotated[int, Meta(ge=2, le=MOST_REPORTS)]
    """The fewest different devices whose masks are added up, whatever their coordinator asks."""
    database: Path
    """The file that has the helper's private key, the devices, and every seed that was used."""
    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on; "0.0.0.0" for all of IPv4."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8770
    """TCP port; 0: any that is free."""
    most_elements: Annotated[int, Meta(ge=1, le=MOST_ELEMENTS)] = 10_000_000
    """Elements of the largest mask: four bytes of memory each, and four of an answer."""
    most_devices: Annotated[int, Meta(ge=2, le=MOST_REPORTS)] = MOST_REPORTS
    """Devices of the largest sum."""
    log_format: LogFormat = "text"
    """text for people, or a line of JSON for each record."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HelperSettings:
        """Read a helper file. Raises HelperFileError."""
        try:
            path = in_home(path)
            raw = tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            text = f"{path}: this is not TOML: {error}"
            raise HelperFileError(Code.BAD_MESSAGE, text) from None
        except (OSError, ValueError) as error:
            text = f"{path}: the helper file cannot be read: {in_words(error)}"
            raise HelperFileError(Code.BAD_MESSAGE, text) from None
        try:
            if "bundle" in raw or "runs" in raw or "identities" in raw:
                raise ValueError(
                    "this is a file of a coordinator, and a helper file is expected here. The "
                    "helper belongs to another operator, on another machine"
                )
            refuse_unknown(raw, KIND, cls, {"tls": Tls}, hidden=())
            settings = read_tables(raw, KIND, cls, paths_from(path.absolute().parent))
            if settings.most_devices < settings.minimum:
                raise ValueError(
                    f"most_devices = {settings.most_devices} is refused: it is less than minimum = "
                    f"{settings.minimum}, so that no sum could be answered"
                )
            if settings.tls.clients is not None:
                raise ValueError(
                    "tls.clients is refused: the helper knows devices by their signatures, and "
                    "asks nobody for a certificate"
                )
        except ValueError as error:
            raise HelperFileError(Code.BAD_MESSAGE, f"{path}: {error}") from None
        return settings


def helper_file(minimum: int) -> str:
    """Return the text of a new helper file. Its paths are relative to its folder."""
    return f"""\
# The settings of `fleetlearn-coordinator helper serve`.

# The fewest different devices whose masks are added up. Fewer are refused, whoever asks.
minimum = {minimum}

# Where coordinators find the helper. "0.0.0.0" for all addresses of this machine.
host = "127.0.0.1"
port = 8770

# The private key, the devices, and every seed that was used. Never put an old copy of this file
# back: the helper would not know which seeds it has used since.
database = "helper.sqlite"

# Most elements of a model, and most devices of a sum.
# most_elements = 10000000
# most_devices = {MOST_REPORTS}

# log_format = "json"

[tls]
certificate = "tls/certificate.pem"
key = "tls/key.pem"
"""
