"""What docs/start/peers.md tells a reader to type, typed on one machine."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime
import pytest
import typed
from processes import ROOT, free_port

PAGE = (ROOT / "docs" / "start" / "peers.md").read_text()
BOARD = re.compile(r"192\.0\.2\.1(\d):8766")


@pytest.mark.slow
def test_the_guide(tmp_path: Path) -> None:
    ports = {number: free_port() for number in "12345"}
    page = BOARD.sub(lambda board: f"127.0.0.1:{ports[board[1]]}", PAGE)
    assert page != PAGE
    typed.write_files(page, tmp_path, free_port())
    typed.type_in(
        [command for section in typed.sections(page).values() for command in section],
        tmp_path,
        free_port(),
        lambda command, printed, status: typed.assert_shown(command, printed, status, tmp_path),
    )
    for number in "12345":
        onnxruntime.InferenceSession(tmp_path / f"board-{number}" / "model.onnx")


def test_every_key_of_the_book_is_on_the_page() -> None:
    from fleetlearn_device.peers.book import PeerBook, PeerTraining

    keys = {*PeerBook.__struct_fields__, *PeerTraining.__struct_fields__} - {"peer"}
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()
