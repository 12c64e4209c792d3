"""``fleetlearn-coordinator helper``, as its operator types it."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import pytest
from commands_typed import check, typed
from fleetlearn_coordinator.__main__ import app
from helper_fleet import SecureDevice, fleet, write_roster
from typer.testing import CliRunner, Result


def type_wrong(*words: str | Path) -> Result:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 1, done.output
    return done


@pytest.fixture
def file(tmp_path: Path) -> Path:
    typed("helper", "init", tmp_path / "helper", "helper.example", "192.0.2.7", "--minimum", 3)
    return tmp_path / "helper" / "helper.toml"


def test_a_new_helper_says_what_others_are_to_be_given(file: Path) -> None:
    (view,) = check("helper status", typed("helper", "status", file, "--json"))
    certificate = (file.parent / "tls" / "certificate.pem").read_text()
    shown = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    assert view["certificate"] == shown
    assert view["address"] == "https://127.0.0.1:8770"
    assert (view["minimum"], view["devices"], view["sets"], view["last"]) == (3, 0, 0, None)
    text = typed("helper", "status", file)
    for part in (view["key"], shown, "helper.example, 192.0.2.7", "0 sums of 0 runs, 0 seeds"):
        assert part in text


def test_init_overwrites_nothing(file: Path) -> None:
    before = {path: path.read_bytes() for path in file.parent.glob("**/*") if path.is_file()}
    done = type_wrong("helper", "init", file.parent, "helper.example")
    assert "is there already" in done.stderr
    file.unlink()
    done = type_wrong("helper", "init", file.parent, "helper.example")
    assert "with a key and what was done with it" in done.stderr
    assert (file.parent / "helper.sqlite").read_bytes() == before[file.parent / "helper.sqlite"]


def test_devices_are_let_in_and_kept_out(file: Path, tmp_path: Path) -> None:
    roster = write_roster(tmp_path / "roster", fleet(["a", "b"]))
    for expected in ("2 of 2 devices are new", "0 of 2 devices are new"):
        done = CliRunner().invoke(app, ["helper", "enrol", str(file), str(roster)])
        assert (done.exit_code, done.stderr.strip()) == (0, expected)
    typed("helper", "revoke", file, "a")
    (view,) = check("helper status", typed("helper", "status", file, "--json"))
    assert view["devices"] == 1
    assert "no device called a is enrolled" in type_wrong("helper", "revoke", file, "a").stderr
    other = write_roster(tmp_path / "other", [SecureDevice("c")])
    other.write_text(other.read_text().replace("c ", "b "))
    assert "b is enrolled with another key" in type_wrong("helper", "enrol", file, other).stderr


def test_a_lost_database_stops_it(file: Path) -> None:
    (file.parent / "helper.sqlite").unlink()
    for verb in ("serve", "status"):
        assert "is never made again" in type_wrong("helper", verb, file).stderr
    assert not (file.parent / "helper.sqlite").exists()


def test_a_certificate_that_cannot_be_read_is_named(file: Path) -> None:
    (file.parent / "tls" / "certificate.pem").write_text("no certificate")
    assert "cannot be read as a PEM certificate" in type_wrong("helper", "status", file).stderr
