"""What an export is asked for beside the model, and what its stages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetlearn_protocol.manifest import LocalStep, SplitPart, TrainMany

from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.graphs.half_precision import Compute, check_compute
from fleetlearn_export.graphs.train_many import check_many_settings
from fleetlearn_export.inspection.memory_budget import Budget
from fleetlearn_export.model.fine_tuning import Trained
from fleetlearn_export.model.frozen_weights import Stored
from fleetlearn_export.model.steps import Function


class ExportSettings(NamedTuple):
    """Arguments of ``export_bundle``, whose docstring says what each is, and what stages add to
    them."""

    step: LocalStep | Function
    features: Function | None
    hyper: Mapping[str, float | None] | None
    personal: Sequence[str]
    sparse: Sequence[str]
    state: Mapping[str, Any] | None
    kept: Sequence[str]
    train: Trained | None
    frozen: Stored
    cache_features: bool
    many: TrainMany | None
    budget: Budget | None
    """What the training step may take of a device's memory. None: any amount."""
    compute: Compute
    progress: Callable[[str], None]
    constants: Constants | None = None
    """Gets the large constants of the graphs, once it is known that there are frozen weights. None:
    the graphs hold them."""
    split: SplitPart | None = None
    """Which part of a split model the bundle is, where it is one."""

    @classmethod
    def plain(
        cls,
        step: LocalStep,
        hyper: Mapping[str, float | None] | None,
        progress: Callable[[str], None],
    ) -> ExportSettings:
        """Return settings that ask for nothing else."""
        return cls(
            step=step,
            features=None,
            hyper=hyper,
            personal=(),
            sparse=(),
            state=None,
            kept=(),
            train=None,
            frozen="float32",
            cache_features=False,
            many=None,
            budget=None,
            compute="float32",
            progress=progress,
        )

    def check(self) -> None:
        """Raise ExportError where the settings do not go together."""
        check_many_settings(self.many)
        if self.sparse and (self.cache_features or self.budget is not None):
            other = "cache_features" if self.cache_features else "memory"
            raise ExportError(f"sparse= and {other}= were given; a bundle has one of them")
        if self.compute != "float32":
            asked = {
                "many": self.many is not None,
                "memory": self.budget is not None,
                "cache_features": self.cache_features,
            }
            step = self.step
            check_compute(self.compute, step, [name for name, there in asked.items() if there])
        if self.cache_features and self.train is None:
            raise ExportError(
                "cache_features needs train=, which keeps frozen modules in evaluation mode. To "
                "train what has requires_grad, give train=lambda name, value: value.requires_grad"
            )
