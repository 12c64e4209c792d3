"""Pages in Firefox, driven over WebDriver BiDi: a WebSocket that Firefox itself serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import wait_for
from websockets.sync.client import ClientConnection, connect

NAMES = ("firefox-esr", "firefox")
PREFERENCES = {
    "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    # This machine alone is reached.
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
}
LISTENING = re.compile(r"WebDriver BiDi listening on (ws://\S+)")


class Tab:
    """A tab of Firefox."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last = 0
        self._ask("session.new", capabilities={})
        self._context = self._ask("browsingContext.getTree")["contexts"][0]["context"]

    def goto(self, url: str) -> None:
        self._ask("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def reload(self) -> None:
        self._ask("browsingContext.reload", context=self._context, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, or of its promise, which must be one
        that JSON has."""
        found = self._ask(
            "script.evaluate",
            expression=f"Promise.resolve({expression}).then(JSON.stringify)",
            target={"context": self._context},
            awaitPromise=True,
        )
        assert found["type"] == "success", found
        return json.loads(found["result"].get("value", "null"))

    def wait_for(self, expression: str) -> None:
        wait_for(lambda: bool(self.evaluate(expression)), expression)

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        self._connection.send(
            json.dumps({"id": self._last, "method": method, "params": parameters})
        )
        while True:
            message = json.loads(self._connection.recv(60))
            if message.get("id") == self._last:
                assert message["type"] == "success", message
                return message["result"]


@contextmanager
def firefox(folder: Path) -> Iterator[Tab]:
    """Firefox with a profile of its own in ``folder``, without a window. Skips the test where there
    is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(
            f"no Firefox here (looked for {', '.join(NAMES)}; on Debian: apt-get install "
            "firefox-esr)"
        )
    profile, log = folder / "firefox", folder / "firefox.log"
    profile.mkdir(exist_ok=True)
    lines = [
        f"user_pref({json.dumps(name)}, {json.dumps(value)});"
        for name, value in PREFERENCES.items()
    ]
    (profile / "user.js").write_text("\n".join(lines))
    command = [
        program,
        "--headless",
        "--no-remote",
        "--profile",
        str(profile),
        "--remote-debugging-port=0",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_for(
            lambda: LISTENING.search(log.read_text()) is not None, f"Firefox, which says {log}"
        )
        found = LISTENING.search(log.read_text())
        assert found
        with connect(f"{found[1]}/session", compression=None, max_size=None) as connection:
            yield Tab(connection)
    finally:
        process.kill()
        process.wait()
