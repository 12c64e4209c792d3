"""Masked updates of the SDK for browsers (in Node): opened as their helper would, each is what the
Python SDK trains."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import as_data, load_npz
from fleetlearn_device.training.local_noise import withheld
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.messages import Report, SecureTask, Task, encode
from fleetlearn_protocol.secure.about import about_update, signed_seed
from fleetlearn_protocol.secure.fixed_point import weighted_sum
from fleetlearn_protocol.secure.masks import add_mask
from fleetlearn_protocol.secure.sealed import unseal
from fleetlearn_protocol.secure.task_terms import terms_of, update_of
from fleetlearn_protocol.vector import Vector
from line_bundle import line_data, write_line_bundle
from msgspec import json as messages
from msgspec.structs import replace
from web_sdk import script

HELPER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
EXAMPLES = 20
CLIP, BITS = 0.5, 20
SHORT = 12
"""Bits of words that travel in 3 bytes."""
FACTOR = 0.25
"""What staleness leaves of the second task's update."""


def tasks_of(bundle: Bundle) -> list[Task]:
    """A task that is masked at once and whose weight is counted in examples, and one that is masked
    when its staleness is known."""
    helper = HELPER.public_key().public_bytes_raw().hex()
    first = Task(
        "5eed-1-1",
        round=1,
        bundle=bundle.sha256,
        vectors=(FLOAT32.reference("model", bundle.parameters()),),
        parts={"update": "masked"},
        hyper={row.name: {"lr": 0.05}.get(row.name, row.default) for row in bundle.manifest.hyper},
        epochs=2,
        batch_size=8,
        seed=2**52 + 12345,
        deadline=600.0,
        evaluate=True,
        clip=CLIP,
        secure=SecureTask("helper", 3, BITS, 4 * EXAMPLES, None, helper),
    )
    second = replace(first, task="5eed-2-2", seed=7)
    short = replace(
        second,
        task="5eed-3-3",
        parts={"update": "masked24"},
        secure=SecureTask("helper", 3, SHORT, None, None, helper),
    )
    return [first, replace(second, secure=SecureTask("helper", 3, BITS, None, 0.2, helper)), short]


def clipped(folder: Path, bundle: Bundle, task: Task) -> Vector:
    """Return the clipped update of a task, as the Python SDK trains it."""
    state = StateDirectory(folder / f"state-{task.task}")
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json")}
    contents |= {task.vectors[0].sha256: bundle.parameters().tobytes()}
    plain = replace(task, secure=None, parts={"update": "float32"})
    while lacking := state.contents.lacking(plain, "onnx"):
        for wanted in lacking:
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    trainer = Trainer(state, as_data(load_npz(folder / "data.npz")), "onnx", 1)
    finished = trainer.train(plain, 600.0)
    state.close()
    return FLOAT32.decode(finished.contents[0])


def train_in_node(
    folder: Path, changes: dict[str, int], **more: float
) -> subprocess.CompletedProcess[str]:
    """Have the SDK for browsers train the two tasks. ``changes``: of the tasks."""
    bundle = write_line_bundle(folder / "line.bundle", buffer=False)
    x, y = line_data(EXAMPLES)
    np.savez(folder / "data.npz", x=x, y=y)
    (folder / "model").write_bytes(bundle.parameters().tobytes())
    tasks = [replace(task, **changes) for task in tasks_of(bundle)]
    spec = {
        "bundle": str(bundle.path),
        "data": str(folder / "data.npz"),
        "output": str(folder),
        "vectors": {tasks[0].vectors[0].sha256: str(folder / "model")},
        "tasks": [json.loads(encode(task)) for task in tasks],
        "factor": FACTOR,
        **more,
    }
    (folder / "specs.json").write_text(json.dumps([spec]))
    command = [*script("train_tasks"), str(folder / "specs.json")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the SDK for browsers wrote of the two tasks."""
    folder = tmp_path_factory.mktemp("masked")
    done = train_in_node(folder, {})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_an_update_of_a_training_that_was_cut_short_is_not_masked(tmp_path: Path) -> None:
    done = train_in_node(tmp_path, {"epochs": 10**6}, seconds=5.0)
    assert done.returncode != 0
    assert "the training was cut short, and such an update is not masked" in done.stderr
    assert not [*tmp_path.glob("*-report.json")]


@pytest.mark.parametrize(
    ("number", "share", "factor"), [(0, 0.25, 1.0), (1, 1.0, FACTOR), (2, 1.0, 1.0)]
)
def test_without_its_mask_it_is_the_clipped_update(
    number: int, share: float, factor: float, folder: Path
) -> None:
    bundle = open_bundle(folder / "line.bundle")
    task = tasks_of(bundle)[number]
    report = messages.decode((folder / f"{number}-report.json").read_bytes(), type=Report)
    assert task.secure is not None
    bits, width = task.secure.bits, 3 if task.secure.bits == SHORT else 4
    words = words_from_bytes((folder / f"{number}-update.bin").read_bytes(), width).copy()
    about = about_update(terms_of(task, len(words)), update_of(task, "device"))
    assert report.sealed is not None
    add_mask(words, unseal(bytes.fromhex(report.sealed), HELPER, about), -1)
    found = weighted_sum(words, 1, CLIP, bits)

    update = clipped(folder, bundle, task)
    assert np.linalg.norm(update) == pytest.approx(CLIP)  # it was longer
    step = 2 * CLIP / (2**bits - 1)
    # Each element is rounded by less than a step; two builds of ONNX Runtime add in other orders.
    # An update that rounding made longer than C is shortened first: by a few steps at most.
    shorter = 3 * step if share * factor == 1 else 0.0
    allowed = step + shorter + 1e-5
    np.testing.assert_allclose(found.total, update * share * factor, rtol=0, atol=allowed)
    assert found.weight == pytest.approx(share, abs=2.0**-bits)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_its_report_is_signed_and_says_nothing_measured(number: int, folder: Path) -> None:
    task = tasks_of(open_bundle(folder / "line.bundle"))[number]
    report = messages.decode((folder / f"{number}-report.json").read_bytes(), type=Report)
    assert report.sealed is not None
    assert report.signature is not None
    name, key = (folder / "roster.txt").read_text("ascii").split(" ")
    size = report.size // (4 if number < 2 else 3)
    about = about_update(terms_of(task, size), update_of(task, name))
    content = signed_seed(about, bytes.fromhex(report.sealed))
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
        bytes.fromhex(report.signature), content
    )
    assert report == withheld(report, task)
    assert [(part.name, part.encoding) for part in report.parts] == [*task.parts.items()]
