"""Bundles that peers do not train are refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fleetlearn_device.peers.bundle_rules import RULES, PeerBundleRule, check_peer_bundle
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.manifest import Manifest, SplitPart
from line_bundle import write_line_bundle
from statistics_bundle import statistics_bundle


def refused(folder: Path, name: str) -> Manifest:
    if name == "computation":
        return statistics_bundle(folder).manifest
    plain = write_line_bundle(folder / "line.bundle").manifest
    return msgspec.structs.replace(plain, split=SplitPart("bottom", ()))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_refuses_its_kind(tmp_path: Path, rule: PeerBundleRule) -> None:
    manifest = refused(tmp_path, rule.name)
    with pytest.raises(BundleError, match=r"x\.bundle is not for peers: it "):
        check_peer_bundle("x.bundle", manifest)


@pytest.mark.parametrize("kind", [{}, {"personal": True, "state": True}])
def test_models_are_taken(tmp_path: Path, kind: dict[str, bool]) -> None:
    check_peer_bundle("x", write_line_bundle(tmp_path / "line.bundle", **kind).manifest)
