"""The files in a run's folder, and how they are written.

    scenario.toml           the scenario, with all defaults and what was measured for it
    options.json            the options that the other files depend on
    made_of.json            values and hashes of files that they depend on
    events.jsonl            one line for each event, in the order of virtual time
    rounds.jsonl            one line for each round
    evaluations.jsonl       one line for each evaluation on devices, if there are any; other kinds
                            of exchanges have a file of their own
    kept_states.f32         what devices keep from task to task, if they keep something: a row of
                            float32 for each
    tied_vectors.f32        what they keep from tasks whose reports counted, such as SCAFFOLD's c_k,
                            in the same way
    residuals.f32           what top-k left out of their updates that counted, in the same way
    checkpoint.safetensors  model, server optimizer and fleet after a round: a stopped run goes on
                            from it
    model.safetensors       the model at the end
    summary.json            the run in a few numbers

A resumed run cuts its logs back to where they ended when the checkpoint was written. So it ends
with the same bytes as a run that was never stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.round_state import EXCHANGE_POLICIES
from fleetlearn_protocol.errors import in_words
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.training.kept_rows import KEPT_STATES, RESIDUALS, TIED_VECTORS

SCENARIO, OPTIONS, EVENTS, ROUNDS = "scenario.toml", "options.json", "events.jsonl", "rounds.jsonl"
MADE_OF = "made_of.json"
"""What the run is made of: values, and SHA-256 of files."""
CHECKPOINT, MODEL, SUMMARY = "checkpoint.safetensors", "model.safetensors", "summary.json"
LINES_AT_ONCE = 4096
"""Lines of the event log that are written together."""
Tensors = dict[str, NDArray[Any]]


def exchanges_file(kind: str) -> str:
    """Return the file with a line for each exchange of this kind."""
    return f"{kind}s.jsonl"


EVALUATIONS = exchanges_file(EVALUATION)


class RunLogs:
    """The open logs of a run.

    ``at``: the lengths of the logs in a checkpoint; they are cut back to these. Without ``at`` the
    logs begin empty, and what an earlier run left in the folder is deleted. Raises SimulatorError
    if a log is shorter than the checkpoint says.
    """

    def __init__(
        self, folder: Path, *, events: bool = True, at: dict[str, int] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.events = folder, events
        for name in (
            () if at else (CHECKPOINT, MODEL, SUMMARY, KEPT_STATES, TIED_VECTORS, RESIDUALS)
        ):
            (folder / name).unlink(missing_ok=True)
        for name in map(exchanges_file, EXCHANGE_POLICIES):
            if name not in (at or {}):  # there was none of the kind until then
                (folder / name).unlink(missing_ok=True)
        for name, length in (at or {}).items():
            if not (folder / name).exists() or (folder / name).stat().st_size < length:
                raise SimulatorError(
                    f"{folder / name} is shorter than when {CHECKPOINT} was written: run the "
                    "scenario again"
                )
        self._files = {
            name: (folder / name).open("r+b" if at else "w+b") for name in at or (EVENTS, ROUNDS)
        }
        for name, file in self._files.items():
            file.truncate((at or {}).get(name, 0))
            file.seek(0, os.SEEK_END)
        self._encoder = msgspec.json.Encoder()
        self._rows: list[Any] = []
        """Lines that are not written yet. To write many together takes a third of the time."""

    def write_events(self, rows: Sequence[Any]) -> None:
        """Add lines to the event log: mappings or msgspec structs."""
        if self.events:
            self._rows += rows
            if len(self._rows) >= LINES_AT_ONCE:
                self._write()

    def _write(self) -> None:
        self._files[EVENTS].write(self._encoder.encode_lines(self._rows))
        self._rows = []

    def write_round(self, row: dict[str, Any]) -> None:
        self._files[ROUNDS].write(self._encoder.encode(row) + b"\n")

    def write_exchange(self, kind: str, row: Mapping[str, Any]) -> None:
        name = exchanges_file(kind)
        if name not in self._files:
            self._files[name] = (self.folder / name).open("w+b")
        self._files[name].write(self._encoder.encode(row) + b"\n")

    def write_checkpoint(self, tensors: Tensors, state: dict[str, Any]) -> None:
        """Write the checkpoint, whole or not at all. The logs are written before it."""
        self._write()
        lengths = {}
        for name, file in self._files.items():
            file.flush()
            lengths[name] = file.tell()
        temporary = self.folder / f".{CHECKPOINT}"
        save_file(
            tensors,
            temporary,
            metadata={"state": self._encoder.encode({**state, "logs": lengths}).decode()},
        )
        temporary.replace(self.folder / CHECKPOINT)

    def close(self) -> None:
        self._write()
        for file in self._files.values():
            file.close()


def read_checkpoint(folder: Path) -> tuple[Tensors, dict[str, Any]] | None:
    """Return tensors and state of the checkpoint. None: there is none. Raises SimulatorError if it
    is damaged."""
    file = folder / CHECKPOINT
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="numpy") as content:
            state = msgspec.json.decode(content.metadata()["state"])
            return {name: content.get_tensor(name) for name in content.keys()}, state  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise SimulatorError(f"{file} is damaged ({error}): run the scenario again") from None


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a log. Raises SimulatorError if it cannot be read."""
    try:
        lines = (folder / name).read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise SimulatorError(
            f"{folder / name} cannot be read as a run's log: {in_words(error)}"
        ) from None


def read_json(file: Path) -> Any:
    """Read what ``write_json`` wrote. Raises SimulatorError if it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise SimulatorError(f"{file} cannot be read: {in_words(error)}") from None


def write_json(file: Path, value: Any) -> None:
    """Write readable JSON. The same value gives the same bytes."""
    write_whole(
        file,
        msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=1) + b"\n",
    )


def write_whole(file: Path, content: bytes) -> None:
    """Write a file. If writing fails, the file that was there stays."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_bytes(content)
    temporary.replace(file)


def save_model(folder: Path, table: Iterable[tuple[str, Vector]]) -> None:
    """Write the model's tensors, by name."""
    save_file({name: np.ascontiguousarray(value) for name, value in table}, folder / MODEL)
