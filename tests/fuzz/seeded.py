"""Fuzzing without atheris: mutations from a seed. From Python 3.12 on, what reaches new lines is
mutated further."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any, NamedTuple

from tests.fuzz import seeds
from tests.fuzz.mutation import mutate
from tests.fuzz.targets.table import Target

PACKAGES = ("fleetlearn_protocol", "fleetlearn_coordinator", "fleetlearn_device")


class Finding(NamedTuple):
    """What a run of a target came to."""

    inputs: int
    seconds: float
    lines: int | None
    """Lines that the seeds did not reach and an input did. None: not known."""
    failed: bytes | None
    """The input that the target failed with, if one did."""
    error: BaseException | None


class Lines:
    """The lines of the packages that were reached so far. Each costs something the first time
    alone."""

    def __init__(self) -> None:
        self.reached = 0
        self._tool: Any = getattr(sys, "monitoring", None)
        if self._tool is not None:
            self._tool.use_tool_id(self._tool.COVERAGE_ID, "fuzz")
            self._tool.register_callback(self._tool.COVERAGE_ID, self._tool.events.LINE, self._line)
            self._tool.restart_events()  # those that another target has reached
            self._tool.set_events(self._tool.COVERAGE_ID, self._tool.events.LINE)

    def _line(self, code: CodeType, line: int) -> Any:
        self.reached += any(package in code.co_filename for package in PACKAGES)
        return self._tool.DISABLE

    def close(self) -> None:
        if self._tool is not None:
            self._tool.set_events(self._tool.COVERAGE_ID, 0)
            self._tool.free_tool_id(self._tool.COVERAGE_ID)


def fuzz(name: str, target: Target, seed: int, inputs: int, seconds: float) -> Finding:
    """Run a target with its seeds and corpus, then with mutations of them, until ``inputs`` are
    done or the time is over."""
    random, lines, begin, done = Random(seed), Lines(), time.monotonic(), 0
    pool = [*target.seeds(), *seeds.corpus(name)]
    known, data = 0, b""
    first = len(pool)
    try:
        while done < first or (done < inputs and time.monotonic() - begin < seconds):
            data = pool[done] if done < first else mutate(random.choice(pool), random, pool)
            before = lines.reached
            target.run(data)
            done += 1
            if done == first:
                known = lines.reached
            elif done > first and lines.reached > before:
                pool.append(data)
    except Exception as error:
        return Finding(done + 1, time.monotonic() - begin, None, data, error)
    finally:
        lines.close()
    new = lines.reached - known if hasattr(sys, "monitoring") else None
    return Finding(done, time.monotonic() - begin, new, None, None)


def keep(folder: Path, data: bytes) -> Path:
    """Write an input that a target failed with. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"failed-{len(list(folder.glob('failed-*')))}"
    path.write_bytes(data)
    return path
