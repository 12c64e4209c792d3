"""How far the live page is behind its coordinator: from the last byte of a round's last update to
the round's model on the page, in a real Chromium.

The page shows a run with all its charts. A script in it notes when the text of "Model version"
changes, by the machine's clock, which devices, coordinator and browser share. Once devices pause
between rounds, as a fleet that trains does; once they come back at once. A version that was never
shown, as the next one came before, counts until a later one is shown.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from typing import Any

import _measure as measure
import _servers
import _websocket_device
from _shown import behind
from live_page import sign_in
from playwright.sync_api import sync_playwright
from rounds import quantile, together

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NOTE = """() => {
  const terms = [...document.querySelectorAll("dt")];
  const term = terms.find((each) => each.textContent === "Model version");
  const place = term.nextElementSibling;
  window.shown = [];
  const note = () => window.shown.push([place.textContent, Date.now() / 1000]);
  const all = { childList: true, characterData: true, subtree: true };
  new MutationObserver(note).observe(place, all);
  note();
}"""
"""Note each text of the version, and when it was shown first."""


class Tab(threading.Thread):
    """A tab of Chromium that shows a run, until ``end``."""

    def __init__(self, server: _servers.Server) -> None:
        super().__init__()
        self._address, self._token = sign_in(server)
        self._profile = server.log.parent / "chromium"
        self.looks, self._ended = threading.Event(), threading.Event()
        self.shown: list[tuple[int, float]] = []
        """Versions, and when each was shown first, in Unix time."""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._look()
        except Exception as error:
            self.error = error
        finally:
            self.looks.set()

    def _look(self) -> None:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None:
            raise RuntimeError(f"no Chromium is here; looked for {', '.join(BROWSERS)}")
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch_persistent_context(
                self._profile, executable_path=path, args=flags,
                viewport={"width": 1400, "height": 900},
            )  # fmt: skip
            try:
                page = browser.pages[0]
                page.goto(f"{self._address}/#token={self._token}")
                page.get_by_role("link", name="benchmark").click()
                page.get_by_role("heading", name="The open round").wait_for()
                page.evaluate(NOTE)
                self.looks.set()
                while not self._ended.is_set():
                    page.wait_for_timeout(200)
                found: list[list[Any]] = page.evaluate("window.shown")
                self.shown = [(int(text.split()[0]), at) for text, at in found]
            finally:
                browser.close()

    def end(self) -> None:
        """Close the tab. Raises what went wrong in it."""
        self._ended.set()
        self.join()
        if self.error is not None:
            raise self.error


def run(devices: int, size: int, rounds: int, pause: float, limit: float) -> dict[str, float]:
    """Return the figures of one fleet. ``pause``: seconds for which each device trains."""
    update, log = _websocket_device.make_update(size), _websocket_device.Log()

    def train(_: bytearray) -> _websocket_device.Update:
        time.sleep(pause)
        return update

    def take_part(name: str) -> Any:
        credential = f"Bearer {_servers.credential_of(name)}"
        return _websocket_device.take_part(
            server.url, name, train if pause else update, log, Authorization=credential
        )

    since = time.time() - time.perf_counter()
    with _servers.coordinator(
        size=size, devices=devices, rounds=rounds, enrolled=devices, admin="{port = 0}"
    ) as server:
        tab = Tab(server)
        tab.start()
        tab.looks.wait()
        try:
            if tab.error is None:
                asyncio.run(together((take_part(f"d{i}") for i in range(devices)), limit))
                time.sleep(2.0)  # the last version is shown
        finally:
            tab.end()
    made = {version: since + moments.last_uploaded for version, moments in log.items()}
    found = behind(tab.shown, made)
    if not found or tab.shown[-1][0] != rounds:
        raise RuntimeError(f"the page showed {tab.shown[-3:]}; {rounds} versions were made")
    return {
        "versions": rounds,
        "shown": len(found),
        "p50_ms": 1e3 * quantile(found, 0.5),
        "p90_ms": 1e3 * quantile(found, 0.9),
        "max_ms": 1e3 * max(found),
    }


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--devices", type=int, default=20)
    options.add_argument(
        "--size", type=int, default=10_000, help="parameters of the model, float32"
    )
    options.add_argument("--rounds", type=int, default=40, help="of the fleet that pauses")
    options.add_argument(
        "--pause", type=float, default=0.37, help="seconds that its devices train (%(default)s)"
    )
    options.add_argument("--busy-rounds", type=int, default=500, help="of the fleet that does not")
    options.add_argument("--limit", type=float, default=120.0, help="seconds that one may take")
    chosen = options.parse_args()
    sizes = chosen.devices, chosen.size
    results = {
        "pausing": run(*sizes, chosen.rounds, chosen.pause, chosen.limit),
        "busy": run(*sizes, chosen.busy_rounds, 0.0, chosen.limit),
    }
    rows = [["fleet", *results["busy"]]]
    rows += [[name, *(f"{value:.0f}" for value in row.values())] for name, row in results.items()]
    print(measure.table(rows))
    settings = {key: value for key, value in vars(chosen).items() if key != "json"}
    measure.write_json(chosen.json, settings, results)


if __name__ == "__main__":
    main()
