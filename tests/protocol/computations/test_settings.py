"""The names of the kinds, and what is imported for them."""

from __future__ import annotations

import subprocess
import sys

from fleetlearn_coordinator.aggregation.computations.registry import REGISTRY as ADVANCES
from fleetlearn_device.computations.registry import REGISTRY as COMPUTES
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.computations.settings import FUNCTION, KIND_NAMES, kind_of


def test_each_kind_is_known_everywhere() -> None:
    assert set(KIND_NAMES) == KINDS.keys() == ADVANCES.keys() == {*COMPUTES, FUNCTION}


def test_the_settings_name_their_kind() -> None:
    for name, kind in KINDS.items():
        assert kind.settings.__struct_config__.tag == name
    assert kind_of.__module__ == "fleetlearn_protocol.computations.settings"


def test_a_device_that_trains_imports_no_computation() -> None:
    code = (
        "import sys, fleetlearn_device.device, fleetlearn_device.driver.driver; "
        "print([name for name in sys.modules if 'computations.' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.strip(" '[]\n") for name in done.stdout.split(",")}
    settings = "fleetlearn_protocol.computations."
    names = "settings", "boosting_settings", "function_settings"
    assert found == {f"{settings}{name}" for name in names}
