"""Activities from a phone's accelerometer: recordings as CSV -> windows -> a small convolution.

python examples/motion.py motion.bundle
fleetlearn-device check recording.csv motion.bundle
fleetlearn-device run --coordinator URL --data recording.csv --hold-out 0.1 --state DIR

recording.csv has the columns t (seconds), ax, ay, az and activity (rest, walk, run). What is done
with them stands in motion.toml, and travels with the bundle.
"""

import sys
from pathlib import Path

import torch
from fleetlearn_export import LocalStep, export_bundle
from torch import nn

model = nn.Sequential(
    nn.Conv1d(3, 8, 9, stride=4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)
)
example = torch.randn(4, 3, 128), torch.tensor([0, 1, 2, 0])

if __name__ == "__main__":
    export_bundle(
        model,
        nn.functional.cross_entropy,
        example,
        sys.argv[1],
        step=LocalStep("momentum"),
        metrics={"accuracy": lambda outputs, y: (outputs.argmax(1) == y).float()},
        preprocessing=Path(__file__).with_name("motion.toml"),
    )
