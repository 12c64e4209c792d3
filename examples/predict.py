"""Recognise digits with a trained model: plain ONNX Runtime, no part of fleetlearn.

python examples/predict.py demo-output/infer.onnx [--show 8]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Before the import: otherwise ONNX Runtime reports to its vendor.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

SHADES = " .:-=+*#%@"


def predict(model: str | os.PathLike[str], x: NDArray[np.float32]) -> NDArray[np.int64]:
    """The most likely digit, int64 (n,), of each scan in ``x``, float32 (n, 1, 8, 8) with values
    from 0 to 1."""
    session = ort.InferenceSession(os.fspath(model), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x})
    most_likely: NDArray[np.int64] = np.asarray(outputs).argmax(1)
    return most_likely


def draw(scan: NDArray[np.float32]) -> list[str]:
    """A scan, float32 (8, 8), as eight lines of text."""
    rows = (np.clip(scan, 0.0, 1.0) * (len(SHADES) - 1)).round().astype(int)
    return ["".join(2 * SHADES[value] for value in row) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Recognise scikit-learn's held-out digits with a trained model."
    )
    parser.add_argument(
        "model", type=Path, help="infer.onnx, as fleetlearn-coordinator export-model writes it"
    )
    parser.add_argument(
        "--show", type=int, default=4, metavar="N", help="how many scans to draw; default: 4"
    )
    options = parser.parse_args()
    if not options.model.is_file():
        parser.error(f"{options.model} is not a file; train a model first: make demo")
    if options.show < 0:
        parser.error(f"--show is {options.show}; expected 0 or more")

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples import digits

    data = digits.data()
    guesses = predict(options.model, data.x_test)
    shown = min(options.show, len(guesses))
    for start in range(0, shown, 4):
        scans = [draw(scan[0]) for scan in data.x_test[start : min(start + 4, shown)]]
        print("\n".join("   ".join(rows) for rows in zip(*scans, strict=True)))
        labels = zip(guesses[start:shown][:4], data.y_test[start:shown][:4], strict=True)
        print(
            "   ".join(f"found {guess}, label {label}".ljust(16) for guess, label in labels),
            end="\n\n",
        )
    right = int((guesses == data.y_test).sum())
    print(f"{right} of {len(guesses)} held-out digits are recognised: {right / len(guesses):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
