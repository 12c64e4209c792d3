"""For tests of commands: a coordinator of one run on a host of several, whose devices have done
something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol.messages import Failed
from peers import plan_text, update_of, write_test_bundle
from processes import free_port, wait_for
from watched import Watched

SIZE = 10
WRONG = "KeyError: 3 (in load, mydata.py line 12)"


class LiveHost:
    """A host with the run ``digits``: roof-8 has failed a task and left, roof-7 has done two rounds
    and has a task of the third."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.service = folder, folder / "service.toml"
        self.plan, self.data = folder / "digits.toml", folder / "digits.run"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        bundle = write_test_bundle(folder / "test.bundle", SIZE)
        # Devices that say nothing more keep their tasks, however long the tests take.
        rules: dict[str, Any] = {"round__deadline": 9000.0, "round__stall": 9000.0}
        rules |= {"round__goal": 1, "round__minimum": 1, "stop__rounds": 50, "round__grace": 0.05}
        self.plan.write_text(plan_text(bundle, self.data, **rules).replace('"test"', '"digits"'))
        self.service.write_text(
            'port = 0\nheartbeat = 3600.0\nidentities = "ids"\nruns = "runs"\n'
            f"[admin]\nport = {port}\n"
        )
        with closing(Runs(folder / "runs")) as runs:
            runs.add("digits", self.plan)
        self.host = Watched(folder, None, admin={"port": port}, heartbeat=3600.0)

    def work(self) -> None:
        """Let the devices do what they do, until the ledger has it."""
        failing = self.host.join("roof-8", ("roof",), runtime="onnx 1.31.1")
        task = self.host.do(failing.task())
        self.host.do(failing.send(Failed(task.task, "bad-data", WRONG)))
        self.host.do(failing.connection.close())
        self.peer = self.host.join("roof-7", ("roof",), runtime="onnx 1.31.1")
        for _ in range(2):
            self.host.do(self.peer.do_round(update_of(1.0, SIZE)))
        self.task = self.host.do(self.peer.task())
        views = LocalViews(service=self.host.service, identities=None)
        wait_for(lambda: [row.done for row in views.devices()] == [2, 0], "the ledger")
        wait_for(lambda: views.run("digits").leases == 1, "the ledger")


@contextmanager
def live_host(folder: Path) -> Iterator[LiveHost]:
    """Serve until the block is left."""
    host = LiveHost(folder)
    with host.host:
        host.work()
        yield host
