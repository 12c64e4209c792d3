"""Run ``pip install`` and say what it does: a line for each step with its time, and one at least
every half minute.

    python .ci/install.py --constraint constraints.txt --editable '.[all,dev]'

By itself pip either says nothing for minutes (--quiet) or prints a line for each of 150 packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque

LARGE = re.compile(r"(Downloading|Using cached) (\S+) \((\d+(?:\.\d+)?) (MB|GB)\)")
INSTALLING = re.compile(r"Installing collected packages: (.*)")
WORTH_A_LINE = 10.0
"""Megabytes from which on a download is named."""
SILENCE = 30.0
"""Seconds without a line after which the step is said again."""


class Steps:
    """The steps so far, and when the last line was printed."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()
        self._step, self._names = "", set[str]()

    def begin(self, step: str) -> None:
        """Say that a step begins."""
        self._step = step
        self._print(step)

    def go_on(self) -> None:
        """Say again what is under way, if nothing was said for a while."""
        if time.monotonic() - self._said > SILENCE:
            self._print(f"still {self._step}")

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"  {self._said - self._began:5.0f} s  {text}", flush=True)

    def read(self, line: str) -> None:
        """Read a line of pip's."""
        if found := INSTALLING.match(line):
            self.begin(f"installing {len(found[1].split(', '))} packages")
        elif found := LARGE.search(line):
            name, megabytes = (
                found[2].split("-")[0],
                float(found[3]) * (1000 if found[4] == "GB" else 1),
            )
            if megabytes >= WORTH_A_LINE and name not in self._names:
                self._names.add(name)
                does = "downloading" if found[1] == "Downloading" else "reading from pip's cache:"
                self.begin(f"{does} {name} ({megabytes:.0f} MB)")
        elif line.startswith("Successfully installed"):
            self.begin("done")


def main(arguments: list[str]) -> int:
    """Install. Returns pip's exit status; if that is not 0, its last lines are on standard
    error."""
    steps, last = Steps(), deque[str](maxlen=30)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *arguments,
    ]
    steps.begin("looking for the packages")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        over = threading.Event()

        def remind() -> None:
            while not over.wait(1.0):
                steps.go_on()

        reminder = threading.Thread(target=remind, daemon=True)
        reminder.start()
        try:
            for line in process.stdout:
                last.append(line)
                steps.read(line.strip())
        except KeyboardInterrupt:
            process.terminate()
            return 130
        finally:
            over.set()
            reminder.join()
    if process.returncode:
        print(*last, sep="", end="", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
