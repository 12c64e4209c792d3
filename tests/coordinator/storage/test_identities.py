"""Tokens, credentials and the audit log: what is kept, what is refused, and what shows that
somebody changed it."""

from __future__ import annotations

import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from secrets import token_urlsafe

import pytest
from fleetlearn_coordinator.storage import identities as module
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.identities import (
    DATABASE,
    EnrolmentError,
    Identities,
    Known,
    first_broken,
)

SECRET, OTHER = token_urlsafe(32), token_urlsafe(32)


@pytest.fixture
def identities(tmp_path: Path) -> Iterator[Identities]:
    with closing(Identities(tmp_path)) as found:
        yield found


def test_a_token_enrols_as_many_devices_as_it_says(identities: Identities) -> None:
    token = identities.make_token(2, 100.0, ["roof", "eu"], 0.0)
    assert re.fullmatch("[0-9a-f]{64}", token), "one that began with - could be given to no command"
    assert identities.enrol("a", SECRET, token, 1.0) == Known("a", ("roof", "eu"), 1.0)
    assert identities.find(SECRET, 2.0) == Known("a", ("roof", "eu"), 1.0)
    identities.enrol("b", OTHER, token, 100.0)
    with pytest.raises(EnrolmentError, match="used up"):
        identities.enrol("c", token_urlsafe(32), token, 3.0)
    assert [row.device for row in identities.devices()] == ["a", "b"]
    assert identities.count() == 2


def test_what_is_refused_changes_nothing(identities: Identities) -> None:
    token = identities.make_token(5, 100.0, [], 0.0)
    identities.enrol("a", SECRET, token, 0.0)
    before = identities.events()
    for device, given, now, words in (
        ("b", "x" * 43, 0.0, "not known here"),
        ("b", token, 100.1, "expired"),
        ("a", token, 0.0, "enrolled already"),
    ):
        with pytest.raises(EnrolmentError, match=words):
            identities.enrol(device, OTHER, given, now)
    assert identities.find(OTHER, 0.0) is None
    assert identities.events() == before
    identities.enrol("b", OTHER, token, 0.0)


def test_what_is_in_the_audit_log_is_not_written_there_again(identities: Identities) -> None:
    for at, what, about in (
        (1.5, "a", {"x": 1, "y": 2}),
        (1.5, "a", {"y": 2, "x": 1}),
        (1.5, "b", {}),
        (2.5, "b", {}),
    ):
        identities.log_once(at, what, about)
    assert [(row.at, row.what) for row in identities.events()] == [
        (1.5, "a"),
        (1.5, "b"),
        (2.5, "b"),
    ]
    assert identities.broken_at() is None


def test_no_secret_is_on_the_disk(identities: Identities) -> None:
    token = identities.make_token(1, 100.0, [], 0.0)
    identities.enrol("a", SECRET, token, 0.0)
    for file in identities.path.parent.iterdir():
        content = file.read_bytes()
        assert SECRET.encode() not in content
        assert token.encode() not in content
    assert stat.S_IMODE(identities.path.stat().st_mode) == 0o600


def test_both_credentials_are_valid_until_the_new_one_is_used(identities: Identities) -> None:
    known = identities.enrol("a", SECRET, identities.make_token(1, 1.0, [], 0.0), 0.0)
    identities.announce_next("a", OTHER)
    assert identities.find(SECRET, 0.0) == known
    assert identities.find(OTHER, 0.0) == known
    assert identities.find(SECRET, 0.0) is None
    assert identities.find(OTHER, 0.0) == known
    assert [row.what for row in identities.events()] == ["token", "enrolled", "rotated"]


def test_no_two_devices_change_to_one_credential(identities: Identities) -> None:
    token = identities.make_token(2, 1.0, [], 0.0)
    identities.enrol("a", SECRET, token, 0.0)
    b = identities.enrol("b", OTHER, token, 0.0)
    with pytest.raises(EnrolmentError, match="that a would change to is another device's"):
        identities.announce_next("a", OTHER)
    following = token_urlsafe(32)
    for _ in range(2):  # a device says it again at each connection
        identities.announce_next("b", following)
    with pytest.raises(EnrolmentError):
        identities.announce_next("a", following)
    assert identities.find(following, 0.0) == b


def test_another_process_s_changes_are_seen(identities: Identities, tmp_path: Path) -> None:
    identities.enrol("a", SECRET, identities.make_token(2, 1.0, [], 0.0), 0.0)
    assert not identities.changed()
    with closing(Identities(tmp_path)) as operator:
        assert operator.revoke("a", 5.0)
        assert not operator.revoke("a", 5.0)
    assert identities.changed()
    assert not identities.changed()
    assert identities.enrolled() == {}
    assert identities.find(SECRET, 6.0) is None


def in_another_process(folder: Path) -> list[str]:
    """What the audit log has, as a command reads it that opens the database and closes it."""
    code = f"""
from contextlib import closing
from pathlib import Path
from {module.__name__} import Identities
with closing(Identities(Path({str(folder)!r}))) as found:
    print(*[row.what for row in found.events()])
"""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


