"""The section [gateway] of a service file: a gateway on another machine, docs/operate/nats.md."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated

from fleetlearn_protocol.messages import Identifier
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section


class GatewaySettings(Section, frozen=True, kw_only=True):
    """[gateway]: what `fleetlearn-coordinator serve-gateway` needs beside the bus."""

    run: Identifier
    """The name of the plan whose devices connect here."""
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")] | None = None
    """The gateway's name on the bus, which no other gateway of the run has. Default: the
    machine's."""
    data_dir: Path = Path("gateway")
    """Folder of arriving updates and of copies of what devices fetch. One process uses it."""

    @property
    def own_name(self) -> str:
        """The name, or the machine's."""
        return self.name or re.sub("[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "gateway"
