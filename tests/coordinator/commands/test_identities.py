"""The commands about identities and keys, as people type them: tokens that bring keys, revoking,
and the audit log."""

from __future__ import annotations

import io
import sqlite3
import stat
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.storage.identities import EnrolmentError, Identities
from typer.testing import CliRunner, Result


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.toml").write_text('identities = "identities"\n')
    return tmp_path / "service.toml"


def command(*arguments: str, expected: int = 0) -> Result:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == expected, done.output
    return done


def words(result: Result) -> str:
    return " ".join(result.stderr.split())


def test_a_token_as_a_link(service: Path) -> None:
    refused = command("token", "service.toml", "--link", expected=1)
    assert "the service file has no [page]" in words(refused)
    with closing(Identities(service.parent / "identities")) as identities:
        assert not identities.events(), "no token is made that nobody sees"
    with service.open("a") as file:
        file.write('[page]\nfolder = "page"\naddress = "https://fleet.example"\n')
    link, _, token = command("token", "service.toml", "--link").stdout.strip().partition("#token=")
    assert link == "https://fleet.example/"
    with closing(Identities(service.parent / "identities")) as identities:
        identities.enrol("tab", "s" * 43, token, time.time())


def test_a_link_as_a_qr_code(service: Path) -> None:
    segno = pytest.importorskip("segno")
    with service.open("a") as file:
        file.write('[page]\nfolder = "page"\n')
    link, _, drawn = command("token", "service.toml", "--qr").stdout.partition("\n")
    assert link.startswith("http://127.0.0.1:8767/#token=")
    expected = io.StringIO()
    segno.make(link, error="l", micro=False).terminal(expected, compact=True)
    assert drawn == expected.getvalue()


def test_without_what_draws_qr_codes(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segno", None)
    assert 'pip install "fleetlearn[qr]"' in str(
        command("token", "service.toml", "--qr", expected=1).exception
    )


def test_the_audit_log_shows_dates(service: Path) -> None:
    command("token", "service.toml", "--tag", "roof", "--tag", "south")
    begin = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC).timestamp()
    with closing(Identities(service.parent / "identities")) as identities:
        identities.certified("roof-7", begin, time.time())
        identities.log(time.time(), "administrator added", {"administrator": "vera", "until": None})
        (token, *_) = identities.events()
    shown = command("audit", "service.toml").stdout
    until = f"{datetime.fromtimestamp(token.about['until'], UTC):%Y-%m-%d %H:%M:%SZ}"
    assert f"until {until}, uses 1" in shown
    assert "tags roof south, " in shown
    assert "certificate 2026-03-04 05:06:07Z, device roof-7" in shown
    assert "administrator vera, until no limit" in shown


def test_verify_finds_what_was_changed_and_what_is_gone(service: Path) -> None:
    for _ in range(2):
        command("token", "service.toml")
    with closing(Identities(service.parent / "identities")) as identities:
        first, second = identities.events()
    assert f"2 rows, none changed; the newest has the hash {second.hash}" in words(
        command("verify", "service.toml")
    )
    command("verify", "service.toml", "--hash", first.hash)
    with closing(sqlite3.connect(identities.path)) as database, database:
        database.execute("DELETE FROM audit WHERE number=2")
    command("verify", "service.toml")
    gone = command("verify", "service.toml", "--hash", second.hash, expected=1)
    assert "its last rows were removed, or the whole log replaced" in words(gone)
    with closing(sqlite3.connect(identities.path)) as database, database:
        database.execute("UPDATE audit SET at=1")
    assert "row 1 of the audit log was changed" in words(
        command("verify", "service.toml", expected=1)
    )


def test_a_token_is_for_runs(service: Path) -> None:
    token = command("token", "service.toml", "--tag", "roof", "--run", "faces").stdout.strip()
    with closing(Identities(service.parent / "identities")) as identities:
        assert identities.enrol("a", "s" * 43, token, time.time()).tags == ("roof", "run:faces")
    assert "at most 16 tags and runs" in words(
        command("token", "service.toml", "--run", "a b", expected=2)
    )


@pytest.mark.parametrize("arguments", [("token", "service.toml"), ("revoke", "service.toml", "a")])
def test_the_service_file_is_read_once(
    service: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Otherwise a file that is changed meanwhile would be read as two."""
    with closing(Identities(service.parent / "identities")) as identities:
        now = time.time()
        identities.enrol("a", "s" * 43, identities.make_token(1, now + 60, [], now), now)
    read, text = list[Path](), Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *given: read.append(path) or text(path, *given)
    )
    command(*arguments)
    assert read == [Path("service.toml")]


def test_a_token_brings_the_public_keys_along(service: Path) -> None:
    assert "." not in command("token", "service.toml").stdout
    keys = [command("signing-key", name).stdout.strip() for name in ("new.pem", "old.pem")]
    assert command("signing-key", "new.pem").stdout.strip() == keys[0], (
        "shown again, not made again"
    )
    assert stat.S_IMODE((service.parent / "new.pem").stat().st_mode) == 0o600
    service.write_text('identities = "identities"\nsigning_keys = ["new.pem", "old.pem"]\n')
    assert command("token", "service.toml").stdout.strip().split(".")[1:] == keys
    (service.parent / "old.pem").write_text("no key")
    assert "old.pem cannot be used to sign" in words(command("token", "service.toml", expected=1))


def test_a_certificate_that_never_connected_can_be_revoked(service: Path) -> None:
    assert "no device called a is enrolled" in words(
        command("revoke", "service.toml", "a", expected=1)
    )
    made = command("device-certificate", "a")
    assert "--name a --certificate a.pem --key a.key" in words(made)
    command("certificate", "127.0.0.1")
    files = 'certificate = "tls/certificate.pem"\nkey = "tls/key.pem"\nclients = "tls/ca.pem"\n'
    service.write_text(f'identities = "identities"\n[tls]\n{files}')
    assert "if it has a certificate, that is revoked" in words(
        command("revoke", "service.toml", "a")
    )
    now = time.time()
    with closing(Identities(service.parent / "identities")) as identities:
        with pytest.raises(EnrolmentError, match="was revoked"):
            identities.certified("a", now - 1, now)
        identities.certified("a", now + 1, now)
