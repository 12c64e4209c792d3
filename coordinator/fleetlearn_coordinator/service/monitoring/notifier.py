"""Tells somebody of alerts, by a webhook and by a command, in threads of their own: nothing that
happens there holds up the event loop."""

from __future__ import annotations

import logging
import queue
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import msgspec
from fleetlearn_protocol.errors import in_words

from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.service.monitoring.alerts import AlertNotice

logger = logging.getLogger("fleetlearn.coordinator")

MOST_WAITING = 100
"""Notices that wait to be told; further ones are dropped, with a line in the log."""
PAUSES = (1.0, 5.0, 25.0)
"""Seconds before a notice that could not be told is tried again."""
WEBHOOK_TIMEOUT = 10.0
"""Seconds in which a webhook must answer."""
COMMAND_TIMEOUT = 30.0
"""Seconds after which a command is killed."""
END_TIMEOUT = 5.0
"""Seconds for which the process's end waits for what is to be told still."""

Deliver = Callable[[bytes], None]
"""Tells one notice, as JSON. Raises OSError, ValueError or SubprocessError where that failed."""


class Notifier:
    """Tells notices by all the ways that ``[alerts]`` names."""

    def __init__(self, settings: AlertSettings) -> None:
        """Raises OSError, ValueError where ``webhook_ca`` cannot be used."""
        self._ways: list[_Way] = []
        if settings.webhook is not None:
            where = urlsplit(settings.webhook).hostname or ""  # the rest may hold a secret
            self._ways.append(_Way(f"webhook at {where}", webhook(settings)))
        if settings.command:
            self._ways.append(_Way(f"command {settings.command[0]}", command(settings.command)))

    def tell(self, notice: AlertNotice) -> None:
        """Tell this, soon. Returns at once."""
        content = msgspec.json.encode(notice)
        for way in self._ways:
            way.put(content)

    def close(self) -> None:
        """Wait END_TIMEOUT seconds at most until all is told that was to be."""
        until = monotonic() + END_TIMEOUT
        for way in self._ways:
            way.end()
        for way in self._ways:
            way.join(until - monotonic())


class _Way:
    """One way to tell notices, in their order, in a separate thread."""

    def __init__(self, name: str, deliver: Deliver) -> None:
        self._name, self._deliver = name, deliver
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def put(self, content: bytes) -> None:
        try:
            self._waiting.put_nowait(content)
        except queue.Full:
            text = "the %s is told too little: %d alerts wait, and one is dropped"
            logger.error(text, self._name, MOST_WAITING)

    def end(self) -> None:
        """Tell what waits, without further tries, and end."""
        self._ended.set()
        with suppress(queue.Full):  # the thread looks at the event, too
            self._waiting.put_nowait(b"")

    def join(self, timeout: float) -> None:
        self._thread.join(max(0.0, timeout))

    def _run(self) -> None:
        while not (self._ended.is_set() and self._waiting.empty()):
            if content := self._waiting.get():
                self._tell(content)

    def _tell(self, content: bytes) -> None:
        for pause in (*PAUSES, None):
            try:
                self._deliver(content)
                return
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                text = "the %s could not be told of an alert: %s%s"
                again = "" if pause is None else f"; it is tried again in {pause:.0f} s"
                logger.warning(text, self._name, _words(error), again)
            if pause is None or self._ended.wait(pause):
                return


def webhook(settings: AlertSettings) -> Deliver:
    """Return what posts JSON to the webhook. The certificate of an https:// one is verified, and no
    redirection is followed."""
    url = settings.webhook
    assert url is not None
    context = ssl.create_default_context(cafile=settings.webhook_ca)
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), _NoRedirections()
    )

    def post(content: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "fleetlearn"}
        request = urllib.request.Request(url, content, headers, method="POST")
        with opener.open(request, timeout=WEBHOOK_TIMEOUT):
            pass

    return post


def command(words: Sequence[str]) -> Deliver:
    """Return what runs the command with the JSON as its input."""

    def run(content: bytes) -> None:
        subprocess.run(
            words,
            input=content,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMMAND_TIMEOUT,
            check=True,
        )

    return run


class _NoRedirections(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _words(error: Exception) -> str:
    match error:
        case urllib.error.HTTPError(code=code):
            error.close()
            return f"it answered {code}"
        case urllib.error.URLError(reason=OSError() as reason):
            return in_words(reason)
        case subprocess.TimeoutExpired(timeout=timeout):
            return f"it was killed after {timeout:.0f} s"
        case subprocess.CalledProcessError(returncode=status, stderr=said):
            last = (said or b"").decode("utf-8", "replace").strip().splitlines()[-1:]
            return f"it ended with status {status}" + "".join(f": {line[:200]}" for line in last)
    return in_words(error) if isinstance(error, OSError) else str(error)
