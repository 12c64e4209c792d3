"""The fuzz targets with their seeds, the corpus, and some mutations of them. ``make fuzz`` runs
many more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from fleetlearn_coordinator.conversation.uploads import Uploads
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.network.driver import ConnectionDriver
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_device.session.session import Session
from fleetlearn_protocol.encodings import Encoding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import __main__ as command
from tests.fuzz import seeds
from tests.fuzz.mutation import MOST_BYTES, mutate
from tests.fuzz.seeded import fuzz
from tests.fuzz.targets import administration, page, sockets, streams
from tests.fuzz.targets.table import TARGETS, Target

EXAMPLES = 60
"""Mutations of the cheapest targets. All together take some seconds."""


@pytest.fixture(autouse=True, scope="module")
def ended() -> Iterator[None]:
    yield
    sockets.stop()
    streams.stop()
    administration.stop()
    page.stop()


def known(name: str) -> list[bytes]:
    return [*TARGETS[name].seeds(), *seeds.corpus(name)]


def test_each_folder_of_the_corpus_is_a_targets() -> None:
    folders = [path for path in seeds.CORPUS.iterdir() if path.is_dir()]
    assert {path.name for path in folders} <= {*TARGETS}
    files = [path for folder in folders for path in folder.iterdir()]
    assert len(files) < 200
    assert sum(path.stat().st_size for path in files) < 500 * 1024


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_corpus(name: str) -> None:
    for data in known(name):
        TARGETS[name].run(data)


def check(name: str, examples: int) -> None:
    begin = known(name)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(st.sampled_from(begin), st.integers(0, 6), st.randoms(use_true_random=False))
    def run(data: bytes, changes: int, random: Random) -> None:
        TARGETS[name].run(mutate(data, random, begin, changes))

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_mutations(name: str) -> None:
    check(name, max(10, round(EXAMPLES / TARGETS[name].cost)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutations(name: str) -> None:
    check(name, max(200, round(3000 / TARGETS[name].cost)))


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    for data in (b"", b"\0", b"\n" * 300, b"{", b"\xff" * 100, bytes(range(256))):
        TARGETS[name].run(data)


# The targets see what is wrong


def fails(name: str) -> bool:
    """Return whether any of the seeds and the corpus fails."""
    for data in known(name):
        try:
            TARGETS[name].run(data)
        except Exception:
            return True
    return False


def test_a_spool_file_that_is_never_freed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Uploads, "_begin_again", lambda self, upload: self._without_place.pop(upload, None)
    )
    assert fails("conversations")


def test_a_lease_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "tick", lambda self, now: [])
    assert fails("conversations")


def test_an_update_that_is_dropped_too_soon_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "interrupt_transfer", lambda self: self.drop_task())
    assert fails("sessions")


def test_an_element_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoding, "check", lambda self, content, elements=None: 0.0)
    assert fails("encodings")
    assert fails("uploads")


def test_a_connection_that_is_not_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = ConnectionDriver.closed

    def forgetful(driver: ConnectionDriver) -> None:
        shared = driver._shared
        closed(driver)
        shared.connections.add(driver)

    monkeypatch.setattr(ConnectionDriver, "closed", forgetful)
    monkeypatch.setattr(sockets, "QUIET", 0.5)
    with pytest.raises(AssertionError):
        sockets.sockets(seeds.corpus("sockets")[0])


def test_messages_that_are_cut_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = DeviceConnection._handle
    monkeypatch.setattr(
        DeviceConnection,
        "_handle",
        lambda self, data: handle(self, data.replace(b"heart", b"Heart")),
    )
    assert fails("streams")


# The drivers


def test_a_failure_is_found_and_comes_again() -> None:
    def run(data: bytes) -> None:
        if b"scaffold" in data:
            raise ValueError("scaffold")

    found = fuzz("none", Target(run, lambda: [b'{"algorithm":"plain"}', b"x"]), 7, 10**6, 60.0)
    assert isinstance(found.error, ValueError)
    assert found.failed is not None
    assert b"scaffold" in found.failed
    again = fuzz("none", Target(run, lambda: [b'{"algorithm":"plain"}', b"x"]), 7, 10**6, 60.0)
    assert (again.failed, again.inputs) == (found.failed, found.inputs)


def test_the_number_of_inputs_is_bounded() -> None:
    found = fuzz("none", Target(lambda data: None, lambda: [b"a", b"b"]), 1, 50, 60.0)
    assert (found.inputs, found.failed) == (50, None)


def test_mutations_are_bounded() -> None:
    random, data = Random(1), b'{"a":[1,2,{"b":"c"}]}\n0>3'
    for _ in range(500):
        data = mutate(data, random, [b"other\nlines"])
        assert len(data) <= MOST_BYTES
    assert mutate(b"", Random(2), []) == mutate(b"", Random(2), [])


def test_the_command_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["fuzz", "--without-atheris", "--inputs", "60", "chunks", "deltas"]
    )
    assert command.main() == 0
    said = capsys.readouterr().out
    assert "120 inputs of 2 targets, 0 targets failed" in said

    def run(data: bytes) -> None:
        raise ValueError("broken")

    monkeypatch.setitem(TARGETS, "chunks", Target(run, lambda: [b"seed"]))
    assert command.main() == 1
    said = capsys.readouterr().out
    assert 'make fuzz ARGS="chunks --replay .fuzz/chunks/failed-0"' in said
    assert Path(".fuzz/chunks/failed-0").read_bytes() == b"seed"
