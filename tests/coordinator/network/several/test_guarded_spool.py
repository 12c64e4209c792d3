"""The spool files of one of several runs: what fails there ends that run alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fleetlearn_coordinator.network.several.guarded_spool import NO_FILE, GuardedSpool
from fleetlearn_protocol import ProtocolError
from fleetlearn_protocol.frames import Buffer


class Broken:
    """A spool whose disk is gone."""

    def has_room(self) -> bool:
        return True

    def take_spool_file(self) -> int:
        raise OSError("gone")

    def free_spool_file(self, number: int) -> None:
        raise OSError("gone")

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        raise OSError("gone")

    def write_checkpoint(self, number: int, content: bytes) -> None:
        raise OSError("gone")


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda spool: spool.take_spool_file() == NO_FILE, id="take"),
        pytest.param(lambda spool: spool.free_spool_file(1) is None, id="free"),
        pytest.param(lambda spool: spool.write_checkpoint(1, b"1") is None, id="checkpoint"),
    ],
)
def test_what_fails_ends_the_run_once(act: Callable[[GuardedSpool], bool]) -> None:
    errors: list[Exception] = []
    spool = GuardedSpool(Broken(), errors.append)
    assert act(spool)
    assert [str(error) for error in errors] == ["gone"]
    assert not spool.has_room()
    spool.free_spool_file(1)
    spool.write_checkpoint(1, b"1")
    assert len(errors) == 1, "its files are nobody's any more"


def test_a_chunk_that_cannot_be_written_is_refused() -> None:
    errors: list[Exception] = []
    with pytest.raises(ProtocolError, match="stopped by an error"):
        GuardedSpool(Broken(), errors.append).write_spool_file(1, 0, b"1234")
    assert len(errors) == 1
