"""The sketches of docs/phones: their names are those of a bundle, and the Kotlin one trains to this
SDK's numbers.

The Kotlin one is compiled and run where FLEETLEARN_KOTLINC names the compiler (bin/kotlinc) and
FLEETLEARN_JARS the jars of onnxruntime (com.microsoft.onnxruntime, for the JVM) and of Android's
org.json, with ``:`` between.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fleetlearn_device import open_runtime
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.manifest import Hyper, Manifest, Parameter, State

FOLDER = Path(__file__).parents[2] / "docs" / "start" / "phones"
SKETCHES = {name: (FOLDER / f"TrainingStep.{name}").read_text("utf-8") for name in ("kt", "swift")}
HYPER = {"lr": 0.05, "mu": 0.3}
SIZES, SEED = (8, 8, 5, 16), 2**52 + 12345
"""Examples in each step; the first step's seed."""


def written(language: str) -> set[str]:
    """The beginnings of tensors' names in a sketch: ``param``, ``batch``, ``loss``."""
    strings = re.findall(r'"([a-z]+)(?:\.(?:\$|\\\()[^"]*)?"', SKETCHES[language])
    return {name for name in strings if name not in ("name", "shape", "offset")}


@pytest.mark.parametrize("language", SKETCHES)
def test_a_sketch_gives_all_inputs_and_takes_all_outputs(
    language: str, cases: Callable[[str], Any]
) -> None:
    bundle = open_bundle(cases("own").path)
    graph = onnx.load(bundle.path / "graphs" / "train.onnx", load_external_data=False).graph
    inputs = {value.name.split(".")[0] for value in graph.input} - set(bundle.manifest.references)
    outputs = {value.name.split(".")[0] for value in graph.output}
    assert inputs == {"param", "state", "batch", "hyper", "seed"}, "the case has one of each kind"
    assert {"anchor", "previous"} <= set(bundle.manifest.references)
    assert inputs | outputs <= written(language)


@pytest.mark.parametrize("language", SKETCHES)
def test_a_sketch_reads_the_manifest_s_fields(language: str) -> None:
    if language == "kt":
        read = set(
            re.findall(r'\.(?:get|opt)(?:String|Int|Boolean|JSONArray)\("(\w+)"', SKETCHES["kt"])
        )
    else:
        tables = re.findall(r"struct \w+: Decodable \{\n(.*?)\n\}", SKETCHES["swift"], re.DOTALL)
        read = {
            name for table in tables for name in re.findall(r"^    let (\w+):", table, re.MULTILINE)
        }
    known = {
        name for table in (Manifest, Parameter, State, Hyper) for name in table.__struct_fields__
    }
    assert read <= known
    needed = {
        "parameters",
        "state",
        "hyper",
        "metrics",
        "references",
        "random",
        "name",
        "shape",
        "offset",
        "personal",
    }
    assert needed <= read


@pytest.fixture(scope="session")
def kotlin(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the Kotlin sketch."""
    compiler, jars = os.environ.get("FLEETLEARN_KOTLINC"), os.environ.get("FLEETLEARN_JARS")
    if compiler is None or jars is None:
        pytest.skip(
            "the Kotlin step is not compiled: FLEETLEARN_KOTLINC and FLEETLEARN_JARS are not set"
        )
    made = tmp_path_factory.mktemp("kotlin") / "step.jar"
    sources = [FOLDER / "TrainingStep.kt", Path(__file__).parent / "phones" / "Run.kt"]
    command = [
        compiler,
        "-Werror",
        "-include-runtime",
        "-cp",
        jars,
        *map(str, sources),
        "-d",
        str(made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ["java", "-cp", f"{made}:{jars}", "RunKt"]


@pytest.mark.parametrize("name", ["softmax", "own"])
def test_the_kotlin_step_trains_to_the_same_numbers(
    name: str, cases: Callable[[str], Any], kotlin: list[str], tmp_path: Path
) -> None:
    case = cases(name)
    bundle = open_bundle(case.path)
    hyper = {row.name: HYPER.get(row.name, row.default) for row in bundle.manifest.hyper}
    runtime = open_runtime(bundle.path)
    begins = np.cumsum([0, *SIZES]).tolist()
    files = {"local": runtime.local, "state": runtime.state, "x": case.x, "y": case.y}
    for file, array in files.items():
        (tmp_path / file).write_bytes(np.ascontiguousarray(array).tobytes())
    steps = [
        {"begin": begin, "count": count, "seed": SEED + number}
        for number, (begin, count) in enumerate(zip(begins, SIZES, strict=False))
    ]
    spec = {
        "bundle": str(bundle.path),
        "output": str(tmp_path),
        "width": 64,
        "hyper": hyper,
        "steps": steps,
    }
    (tmp_path / "spec.json").write_text(
        json.dumps(spec | {file: str(tmp_path / file) for file in files})
    )
    losses, before = [], runtime.local.copy()
    for step in steps:
        rows = slice(step["begin"], step["begin"] + step["count"])
        losses.append(runtime.step((case.x[rows], case.y[rows]), seed=step["seed"], **hyper))
    done = subprocess.run(
        [*kotlin, str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert np.abs(runtime.local - before).max() > 0.01
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["results"] == ", ".join(
        sorted(["loss", *(f"metric.{metric}" for metric in bundle.manifest.metrics)])
    )
    for file, expected in (("local.bin", runtime.local), ("state.bin", runtime.state)):
        np.testing.assert_allclose(
            np.fromfile(tmp_path / file, np.float32), expected, rtol=0, atol=1e-5
        )
