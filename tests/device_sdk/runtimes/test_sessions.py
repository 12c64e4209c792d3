"""Sessions of a bundle's graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from changed_bundle import changed
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.sessions import NOTHING_TO_FIND, make_session, session_options
from fleetlearn_protocol import BundleError, open_bundle
from fleetlearn_protocol.manifest import TRAIN

Cases = Callable[[str], Any]


def test_a_session_runs_the_same_graph_without_the_optimizers_that_find_nothing(
    cases: Cases, tmp_path: Path
) -> None:
    def optimized(disabled: Sequence[str]) -> list[tuple[Any, ...]]:
        options = session_options(1)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.add_session_config_entry(
            "optimization.disable_specified_optimizers", ";".join(disabled)
        )
        onnxruntime.InferenceSession(
            cases("cnn").path / TRAIN, options, providers=["CPUExecutionProvider"]
        )
        nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
        # Without the nodes' own names, which differ from run to run.
        return [
            (node.op_type, [*node.input], [*node.output], [*map(str, node.attribute)])
            for node in nodes
        ]

    expected = optimized([])
    assert optimized(NOTHING_TO_FIND) == expected
    assert optimized(["AnotherVersionsOptimizer"]) == expected
    assert (
        optimized(["NchwcTransformer", "TransposeOptimizer", "MatmulTransposeFusion"]) != expected
    )


PEAKS = """
import sys
import numpy as np
from fleetlearn_device import open_runtime
runtime = open_runtime(sys.argv[1], kind="onnx")
batch = np.zeros((2000, *runtime.manifest.batch[0].shape), np.float32), np.zeros(2000, np.int64)
for work in (lambda: runtime.step(batch, lr=0.1), lambda: runtime.evaluate(batch)):
    work()
    print(open("/proc/self/status").read().partition("VmRSS:")[2].split()[0])
"""


def test_evaluation_uses_the_memory_that_training_took(cases: Cases) -> None:
    """In a process of its own, since the arena of this one may have room already."""
    command = [sys.executable, "-c", PEAKS, str(cases("cnn").path)]
    trained, evaluated = map(
        int, subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.split()
    )
    assert evaluated - trained < 4096  # KiB: 200 here, and 15,700 with an arena for each session


def test_a_graph_that_onnx_runtime_cannot_read_is_named(cases: Cases, tmp_path: Path) -> None:
    path = changed(cases("softmax"), tmp_path / "bad.bundle", b"no graph at all")
    with pytest.raises(BundleError, match=r"ONNX Runtime [\d.]+ cannot load graphs/train.onnx: "):
        open_runtime(path)


def test_a_graph_with_other_names_than_the_manifest_is_refused(
    cases: Cases, tmp_path: Path
) -> None:
    other = cases("plain").path / TRAIN
    path = changed(cases("softmax"), tmp_path / "mixed.bundle", other.read_bytes())
    with pytest.raises(BundleError) as caught:
        open_runtime(path)
    assert (
        "graphs/train.onnx and the manifest differ in these inputs: ['anchor.bias', "
        "'anchor.weight', 'hyper.mu']"
    ) in str(caught.value)


def test_a_session_for_one_number_of_examples(cases: Cases) -> None:
    """Its inputs have that size, and others are refused."""
    case = cases("softmax")
    bundle = open_bundle(case.path)
    names = [[value.name for value in values] for values in io_of(case.path / TRAIN)]
    session = make_session(bundle, TRAIN, 1, *names, "cpu", {"n": 5})
    batch = next(value for value in session.get_inputs() if value.name == "batch.x")
    assert batch.shape == [5, 64]
    inputs = {
        value.name: np.zeros(value.shape, np.float32)
        for value in session.get_inputs()
        if value.name != "batch.y"
    }
    for size in (5, 6):
        given = inputs | {
            "batch.x": np.zeros([size, 64], np.float32),
            "batch.y": np.zeros(size, np.int64),
        }
        if size == 5:
            session.run(None, given)
        else:
            with pytest.raises(Exception, match="Got: 6 Expected: 5"):
                session.run(None, given)


def io_of(graph: Path) -> tuple[Any, Any]:
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    return session.get_inputs(), session.get_outputs()
