"""What the name of a task says."""

from __future__ import annotations


def run_of(task: str) -> str:
    """Return what names the run that a task belongs to: what stands before the first ``-`` of the
    task's name (PROTOCOL.md, section 4, "Differential privacy")."""
    return task.partition("-")[0]
