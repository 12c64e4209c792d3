"""For all tests: which of them this environment can run, and no reports of ONNX Runtime's from those that import it."""

from __future__ import annotations

import os
from importlib.metadata import distributions

import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

TRAINING_BUILD = any(found.name == "onnxruntime-training-cpu" for found in distributions())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=100, help="SIGKILLs at random instants in end_to_end/faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs ONNX Runtime's training build: make test runs it in .venv/ort-training, where that can be had"
    for item in items:
        if item.get_closest_marker("ort_training") and not TRAINING_BUILD:
            item.add_marker(pytest.mark.skip(reason=reason))
