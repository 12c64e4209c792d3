"""The tools that draw a run's curves: TensorBoard, MLflow, and files with Weights & Biases' keys.

A tool remembers beside the points which rows it has, so that a later call adds only what came
since. A call that was killed may leave points which the next one adds again, with the same step and
value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fleetlearn_coordinator.results.errors import ResultsError
from fleetlearn_coordinator.results.points import (
    RowsSent,
    curves_of,
    last_of,
    points_of,
    rows_after,
)
from fleetlearn_coordinator.results.result_table import ResultRow, tool
from fleetlearn_coordinator.results.run_results import RunResults, flat

REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. /]")
"""Characters that a name in MLflow cannot have, whatever the version."""
METRICS_IN_CALL, PARAMETER_LENGTH = 1000, 500
"""MLflow's limits, the parameter's in characters: of the oldest stores."""
MARKER = "fleetlearn-sent.json"
"""In TensorBoard's folder: which rows are there."""


class Tracker(Protocol):
    """A tool that draws curves."""

    def add(self, results: RunResults) -> int:
        """Add the rows that are not there yet, and return how many they are. Raises ResultsError,
        OSError."""


class TensorBoard:
    """A folder of event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, results: RunResults) -> int:
        marker = self._folder / MARKER
        sent = _read_marker(marker)
        rows = rows_after(results, sent)
        if not rows:
            return 0
        writer = tool("tensorboard.summary").Writer(str(self._folder))
        try:
            for row in rows:
                for point in points_of(row):
                    writer.add_scalar(point.curve, point.value, point.step, wall_time=point.time)
        finally:
            writer.close()
        temporary = marker.with_name(f".{MARKER}")
        temporary.write_bytes(msgspec.json.encode(last_of(results, sent)))
        temporary.replace(marker)
        return len(rows)


def _read_marker(marker: Path) -> RowsSent:
    try:
        return msgspec.json.decode(marker.read_bytes(), type=RowsSent)
    except FileNotFoundError:
        return RowsSent()
    except msgspec.DecodeError as error:
        raise ResultsError(
            f"{marker} is damaged ({error}): delete its folder, and all rows are written again"
        ) from None


class MLflow:
    """A run of an MLflow experiment, in any store that MLflow knows."""

    def __init__(self, uri: str, experiment: str, key: str) -> None:
        """``key``: tells the run from all others of the experiment, such as where its data are."""
        self._mlflow = tool("mlflow")
        self._uri, self._experiment, self._key = uri, experiment, key

    def add(self, results: RunResults) -> int:
        try:
            client = self._mlflow.tracking.MlflowClient(tracking_uri=self._uri)
            return self._add(client, results)
        except self._mlflow.exceptions.MlflowException as error:
            raise ResultsError(f"MLflow at {self._uri} refuses: {error}") from None
        except ImportError as error:  # the database's driver is no part of mlflow-skinny
            raise ResultsError(
                f"MLflow cannot use {self._uri} with what is installed here ({error}): pip install "
                "mlflow"
            ) from None

    def _add(self, client: Any, results: RunResults) -> int:
        run = self._find(client) or self._create(client, results)
        tags, number = run.data.tags, run.info.run_id
        sent = RowsSent(
            int(tags.get("fleetlearn.round", 0)), int(tags.get("fleetlearn.evaluation", 0))
        )
        rows = rows_after(results, sent)
        metrics = [
            self._mlflow.entities.Metric(
                REFUSED_BY_MLFLOW.sub("_", point.curve),
                point.value,
                int(1000 * point.time),
                point.step,
            )
            for row in rows
            for point in points_of(row)
        ]
        for begin in range(0, len(metrics), METRICS_IN_CALL):
            client.log_batch(number, metrics=metrics[begin : begin + METRICS_IN_CALL])
        last = last_of(results, sent)
        client.set_tag(number, "fleetlearn.round", str(last.round))
        client.set_tag(number, "fleetlearn.evaluation", str(last.evaluation))
        if results.finished:
            client.set_terminated(number)
        return len(rows)

    def _find(self, client: Any) -> Any:
        """Return the run, or None where there is none yet."""
        experiment = client.get_experiment_by_name(self._experiment)
        token = None
        while experiment is not None:
            # Compared here, as a path may hold characters that a filter cannot.
            page = client.search_runs([experiment.experiment_id], page_token=token)
            for run in page:
                if run.data.tags.get("fleetlearn.key") == self._key:
                    return run
            token = page.token
            if not token:
                break
        return None

    def _create(self, client: Any, results: RunResults) -> Any:
        experiment = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        run = client.create_run(number, run_name=results.name, tags={"fleetlearn.key": self._key})
        for name, value in flat(results.settings).items():
            client.log_param(
                run.info.run_id, REFUSED_BY_MLFLOW.sub("_", name), str(value)[:PARAMETER_LENGTH]
            )
        return run


class HistoryFile:
    """A file of JSON lines with the keys of Weights & Biases' history: ``_step`` (the last round
    that is over), ``_timestamp``, ``_runtime``, and one for each curve. An evaluation's line has
    ``evaluation`` and ``version`` too."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, results: RunResults) -> int:
        content = self._file.read_bytes() if self._file.exists() else b""
        whole = content.rfind(b"\n") + 1  # a killed call may have written half a line
        try:
            lines = msgspec.json.Decoder(dict[str, Any]).decode_lines(content[:whole])
            sent = RowsSent(
                max((line["_step"] for line in lines), default=0),
                max((line.get("evaluation", 0) for line in lines), default=0),
            )
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise ResultsError(
                f"{self._file} has lines that were not written here ({error!r}): name another file"
            ) from None
        rows = rows_after(results, sent)
        began = lines[0]["_timestamp"] - lines[0]["_runtime"] if lines else _began(rows)
        new, step = [], sent.round
        for row in rows:
            step = row.get("round", step)
            new.append(_history_line(row, step, began))
        with self._file.open("r+b" if content else "wb") as file:
            file.truncate(whole)
            file.seek(whole)
            file.write(msgspec.json.Encoder().encode_lines(new))
        return len(rows)


def _began(rows: list[ResultRow]) -> float:
    return min((row["time"] - row.get("seconds", 0.0) for row in rows), default=0.0)


def _history_line(row: ResultRow, step: int, began: float) -> dict[str, Any]:
    which = {key: row[key] for key in ("evaluation", "version") if "evaluation" in row}
    where = {"_step": step, "_timestamp": row["time"], "_runtime": row["time"] - began}
    return {**where, **which, **curves_of(row)}
