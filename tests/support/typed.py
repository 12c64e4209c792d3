"""For tests: what a Markdown page tells a reader to type, typed, and what it shows compared with
what is printed.

A fenced block whose first line is ``# NAME.py`` or ``# NAME.toml`` is that file. A ``console``
block has commands after ``$ ``, and under each what it prints; ``...`` stands for lines left out.
Commands run in the page's order, in bash; one with ``&`` at its end runs beside those behind it,
until ``wait``.

    # types all in the empty FOLDER, writes what is printed into PAGE
    python tests/support/typed.py PAGE FOLDER
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from processes import Processes, processes

FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r"^## (.*)$", re.MULTILINE)
PORT = "8765"
HOME = "/home/you"
"""Where the page says that it was typed, in paths."""
PATIENCE = 300.0


class Command(NamedTuple):
    text: str
    shown: str
    """What the page says that it prints."""


Check = Callable[[Command, str, int], None]
"""Gets a command, what it printed, and its exit status."""


def block(page: str, kind: str, word: str) -> str:
    """The page's one fenced block of a kind with this word in it."""
    (found,) = (text for name, text in FENCED.findall(page) if name == kind and word in text)
    return str(found)


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    blocks = (text for _, text in FENCED.findall(page))
    return {
        found[1]: text for text in blocks if (found := re.match(r"# ([\w-]+\.(?:py|toml))\n", text))
    }


def sections(page: str) -> dict[str, list[Command]]:
    """The commands below each title (a line that begins with ``## ``)."""
    _, *parts = TITLE.split(page)
    return {title: commands(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def commands(text: str) -> list[Command]:
    found = []
    for kind, block in FENCED.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:] if kind == "console" else ():
            words, _, shown = part.partition("\n")
            found.append(Command(words, shown))
    return found


def write_files(page: str, folder: Path, port: int) -> None:
    for name, text in files(page).items():
        (folder / name).write_text(text.replace(PORT, str(port)))


def environment() -> dict[str, str]:
    """This environment's commands by their names."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "COLUMNS": "80"}


def type_in(wanted: list[Command], folder: Path, port: int, check: Check) -> None:
    """Run the commands in the folder. ``check`` gets each with what it printed, those beside others
    at their end."""
    path = environment()
    with processes(folder) as run:
        beside: dict[str, Command] = {}
        for command in wanted:
            words = command.text.replace(PORT, str(port))
            if words == "wait":
                _wait(run, beside, check)
            elif words.endswith("&"):
                name = f"beside-{len(beside)}"
                beside[name] = command
                run.start(name, "bash", "-c", f"exec {words[:-1]}", cwd=folder, env=path)
            else:
                done = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", words], cwd=folder, env=path, timeout=PATIENCE,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                check(command, done.stdout, done.returncode)


def _wait(run: Processes, beside: Mapping[str, Command], check: Check) -> None:
    for name, command in beside.items():
        status = run.running[name].wait(PATIENCE)
        check(command, run.log(name), status)


def assert_shown(command: Command, printed: str, status: int, folder: Path) -> None:
    """Compare what the page shows with what was printed. Numbers, hashes, paths and the width of
    columns may differ."""
    refused = command.shown.startswith("fleetlearn-")
    assert (status != 0) == refused, f"$ {command.text}\n{printed}\nexit status {status}"
    parts = re.split(r"^\.\.\.\n", command.shown, flags=re.MULTILINE)
    wanted = ".*".join(re.escape(plain(part, folder)) for part in parts)
    assert re.fullmatch(wanted, plain(printed, folder)), (
        f"$ {command.text}\n{printed}\nThe page shows (see {Path(__file__).name} for how to renew "
        f"it):\n{command.shown}"
    )


def plain(text: str, folder: Path) -> str:
    return _without_numbers(text).replace(_without_numbers(str(folder)), HOME)


def _without_numbers(text: str) -> str:
    """Nor spaces, lines of tables, the name of torch's build, and which operator is the farthest
    from PyTorch: rounding decides that, with the number of threads. Numbers go first: what follows
    could be part of them."""
    text = re.sub(r"\+(cpu|cu[0-9]+)\b", "", text)
    text = re.sub(r"\w{8}(-\w{4}){3}-\w{12}", "0", text)
    text = re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "0", text)
    text = re.sub(r"0([.,:+-]*0)*", "0", re.sub(r"[\s─-╿]", "", text))
    return re.sub(r"theworst,[\w.]+\(\w+\),at0", "theworst", text)


def renewed(shown: str, printed: str, folder: Path) -> str:
    """What was printed; of what the page leaves lines out of, the first lines like those that it
    shows."""
    lines = [line.rstrip() for line in printed.replace(str(folder), HOME).splitlines()]
    if "...\n" in shown:
        rest = iter(lines)
        lines = [
            line
            if line == "..."
            else next(row for row in rest if plain(row, folder) == plain(line, folder))
            for line in shown.splitlines()
        ]
    return "".join(f"{line}\n" for line in lines)


def retype(page: Path, folder: Path) -> None:
    """Put what is printed into the page."""
    text = page.read_text()
    write_files(text, folder, int(PORT))

    def put(command: Command, printed: str, status: int) -> None:
        nonlocal text
        before = f"\n$ {command.text}\n{command.shown}"
        assert text.count(before) == 1, before
        text = text.replace(
            before, f"\n$ {command.text}\n{renewed(command.shown, printed, folder)}"
        )

    type_in(commands(text), folder, int(PORT), put)
    page.write_text(text)


if __name__ == "__main__":
    retype(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
