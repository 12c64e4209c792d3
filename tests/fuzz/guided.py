"""One target under atheris (libFuzzer), which looks for inputs that reach new code. Ends the
process.

    python -m tests.fuzz.guided TARGET FOLDER SECONDS INPUTS SEED

FOLDER keeps the inputs that reached new code, and those that a target failed with.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(
    include=["fleetlearn_protocol", "fleetlearn_coordinator", "fleetlearn_device"]
):
    from tests.fuzz import seeds
    from tests.fuzz.mutation import MOST_BYTES, mutate
    from tests.fuzz.targets.table import TARGETS


def main(name: str, folder: Path, seconds: int, inputs: int, seed: int) -> None:
    target = TARGETS[name]
    known = [*target.seeds(), *seeds.corpus(name)]
    folder.mkdir(parents=True, exist_ok=True)
    for place, data in enumerate(known):
        (folder / f"seed-{place}").write_bytes(data)

    def custom(data: bytes, most: int, drawn: int) -> bytes:
        random = Random(drawn)
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        return mutate(data, random, known)[:most]

    options = {
        "max_total_time": seconds,
        "runs": inputs,
        "seed": seed,
        "max_len": MOST_BYTES,
        "timeout": 30,
        "rss_limit_mb": 2048,
        "print_final_stats": 1,
        "artifact_prefix": f"{folder}/failed-",
    }
    atheris.Setup(
        [name, *(f"-{option}={value}" for option, value in options.items()), str(folder)],
        target.run,
        custom_mutator=custom,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    logging.getLogger("fleetlearn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
