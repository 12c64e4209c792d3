"""After a test, the log is as before it, whatever the test's command set up."""

from __future__ import annotations

import logging

import pytest
from fleetlearn_coordinator.commands.logs import log_at as _log
from kept_loggers import loggers_kept


def test_a_commands_log_is_put_back() -> None:
    logger = logging.getLogger("fleetlearn")
    level, handlers = logger.level, logger.handlers[:]
    with loggers_kept():
        _log("debug")
        assert (logger.level, len(logger.handlers)) == (logging.DEBUG, len(handlers) + 1)
    assert (logger.level, logger.handlers) == (level, handlers)


def test_every_test_is_in_such_a_context(request: pytest.FixtureRequest) -> None:
    assert "loggers_as_before" in request.fixturenames
