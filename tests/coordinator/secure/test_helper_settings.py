"""The helper file and the roster: what is read, and what their errors say."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.secure.helper_settings import (
    HelperFileError,
    HelperSettings,
    helper_file,
)
from fleetlearn_protocol.secure.roster import RosterError, read_roster
from helper_fleet import fleet, write_roster

TLS = '[tls]\ncertificate = "c.pem"\nkey = "k.pem"\n'
GOOD = 'minimum = 3\ndatabase = "helper.sqlite"\n'


def test_a_new_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "helper.toml"
    file.write_text(helper_file(12))
    settings = HelperSettings.load(file)
    assert settings.minimum == 12
    assert settings.database == tmp_path / "helper.sqlite"
    assert settings.tls.certificate == tmp_path / "tls" / "certificate.pem"
    assert (settings.host, settings.port) == ("127.0.0.1", 8770)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD, "tls is missing; a helper file must have it"),
        (TLS, "minimum is missing"),
        ("minimum = 1\n" + GOOD[12:] + TLS, "minimum = 1 is refused: it takes an integer, at"),
        (GOOD + "minimun = 3\n" + TLS, "minimun is not a key of a helper file; did you mean"),
        (GOOD + "most_devices = 2\n" + TLS, "most_devices = 2 is refused: it is less than"),
        (GOOD + "port = 70000\n" + TLS, "port = 70000 is refused"),
        (GOOD + TLS + 'clients = "ca.pem"\n', "tls.clients is refused"),
        (
            GOOD + 'runs = "runs"\n' + TLS,
            "this is a file of a coordinator, and a helper file is expected",
        ),
        ("minimum = ", "this is not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "helper.toml"
    file.write_text(text)
    with pytest.raises(HelperFileError) as refused:
        HelperSettings.load(file)
    assert refused.value.text.startswith(f"{file}: {words}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HelperFileError, match="the helper file cannot be read: no such file"):
        HelperSettings.load(tmp_path / "helper.toml")


def test_a_roster_is_read(tmp_path: Path) -> None:
    devices = fleet(["a", "b-2"])
    found = read_roster(write_roster(tmp_path / "roster", devices))
    assert found == [(device.name, device.public) for device in devices]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n", r'line 1: "a" was given; a name and 64'),
        (f"# x\n\na {'g' * 64}\n", "line 3"),
        (f"a b {'0' * 64}\n", "line 1"),
        (f"a {'0' * 64}\na {'1' * 64}\n", "line 2: a is named twice"),
        (f"a {'0' * 64}\nb {'0' * 64}\n", "line 2: b has the key of a"),
        ("# nobody\n", "names no device"),
    ],
)
def test_a_roster_s_mistake_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "roster"
    file.write_text(text)
    with pytest.raises(RosterError, match=words):
        read_roster(file)


def test_a_roster_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RosterError, match="the roster cannot be read"):
        read_roster(tmp_path / "roster")
