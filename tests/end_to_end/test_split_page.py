"""The commands of docs/algorithms/split.md run as they are typed, in their order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import PATIENCE, wait_for

from examples import bank_and_shop, splitfed
from examples.vertical import free_port, outputs_of

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "split.md"


def commands(section: str) -> list[list[str]]:
    """Return the words of each command in the blocks of a section of the page."""
    text = PAGE.read_text("utf-8").split(f"\n{section}\n")[1]
    text = re.split(r"\n##+ ", text)[0]
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    typed = "\n".join(block for language, block in blocks if not language)
    lines = typed.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


class Typed:
    """Somebody who types commands in a folder; what serves goes on in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[bytes]]()
        self.port = str(free_port())

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        module = words[0].replace("-", "_")
        given = [word.replace("8780", self.port) for word in words[1:]]
        process = subprocess.Popen([sys.executable, "-m", module, *given], cwd=self.folder)
        self.running.append(process)
        return process

    def do(self, words: list[str]) -> None:
        assert self.start(words).wait(PATIENCE) == 0, words

    def change(self, plan: str, lines: dict[str, str]) -> None:
        """Make the run shorter, on a port that is free."""
        path = self.folder / plan
        text = path.read_text("utf-8")
        for before, after in {"8780": self.port, **lines}.items():
            assert before in text
            text = text.replace(before, after)
        path.write_text(text, "utf-8")


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Typed]:
    one = Typed(tmp_path)
    yield one
    for process in one.running:
        process.kill()
        process.wait()


def test_the_commands_of_a_vertical_run(typed: Typed) -> None:
    bank_and_shop.write(typed.folder)
    init, serve, status, bank, shop, *exports = commands("## Step by step")
    typed.do(init)
    typed.change("run/vertical.toml", {"steps = 1000": "steps = 200"})
    coordinator = typed.start(serve)
    wait_for((typed.folder / "run" / "data" / "status.json").exists, "the status")
    typed.do(status)
    parties = [typed.start(bank), typed.start(shop)]
    assert [one.wait(PATIENCE) for one in (coordinator, *parties)] == [0, 0, 0]
    assert len(exports) == 4, exports
    for command in exports:
        typed.do(command)
    found = bank_and_shop.customers()
    feed = {"bank.x": found.bank, "shop.x": found.shop}
    outputs = outputs_of(typed.folder / "model.onnx", **feed)
    parts = {
        f"activations_{name}": outputs_of(typed.folder / f"{name}.onnx", x=x)
        for name, x in (("bank", found.bank), ("shop", found.shop))
    }
    assert np.array_equal(outputs, outputs_of(typed.folder / "top.onnx", **parts))
    assert (outputs.argmax(1) == found.bought).mean() > 0.9


def test_the_commands_of_a_split_run(typed: Typed) -> None:
    splitfed.write(typed.folder / "work")
    init, serve, status, export, device = commands("### Step by step")
    typed.do(init)
    typed.change("work/run/split.toml", {"rounds = 50": "rounds = 3"})
    coordinator = typed.start(serve)
    wait_for((typed.folder / "work" / "run" / "data" / "status.json").exists, "the status")
    typed.do(status)
    others = [
        typed.start([word.replace("attic", name) for word in device]) for name in splitfed.DEVICES
    ]
    assert [one.wait(PATIENCE) for one in (coordinator, *others)] == [0, 0, 0, 0]
    typed.do(export)
    x = splitfed.tables()[1].x
    assert outputs_of(typed.folder / "work" / "model.onnx", x=x).shape == (len(x), 10)
