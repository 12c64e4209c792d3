"""For tests: a helper that listens on a port of this machine, in another thread, and the settings
of plans that name it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fleetlearn_coordinator.secure.helper_port import listening_helper
from fleetlearn_coordinator.secure.helper_settings import HelperSettings
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_coordinator.secure.helper_views import HelperView, helper_view
from fleetlearn_coordinator.service.private_ca import CERTIFICATE, KEY, make_certificate
from helper_fleet import SecureDevice
from masked_peers import SECURE
from processes import free_port

TIMEOUT = 30.0


class HelperFolder:
    """The files of a helper. ``listening`` serves them."""

    def __init__(self, folder: Path, devices: str, minimum: int = 2) -> None:
        make_certificate(folder, ["127.0.0.1"], 2)
        make_helper_store(folder / "helper.sqlite", 1.0)
        self.file = folder / "helper.toml"
        self.port = free_port()
        self.file.write_text(
            f'minimum = {minimum}\ndatabase = "helper.sqlite"\nport = {self.port}\n'
            f'[tls]\ncertificate = "{CERTIFICATE}"\nkey = "{KEY}"\n'
        )
        self.settings = HelperSettings.load(self.file)
        with closing(HelperStore(self.settings.database)) as store:
            store.enrol([(name, SecureDevice(name).public) for name in devices], 2.0)
        self.view: HelperView = helper_view(self.file)

    def plan_settings(self, **changed: Any) -> dict[str, Any]:
        """Settings of ``plan_text`` for rounds of two masked updates."""
        return SECURE | {
            "round__goal": 2,
            "secure__helper": f"https://127.0.0.1:{self.port}",
            "secure__key": self.view.key,
            "secure__certificate": self.view.certificate,
            **changed,
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Serve in another thread."""
        listens, over = threading.Event(), threading.Event()

        async def main() -> None:
            async with listening_helper(self.settings):
                listens.set()
                await asyncio.get_running_loop().run_in_executor(None, over.wait)

        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        try:
            assert listens.wait(TIMEOUT)
            yield
        finally:
            over.set()
            thread.join()
