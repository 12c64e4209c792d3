"""What docs/start/first-fleet.md tells a reader to type, typed: a coordinator and three devices, by
TLS on 127.0.0.1."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import onnxruntime
import typed
from fleetlearn_coordinator import ServiceSettings
from fleetlearn_coordinator.storage.identities import Identities
from processes import ROOT, free_port

PAGE = (ROOT / "docs" / "start" / "first-fleet.md").read_text()
HERE = PAGE.replace("192.0.2.7", "127.0.0.1").replace('"0.0.0.0"', '"127.0.0.1"')
"""The page on a machine alone."""


def test_ten_commands_from_a_laptop_to_three_devices(tmp_path: Path) -> None:
    port, commands = free_port(), typed.commands(HERE)
    assert len([each for each in commands if each.text != "wait"]) == 10
    typed.write_files(HERE, tmp_path, port)
    check = functools.partial(typed.assert_shown, folder=tmp_path)
    typed.type_in(commands, tmp_path, port, check)
    settings = ServiceSettings.load(tmp_path / "service.toml")
    assert settings.identities is not None
    identities = Identities(settings.identities)
    assert [known.device for known in identities.devices()] == ["sensor-1", "sensor-2", "sensor-3"]
    identities.close()
    session = onnxruntime.InferenceSession(
        str(tmp_path / "worn.onnx"), providers=["CPUExecutionProvider"]
    )
    right = []
    for number in (1, 2, 3):
        data = np.load(tmp_path / f"sensor-{number}.npz")
        (outputs,) = session.run(None, {session.get_inputs()[0].name: data["x"]})
        right.append((np.asarray(outputs).argmax(1) == data["y"]).mean())
    assert np.mean(right) > 0.75


def test_the_page_names_no_other_address() -> None:
    assert PAGE.count("192.0.2.7") == 5, "the laptop's address, once for each command and once said"
