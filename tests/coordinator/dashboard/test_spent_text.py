"""The page's words for what is spent are those of the commands: both are asked for the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import fleetlearn_coordinator.dashboard as dashboard
import pytest
from fleetlearn_protocol.epsilon_text import spent_text

pytestmark = pytest.mark.slow
DOM = Path(dashboard.__file__).parent / "page" / "dom.js"
SCRIPT = """
const { spentText } = await import(process.argv[1]);
const asked = JSON.parse(process.argv[2]);
console.log(JSON.stringify(asked.map(([epsilon, budget]) => spentText(epsilon, budget))));
"""


def test_the_page_rounds_up_as_the_commands_do(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not here")
    random = Random(36)
    asked: list[tuple[float, float | None]] = [
        (1.5449, None), (7.9999, 8.0), (7.9921, 7.993), (8.0001, 8.0), (0.0, 8.0), (1.1, None),
    ]  # fmt: skip
    asked += [(10 ** random.uniform(-3, 2.9), None) for _ in range(500)]
    asked += [(7.99 + random.random() / 1e3, 7.9911) for _ in range(100)]
    module = tmp_path / "dom.mjs"  # node takes a .js for a module of the older kind
    shutil.copy(DOM, module)
    words = [node, "--input-type=module", "--eval", SCRIPT, module.as_uri(), json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[:4] == ["1.55", "8", "7.993", "8.01"]
    told = [spent_text(epsilon, budget) for epsilon, budget in asked]
    assert [float(text) for text in found] == [float(text) for text in told]
