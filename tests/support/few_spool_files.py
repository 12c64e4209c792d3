"""Serve a plan with few spool files, so that a small fleet's sums are saved, too: as the command
serve, for tests.

    python -m few_spool_files serve PLAN.toml --service SERVICE.toml

With IN_THREAD in its environment, updates are added, saved and committed in another thread, as
those of large models.
"""

from __future__ import annotations

import os

from fleetlearn_coordinator.__main__ import main
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.storage import store

if __name__ == "__main__":
    store.SPOOL_FILES_HELD = 2
    if "IN_THREAD" in os.environ:
        server.LARGE_MODEL = 0
    main()
