"""docs/operate/monitoring.md: its table of metrics is the catalogue's."""

from __future__ import annotations

from pathlib import Path

from fleetlearn_coordinator.service.monitoring.catalogue import CATALOGUE, PROCESS_METRICS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "operate" / "monitoring.md").read_text("utf-8")


def metric_rows() -> list[str]:
    """Return the table's rows, as the page must have them."""
    own = [
        f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels)} | {spec.help} |"
        for spec in CATALOGUE
    ]
    return own + [f"| `{name}` | {kind} |  | {text} |" for name, kind, text in PROCESS_METRICS]


def test_the_page_lists_every_metric_and_no_other() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(("| `fleetlearn_", "| `process"))]
    assert rows == metric_rows()
