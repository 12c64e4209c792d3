"""The text of the files that ``init`` writes."""

from __future__ import annotations

import re

from fleetlearn_protocol.computations.settings import kind_of
from fleetlearn_protocol.manifest import Manifest
from msgspec import UNSET

RATE = 0.1
"""The learning rate of a bundle that has no default for it."""


def plan_text(bundle: str, manifest: Manifest, goal: int) -> str:
    """Return a plan, with comments. ``bundle``: its path from the plan's folder. ``goal``: reports
    that a round wants."""
    name = re.sub("[^A-Za-z0-9._-]", "-", re.sub(r"\.bundle$", "", bundle.rpartition("/")[2]))
    if manifest.public is not UNSET:
        return _scoring(name, bundle, goal)
    if manifest.computation is not UNSET:
        return _computing(name, bundle, kind_of(manifest.computation), goal)
    default = next((row.default for row in manifest.hyper if row.name == "lr"), None)
    rate = RATE if default is None else default
    minimum = -(-goal // 2)
    metrics = [*manifest.metrics, "loss"]
    return f'''# A plan: what is trained, and how. It is served by
#     fleetlearn-coordinator serve plan.toml --service service.toml
# All keys: docs/operate/rounds.md and docs/algorithms/. A line with # before its key is a default.

name = "{name}"
bundle = "{bundle}"  # {manifest.size} parameters; metrics: {", ".join(metrics)}
recipe = "fedavg"  # how updates become a model: fedprox, fedadam, scaffold, fedbuff, ...
# seed = 0
# data_dir = "{name}.run"  # the run's database, models and updates
# durable = "process"  # "power": an acknowledged update survives a power cut, too

[local]  # what a device does with a task
lr = {rate:g}  # learning rate
# epochs = 1  # passes over the device's data
# batch_size = 20  # examples in a step; 0: all
# time_budget = 60.0  # seconds of training at most; default: until the deadline

[round]  # who takes part, and for how long
goal = {goal}  # reports wanted: the round commits as soon as it has them
minimum = {minimum}  # with fewer at the deadline the round is given up
deadline = 600.0  # seconds
# over_selection = 1.3  # tasks given for each report wanted, since some devices vanish
# grace = 10.0  # seconds that a task outlives its device's connection

[stop]  # when training is over, whichever comes first
rounds = 100
# metric = "{metrics[0]}"
# target = 0.95

[models]  # which versions are kept, beside the first and the newest
last = 3
# best = 3  # the best by stop.metric
'''


def _computing(name: str, bundle: str, kind: str, goal: int) -> str:
    """Return a plan of a run without a model."""
    return f'''# A plan: what is computed, and with whom. It is served by
#     fleetlearn-coordinator serve plan.toml --service service.toml
# and `fleetlearn-coordinator result plan.toml` shows what comes out
# (docs/algorithms/computations.md). A line with # before its key is a default.

name = "{name}"
bundle = "{bundle}"  # a computation, in place of a model
recipe = "{kind}"
# data_dir = "{name}.run"  # the run's database, states and sums

[round]  # who takes part, and for how long
goal = {goal}  # devices wanted: a round's total is of those that report
minimum = {-(-goal // 2)}  # with fewer at the deadline the round is given up
deadline = 600.0  # seconds
# over_selection = 1.3  # tasks given for each report wanted, since some devices vanish

# [stop]
# rounds = 1000  # give up after 1000 rounds; by default it ends by itself, when it is done
'''


def _scoring(name: str, bundle: str, goal: int) -> str:
    """Return a plan of a run whose devices tell class scores."""
    return f'''# A plan: devices keep their models, and tell class scores of public examples.
# It is served by
#     fleetlearn-coordinator serve plan.toml --service service.toml
# (docs/algorithms/fedmd.md). A line with # before its key is a default.

name = "{name}"
bundle = "{bundle}"  # public examples, in place of a model
recipe = "fedmd"
# data_dir = "{name}.run"  # the run's database and the devices' mean scores

[local]  # what a device does with a task
lr = 0.1  # learning rate, for devices whose own bundle has no default for it
# epochs = 1  # passes over the device's own data
evaluate = true  # measure the device's own model before it trains on its own data
# batch_size = 20  # examples in a step; 0: all
# hyper.digest_lr = 0.001  # the same of what they learn from the mean scores
# hyper.digest_epochs = 5  # passes over the public examples
# hyper.temperature = 1.0

[round]  # who takes part, and for how long
goal = {goal}  # devices wanted
minimum = {-(-goal // 2)}  # with fewer at the deadline the round is given up
deadline = 600.0  # seconds

[stop]
rounds = 20
'''


def service_text(host: str, *, tls: bool) -> str:
    """Return a service file, with comments. ``tls``: with the section [tls]."""
    off = "" if tls else "# "
    return f'''# A service file: how the coordinator's process listens, and whom it lets in.
# All keys: docs/operate/running.md. A line with # before its key is a default, or an example.

host = "{host}"  # "0.0.0.0": other machines may connect, which needs [tls]
port = 8765
identities = "identities"  # only enrolled devices connect: `fleetlearn-coordinator enrol`
# max_connections = 20000
# heartbeat = 15.0  # seconds between a device's signs of life
# uploads = 16  # at a time
# runs = "runs"  # a folder of several runs, in place of one plan: docs/operate/several-runs.md
# signing_keys = ["signing-key.pem"]  # `fleetlearn-coordinator signing-key`

[admin]  # for commands on other machines and the live page; it has TLS where [tls] is there
host = "127.0.0.1"
port = 8766  # `fleetlearn-coordinator administrator add service.toml NAME --role operate`

{off}[tls]  # `fleetlearn-coordinator certificate NAME...` makes both; renewed files are taken up
{off}certificate = "tls/certificate.pem"
{off}key = "tls/key.pem"

# [limits]  # of one address, which many devices may share
# connections = 1000
'''
