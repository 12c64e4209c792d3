"""A helper is killed while it answers, at every step: whatever is asked afterwards, no seed is in
two answers. Real processes, real TLS, real SIGKILL."""

from __future__ import annotations

import random
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.secure.helper_client import (
    HelperAddress,
    HelperRefusedError,
    NoHelperError,
    ask_for_card,
    ask_for_sum,
)
from fleetlearn_coordinator.secure.helper_views import HelperView
from fleetlearn_protocol.secure.helper_messages import MaskSumRequest, RefusalName
from helper_fleet import exact_sum, fleet, ordinary, seeds_of, terms_of, write_roster
from processes import Processes, free_port, wait_for

CRASH = Path(__file__).with_name("crash_helper.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    POINTS: list[str] = [*runpy.run_path(str(CRASH))["POINTS"]]
DEVICES = fleet([f"d{number}" for number in range(6)])
SIZE = 1000
pytestmark = pytest.mark.slow


class Life:
    """One helper through its deaths, and all that it ever answered."""

    def __init__(self, run: Processes, folder: Path) -> None:
        self.run, self.folder, self.file = run, folder, folder / "helper.toml"
        run.command("helper", "init", folder, "127.0.0.1", "--minimum", "3")
        port = free_port()
        self.file.write_text(self.file.read_text().replace("port = 8770", f"port = {port}"))
        run.command("helper", "enrol", self.file, write_roster(folder / "roster", DEVICES))
        view = msgspec.json.decode(
            run.command("helper", "status", self.file, "--json").stdout, type=HelperView
        )
        self.address = HelperAddress(view.address, view.certificate)
        self.key = bytes.fromhex(view.key)
        self.answers: dict[bytes, MaskSumRequest] = {}
        """The digest of each set that was answered."""

    def request(self, round: int, *, without: int | None = None) -> MaskSumRequest:
        devices = [device for number, device in enumerate(DEVICES) if number != without]
        return ordinary(terms_of(self.key, size=SIZE), devices, round)

    @contextmanager
    def alive(self, *command: str | Path) -> Iterator[Any]:
        process = self.run.start("helper", sys.executable, *(command or self._plain()))
        try:
            wait_for(self._listens, "the helper")
            yield process
        finally:
            process.kill()
            process.wait(20)

    def dying_at(self, point: str, mistake: str = "none") -> Any:
        return self.alive(CRASH, point, "1", mistake, "serve", self.file)

    def _plain(self) -> tuple[str | Path, ...]:
        return "-m", "fleetlearn_coordinator", "helper", "serve", self.file

    def _listens(self) -> bool:
        try:
            return ask_for_card(self.address, self.key, 5.0).minimum == 3
        except NoHelperError:
            return False

    def ask(self, request: MaskSumRequest) -> str:
        """Ask, and check what comes. Returns ``answered``, the name of a refusal, or ``gone``."""
        try:
            words = ask_for_sum(self.address, request, 20.0)
        except NoHelperError:
            return "gone"
        except HelperRefusedError as refused:
            return refused.refusal.name.value
        assert (words == exact_sum(seeds_of(request), SIZE)).all()
        self.answers[request.digest()] = request
        self.check()
        return "answered"

    def check(self) -> None:
        """No seed is in two answers."""
        used = [seed for request in self.answers.values() for seed in seeds_of(request)]
        assert len({*used}) == len(used), "a seed is in two answers"


def kill_and_ask(life: Life, point: str, mistake: str = "none") -> tuple[str, str, str]:
    """Ask for a set while the helper dies at a point, then for all but one of its devices, then for
    the first set again. Returns what came."""
    whole, rest = life.request(1), life.request(1, without=0)
    # The seeds of both are the same: a device draws one for an update.
    assert {*seeds_of(rest)} < {*seeds_of(whole)}
    with life.dying_at(point, mistake) as process:
        first = life.ask(whole)
        assert process.wait(20) == -signal.SIGKILL
    with life.alive():
        return first, life.ask(rest), life.ask(whole)


BEFORE = POINTS[: POINTS.index("the commit is over")]


@pytest.mark.parametrize("point", POINTS)
def test_a_helper_that_dies_answers_one_of_two_sets(
    run: Processes, tmp_path: Path, point: str
) -> None:
    life = Life(run, tmp_path / "helper")
    first, rest, whole = kill_and_ask(life, point)
    assert first in ("gone", "answered")
    if point in BEFORE:
        assert (first, rest, whole) == ("gone", "answered", RefusalName.SEED_USED.value)
    else:
        assert (rest, whole) == (RefusalName.SEED_USED.value, "answered")


@pytest.mark.parametrize("mistake", ["remembers late", "commits never"])
def test_a_helper_that_remembers_too_late_is_found(
    run: Processes, tmp_path: Path, mistake: str
) -> None:
    """The same look at a helper with a planted mistake."""
    life = Life(run, tmp_path / "helper")
    for _ in range(5):  # the answer may be lost with the process, and then nobody has two
        with life.dying_at("the answer is on its way", mistake):
            if life.ask(life.request(1)) == "answered":
                break
    with life.alive(), pytest.raises(AssertionError, match="a seed is in two answers"):
        life.ask(life.request(1, without=0))


def test_a_helper_that_is_killed_at_any_moment(run: Processes, tmp_path: Path) -> None:
    """The same at no moment in particular, many times over one file."""
    life, draw = Life(run, tmp_path / "helper"), random.Random(37)
    for round in range(1, 13):
        choices = [life.request(round), *(life.request(round, without=n) for n in range(3))]
        with life.alive() as process:
            for request in draw.sample(choices, 2):
                life.ask(request)
            if draw.random() < 0.5:
                process.send_signal(signal.SIGKILL)
        with life.alive():
            found = [life.ask(request) for request in choices]
        assert found.count("answered") == 1, found
    assert len(life.answers) == 12
