"""A party's data, sorted by the hashes of its rows' ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bottom_manifest import bottom_manifest
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.vertical.party_table import (
    PartyTable,
    read_key,
    read_own_rows,
    read_table,
)
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.vertical.alignment import digest_of, hash_rows, membership
from fleetlearn_protocol.vertical.messages import CommonRows

KEY = b"k" * 32
Y = Input("y", "int64", (), 2)


def table_of(path: Path, text: str, options: str = "?x=a,b") -> PartyTable:
    file = path / "bank.csv"
    file.write_text(text)
    return read_table(f"{file}{options}", "id", KEY, bottom_manifest())


ROWS = "id,a,b,y\nanna,1,2,0\nbert,3,4,1\n17,5,6,1\n"


def test_rows_are_sorted_by_their_hashes_whatever_their_order(tmp_path: Path) -> None:
    one = table_of(tmp_path, ROWS)
    other = table_of(tmp_path, "id,a,b,y\n17,5,6,1\nanna,1,2,0\nbert,3,4,1\n")
    assert np.array_equal(one.hashes, np.sort(hash_rows(["anna", "bert", "17"], KEY)))
    assert np.array_equal(one.hashes, other.hashes)
    assert np.array_equal(one.arrays[0], other.arrays[0])
    assert np.array_equal(one.targets([Y])[0], other.targets([Y])[0])
    anna = list(one.hashes).index(hash_rows(["anna"], KEY)[0])
    assert one.arrays[0][anna].tolist() == [1, 2]
    assert one.targets([Y])[0][anna] == 0
    assert one.targets([]) == []


def test_arrays_of_an_npz_stand_beside_ids_and_labels(tmp_path: Path) -> None:
    file = tmp_path / "bank.npz"
    x = np.array([[1, 2], [3, 4]], np.float32)
    np.savez(file, id=np.array([5, 6]), x=x, y=np.array([0, 1]))
    table = read_table(str(file), "id", KEY, bottom_manifest())
    assert sorted(table.arrays[0].tolist()) == x.tolist()


def test_the_common_rows_are_checked_by_their_digest(tmp_path: Path) -> None:
    table = table_of(tmp_path, ROWS)
    common = table.hashes[[0, 2]]
    bits = membership(table.hashes, common)
    right = CommonRows(2, digest_of(common), len(bits), 0)
    assert table.common(right, bits).tolist() == [0, 2]
    with pytest.raises(ProtocolError, match="of this party's rows they are 2 with the digest"):
        table.common(CommonRows(2, "0" * 64, len(bits), 0), bits)
    with pytest.raises(ProtocolError, match="says that 3 rows"):
        table.common(CommonRows(3, digest_of(common), len(bits), 0), bits)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,a,b\nanna,1,2\n", "there is no column id with the rows' ids; there are name, a, b"),
        ("id,a,b\nanna,1,2\nanna,3,4\n", "ids are there twice: 'anna' in rows 0 and 1"),
        ("id,a,b\nanna,1,2\nbert,nan,4\n", "expected finite numbers"),
        ("id,a\nanna,1\n", "there is no column b"),
    ],
)
def test_data_that_cannot_take_part_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        table_of(tmp_path, text)


def test_labels_that_are_not_there_or_out_of_range_are_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, ROWS.replace("bert,3,4,1", "bert,3,4,2"))
    with pytest.raises(DataError, match="is to give the labels, and there is no column z"):
        table.targets([Input("z", "int64", ())])
    with pytest.raises(DataError, match="y: 2; expected 0 to 1"):
        table.targets([Y])


@pytest.mark.parametrize("name", ["a", "b", "x", "id"])
def test_ids_and_features_are_no_labels_whatever_the_coordinator_asks_for(
    tmp_path: Path, name: str
) -> None:
    """It was sent any column that it named, where the command says that rows and ids stay."""
    shape = (2,) if name == "x" else ()
    wanted = [Y, Input(name, "float32", shape)]
    table = table_of(tmp_path, ROWS.replace("anna", "1").replace("bert", "2"))
    own = read_own_rows(f"{tmp_path / 'bank.csv'}?x=a,b", bottom_manifest())
    for rows in (table, own):
        if rows is own and name == "id":  # nobody said that it is one
            continue
        with pytest.raises(DataError, match=f"no column {name} beside ids and features"):
            rows.targets(wanted)
    assert own.targets([Y])[0].tolist() == [0, 1, 1]


def test_features_by_another_name_are_no_labels_either(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.ones((2, 2), np.float32), y=np.array([0, 1]))
    own = read_own_rows(str(tmp_path / "own.npz"), bottom_manifest())
    assert own.targets([Y])[0].tolist() == [0, 1]
    with pytest.raises(DataError, match="no column x beside ids and features"):
        own.targets([Input("x", "float32", (2,))])
    (tmp_path / "bank.csv").write_text("a1,a2,y\n1,2,0\n3,4,1\n", "utf-8")
    own = read_own_rows(f"{tmp_path / 'bank.csv'}?x=a*", bottom_manifest())
    with pytest.raises(DataError, match="no column a2 beside ids and features"):
        own.targets([Input("a2", "float32", ())])


def test_the_key_is_read_without_what_is_around_it(tmp_path: Path) -> None:
    (tmp_path / "rows.key").write_text(f"{'k' * 32}\n")
    assert read_key(str(tmp_path / "rows.key")) == KEY
    with pytest.raises(DataError, match=r"the parties. key .* cannot be read"):
        read_key(str(tmp_path / "none.key"))
