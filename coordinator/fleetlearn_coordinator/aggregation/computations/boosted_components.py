"""What the coordinator makes of component-wise boosting's sums.

Schalk, Bischl and Rügamer, "Privacy-Preserving and Lossless Distributed Estimation of
High-Dimensional Generalized Additive Mixed Models", arXiv 2210.07723. One thing differs: devices
send no sums of squared errors. These follow from X^T X and X^T r, by SSE = r^T r - (2 b^T X^T r -
b^T X^T X b), of which r^T r is the same for all base learners; that spares an exchange for each
iteration.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedComponents
from fleetlearn_protocol.computations.components_layout import (
    DESIGN,
    DONE,
    FIND_RANGES,
    FIT,
    HEADROOM,
    LOSS_BITS,
    LOWEST_EXPONENT,
    base_learners,
    components_state,
    components_sums,
    grid_bits,
    range_counts_of,
)
from fleetlearn_protocol.computations.fixed_point import from_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.portable_math import portable_log
from fleetlearn_protocol.computations.shared_edges import refine_range
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.computations.component_effects import effect_of
from fleetlearn_coordinator.aggregation.computations.component_fits import (
    fit,
    gram_of,
    penalty_for,
)

Values = dict[str, NDArray[Any]]


def advance(state: Vector, total: Sums, devices: int, settings: BoostedComponents) -> Vector:
    """Return the state after an exchange. total: the sums of its devices, int64 (S,). Raises
    ValueError where the total can be none."""
    layout = components_state(settings)
    values, sums = layout.unpack(state), components_sums(settings).unpack(total)
    with np.errstate(all="ignore"):  # what is not finite is refused by name
        if values["phase"] == FIND_RANGES:
            _find_ranges(values, sums, settings)
        elif values["phase"] == DESIGN:
            _take_design(values, sums, settings)
        elif values["phase"] == FIT:
            _add_best(values, sums, settings)
        _check_finite(values, settings)
    return layout.pack(values)


def is_done(state: Vector, settings: BoostedComponents) -> bool:
    return bool(components_state(settings).unpack(state)["phase"] == DONE)


def progress(state: Vector, settings: BoostedComponents) -> str:
    """Return a line for ``status``."""
    values = components_state(settings).unpack(state)
    phase, iteration = int(values["phase"]), int(values["iteration"])
    if phase == FIND_RANGES:
        return f"finding the columns' ranges, exchange {int(values['exchange']) + 1}"
    if phase == DESIGN:
        return "adding up X^T X"
    if phase == DONE:
        return f"{iteration} iterations"
    where = f"iteration {iteration + 1} of {settings.iterations}"
    if iteration == 0:  # no device has measured a loss yet
        return where
    return f"{where}; loss {values['loss']:.6g}"


def result(state: Vector, settings: BoostedComponents) -> dict[str, Any]:
    """Return the chosen effects, for people and for JSON: the ones that lower the loss most come
    first."""
    values = components_state(settings).unpack(state)
    learners, chosen = base_learners(settings), values["chosen"].astype(np.int64)
    gained = values["gains"] / max(float(values["gains"].sum()), 1e-300)
    order = np.argsort(-gained, kind="stable")
    return {
        "iterations": int(values["iteration"]),
        "rows": int(values["rows"]),
        "loss": float(values["loss"]),
        "base": float(values["base"]),
        "effects": [
            {
                "column": settings.columns[learners[number].column].name,
                "kind": learners[number].kind,
                "iterations": int(np.count_nonzero(chosen == number + 1)),
                "share_of_gain": round(float(gained[number]), 6),
                **effect_of(learners[number], values, settings),
            }
            for number in order.tolist()
            if (chosen == number + 1).any()
        ],
    }


def _check_finite(values: Values, settings: BoostedComponents) -> None:
    """Raise ValueError where a number of the state, or of the effects that ``result`` tells, is
    not finite. Sums of rows never make one: a device made them up."""
    for name in ("base", "loss", "penalties", "coefficients"):
        if not np.isfinite(values[name]).all():
            raise ValueError(f"the total of the sums makes {name} that are not finite numbers")
    if not np.isfinite(values["gains"].sum()):
        raise ValueError("the total of the sums makes gains that are not finite numbers")
    learners = base_learners(settings)
    for number in np.unique(values["chosen"][values["chosen"] > 0]).astype(np.int64) - 1:
        learner = learners[number]
        told = [np.ravel(effect) for effect in effect_of(learner, values, settings).values()]
        if not np.isfinite(np.concatenate(told)).all():
            raise ValueError(
                f"the total of the sums gives column {settings.columns[learner.column].name} an "
                "effect that is not finite"
            )


def _find_ranges(values: Values, sums: dict[str, Sums], settings: BoostedComponents) -> None:
    boundaries = values["boundaries"]
    counts = range_counts_of(sums["body"], settings)
    values["exchange"][()] += 1
    values["rows"][()] = sums["rows"]
    if settings.loss == "squared":
        used = np.flatnonzero(sums["exponents"])
        values["scale"][()] = used[-1] + LOWEST_EXPONENT if len(used) else 0
    is_found = True
    for place, own in enumerate(counts):
        finer, low, high = refine_range(boundaries[place], own)
        values["ranges"][place] = low, high
        if finer is not None:
            boundaries[place], is_found = finer, False
    if is_found:
        values["phase"][()] = DESIGN


def _take_design(values: Values, sums: dict[str, Sums], settings: BoostedComponents) -> None:
    bits, rows = grid_bits(int(values["rows"])), max(int(sums["rows"]), 1)
    values["gram"][:] = from_fixed(sums["body"][: len(values["gram"])], bits)
    mean = float(from_fixed(sums["label"], bits - int(values["scale"]))) / rows
    if settings.loss == "logistic":
        mean = min(max(mean, 0.5 / rows), 1 - 0.5 / rows)  # where all rows are of one class
        values["base"][()] = portable_log(np.array(mean)) - portable_log(np.array(1 - mean))
    else:
        values["base"][()] = mean
    # The iterations' sums are compared with these rows; their grid stays the one of before.
    values["design_rows"][()] = rows
    for number, learner in enumerate(base_learners(settings)):
        gram = gram_of(learner, values["gram"])
        values["penalties"][number] = penalty_for(learner, gram, settings)
    values["phase"][()] = FIT


def _add_best(values: Values, sums: dict[str, Sums], settings: BoostedComponents) -> None:
    """Add a little of the base learner that fits the residuals best."""
    if not sums["rows"]:
        return
    scale, bits = int(values["scale"]), grid_bits(int(values["rows"]))
    values["loss"][()] = from_fixed(sums["loss"], LOSS_BITS - 2 * scale) / int(sums["rows"])
    # X^T X is of the devices of one exchange, X^T r of those of this one: equal rows where the
    # same devices took part, and this is 1.
    share = int(values["design_rows"]) / int(sums["rows"])
    gradients = from_fixed(sums["body"], bits - scale - HEADROOM) * share
    best, best_gain, best_fit = -1, 0.0, np.zeros(0)
    for number, learner in enumerate(base_learners(settings)):
        gram = gram_of(learner, values["gram"])
        gradient = gradients[learner.coefficients]
        penalty = float(values["penalties"][number])
        found = fit(learner, gram, penalty, gradient, settings)
        gain = float(2 * found @ gradient - found @ gram @ found)
        if gain > best_gain:
            best, best_gain, best_fit = number, gain, found
    iteration = int(values["iteration"])
    if best < 0:  # no base learner fits anything of the residuals
        values["phase"][()] = DONE
        return
    own = base_learners(settings)[best].coefficients
    values["coefficients"][own] += settings.learning_rate * best_fit
    values["gains"][best] += best_gain
    values["chosen"][iteration] = best + 1
    values["iteration"][()] = iteration + 1
    if iteration + 1 == settings.iterations:
        values["phase"][()] = DONE
