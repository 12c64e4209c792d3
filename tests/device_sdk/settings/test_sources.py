"""Flag, variable, file, default: which one counts, and what a wrong one says."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from fleetlearn_device.data.sources import SOURCES
from fleetlearn_device.settings.kinds import DATA_KINDS
from fleetlearn_device.settings.sources import (
    SettingError,
    Values,
    add_flags,
    read_settings,
    required,
    unknown_variables,
)

FILE = """\
coordinator = "ws://127.0.0.1:9"
state = "kept/here"

[states]
tags = ["roof", "eu"]
charging = true

[limits]
threads = 4

[connection]
insecure = true
token = "secret-of-the-file"
"""


def read(*flags: str, file: str | None = None, folder: Path = Path(), **variables: str) -> Values:
    """The settings by these flags, a file with this text and these variables."""
    words = [*flags]
    if file is not None:
        (folder / "device.toml").write_text(file)
        words += ["--config", str(folder / "device.toml")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return read_settings(parser.parse_args(words), variables)


def test_a_flag_counts_before_a_variable_before_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    def threads(*flags: str, file: str | None = None, **variables: str) -> tuple[object, str]:
        return read(*flags, file=file, folder=tmp_path, **variables)["limits.threads"]

    assert threads() == (1, "default")
    where = f"{tmp_path / 'device.toml'}, line 9"
    assert threads(file=FILE) == (4, where)
    assert threads(file=FILE, FLEETLEARN_THREADS="") == (4, where)
    assert threads(file=FILE, FLEETLEARN_THREADS="3") == (3, "FLEETLEARN_THREADS")
    assert threads("--threads", "2", file=FILE, FLEETLEARN_THREADS="3") == (2, "--threads")


def test_each_source_has_its_way_to_write_a_value(tmp_path: Path) -> None:
    of_file = read(file=FILE, folder=tmp_path)
    assert of_file["states.tags"].value == ("roof", "eu")
    assert of_file["states.charging"].value is True
    assert of_file["connection.insecure"].value is True
    assert of_file["state"].value == str(tmp_path / "kept/here")
    of_variables = read(
        FLEETLEARN_TAG="roof  eu", FLEETLEARN_CHARGING="no", FLEETLEARN_INSECURE="yes",
        FLEETLEARN_STATE="kept/here",
    )  # fmt: skip
    assert of_variables["states.tags"].value == ("roof", "eu")
    assert of_variables["states.charging"].value is False
    assert of_variables["connection.insecure"].value is True
    assert of_variables["state"].value == "kept/here", "as a flag: from where the command runs"
    of_flags = read("--tag", "roof", "--tag", "eu", "--charging", "no", "--insecure")
    assert of_flags["states.tags"].value == ("roof", "eu")
    assert of_flags["states.charging"].value is False
    assert of_flags["connection.insecure"] == (True, "--insecure")


def test_a_flag_switches_off_what_the_file_switches_on(tmp_path: Path) -> None:
    found = read("--no-insecure", file=FILE, folder=tmp_path)["connection.insecure"]
    assert found == (False, "--no-insecure")


def test_a_home_folder_stays_for_the_device_to_find(tmp_path: Path) -> None:
    assert read(file='state = "~/fleet"', folder=tmp_path)["state"].value == "~/fleet"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(FILE)
    assert read(FLEETLEARN_CONFIG=str(tmp_path / "d.toml"))["limits.threads"].value == 4


@pytest.mark.parametrize(
    ("flags", "variables", "text"),
    [
        (("--threads", "0"), {}, "--threads: '0' was given; expected a whole number from 1 to"),
        ((), {"FLEETLEARN_THREADS": "two"}, "FLEETLEARN_THREADS: 'two' was given; expected a"),
        (("--runtime", "tf"), {}, "--runtime: 'tf' was given; expected auto, onnx or ort-training"),
        ((), {"FLEETLEARN_INSECURE": "2"}, "FLEETLEARN_INSECURE: '2' was given; expected true or"),
        (("--name", ""), {}, "--name: '' was given; expected a text that is not empty"),
        (("--config", "missing.toml"), {}, "missing.toml: the settings file cannot be read: No"),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_place_and_what_was_expected(
    flags: tuple[str, ...], variables: dict[str, str], text: str
) -> None:
    with pytest.raises(SettingError, match=re.escape(text)):
        read(*flags, **variables)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("[limits]\n\nthreads = 'x'", "device.toml, line 3: limits.threads: 'x' was given; exp"),
        ("[limits]\nthreads = true", "line 2: limits.threads: True was given; expected a whole"),
        ("limits = {threads = 0}", "line 1: limits.threads: 0 was given; expected a whole number"),
        ("limits.threads = 0", "line 1: limits.threads: 0 was given; expected a whole number"),
        ("states.tags = 'roof'", "states.tags: 'roof' was given; expected a list of tags"),
        ("states.tags = [3]", "states.tags: [3] was given; expected a list of tags"),
        ("[connection]\ntoken = 3", "connection.token: a value that is not shown was given;"),
        ("thread = 1", "line 1: thread is not a setting; did you mean limits.threads?"),
        ("threads = 1", "line 1: threads is not a setting; did you mean limits.threads?"),
        ("[limit]\nthreads = 1", "line 2: limit.threads is not a setting; did you mean limits.t"),
        ("zzz = 1", "line 1: zzz is not a setting; see `fleetlearn-device config`"),
        ("[weather]", "line 1: weather is not a setting"),
        ("data = 'mine.npz'", "line 1: data = 'mine.npz' was given; expected the table [data]"),
        ("a b = 1", "this is not TOML"),
    ],
)  # fmt: skip
def test_a_bad_file_names_its_line_and_key(file: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=re.escape(text)) as caught:
        read(file=file, folder=tmp_path)
    assert str(tmp_path / "device.toml") in str(caught.value)


def test_an_empty_table_that_there_is_sets_nothing(tmp_path: Path) -> None:
    assert read(file="[limits]", folder=tmp_path)["limits.threads"] == (1, "default")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="this is not UTF-8"):
        read("--config", str(tmp_path / "d.toml"))


def test_a_variable_that_looks_like_a_setting_and_is_none_is_noticed() -> None:
    variables = {
        "FLEETLEARN_THREDS": "2", "FLEETLEARN_ADMIN": "x", "FLEETLEARN_THREADS": "2", "PATH": "",
        "FLEETLEARN_CONFG": "y",
    }  # fmt: skip
    assert unknown_variables(variables) == [
        ("FLEETLEARN_THREDS", "FLEETLEARN_THREADS"),
        ("FLEETLEARN_CONFG", "FLEETLEARN_CONFIG"),
    ]


def test_a_secret_is_in_no_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        read(file="[connection]\ntoken = ['secret-of-the-file']", folder=tmp_path)
    assert "secret-of-the-file" not in str(caught.value)


def test_what_a_command_needs_and_nobody_said_names_all_three_ways() -> None:
    with pytest.raises(SettingError) as caught:
        required(read(), "data.source")
    assert str(caught.value) == (
        "data.source is not set: give --data DATA, the variable FLEETLEARN_DATA, or data.source in "
        "the file that --config names"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("mine.npz", "{folder}/mine.npz"),
        ("csv:a/b.log?x=a&y=b", "csv:{folder}/a/b.log?x=a&y=b"),
        ("csv:readings", "csv:{folder}/readings"),
        ("/data/mine.npz", "/data/mine.npz"),
        ("~/mine.npz", "~/mine.npz"),
        ("npz:~/mine", "npz:~/mine"),
        ("my.own:load", "my.own:load"),
    ],
)
def test_a_files_data_begin_at_its_folder_unless_they_are_a_function(
    given: str, expected: str, tmp_path: Path
) -> None:
    found = read(file=f'[data]\nsource = "{given}"\n', folder=tmp_path)["data.source"].value
    assert found == expected.format(folder=tmp_path)


def test_the_kinds_of_data_are_those_that_can_be_opened() -> None:
    assert set(DATA_KINDS) == set(SOURCES)
