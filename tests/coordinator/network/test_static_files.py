"""The files of a folder: which are read, and as what."""

from __future__ import annotations

import os
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import pytest
from fleetlearn_coordinator.network.http_port import RefusedError
from fleetlearn_coordinator.network.static_files import FOR_EVER, HASHED, StaticFolder
from fleetlearn_protocol.errors import FleetError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = tmp_path / "page"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("<p>hello")
    (page / "assets" / "ort.wasm").write_bytes(b"\0asm" * 5)
    return page


def found(folder: Path, path: str, **headers: str) -> tuple[HTTPStatus, dict[str, str], bytes]:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    answer = StaticFolder(folder).find(tuple(path.split("/")), given)
    with closing(answer.content):
        return answer.status, dict(answer.headers), answer.content.read(answer.size)


def test_files_and_the_folder_itself(folder: Path) -> None:
    status, headers, content = found(folder, "")
    assert (status, content) == (200, b"<p>hello")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Length"] == "8"
    assert headers["Cache-Control"] == "no-cache"
    _, headers, content = found(folder, "assets/ort.wasm")
    assert (headers["Content-Type"], len(content)) == ("application/wasm", 20)


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "../secret",
        "assets/../../secret",
        "assets/..",
        ".",
        "./index.html",
        "assets//ort.wasm",
        ".hidden",
        "assets",
        "assets/",
        "..\\secret",
        "index.html\0",
        "/etc/passwd",
        "nothing",
        "index.html/x",
        "x" * 300,
        "out",
        "out-folder/secret",
        "hidden-link",
        "circle",
        "pipe",
    ],
)
def test_what_is_not_there_for_anybody(folder: Path, path: str) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / ".hidden").write_text("secret")
    (folder / "out").symlink_to("../secret")
    (folder / "out-folder").symlink_to("..")
    (folder / "hidden-link").symlink_to(".hidden")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    with pytest.raises(RefusedError) as refused:
        found(folder, path)
    assert refused.value.status == HTTPStatus.NOT_FOUND
    assert refused.value.text == "there is no such file"


def test_a_link_within_the_folder_counts_as_where_it_leads(folder: Path) -> None:
    (folder / "same.wasm").symlink_to("assets/ort.wasm")
    assert found(folder, "same.wasm")[0] == 200


def test_a_file_that_a_browser_has_is_not_sent_again(folder: Path) -> None:
    tag = found(folder, "index.html")[1]["ETag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        status, headers, content = found(folder, "index.html", if_none_match=known)
        assert (status, headers["ETag"], content) == (304, tag, b"")
    (folder / "index.html").write_text("<p>hello again")
    status, headers, _ = found(folder, "index.html", if_none_match=tag)
    assert status == 200
    assert headers["ETag"] != tag


def test_a_packed_file_is_sent_to_who_takes_it_while_it_is_of_the_same_content(
    folder: Path,
) -> None:
    plain, packed = folder / "assets" / "ort.wasm", folder / "assets" / "ort.wasm.gz"
    packed.write_bytes(b"packed")
    status, headers, content = found(folder, "assets/ort.wasm", accept_encoding="br, gzip;q=0.5")
    assert (status, content, headers["Content-Encoding"]) == (200, b"packed", "gzip")
    assert (headers["Content-Type"], headers["Vary"], headers["Content-Length"]) == (
        "application/wasm", "Accept-Encoding", "6",
    )  # fmt: skip
    assert (
        found(folder, "assets/ort.wasm", accept_encoding="gzip", if_none_match=headers["ETag"])[0]
        == 304
    )
    for accepted in ("", "br", "gzip;q=0", "gzip; q=0.0"):
        _, headers, content = found(folder, "assets/ort.wasm", accept_encoding=accepted)
        assert "Content-Encoding" not in headers
        assert headers["Vary"] == "Accept-Encoding"
        assert len(content) == 20
    os.utime(packed, ns=(0, plain.stat().st_mtime_ns - 1))
    assert "Content-Encoding" not in found(folder, "assets/ort.wasm", accept_encoding="gzip")[1]


def test_names_with_a_hash_are_kept_for_long(folder: Path) -> None:
    (folder / "page-0123abcd.js").write_text("")
    assert found(folder, "page-0123abcd.js")[1]["Cache-Control"] == FOR_EVER
    assert all(map(HASHED.search, ("page-5XQKZ2AB.js", "a.0f3e5d7c9b1a.css", "page-QWERTZUI.js")))
    assert not any(
        map(HASHED.search, ("ort-wasm-simd-threaded.wasm", "page-deadbeef.js", "page.js", "sw.js"))
    )


def test_a_folder_without_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"is no folder with a file index\.html"):
        StaticFolder(tmp_path)
