"""Run a device whose training always comes to the update that follows from its name
(``marked_update.py``).

python marked_device.py run --coordinator URL ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

from fleetlearn_device.__main__ import main
from fleetlearn_device.training import trainer
from fleetlearn_protocol.messages import UPDATE
from marked_update import marked_update

run_algorithm = trainer.run_algorithm


def marked(*arguments: Any, **named: Any) -> Any:
    outcome = run_algorithm(*arguments, **named)
    own = marked_update(NAME, len(outcome.parts[UPDATE]))
    return outcome._replace(parts={**outcome.parts, UPDATE: own})


if __name__ == "__main__":
    NAME = sys.argv[sys.argv.index("--name") + 1]
    trainer.run_algorithm = marked
    sys.exit(main(sys.argv[1:]))
