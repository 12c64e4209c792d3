"""What the name of a task says."""

from __future__ import annotations

from fleetlearn_protocol.task_names import run_of


def test_tasks_and_questions_of_a_run_have_its_name() -> None:
    assert run_of("5eed-4-1") == run_of("5eed-e2-7") == "5eed"
