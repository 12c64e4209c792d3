"""The state at a run's newest model, as its data directory has it; or the first one."""

from __future__ import annotations

import numpy as np
from fleetlearn_protocol.messages import CONTROL
from fleetlearn_protocol.vector import digest

from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.algorithm_change import (
    begin_algorithm,
    devices_factor,
)
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.saved_privacy import load_privacy, take_buffers
from fleetlearn_coordinator.service.training_run.saved_tied_sum import load_tied_sum
from fleetlearn_coordinator.service.training_run.written_model import write_model
from fleetlearn_coordinator.storage.ledger import ModelMade
from fleetlearn_coordinator.storage.store import Store


def load_or_begin(
    plan: Plan, members: Members, store: Store, wall: float, log: RunLog
) -> ModelState:
    """Return the state at the newest model. A new run begins with the bundles' parameters. What
    goes with another algorithm or another server optimizer than the plan's begins from the
    beginning. ``wall``: Unix time. Raises StoreError (missing, damaged)."""
    rules = members.all[0].rules  # what is asked of them here is the same for all members
    found = store.load_model()
    if found is None:
        begin(plan, members, store, wall)
        found = store.load_model()
    assert found is not None
    version, model, state = found
    vectors = {CONTROL: state.pop(CONTROL)} if CONTROL in state else {}
    vectors, rows = begin_algorithm(plan, store.ledger, version, model, vectors)
    privacy, first_rows = load_privacy(rules.privacy, store.ledger, model.size, take_buffers(state))
    store.write([*rows, *first_rows])
    # The name of its optimizer is missing in a data directory of an earlier version; slots say
    # less.
    name = rules.optimizer.name
    before = store.ledger.get("optimizer") or name
    if before != name or set(state) != set(rules.optimizer.init(model)):
        log.warning("the server optimizer is now %s: its state starts from the beginning", name)
        state = rules.optimizer.init(model)
    factor = devices_factor(plan, store.ledger)
    if factor != 1.0:
        text = (
            "server.devices is %d now: what the coordinator keeps of all devices is multiplied by "
            "%.6g"
        )
        log.warning(text, plan.server.devices, factor)
        vectors = {key: vector * np.float32(factor) for key, vector in vectors.items()}
        if name == "feddyn":
            state = {key: vector * np.float32(factor) for key, vector in state.items()}
    return members.rules.make_state(
        store.ledger.last_committed(),
        version=version,
        model=model,
        optimizer_state=state,
        vectors=vectors,
        tied_sum=load_tied_sum(store.ledger),
        privacy=privacy,
    )


def begin(plan: Plan, members: Members, store: Store, wall: float) -> None:
    """Write the model that a new run begins with."""
    rules, model = members.all[0].rules, members.first_model(plan)
    privacy, first_rows = load_privacy(rules.privacy, store.ledger, model.size, {})
    first = members.rules.make_state(
        None,
        version=0,
        model=model,
        optimizer_state=rules.optimizer.init(model),
        # For tasks that outlive the version.
        vectors={name: np.zeros_like(model) for name in plan.vectors},
        privacy=privacy,
    )
    made = ModelMade(0, digest(model), 0, wall)
    store.write([*first_rows, *write_model(rules, store, made, first)])
