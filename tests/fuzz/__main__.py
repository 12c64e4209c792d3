"""``make fuzz``: runs the fuzz targets, each for some seconds, and says how many inputs, how quick,
and what was new.

With atheris where it is installed (Linux, macOS; the extra ``fuzz``), else with mutations from a
seed. An input that a target fails with is kept in .fuzz/TARGET/, and the status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.seeded import fuzz, keep
from tests.fuzz.targets.decoders import SCRATCH, scratch_parent
from tests.fuzz.targets.table import TARGETS

KEPT = Path(".fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.split("\n")[0])
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}"
    )
    parser.add_argument("--seconds", type=int, default=20, help="for each target; default: 20")
    parser.add_argument("--inputs", type=int, default=10**9, help="for each target, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations; default: 1")
    parser.add_argument(
        "--without-atheris",
        action="store_true",
        help="mutations from the seed, also where atheris is",
    )
    parser.add_argument(
        "--replay", type=Path, help="run one target with this file, and show where it fails"
    )
    options = parser.parse_args()
    unknown = {*options.targets} - {*TARGETS}
    if unknown:
        parser.error(
            f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}"
        )
    for name in ("fleetlearn", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if options.replay is not None:
        if len(options.targets) != 1:
            parser.error("--replay needs one target")
        TARGETS[options.targets[0]].run(options.replay.read_bytes())
        print("no failure")
        return 0
    guided = importlib.util.find_spec("atheris") is not None and not options.without_atheris
    if not guided:
        print(
            "atheris is not used: inputs are mutations from the seed"
            + (
                ""
                if hasattr(sys, "monitoring")
                else ", and new coverage is not measured (that needs atheris, or Python 3.12)"
            )
        )
    names = options.targets or [*TARGETS]
    run = _run_guided if guided else _run_seeded
    total = failures = 0
    for name in names:
        inputs, failed = run(name, options)
        total, failures = total + inputs, failures + failed
    print(f"{total} inputs of {len(names)} targets, {failures} targets failed")
    return 1 if failures else 0


def _run_seeded(name: str, options: argparse.Namespace) -> tuple[int, bool]:
    found = fuzz(name, TARGETS[name], options.seed, options.inputs, options.seconds)
    new = "not measured" if found.lines is None else f"{found.lines} new lines"
    _say(name, found.inputs, found.inputs / max(found.seconds, 1e-9), new)
    if found.failed is not None and found.error is not None:
        traceback.print_exception(found.error)
        _say_failed(name, keep(KEPT / name, found.failed))
    return found.inputs, found.failed is not None


def _run_guided(name: str, options: argparse.Namespace) -> tuple[int, bool]:
    folder = KEPT / name
    before = {*folder.glob("failed-*")}
    numbers = (str(number) for number in (options.seconds, options.inputs, options.seed))
    command = [sys.executable, "-m", "tests.fuzz.guided", name, str(folder), *numbers]
    # libFuzzer ends by _exit
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=scratch_parent()) as scratch:
        environment = {**os.environ, SCRATCH: scratch}
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment
        )
    said = ran.stdout + ran.stderr
    units = re.search(r"number_of_executed_units:\s*(\d+)", said)
    inputs = int(units[1]) if units else 0
    rate = re.search(r"average_exec_per_sec:\s*(\d+)", said)
    coverage = [int(count) for count in re.findall(r"\bcov: (\d+)", said)]
    begin = re.search(r"INITED\s+cov: (\d+)", said)
    new = (
        f"{coverage[-1]} edges, {coverage[-1] - int(begin[1])} new"
        if coverage and begin
        else "not known"
    )
    _say(name, inputs, float(rate[1]) if rate else 0.0, new)
    failed = ran.returncode != 0
    if failed:
        lines = [line for line in said.splitlines() if not line.startswith("#")]
        print("\n".join(lines)[-6000:])
        for path in sorted({*folder.glob("failed-*")} - before):
            _say_failed(name, path)
    return inputs, failed


def _say(name: str, inputs: int, rate: float, coverage: str) -> None:
    print(f"{name:18} {inputs:9} inputs {rate:8.0f}/s   {coverage}", flush=True)


def _say_failed(name: str, path: Path) -> None:
    print(
        f'FAILED: the input is {path}; to see it again: make fuzz ARGS="{name} --replay {path}"',
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
