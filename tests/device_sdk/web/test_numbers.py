"""The same tasks on the same data, trained by the SDK for browsers (onnxruntime-web in Node) and by
the Python SDK."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.data import as_data, load_npz
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.messages import Report, StepSchedule, Task, encode
from fleetlearn_protocol.vector import Vector
from line_bundle import line_data, write_line_bundle
from sparse_fleet import ratings_bundle, ratings_of
from torch import nn
from web_sdk import script

TOLERANCE = 1e-4
"""Of an element of a part, and of the loss: two builds of ONNX Runtime add in other orders."""


def tasks_of(bundle: Bundle, vectors: Mapping[str, Vector], **changes: Any) -> list[Task]:
    """Two tasks, the second of which goes on from what the device kept of the first."""
    settings: dict[str, Any] = {
        "round": 1,
        "parts": {"update": "float32"},
        "hyper": {
            row.name: {"lr": 0.05, "mu": 0.3}.get(row.name, row.default)
            for row in bundle.manifest.hyper
        },
        "epochs": 2,
        "batch_size": 8,
        "deadline": 600.0,
        "evaluate": True,
    } | changes
    if bundle.manifest.buffers:
        settings["parts"] = {**settings["parts"], "buffers": "float32"}
    references = tuple(FLOAT32.reference(name, vector) for name, vector in vectors.items())
    first = Task("first", bundle=bundle.sha256, vectors=references, seed=2**52 + 12345, **settings)
    return [first, msgspec.structs.replace(first, task="second", seed=7, kept="first")]


def train_here(
    folder: Path, bundle: Bundle, data: Path, vectors: Mapping[str, Vector], tasks: list[Task]
) -> Any:
    state = StateDirectory(folder / "state")
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json")}
    contents |= {
        reference.sha256: vectors[reference.name].tobytes() for reference in tasks[0].vectors
    }
    trainer, reports, parts = Trainer(state, as_data(load_npz(data)), "onnx", 1), [], []
    for task in tasks:
        while lacking := state.contents.lacking(task, "onnx"):
            for wanted in lacking:
                state.contents.append(wanted, 0, contents[wanted.sha256])
                assert state.contents.finish(wanted)
        finished = trainer.train(task, 600.0)
        state.outbox.save(*finished)
        reports.append(finished.report)
        parts.append(decoded(task, dict(zip(task.parts, finished.contents, strict=True)), bundle))
    state.close()
    return reports, parts


def read_results(folder: Path, bundle: Bundle, tasks: list[Task]) -> Any:
    """Return the reports, and the parts, that the SDK for browsers wrote."""
    reports, parts = [], []
    for number, task in enumerate(tasks):
        reports.append(
            msgspec.json.decode((folder / f"{number}-report.json").read_bytes(), type=Report)
        )
        contents = {name: (folder / f"{number}-{name}.bin").read_bytes() for name in task.parts}
        parts.append(decoded(task, contents, bundle))
    return reports, parts


def decoded(task: Task, contents: Mapping[str, Any], bundle: Bundle) -> dict[str, Vector]:
    return {
        name: find_encoding(task.parts[name]).decode(content, bundle.manifest.elements_of(name))
        for name, content in contents.items()
    }


class Case(NamedTuple):
    """Tasks of one bundle, for one device."""

    folder: Path
    bundle: Bundle
    data: Path
    vectors: Mapping[str, Vector]
    tasks: list[Task]
    cores: int | None = None
    """Of a page that may have threads: what computes is measured first."""

    def spec(self) -> dict[str, Any]:
        """What the script of the SDK for browsers reads."""
        files = {}
        for reference in self.tasks[0].vectors:
            files[reference.sha256] = str(self.folder / f"{reference.name}.vector")
            Path(files[reference.sha256]).write_bytes(self.vectors[reference.name].tobytes())
        messages = [json.loads(encode(task)) for task in self.tasks]
        paths = {
            "bundle": str(self.bundle.path),
            "data": str(self.data),
            "output": str(self.folder),
        }
        cores = {} if self.cores is None else {"cores": self.cores}
        return {**paths, "vectors": files, "tasks": messages, **cores}


def make_case(folder: Path, bundle: Bundle, arrays: Sequence[Any], **changes: Any) -> Case:
    np.savez(
        folder / "data.npz",
        **{row.name: array for row, array in zip(bundle.manifest.batch, arrays, strict=True)},
    )
    size = bundle.manifest.size
    vectors = {"model": bundle.parameters()[:size]}
    if changes.get("algorithm", "").startswith("scaffold"):
        vectors["control"] = CONTROL[:size]
    return Case(folder, bundle, folder / "data.npz", vectors, tasks_of(bundle, vectors, **changes))


CONTROL = np.array([0.25, -0.5, 0.125, 0, 1], np.float32)
BOTH = {"update": "float32", "control": "float32"}
SCAFFOLD = {"references": ("correction",), "optimizer": "sgd"}
LINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kept state": (
        {"personal": True, "state": True, "references": ("anchor", "previous"), "random": True},
        {},
    ),
    "scaffold": (SCAFFOLD, {"algorithm": "scaffold", "parts": BOTH}),
    "scaffold-gradient": (SCAFFOLD, {"algorithm": "scaffold-gradient", "parts": BOTH}),
    "scaffold by step": (
        SCAFFOLD,
        {
            "algorithm": "scaffold",
            "parts": BOTH,
            "hyper": {"lr": 0.2},
            "schedule": StepSchedule("one-cycle", warm_up=2, start=0.25),
        },
    ),
    "ditto by step": (
        {"references": ("anchor",)},
        {"algorithm": "ditto", "schedule": StepSchedule("exponential", factor=0.5, first=1)},
    ),
    "feddyn": ({"references": ("anchor", "correction")}, {"algorithm": "feddyn"}),
    "feddyn int4": (
        {"references": ("anchor", "correction")},
        {"algorithm": "feddyn", "parts": {"update": "int4"}},
    ),
    "ditto": ({"references": ("anchor",)}, {"algorithm": "ditto", "personal_epochs": 3}),
    "fedrep": ({"personal": True}, {"algorithm": "fedrep"}),
    "pfedme": (
        {"references": ("anchor",), "random": True},
        {
            "algorithm": "pfedme",
            "hyper": {"lr": 0.1, "mu": 0.5, "inner_steps": 3.0, "outer_lr": 0.7},
        },
    ),
    "apfl": (
        {"references": ("anchor",), "optimizer": "sgd", "random": True},
        {"algorithm": "apfl", "hyper": {"lr": 0.1, "alpha": 0.4, "adapt_alpha": 1.0}},
    ),
    "int8": ({}, {"parts": {"update": "int8"}}),
    "topk": ({}, {"parts": {"update": "topk-0.5-float16"}}),
}
"""Name -> what the bundle has, and what its tasks say."""
MODELS = ("cnn", "own")
"""Exported models: a CNN; and a personal head, MOON's previous model, momentum's state and
dropout."""


class Masked(nn.Module):
    """Its gradient is the dropout mask, times two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


