"""What the demo starts: a coordinator with a page, and a few devices whose data are skewed."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.page import join_link
from fleetlearn_coordinator.storage.identities import open_identities

from examples import digits
from examples.demo.fleet import Paths
from examples.demo.processes import Child

EXAMPLES = 60
"""Scans of each device: few, so that accuracy rises slowly enough to be watched."""
ALPHA = 0.3
"""Dirichlet parameter of the devices' labels: most devices have few of the ten digits."""
USES = 1000
"""Devices that the link may enrol."""

PLAN = """\
name = "digits"
bundle = "digits.bundle"
recipe = "fedavg"
seed = {seed}
data_dir = "run"

[local]
epochs = 2
batch_size = 5
lr = 0.1

[round]
goal = {goal}            # more than the devices that the demo starts: the others are people's
minimum = {minimum}
over_selection = 1.0
gather = {gather}        # seconds that a round waits for people before it goes on
deadline = 60.0
grace = 5.0

[stop]
rounds = {rounds}
"""
ABOUT = (
    "A small model learns to read handwritten digits. A few devices with scans of digits train it; "
    "you can help with digits that you draw here. Your drawings stay in this browser: only what "
    "the model learned from them is sent."
)


def write_plan(paths: Paths, *, devices: int, rounds: int, gather: float, seed: int) -> None:
    settings = {
        "seed": seed,
        "goal": 2 * devices,
        "minimum": devices,
        "gather": gather,
        "rounds": rounds,
    }
    paths.plan.write_text(PLAN.format(**settings), "utf-8")


def write_service(
    paths: Paths, page: Path, *, host: str, port: int, page_port: int, tls: Path | None
) -> None:
    """``tls``: the folder of a certificate, or None."""
    values = {
        "title": "Train together: digits",
        "about": ABOUT,
        "task": "digits",
        "folder": str(page),
    }
    text = f'host = "{host}"\nport = {port}\nheartbeat = 5.0\nidentities = "identities"\n'
    if tls is not None:
        text += f"[tls]\ncertificate = {json.dumps(str(tls / 'certificate.pem'))}\n"
        text += f"key = {json.dumps(str(tls / 'key.pem'))}\n"
    text += f"[page]\nport = {page_port}\n"
    text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    paths.service.write_text(text, "utf-8")


def make_link(paths: Paths) -> tuple[str, str]:
    """Return a token that enrols devices for a day, and the link that brings it to the page."""
    service = ServiceSettings.load(paths.service)
    assert service.identities is not None
    with closing(open_identities(service.identities)) as identities:
        now = time.time()
        token = identities.make_token(USES, now + 86400.0, (), now)
    return token, join_link(service, token)


def coordinator(paths: Paths) -> Child:
    command = [Path(sys.executable).with_name("fleetlearn-coordinator"), "serve", paths.plan]
    return Child(
        "the coordinator",
        [*command, "--service", paths.service, "--stay"],
        paths.logs / "coordinator.log",
    )


def devices(
    paths: Paths, number: int, url: str, token: str, ca: Path | None, seed: int
) -> list[Child]:
    """Write the devices' data. Returns the devices, which are not started. ``ca``: the only CA that
    they trust."""
    data = digits.data()
    children = []
    for index, shard in enumerate(digits.dirichlet_shards(data.y_train, number, ALPHA, seed), 1):
        folder = paths.devices / f"{index:02d}"
        folder.mkdir(parents=True)
        mine = shard[:EXAMPLES]
        np.savez(folder / "data.npz", x=data.x_train[mine], y=data.y_train[mine])
        run = [Path(sys.executable).with_name("fleetlearn-device"), "run", "--coordinator", url]
        run += ["--data", folder / "data.npz", "--state", folder / "state", "--token", token]
        run += ["--until-finished", *(() if ca is None else ("--ca", ca))]
        children.append(Child(f"python-{index}", run, paths.logs / f"python-{index}.log"))
    return children