def test_two_connections_of_a_process_keep_other_processes_from_deleting_the_log(
    tmp_path: Path,
) -> None:
    """A coordinator has the database open, an administrator's request opens it beside that, and a
    command comes and goes: SQLite deletes the -wal file where the command's process believes itself
    alone."""
    with closing(Identities(tmp_path)) as coordinator, closing(Identities(tmp_path)) as request:
        token = coordinator.make_token(1, 100.0, [], 0.0)
        assert in_another_process(tmp_path) == ["token"]
        coordinator.enrol("a", SECRET, token, 1.0)
        request.revoke("a", 2.0)
        assert in_another_process(tmp_path) == ["token", "enrolled", "revoked"]


def test_a_device_that_is_enrolled_again_is_another(identities: Identities) -> None:
    token = identities.make_token(2, 100.0, [], 0.0)
    known = identities.enrol("a", SECRET, token, 1.0)
    identities.revoke("a", 2.0)
    again = identities.enrol("a", OTHER, token, 3.0)
    assert identities.enrolled() == {"a": again.enrolled} != {"a": known.enrolled}


def test_a_certificate_is_enrolled_once_and_not_beside_a_credential(identities: Identities) -> None:
    token = identities.make_token(2, 100.0, [], 0.0)
    assert (
        identities.certified("a", 1.0, 2.0)
        == identities.certified("a", 1.5, 3.0)
        == Known("a", (), 2.0)
    )
    with pytest.raises(EnrolmentError, match="enrolled already"):
        identities.enrol("a", SECRET, token, 3.0)
    identities.enrol("b", SECRET, token, 3.0)
    with pytest.raises(
        EnrolmentError, match="a device called b is enrolled already, with a credential"
    ):
        identities.certified("b", 1.0, 4.0)
    assert [row.what for row in identities.events()] == ["token", "enrolled", "enrolled"]


def test_a_certificate_from_before_a_revocation_is_not_valid(identities: Identities) -> None:
    identities.certified("a", 1.0, 2.0)
    assert identities.revoke("a", 5.0)
    assert identities.enrolled() == {}
    for begin in (1.0, 4.0, 5.0):
        with pytest.raises(EnrolmentError, match="the certificate of a was revoked"):
            identities.certified("a", begin, 6.0)
    assert identities.certified("a", 5.5, 7.0) == Known("a", (), 7.0)
    assert not identities.revoke("b", 8.0)
    assert identities.certified("b", 1.0, 9.0) == Known("b", (), 9.0), (
        "nobody was revoked: there was no b"
    )


@pytest.mark.parametrize(
    ("statement", "broken"),
    [
        ('UPDATE audit SET about=\'{"device": "b"}\' WHERE number=2', 2),
        ("UPDATE audit SET at=9 WHERE number=1", 1),
        ("DELETE FROM audit WHERE number=2", 3),
        ("UPDATE audit SET about=x'ff' WHERE number=2", 2),
        ("UPDATE audit SET hash=hash WHERE number=2", None),
    ],
)
def test_a_changed_log_shows(identities: Identities, statement: str, broken: int | None) -> None:
    identities.enrol("a", SECRET, identities.make_token(1, 1.0, [], 0.0), 0.0)
    identities.revoke("a", 1.0)
    assert identities.broken_at() is None
    with closing(sqlite3.connect(identities.path)) as database, database:
        database.execute(statement)
    assert identities.broken_at() == broken
    assert all(row.number < (broken or 4) for row in identities.events(broken)), (
        "the others may be no rows now"
    )


def test_it_is_all_there_after_a_restart(tmp_path: Path) -> None:
    with closing(Identities(tmp_path)) as first:
        known = first.enrol("a", SECRET, first.make_token(1, 1.0, ["x"], 0.0), 0.0)
        events = first.events()
    with closing(Identities(tmp_path)) as second:
        assert second.find(SECRET, 0.0) == known
        assert second.events() == events


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    Identities(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("PRAGMA user_version=2")
    with pytest.raises(StoreError, match=f"{DATABASE} is of version 2"):
        Identities(tmp_path)


def test_rows_that_were_sent_are_checked_against_each_other(identities: Identities) -> None:
    for number in range(1, 6):
        identities.log(number / 3, "a run began", {"run": f"ü{number}", "until": None, "at": 1e300})
    rows = identities.events()
    assert first_broken([]) is None
    assert first_broken(rows) is None
    assert first_broken(rows[2:]) is None
    for change in ({"what": "x"}, {"at": 9.0}, {"about": {}}, {"hash": "0" * 64}):
        changed = [*rows[:3], rows[3]._replace(**change), rows[4]]
        assert first_broken(changed) == 4
    assert first_broken([rows[0]._replace(what="x")]) == 1
    assert first_broken([rows[1]._replace(what="x"), *rows[2:]]) is None, (
        "the row before is not here"
    )
    assert first_broken([*rows[:2], *rows[3:]]) == 4, "row 3 was removed"
