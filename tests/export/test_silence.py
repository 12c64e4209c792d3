from __future__ import annotations

import logging
import os
import sys
import warnings

import pytest
from fleetlearn_export.silence import silenced_process, silenced_python


def test_quiet_hides_torchs_talk_and_gives_everything_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("torch.of_this_test")
    logger.addHandler(handler)
    # to torch's own handler, which is there once another test has exported something
    logger.propagate = False
    try:
        with silenced_python():
            logger.error("hidden")
            print("hidden")
            warnings.warn("hidden", stacklevel=1)
        logger.error("seen")
    finally:
        logger.removeHandler(handler)
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)
    out, error = capfd.readouterr()
    assert out == ""
    assert error == "seen\n"


def test_quiet_process_hides_what_passes_python_by(capfd: pytest.CaptureFixture[str]) -> None:
    with silenced_process():
        os.write(1, b"hidden")
        os.write(2, b"hidden")
    os.write(1, b"out")
    os.write(2, b"error")
    assert capfd.readouterr() == ("out", "error")
