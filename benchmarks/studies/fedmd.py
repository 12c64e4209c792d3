"""What class scores alone are worth (FedMD): twelve devices with three architectures and skewed
digits, each with a model that never leaves it, against each device alone; and the bytes of a round
beside those of FedAvg.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, arXiv 1910.03581.
docs/algorithms/fedmd.md says more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
from _distillation_models import bundles_of, scans, test_scans
from _distillation_rounds import logits_of
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_device.training.data import as_data
from fleetlearn_device.training.own_scores import OwnModel
from fleetlearn_device.training.work import TaskSettings
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.public_examples import write_public_bundle
from fleetlearn_protocol.vector import Vector

from examples import digits

KINDS = ("linear", "mlp", "cnn")
DEVICES, ALPHA, ROUNDS = 12, 0.3, 20
LOCAL: dict[str, Any] = {
    "lr": 0.1,
    "epochs": 5,
    "batch_size": 10,
    "hyper": {"digest_lr": 0.003, "digest_epochs": 5},
}


class Found(NamedTuple):
    """What came of a fleet."""

    accuracies: list[float]
    """Of each device's own model, on digits that nobody trained on."""
    consensus: float
    """Share of the public digits that the mean of the scores names right; 0 without any."""


class Fleet:
    """Devices of a run in this process, whose scores go through the coordinator's own rounds."""

    def __init__(self, folder: Path, seed: int) -> None:
        x, y, self.public = scans()
        shards = digits.dirichlet_shards(y, DEVICES, ALPHA, seed)
        self.data = [as_data({"x": x[rows], "y": y[rows]}) for rows in shards]
        written = folder / "public.bundle"
        write_public_bundle(written, "public digits", {"x": self.public}, 10, ["accuracy"])
        self.bundle: Bundle = open_bundle(written)
        self.plan = Plan.read(
            {
                "name": "fedmd",
                "recipe": "fedmd",
                "bundle": str(written),
                "round": {"goal": DEVICES},
                "local": LOCAL,
                "seed": seed,
            },
            folder,
        )
        self.rules = self.plan.family_rules({"": self.bundle.manifest})
        self.devices = list[OwnModel]()
        for number in range(DEVICES):
            own, distillation = bundles_of(KINDS[number % len(KINDS)], folder)
            self.devices.append(OwnModel(own.path, distillation.path))
        self.models: list[Vector | None] = [None] * DEVICES

    def run(self, *, tell: bool) -> Found:
        """Train for all rounds. tell: whether the devices hear of each other's scores."""
        begun = self.bundle.parameters()
        state = self.rules.make_state(
            None, version=0, model=begun, optimizer_state=self.rules.init(begun), vectors={}
        )
        for number in range(ROUNDS):
            round = self.rules.open_round(state)
            consensus = state.model if tell else np.zeros_like(state.model)
            for device, own in enumerate(self.devices):
                settings = TaskSettings(
                    hyper=self.plan.hyper(self.bundle.manifest),
                    epochs=self.plan.local.epochs,
                    batch_size=self.plan.local.batch_size,
                    seed=1000 * number + device,
                )
                data, model = self.data[device], self.models[device]
                found = own.exchange(self.bundle, consensus, model, None, data, settings)
                self.models[device] = found.model
                update = found.scores - state.model
                columns = ReportColumns(
                    weights=np.array([1]),
                    examples=np.array([found.result.examples]),
                    steps=np.array([found.result.steps]),
                    complete=np.array([True]),
                    loss=np.array([found.result.loss]),
                    metrics={
                        name: np.array([found.result.metrics.get(name, np.nan)])
                        for name in self.bundle.manifest.metrics
                    },
                    largest={UPDATE: np.array([np.abs(update).max()])},
                    parts={UPDATE: update[None]},
                )
                refusal = round.receive(columns).refusal
                assert refusal is None, refusal
                round.accept(columns)
                round.add(columns)
            state = round.commit(number + 1, round.summary({})).state
        right = state.model.reshape(-1, 10).argmax(1) == digits.data().y_train[: len(self.public)]
        return Found(self._accuracies(), float(right.mean()) if tell else 0.0)

    def _accuracies(self) -> list[float]:
        test, found = test_scans(), []
        for own, model in zip(self.devices, self.models, strict=True):
            assert model is not None
            said = logits_of(own.bundle, model, test["x"]).argmax(1)
            found.append(float((said == test["y"]).mean()))
        return found


def spread(values: Sequence[float]) -> str:
    """Return the mean of accuracies in per cent, and the least and the greatest."""
    least, most = 100 * min(values), 100 * max(values)
    return f"{100 * float(np.mean(values)):.1f} [{least:.1f}-{most:.1f}]"


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args()
    runs: dict[str, list[Found]] = {}
    with measure.scratch() as folder:
        for name in ("alone", "fedmd"):
            runs[name] = [
                Fleet(folder, seed).run(tell=name == "fedmd") for seed in range(1, chosen.seeds + 1)
            ]
        sizes = {kind: 4 * bundles_of(kind, folder)[0].manifest.size for kind in KINDS}
    scores = 4 * 10 * len(scans()[2])
    rows: list[Sequence[str]] = [("devices", *KINDS, "the worst device")]
    for name, found in runs.items():
        of_kinds = [
            spread([value for each in found for value in each.accuracies[place :: len(KINDS)]])
            for place in range(len(KINDS))
        ]
        worst = min(value for each in found for value in each.accuracies)
        rows.append((name, *of_kinds, f"{100 * worst:.1f}"))
    print(f"## Digits that nobody trained on, per cent right\n\n{measure.table(rows)}\n")
    consensus = spread([each.consensus for each in runs["fedmd"]])
    print(f"The consensus names {consensus} % of the public digits right.\n")
    rows = [("what travels each way in a round", "bytes")]
    rows += [(f"FedAvg, the {kind}", f"{size:,}") for kind, size in sizes.items()]
    rows += [("FedMD, scores of 400 digits", f"{scores:,}")]
    print(f"## Bytes of a device\n\n{measure.table(rows)}")
    results = {name: [each._asdict() for each in found] for name, found in runs.items()}
    measure.write_json(chosen.json, {"seeds": chosen.seeds}, {"fleets": results, "bytes": sizes})


if __name__ == "__main__":
    main()
