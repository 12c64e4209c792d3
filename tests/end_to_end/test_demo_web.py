"""``make demo-web`` as a user runs it: real processes, a page over http and https, and an end by
Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
from browser import browsing
from bundle_cache import cached_export
from fleetlearn_coordinator.service.status import Closed
from page_person import draw, join, watched
from page_site import built_page
from processes import DIGITS, wait_for

from examples.demo_web import lan
from examples.demo_web.__main__ import _line, main

ROOT = Path(__file__).resolve().parents[2]


class Demo(NamedTuple):
    """A demo that listens."""

    process: subprocess.Popen[str]
    link: str
    words: str
    """What it said before the rounds."""

    def line(self, begins: str) -> str:
        """Wait for a line that begins so."""
        assert self.process.stdout is not None
        heard = []
        for line in self.process.stdout:
            heard.append(line)
            if line.startswith(begins):
                return line
        raise AssertionError(f"the demo ended, and said: {''.join(heard)}")

    def fetch(self, name: str, context: ssl.SSLContext | None = None) -> Any:
        address = urlsplit(self.link)
        with urlopen(
            f"{address.scheme}://{address.netloc}/{name}", timeout=20, context=context
        ) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo exports, exported once."""
    options: dict[str, Any] = DIGITS["export"]()
    path = tmp_path_factory.mktemp("digits") / "digits.bundle"
    cached_export(
        options.pop("model"), options.pop("loss"), options.pop("example"), path, **options
    )
    return path


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "index.html").write_text("<p>hello")
    return folder


def test_a_rounds_line_says_whose_digits_were_measured() -> None:
    summary = {
        "reports": 3,
        "metrics": {"accuracy": 0.5, "loss": 1.25},
        "evaluation": {"accuracy": 0.5},
    }
    assert _line(Closed(2, "committed", 0.0, 1.0, summary), 4) == (
        "round 2 committed by 3 devices, 4 connected; on their own digits, before they trained: "
        "accuracy 50.0%, loss 1.250"
    )
    assert _line(Closed(2, "committed", 0.0, 1.0, {"reports": 3, "metrics": {}}), 4).endswith(
        "4 connected"
    )


@contextmanager
def demo(output: Path, page: Path, bundle: Path, *arguments: str) -> Iterator[Demo]:
    """A demo, until the block is left: then Ctrl-C ends it, and everything that it started."""
    whole = [
        sys.executable,
        "-u",
        "-m",
        "examples.demo_web",
        "--output",
        output,
        "--page",
        page,
        *arguments,
    ]
    whole += ["--bundle", bundle]
    process = subprocess.Popen(
        whole, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    alarm = threading.Timer(300, process.kill)  # its children die with it
    alarm.start()
    try:
        words, link = "", ""
        assert process.stdout is not None
        for line in process.stdout:
            words += line
            if line.startswith("Join: "):
                link = line.removeprefix("Join: ").strip()
            if line.startswith("Open it"):
                break
        assert link, words
        yield Demo(process, link, words)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[0]
        assert process.returncode == 0, said
        assert said.endswith("demo-web: stopped; nothing is left running\n")
        assert_nothing_runs(output)
    finally:
        alarm.cancel()
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)


def assert_nothing_runs(output: Path) -> None:
    left = []
    for process in psutil.process_iter():
        try:
            left += (
                [process.cmdline()]
                if any(str(output) in part for part in process.cmdline())
                else []
            )
        except psutil.NoSuchProcess:
            continue
    assert not left


@pytest.mark.slow
def test_rounds_go_on_without_people(tmp_path: Path, page: Path, bundle: Path) -> None:
    arguments = ("--devices", "3", "--rounds", "12", "--gather", "0.2")
    with demo(tmp_path / "out", page, bundle, *arguments) as running:
        assert running.link.startswith("http://127.0.0.1:")
        assert "/#token=" in running.link
        assert "in this machine's browser" in running.words
        settings = running.fetch("page.json")
        assert (settings["task"], settings["status"]) == ("digits", "status.json")
        running.line("round 1 committed by 3 devices, ")
        running.line("The training is finished: 12 rounds done.")
        wait_for(
            lambda: running.fetch("status.json")["state"] == "finished", "the status of the end"
        )
        status = running.fetch("status.json")
        assert (status["goal"], len(status["history"])) == (6, 12)
        losses = [row["loss"] for row in status["history"]]
        assert losses[-1] < losses[0]
    arguments = ("--devices", "3", "--gather", "0.2")
    # begins again, in the same folder
    with demo(tmp_path / "out", page, bundle, *arguments) as running:
        running.line("round 1 committed by 3 devices")


@pytest.mark.slow
def test_with_tls_for_phones(tmp_path: Path, page: Path, bundle: Path) -> None:
    arguments = ("--lan", "127.0.0.1", "--devices", "2", "--gather", "0.2")
    tls = tmp_path / "out" / "tls" / "127.0.0.1"
    with demo(tmp_path / "out", page, bundle, *arguments) as running:
        assert running.link.startswith("https://127.0.0.1:")
        for words in (str(tls / "ca.pem"), "iPhone", "Android", "on the phone"):
            assert words in running.words
        assert not (tls / "ca-key.pem").exists(), (
            "whoever had it could pass for every site to that phone"
        )
        context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        assert running.fetch("page.json", context)["task"] == "digits"
        running.line("round 1 committed by 2 devices")


@pytest.mark.slow
def test_a_person_draws_and_trains_with_the_devices(tmp_path: Path, bundle: Path) -> None:
    """In Chromium, by the link: with the page that is built, under the headers that the coordinator
    sends."""
    browser_page = built_page()
    with (
        browsing(tmp_path / "profile") as browser,
        demo(tmp_path / "out", browser_page, bundle, "--devices", "3", "--gather", "2") as running,
    ):
        person = browser.pages[0]
        problems = watched(person)
        join(person, running.link)
        assert person.evaluate("crossOriginIsolated && isSecureContext")
        assert "token" not in person.url
        for digit in (1, 4, 7, 1, 7):
            draw(person, digit)
        person.locator("#start").click()
        wait_for(
            lambda: int(person.locator("#accepted").inner_text()) >= 2,
            "two updates of the person's device",
        )
        rounds = [row["devices"] for row in running.fetch("status.json")["history"]]
        assert 4 in rounds, "a round of the three devices in Python and the browser"
        assert problems == []


def test_a_certificate_is_used_again_while_it_is_valid(tmp_path: Path) -> None:
    folder = lan.certificate_for(tmp_path, "192.0.2.7")
    first = (folder / "certificate.pem").read_bytes()
    assert lan.certificate_for(tmp_path, "192.0.2.7") == folder
    assert (folder / "certificate.pem").read_bytes() == first
    old = time.time() - 26 * 86400
    os.utime(folder / "certificate.pem", (old, old))
    lan.certificate_for(tmp_path, "192.0.2.7")
    assert (folder / "certificate.pem").read_bytes() != first
    assert not (folder / "ca-key.pem").exists()


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "out"), "--page", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"there is no page in {tmp_path}" in said
    assert "Node 20.19 or newer, and npm, which are not here" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--devices 1", "argument --devices: '1' was given; expected a whole number from 2 to 50"),
        (
            "--gather never",
            "argument --gather: 'never' was given; expected a number from 0.1 to 3600",
        ),
        ("--round 3", "unrecognized arguments: --round 3"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--output", str(tmp_path / "out"), *arguments.split()])
    assert left.value.code == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
