"""What of a plan and a scenario has no meaning among peers, and is refused with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fleetlearn_device.training.kept_state import kept_state_size
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import PLAIN
from msgspec import UnsetType

from fleetlearn_simulator.scenario.scenario import Scenario

Rule = tuple[Callable[[Scenario], object], str]
"""Whether a scenario has it, and the reason against it."""

PEER_RULES: Mapping[str, Rule] = {
    "[plan.secure]": (
        lambda run: run.plan.secure,
        "it hides updates from a coordinator, and neighbours need each other's models",
    ),
    "[plan.privacy]": (
        lambda run: run.plan.privacy,
        "its account is of a coordinator's releases; what neighbours learn is not accounted for",
    ),
    "[plan.distil]": (
        lambda run: run.plan.distil,
        "a process beside a coordinator distils",
    ),
    'plan.round.participation = "asynchronous"': (
        lambda run: run.plan.round.asynchronous,
        'a coordinator buffers updates by it; peers are asynchronous by peers.mode = "gossip"',
    ),
    "plan.local.algorithm": (
        lambda run: run.plan.local.algorithm != PLAIN,
        "it goes by vectors that a coordinator keeps; peers train plainly: choose fedavg",
    ),
    "plan.initial": (
        lambda run: run.plan.initial,
        "a coordinator begins a run with it; each peer begins with the bundle's model",
    ),
    "plan.local.step_schedule": (
        lambda run: run.plan.local.step_schedule,
        "peers train with a fixed plan.local.lr",
    ),
    "plan.local.schedule": (
        lambda run: run.plan.local.schedule,
        "it goes by the versions of a coordinator's model; peers train with a fixed plan.local.lr",
    ),
    "plan.local.mu": (
        lambda run: run.plan.local.mu,
        "it holds a device near the round's model, and peers have none; choose fedavg, or 0",
    ),
    "plan.stop.metric": (
        lambda run: run.plan.stop.metric,
        "nobody measures all peers; they stop after plan.stop.rounds steps",
    ),
    "plan.encoding.up": (
        lambda run: run.plan.encoding.up != "float32",
        "simulated peers send whole models in float32",
    ),
    "failures.corrupt": (
        lambda run: run.failures.corrupt,
        "a mean of neighbours has no defence against one that lies, and none is simulated",
    ),
    "coordinator.crashes": (
        lambda run: run.coordinator.crashes,
        "there is no coordinator that could die",
    ),
    'peers.mode = "gossip" with one-peer-exponential': (
        lambda run: (
            run.peers is not None
            and (run.peers.mode, run.peers.topology) == ("gossip", "one-peer-exponential")
        ),
        "gossip draws one neighbour at each meeting by itself: choose exponential",
    ),
}


def peer_problems(scenario: Scenario, manifest: Manifest) -> Iterator[str]:
    """Yield why a scenario cannot be trained by peers."""
    if scenario.peers is None:
        yield "there is no [peers] that says who mixes with whom; [peers] alone is a ring"
    for key, (has, reason) in PEER_RULES.items():
        if has(scenario):
            yield f"{key} is not for peers: {reason}"
    if not isinstance(manifest.computation, UnsetType):
        yield (
            f"bundle {manifest.name} is of a computation, whose sums a coordinator adds up; peers "
            "train a model"
        )
    elif not manifest.has_graphs:
        yield (
            f"bundle {manifest.name} has public examples, whose class scores a coordinator "
            "averages; peers train a model"
        )
    elif kept_state_size(manifest):
        yield (
            f"bundle {manifest.name} has parameters or a state that devices keep for themselves; "
            "simulated peers keep their model alone"
        )
