"""Which devices serve a run: its population filter, applied to what a device states."""

from __future__ import annotations

import hashlib

from fleetlearn_protocol.messages import CheckIn

from fleetlearn_coordinator.storage.canaries import Split
from fleetlearn_coordinator.storage.identities import RUN
from fleetlearn_coordinator.storage.runs import Population

EVERYBODY = Population()


def why_not(population: Population, run: str, check_in: CheckIn, split: Split | None = None) -> str:
    """Return why the device is not of this run's population, for its owner; empty if it is.
    ``run``: the run's name. ``split``: which part of the devices serve it, if it has a canary or is
    one."""
    if split is None:
        return _why_not(population, run, check_in)
    why = _why_not(population, split.of, check_in)
    if why or has_canary(split, check_in) == split.is_canary:
        return why
    if not split.is_canary:
        return f"the device has the canary of {split.of}"
    missing = [f"the tag {tag}" for tag in split.tags if tag not in check_in.tags]
    kind = f" with {missing[0]}" if missing else ""
    return f"the run is the canary of {split.of}, for some of its devices{kind}"


def has_canary(split: Split, check_in: CheckIn) -> bool:
    """Return whether a device of the old run's population is one of those that have the canary."""
    if check_in.device in split.devices:
        return True
    return {*split.tags} <= {*check_in.tags} and place(split.key, check_in.device) < split.share


def _why_not(population: Population, run: str, check_in: CheckIn) -> str:
    runs = [tag.removeprefix(RUN) for tag in check_in.tags if tag.startswith(RUN)]
    if runs and run not in runs:
        return f"the device's token was for {' and '.join(runs)}"
    if population == EVERYBODY:
        return ""
    missing = [tag for tag in population.tags if tag not in check_in.tags]
    if missing:
        return f"the run is for devices with the tag {missing[0]}"
    if population.tiers and check_in.tier not in population.tiers:
        return f"the run is for devices of the tier {' or '.join(population.tiers)}"
    if population.runtimes and check_in.runtime.partition(" ")[0] not in population.runtimes:
        return f"the run is for devices that train with {' or '.join(population.runtimes)}"
    if place(run, check_in.device) >= population.share:
        return (
            f"the run is for {population.share:.3g} of all devices, and this one is not among them"
        )
    return ""


def place(run: str, device: str) -> float:
    """Return where a device stands among all devices, from 0 up to 1, always the same in a run: the
    first ``share`` of them are a run's population. Another run's are others."""
    found = hashlib.sha256(f"{run}/{device}".encode()).digest()
    return int.from_bytes(found[:8]) / 2**64


def describe(population: Population, split: Split | None = None) -> str:
    """Return which devices a population is, in a few words. ``split``: which part of it serves the
    run."""
    if split is not None:
        all_, share = describe(population), f"{100 * split.share:.3g} %"
        if split.is_canary:
            part = f"canary of {split.of}: {share}"
        else:
            part = (
                f"all but the canary's {share}" if split.share < 1 else "none: all have the canary"
            )
        return part if all_ == "all" else f"{all_}; {part}"
    kinds = (("tag", population.tags), ("tier", population.tiers), ("runtime", population.runtimes))
    words = [f"{kind} {name}" for kind, names in kinds for name in names]
    if population.share < 1:
        words.append(f"{100 * population.share:.3g} %")
    return ", ".join(words) or "all"
