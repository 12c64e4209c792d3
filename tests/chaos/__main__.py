"""``make chaos``: disturbs fleets of real processes by faults that a seed chooses.

They must end with the model of an undisturbed run, bit for bit.

Each seed is one fleet and one schedule of faults. What fails is kept in .chaos/seed-N/: all logs,
and the schedule, which can be played again and shortened. The status is 1 then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.fault_kinds import Abilities
from tests.chaos.machines import in_own_namespaces, words_around

KEPT = Path(__file__).parents[2] / ".chaos"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="the first seed; default: 1")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="until no other seed begins; default: 60"
    )
    parser.add_argument("--seeds", type=int, default=10**9, help="how many, at most")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of faults for each seed; default: 40"
    )
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="play this schedule alone")
    parser.add_argument(
        "--shorten", action="store_true", help="look for fewer faults that fail too"
    )
    parser.add_argument("--mistake", help="plant one of tests/chaos/mistakes.py")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder of what fails")
    parser.add_argument("--keep-all", action="store_true", help="keep what does not fail too")
    parser.add_argument("--verbose", action="store_true", help="a line for each fault")
    options = parser.parse_args()
    around = words_around()
    if around and not in_own_namespaces():
        command = [*around, sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        os.execvp(command[0], command)
    compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    abilities = Abilities(bool(around), bool(around), compiler)
    if not around:
        print("namespaces are not allowed here: faults of links and full disks are left out")
    if not compiler:
        print("there is no C compiler: faults of clocks and losses of power are left out")
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the database's user goes through it
        return run(options, abilities, folder)


def run(options: argparse.Namespace, abilities: Abilities, folder: Path) -> int:
    """Play schedules until the time is over. Returns the exit status."""
    from faults import compile_shim
    from warm_processes import warm_server

    from tests.chaos.bundles import write_bundle
    from tests.chaos.scenario import LARGE, SMALL, scenario_of
    from tests.chaos.schedule import Schedule, drawn

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    bundles = {kind: write_bundle(folder, kind) for kind in (SMALL, LARGE)}
    shim = compile_shim(folder) if abilities.clocks else None
    failed: list[int] = []
    total: Counter[str] = Counter()
    until = time.monotonic() + 60 * options.minutes
    with warm_server(folder, shim) as warm:
        stage = Stage(options, abilities, folder, bundles, warm, shim)
        if options.schedule is not None:
            schedules = iter([Schedule.read(options.schedule)])
        else:
            seeds = range(options.seed, options.seed + options.seeds)
            schedules = (drawn(n, scenario_of(n), options.seconds, abilities) for n in seeds)
        for schedule in schedules:
            good, kinds = stage.play(schedule)
            total.update(kinds)
            failed += [] if good else [schedule.seed]
            if time.monotonic() > until:
                break
    print(f"{total.total()} faults: {said(total)}")
    print(f"{len(failed)} seeds failed: {failed}" if failed else "nothing failed")
    return 1 if failed else 0


class Stage(NamedTuple):
    """Where schedules are played."""

    options: argparse.Namespace
    abilities: Abilities
    folder: Path
    bundles: dict[str, Path]
    warm: Path
    shim: Path | None

    def play(self, schedule: Any) -> tuple[bool, Counter[str]]:
        """Play a schedule, and print what came of it. Returns whether all held, and how many faults
        of each kind happened."""
        own = self.folder / f"seed-{schedule.seed}"
        print(f"seed {schedule.seed}: {schedule.scenario}", flush=True)
        began = time.monotonic()
        outcome = self._played(schedule, own, verbose=self.options.verbose)
        kinds = Counter(event.kind for event in outcome.done)
        packets = f"; packets {said(Counter(outcome.packets))}" if outcome.packets else ""
        print(
            f"  {outcome.versions} models, {outcome.updates} updates acknowledged, "
            f"{time.monotonic() - began:.0f} s; {kinds.total()} faults: {said(kinds)}{packets}"
        )
        for problem in outcome.problems:
            print(f"  FAILED: {problem}")
        kept = self.options.keep / own.name
        if outcome.problems or self.options.keep_all:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(own, kept, ignore=shutil.ignore_patterns("*.net", "*.sock"))
            print(f'  kept: {kept}; again: make chaos ARGS="--schedule {kept}/schedule.jsonl"')
        self._remove(own)
        if outcome.problems and self.options.shorten:
            self._shorten(schedule, kept / "shortened.jsonl")
        sys.stdout.flush()
        return not outcome.problems, kinds

    def _shorten(self, schedule: Any, file: Path) -> None:
        from tests.chaos.schedule import shortened

        def fails(shorter: Any) -> bool:
            own = self.folder / f"try-{time.monotonic_ns()}"
            problems = self._played(shorter, own).problems
            print(f"  with {len(shorter.events)} faults: {(problems or ['holds'])[0][:150]}")
            sys.stdout.flush()
            self._remove(own)
            return bool(problems)

        short = shortened(schedule, fails)
        short.write(file)
        print(f"  {len(short.events)} of {len(schedule.events)} faults are enough: {file}")

    def _played(self, schedule: Any, own: Path, *, verbose: bool = False) -> Any:
        from tests.chaos.play import play

        say = print if verbose else (lambda line: None)
        _, abilities, _, bundles, warm, shim = self
        return play(schedule, own, abilities, bundles, warm, shim, self.options.mistake, say)

    def _remove(self, own: Path) -> None:
        shutil.rmtree(own, ignore_errors=True)
        shutil.rmtree(own.with_name(f"{own.name}-database"), ignore_errors=True)


def said(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
