"""Exports of models of real size: what an export costs, and how far five steps of the bundle are
from PyTorch's.

The models are those of ``tests/support/public_models/``: torchvision's, transformers', and three
written from papers, with random weights; batches of four. Each is exported and trained in a process
of its own on one thread. Needs the extra ``zoo``, which ``make test-zoo`` installs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import _measure as measure

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from public_models.measured import ALLOWED, HEADINGS, LIMIT, LR, ROWS, STEPS, Failed, measured, row
from public_models.table import LARGE, MODELS, WHOLE, missing_packages


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"of {', '.join(MODELS)}; without it, all but *_whole",
    )
    options.add_argument(
        "--small", action="store_true", help="without those above 20 million parameters"
    )
    options.add_argument(
        "--limit", type=float, default=LIMIT, help="CPU-seconds that a model may take (%(default)s)"
    )
    chosen = options.parse_args()
    unknown = [name for name in chosen.models if name not in MODELS]
    if unknown:
        options.error(f"no model {', '.join(unknown)}; expected some of {', '.join(MODELS)}")
    if missing := missing_packages():
        options.error(
            f"needs {', '.join(missing)}, not installed here: pip install -c constraints.txt .[zoo]"
        )
    results = {}
    usual = [name for name in MODELS if name not in (LARGE if chosen.small else WHOLE)]
    for name in chosen.models or usual:
        results[name] = measured(name, chosen.limit)
        print(*row(results[name]), sep=" | ", flush=True, file=sys.stderr)
    print(measure.table([HEADINGS, *map(row, results.values())]))
    settings = {"batch": ROWS, "steps": STEPS, "lr": LR, "allowed": ALLOWED, "limit": chosen.limit}
    measure.write_json(
        chosen.json, settings, {name: result._asdict() for name, result in results.items()}
    )
    if any(isinstance(result, Failed) for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
