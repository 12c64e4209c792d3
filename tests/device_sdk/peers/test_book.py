"""The address book: what it may say, and what is wrong with it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from fleetlearn_device.peers.book import (
    BookError,
    PeerGraph,
    compared_settings,
    read_book,
)


def card(name: str, text: str = "") -> str:
    certificate = base64.b64encode(f"certificate of {name}{text}".encode()).decode()
    return f'[[peer]]\nname = "{name}"\naddress = "127.0.0.1:8766"\ncertificate = "{certificate}"\n'


def book(folder: Path, *parts: str) -> str:
    path = folder / "peers.toml"
    path.write_text("\n".join(parts))
    return str(path)


def test_a_book(tmp_path: Path) -> None:
    settings = 'mode = "gossip"\ntraining = { epochs = 2, hyper = { lr = 0.1, mu = 1 } }'
    found = read_book(book(tmp_path, settings, card("a"), card("b")))
    assert found.names == ("a", "b")
    assert found.entry("a").place == ("127.0.0.1", 8766)
    assert found.entry("b").der == b"certificate of b"
    assert compared_settings(found) == {
        "mode": "gossip",
        "encoding": "float32",
        "epochs": "2",
        "local_steps": "0",
        "batch_size": "0",
        "seed": "0",
        "hyper.lr": "0.1",
        "hyper.mu": "1.0",
    }
    graph = PeerGraph(found)
    assert graph.neighbours("a") == ("b",)
    assert graph.weights("a", 1) == {"b": 0.5}


def test_a_matrix_stands_beside_the_book(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("0.5,0.5,0\n0.5,0.25,0.25\n0,0.25,0.75\n")
    settings = 'topology = { kind = "file", file = "w.csv" }'
    graph = PeerGraph(read_book(book(tmp_path, settings, card("a"), card("b"), card("c"))))
    assert graph.weights("b", 1) == {"a": 0.5, "c": 0.25}
    assert graph.weights("c", 1) == {"b": 0.25}


def test_neighbours_take_turns(tmp_path: Path) -> None:
    settings = 'topology = { kind = "one-peer-exponential" }'
    graph = PeerGraph(read_book(book(tmp_path, settings, *map(card, "abcd"))))
    assert [graph.weights("a", step) for step in (1, 2, 3)] == [{"b": 0.5}, {"c": 0.5}, {"b": 0.5}]
    assert graph.neighbours("a") == ("b", "c")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([card("a")], "it has 1 peers; expected 2 to 1000"),
        ([card("a"), card("a", "!")], "a is there twice"),
        ([card("a"), card("a").replace('"a"', '"b"')], "a and b have one certificate"),
        ([card("a"), card("b").replace("certificate = ", "certificate = 'x' # ")], "not base64"),
        ([card("a"), card("b").replace("127.0.0.1:8766", "here")], "expected HOST:PORT"),
        (['encoding = "topk-0.1"', card("a"), card("b")], "peers send whole models"),
        (['encoding = "zip"', card("a"), card("b")], "there is no encoding zip"),
        (["deadlin = 3", card("a"), card("b")], "is no address book: .*deadlin"),
        (["deadline = 0", card("a"), card("b")], "is no address book: .*deadline"),
        (["a = [", card("a"), card("b")], "is no address book"),
        (
            ["training = { epochs = 0 }", card("a"), card("b")],
            "training.epochs: expected a whole number >= 1",
        ),
    ],
)
def test_what_is_wrong_with_a_book(tmp_path: Path, parts: list[str], expected: str) -> None:
    with pytest.raises(BookError, match=expected):
        read_book(book(tmp_path, *parts))


def test_there_is_no_book(tmp_path: Path) -> None:
    with pytest.raises(BookError, match=r"none\.toml cannot be read: No such file"):
        read_book(str(tmp_path / "none.toml"))


def test_an_impossible_topology(tmp_path: Path) -> None:
    settings = 'topology = { kind = "torus", rows = 2 }'
    with pytest.raises(BookError, match="3 peers cannot stand in 2 rows"):
        PeerGraph(read_book(book(tmp_path, settings, *map(card, "abc"))))
