"""What people ask of a run, in files of its data directory: a file is the request as long as it is
there."""

from __future__ import annotations

import re
from pathlib import Path
from secrets import token_hex

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.requests import RollBack, decode_roll_back, encode_roll_back

EVALUATION = "evaluate.request"
ROLL_BACK = "roll-back.request"


class FileRequests:
    """``Requests`` in a data directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ask_for_evaluation(self) -> None:
        self._write(EVALUATION, token_hex(8))

    def evaluation(self) -> str | None:
        return self._read(EVALUATION)

    def remove_evaluation(self) -> None:
        (self.folder / EVALUATION).unlink(missing_ok=True)

    def ask_for_roll_back(self, version: int, who: str) -> None:
        self._write(ROLL_BACK, encode_roll_back(RollBack(token_hex(8), version, who)))

    def roll_back(self) -> RollBack | None:
        text = self._read(ROLL_BACK) or ""
        return decode_roll_back(text) if re.fullmatch("[^ ]* [0-9]+ .*", text) else None

    def remove_roll_back(self) -> None:
        (self.folder / ROLL_BACK).unlink(missing_ok=True)

    def _write(self, file: str, text: str) -> None:
        if not self.folder.is_dir():
            why = f"{self.folder} does not exist: serve the plan first"
            raise StoreError(Code.UNKNOWN_CONTENT, why)
        draft = self.folder / f"{file}.draft"
        draft.write_text(text, encoding="ascii")
        draft.replace(self.folder / file)

    def _read(self, file: str) -> str | None:
        try:
            return (self.folder / file).read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return None
