"""Completion: a package that imports its parts late shows its public names all the same."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.mark.parametrize("room", ["protocol", "device", "coordinator", "simulator", "export"])
def test_a_package_shows_its_public_names(room: str) -> None:
    package = import_module(f"fleetlearn_{room}")
    assert dir(package) == sorted(package.__all__)
    for name in dir(package):
        assert getattr(package, name) is not None
