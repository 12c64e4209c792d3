"""A gateway makes the own encoding of a run itself: what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import ServiceSettings
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.run_there import allow_plugins, find_own_encoding
from fleetlearn_coordinator.plan.service_settings import ServiceError
from fleetlearn_protocol import FleetError, extensions
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.messages import OwnEncoding
from fleetlearn_protocol.own_encodings import open_encoding
from own_formats import BLOCKS, signs

OWN = OwnEncoding("thin_updates:signs", {"block": 32.0})


def service(folder: Path, module: str) -> ServiceSettings:
    return ServiceSettings.read({"plugins": {"modules": [module], "folder": str(folder)}})


def test_a_gateway_reads_updates_as_its_run_does(tmp_path: Path) -> None:
    (tmp_path / "thin_updates.py").write_text(BLOCKS["thin_updates"])
    with extensions.apart():
        allow_plugins(ServiceSettings())
        with pytest.raises(FleetError) as refused:
            find_own_encoding(OWN, residual=True)
        assert "this gateway cannot read the run's updates" in refused.value.text
        assert "the module thin_updates is not allowed here" in refused.value.text
        allow_plugins(service(tmp_path, "thin_updates"))
        find_own_encoding(OWN, residual=True)
        name = open_encoding(OWN, signs(32), "there", residual=True).name
        assert find_encoding(name).block == 32
        with pytest.raises(FleetError, match="has no function lines"):
            find_own_encoding(OwnEncoding("thin_updates:lines"), residual=False)
    with pytest.raises(ServiceError, match="the module no_such_module is not there"):
        allow_plugins(service(tmp_path, "no_such_module"))


def test_it_is_told_by_the_run() -> None:
    setup = wire.Setup((), "", "", (), None, None, "", encoding=OWN, residual=True)
    (found,) = wire.decode_for_gateway(wire.encode_batch([setup]))
    assert isinstance(found, wire.Setup)
    assert (found.encoding, found.residual) == (OWN, True)
