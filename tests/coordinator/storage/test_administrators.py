"""Administrators: tokens that are shown once, roles, expiry, and the audit log."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.storage.administrators import SESSION, Administrator, Administrators
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.identities import DATABASE, Identities


@pytest.fixture
def administrators(tmp_path: Path) -> Administrators:
    Identities(tmp_path).close()  # of the version before, without a table of administrators
    return Administrators(tmp_path)


def test_a_token_is_one_administrator_s_and_its_hash_alone_is_kept(
    administrators: Administrators, tmp_path: Path
) -> None:
    assert administrators.administrators() == [], "there is none by default"
    ada = administrators.add("ada", "operate", None, 10.0)
    bob = administrators.add("bob", "view", 100.0, 11.0)
    assert administrators.find_administrator(ada, 1e12) == Administrator(
        "ada", "operate", 10.0, None
    )
    assert administrators.find_administrator(bob, 100.0) == Administrator(
        "bob", "view", 11.0, 100.0
    )
    assert administrators.find_administrator(bob, 101.0) is None, "it has expired"
    for token in ("", "x", ada[:-1], ada + "x", administrators.make_token(1, 1e12, [], 0.0)):
        assert administrators.find_administrator(token, 50.0) is None
    assert len(ada) >= 43
    administrators.close()
    content = (tmp_path / DATABASE).read_bytes()
    assert ada.encode() not in content
    assert bob.encode() not in content


def test_a_removed_administrator_is_nobody_at_once(
    administrators: Administrators, tmp_path: Path
) -> None:
    token = administrators.add("ada", "view", None, 10.0)
    with pytest.raises(StoreError, match="there is an administrator called ada already"):
        administrators.add("ada", "operate", None, 11.0)
    other = Administrators(tmp_path)
    assert other.find_administrator(token, 12.0) is not None
    assert administrators.remove("ada", 13.0)
    assert not administrators.remove("ada", 14.0)
    assert other.find_administrator(token, 15.0) is None
    again = administrators.add("ada", "view", None, 16.0)
    assert again != token
    assert other.find_administrator(token, 17.0) is None


def test_each_change_is_a_row_of_the_audit_log(administrators: Administrators) -> None:
    token = administrators.add("ada", "operate", None, 10.0)
    administrators.make_token(3, 99.0, ["roof"], 11.0, "ada")
    administrators.remove("ada", 12.0)
    rows = administrators.events()
    assert [(row.what, row.about["who"]) for row in rows] == [
        ("administrator added", "command"), ("token", "ada"), ("administrator removed", "command")
    ]  # fmt: skip
    assert token not in str(rows)
    assert administrators.broken_at() is None
    assert administrators.last_events(2) == rows[1:]


def test_a_session_stands_for_the_token_as_long_as_that_is_good(
    administrators: Administrators, tmp_path: Path
) -> None:
    """It outlives the process, and ends after SESSION, with the token, and with its
    administrator."""
    ada = administrators.add("ada", "operate", None, 0.0)
    bob = administrators.add("bob", "view", 50.0, 0.0)
    assert administrators.begin_session("x" * 43, 1.0) is None
    begun = administrators.begin_session(ada, 1.0)
    assert begun is not None
    secret, who = begun
    assert (who.name, who.role) == ("ada", "operate")
    assert secret not in (ada, "")
    found = Administrators(tmp_path).find_session(secret, 1.0 + SESSION)
    assert found == who
    assert administrators.find_session(secret, 2.0 + SESSION) is None
    assert administrators.find_session(ada, 2.0) is None, "a token is no session"
    short = administrators.begin_session(bob, 10.0)
    assert short is not None
    assert administrators.find_session(short[0], 50.0) is not None
    assert administrators.find_session(short[0], 51.0) is None
    assert administrators.begin_session(bob, 51.0) is None
    administrators.end_session(secret)
    assert administrators.find_session(secret, 3.0) is None
    again = administrators.begin_session(ada, 4.0)
    assert again is not None
    administrators.remove("ada", 5.0)
    administrators.add("ada", "view", None, 6.0)
    assert administrators.find_session(again[0], 7.0) is None, "that is somebody else"
    rows = [row for row in administrators.events() if row.what == "signed in"]
    assert [row.about for row in rows] == [{"who": "ada"}, {"who": "bob"}, {"who": "ada"}]
    assert secret not in str(rows)
