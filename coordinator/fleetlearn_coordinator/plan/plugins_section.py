"""[plugins] of a service file: the modules that may bring own algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fleetlearn_protocol import extensions
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section


class PluginsSection(Section, frozen=True, kw_only=True):
    """[plugins]: the modules that may bring own algorithms, docs/start/your-own-algorithm.md.
    Their code runs in this process, with all that it may do."""

    modules: Annotated[tuple[str, ...], Meta(max_length=100)]
    """Modules or packages, such as "my_package". Those within them are allowed too."""
    folder: Path | None = None
    """Where modules are looked for that are not installed. Default: the service file's folder; of a
    scenario, the scenario's."""

    def allow(self) -> None:
        """Let the modules' functions be named in this process. Raises ExtensionError, a
        ValueError."""
        extensions.allow(self.modules, self.folder)