@pytest.fixture(scope="module")
def trained(
    cases: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Case]:
    """All cases, which the SDK for browsers has trained: one process, since the runtime takes a
    second to load."""
    found = {}
    for name in MODELS:
        case = cases(name)
        found[name] = make_case(
            tmp_path_factory.mktemp(name), open_bundle(case.path), (case.x[:100], case.y[:100])
        )
    for name, (given, changes) in LINES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        found[name] = make_case(
            folder, write_line_bundle(folder / "line.bundle", **given), line_data(20), **changes
        )
    # This SDK trains whole tables, of which the bundle's graphs take any number of rows.
    folder = tmp_path_factory.mktemp("sparse")
    rated = ratings_of(0)
    found["sparse"] = make_case(
        folder, open_bundle(ratings_bundle(folder)), (rated["film"], rated["rating"])
    )
    folder = tmp_path_factory.mktemp("mask")
    example = (torch.ones(2, 4096),)
    cached_export(
        Masked(), lambda outputs: outputs.sum(1).mean(), example, folder / "mask.bundle", targets=0
    )
    ones = (np.ones((1, 4096), np.float32),)
    settings = {"hyper": {"lr": 1.0}, "epochs": 1}
    found["mask"] = make_case(folder, open_bundle(folder / "mask.bundle"), ones, **settings)
    # The last, since the process counts as such a page from then on.
    case, folder = cases("own"), tmp_path_factory.mktemp("measured")
    found["measured"] = make_case(
        folder, open_bundle(case.path), (case.x[:100], case.y[:100])
    )._replace(cores=2)
    (folder / "specs.json").write_text(json.dumps([case.spec() for case in found.values()]))
    command = [*script("train_tasks"), str(folder / "specs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        "training with wasm.*: wasm [0-9.]+ ms a step; wasm, 2 threads [0-9.]+ ms a step;",
        done.stdout,
    )
    return found


@pytest.mark.parametrize("name", [*MODELS, *LINES, "sparse", "measured"])
def test_the_numbers_are_the_same(name: str, trained: dict[str, Case]) -> None:
    folder, bundle, data, vectors, tasks, _ = trained[name]
    expected, expected_parts = train_here(folder, bundle, data, vectors, tasks)
    found, found_parts = read_results(folder, bundle, tasks)
    for here, there in zip(expected, found, strict=True):
        for field in ("task", "round", "examples", "steps", "epochs", "complete"):
            assert getattr(there, field) == getattr(here, field)
        assert there.loss == pytest.approx(here.loss, rel=TOLERANCE)
        assert there.metrics == pytest.approx(here.metrics, rel=TOLERANCE)
        for mine, other in ((there.evaluation, here.evaluation), (there.personal, here.personal)):
            assert (mine is None) == (other is None)
            if mine is not None:
                assert mine.examples == other.examples
                assert mine.loss_sum == pytest.approx(other.loss_sum, rel=TOLERANCE)
                assert mine.metric_sums == pytest.approx(other.metric_sums, rel=TOLERANCE)
        for mine, other in zip(there.parts, here.parts, strict=True):
            assert (mine.name, mine.encoding, mine.size) == (other.name, other.encoding, other.size)
    for here, there in zip(expected_parts, found_parts, strict=True):
        assert np.abs(here["update"]).max() > 0.01
        for part, vector in here.items():
            np.testing.assert_allclose(there[part], vector, rtol=0, atol=TOLERANCE)


def test_a_seed_gives_the_same_dropout_mask(trained: dict[str, Case]) -> None:
    folder, bundle, data, vectors, tasks, _ = trained["mask"]
    expected = train_here(folder, bundle, data, vectors, tasks)[1]
    found = read_results(folder, bundle, tasks)[1]
    for here, there in zip(expected, found, strict=True):
        assert there["update"].tobytes() == here["update"].tobytes()
        assert set(np.unique(there["update"])) == {-2.0, 0.0}
        assert 0.4 < (there["update"] == 0).mean() < 0.6
    assert (found[0]["update"] != found[1]["update"]).any()
