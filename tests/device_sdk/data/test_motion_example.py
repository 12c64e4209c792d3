"""examples/motion.py as a person types it: a recording as CSV, a bundle, and no glue between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device import Predictor, open_data, open_runtime
from fleetlearn_device.__main__ import main
from fleetlearn_device.data.preprocessing import prepare
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.storage.model_in_use import ModelInUse, ModelsInUse
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.task_data import TaskDataMaker
from fleetlearn_device.training.train import evaluate_data, train
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.bundle import write_inference_model
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.vector import Vector
from line_bundle import write_line_bundle

EXAMPLE = Path(__file__).parents[3] / "examples" / "motion.py"
SWING = {"rest": 0.1, "walk": 3.0, "run": 12.0}


def recording(path: Path, seconds: int = 120) -> Path:
    """A made-up recording: the activity changes every 20 s, the clock jitters."""
    random = np.random.default_rng(5)
    t = np.cumsum(random.uniform(0.018, 0.022, seconds * 50))
    lines = ["t,ax,ay,az,activity"]
    for at in t:
        activity = [*SWING][int(at / 20) % 3]
        ax, ay, az = SWING[activity] * np.sin(np.array([12.0, 9.0, 15.0]) * at)
        lines.append(f"{at:.4f},{ax:.3f},{ay:.3f},{az + 9.81:.3f},{activity}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_a_recording_becomes_a_model_without_glue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "motion.bundle"
    subprocess.run([sys.executable, EXAMPLE, path], check=True, capture_output=True)
    csv = recording(tmp_path / "recording.csv")
    assert main(["check", str(csv), str(path)]) == 0
    assert "examples fit" in capsys.readouterr().out
    bundle, runtime = open_bundle(path), open_runtime(path)
    made = TaskDataMaker(open_data(csv), 0.3).of(bundle.manifest)
    assert made.held_out is not None
    before = evaluate_data(runtime, made.held_out)
    train(runtime, made.training, hyper={"lr": 0.05}, epochs=40, batch_size=16, seed=1)
    after = evaluate_data(runtime, made.held_out)
    assert after.metric_sums["accuracy"] > max(before.metric_sums["accuracy"], 0.8 * after.examples)

    # The same way at a prediction: raw samples without labels.
    (tmp_path / "infer.onnx").write_bytes(write_inference_model(bundle, runtime.local))
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "infer.onnx")
    columns = np.genfromtxt(csv, delimiter=",", skip_header=1, usecols=range(4)).T
    raw = dict(zip(("t", "ax", "ay", "az"), columns, strict=True))
    arrays = prepare(raw, bundle.manifest)
    assert set(arrays) == {"x"}
    (logits,) = session.run(None, {session.get_inputs()[0].name: arrays["x"]})
    words = open_data(csv).fit_to(bundle.manifest.batch, bundle.manifest.preprocessing)  # type: ignore[attr-defined]
    assert (logits.argmax(1) == words.data.columns[1]).mean() > 0.8
    state = keep_model(tmp_path / "state", bundle, runtime.local)
    np.testing.assert_allclose(Predictor(state).predict(raw, 1000), logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="expected a dict with"):
        Predictor(state).predict(arrays["x"])
    out = ["--output", str(tmp_path / "found.npy")]
    assert main(["predict", "--state", str(state), str(csv), *out]) == 0
    found = np.load(tmp_path / "found.npy")
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    csv.write_text(csv.read_text().replace(",run\n", ",fly\n"))
    assert main(["check", str(csv), str(path)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "recording.csv, line 1989" in shown  # 40 s at 50 Hz: the first window of running
    assert "y: fly was found; expected one of rest, walk, run" in shown
    # A prediction reads no labels.
    assert main(["predict", "--state", str(state), str(csv), *out]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), found)
    raw["activity"] = np.full(len(raw["t"]), "fly")
    np.testing.assert_allclose(Predictor(state).predict(raw, 1000), logits, rtol=1e-5, atol=1e-5)


def keep_model(folder: Path, bundle: Bundle, vector: Vector) -> Path:
    """A state directory whose device keeps this model."""
    reference = FLOAT32.reference("model", vector)
    StateDirectory(folder).close()
    model = ModelInUse(bundle.sha256, "motion", reference.sha256, FLOAT32.name, 0.0)
    ModelsInUse(folder).take(model, vector.tobytes(), bundle)
    return folder


ANONYMOUS = """
def anonymous():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) / 1024
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mapped", [True, False])
def test_mapped_data_are_not_copied_whole(tmp_path: Path, mapped: bool) -> None:
    """Data of 200 MB, of another dtype than the bundle's. Not mapped, the test sees them."""
    rows = 6_250_000
    with (tmp_path / "x.npy").open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (rows, 3)}
        np.lib.format.write_array_header_1_0(file, header)
        for _ in range(25):
            file.write(np.ones((rows // 25, 3)).tobytes())
    np.save(tmp_path / "y.npy", np.zeros(rows))
    bundle = write_line_bundle(tmp_path / "line.bundle")
    code = f"""{ANONYMOUS}
from fleetlearn_device import open_data, open_runtime
from fleetlearn_device.data import arrays
from fleetlearn_device.training.train import evaluate_data
arrays.MAPPED_FROM = 0 if {mapped} else 2**40
runtime = open_runtime({str(bundle.path)!r})
before = anonymous()
data = open_data({str(tmp_path)!r}).fit(runtime.manifest.batch)
evaluate_data(runtime, data)
print(anonymous() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    taken = float(done.stdout)
    assert (taken < 40) == mapped, f"{taken} MiB"
