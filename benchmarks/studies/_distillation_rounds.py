"""Rounds of a run in this process, for distillation.py: devices train one after the other, and what
they report goes through the coordinator's own rounds. Which devices train is in the study's hand,
where a simulated coordinator would choose them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before its import: no telemetry
import onnxruntime
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_device import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.training.train import evaluate_data, train
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.bundle import write_inference_model
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator.fleet.simulated_distillation import SimulatedDistillation
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def logits_of(bundle: Bundle, model: Vector, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what a model of the bundle says of examples, (n, C)."""
    session = onnxruntime.InferenceSession(write_inference_model(bundle, model))
    return np.asarray(session.run(None, {"x": x})[0])


class LocalData(NamedTuple):
    """A device of a round."""

    member: int
    """The place of the member that it trains."""
    data: Arrays


class InProcessRun:
    """A run of a plan's models. They have no buffers."""

    def __init__(self, plan: Plan, bundles: Mapping[str, Bundle]) -> None:
        """``bundles``: name of each member -> its training bundle."""
        self.plan, self.bundles = plan, [*bundles.values()]
        manifests = {name: bundle.manifest for name, bundle in bundles.items()}
        self.rules = plan.family_rules(manifests)
        model = np.concatenate([bundle.parameters() for bundle in self.bundles])
        self.state = self.rules.make_state(
            None, version=0, model=model, optimizer_state=self.rules.init(model), vectors={}
        )
        self.distillation = SimulatedDistillation(plan, manifests, self.rules)
        self._runtimes: list[Runtime] = [
            open_runtime(bundle, kind="onnx") for bundle in self.bundles
        ]
        self.trained: list[Vector] = []
        """The models of the last round's devices, in order."""

    def models(self) -> dict[str, Vector]:
        """Return name of each member -> its model now."""
        return self.rules.models_of(self.state.model)

    def round(self, devices: Sequence[LocalData]) -> dict[str, Any]:
        """Have the devices train, and make the next models. Returns the round's summary."""
        round = self.rules.open_round(self.state)
        self.distillation.begin_round()
        self.trained, models = [], [*self.models().values()]
        for number, (member, data) in enumerate(devices):
            runtime = self._runtimes[member]
            runtime.load(models[member])
            hyper = self.plan.hyper(self.bundles[member].manifest)
            local, seed = self.plan.local, 1000 * self.state.version + number
            result = train(
                runtime,
                data,
                hyper=hyper,
                epochs=local.epochs,
                batch_size=local.batch_size,
                seed=seed,
            )
            self.trained.append(models[member] + result.update)
            metrics = self.bundles[member].manifest.metrics
            columns = ReportColumns(
                weights=np.array([result.examples]),
                examples=np.array([result.examples]),
                steps=np.array([result.steps]),
                complete=np.array([True]),
                loss=np.array([result.loss]),
                metrics={name: np.array([result.metrics[name]]) for name in metrics},
                largest={UPDATE: np.array([result.largest])},
                parts={UPDATE: result.update[None]},
                member=member,
            )
            received = round.receive(columns)
            assert received.refusal is None
            round.accept(columns)
            round.add(columns)
            self.distillation.add(columns)
        made = round.commit(self.state.version + 1, round.summary({}))
        made = self.distillation.distilled(made, self.state)
        self.state = made.state
        return dict(made.summary)

    def accuracy(self, place: int, model: Vector, data: Arrays) -> float:
        """Return the accuracy of a model of the member at this place."""
        runtime = self._runtimes[place]
        runtime.load(model)
        found = evaluate_data(runtime, data)
        return found.metric_sums["accuracy"] / found.examples
