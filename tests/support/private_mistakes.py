"""Mistakes that a private coordinator could make, planted in its rounds: an audit must find each of
them. Nothing in the packages can be set to do any of this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from fleetlearn_coordinator.aggregation import open_round
from fleetlearn_coordinator.aggregation.exact_mean import add_up
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy import release as releases
from fleetlearn_coordinator.aggregation.privacy.round_release import RoundRelease
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_protocol.messages import UPDATE
from fleetlearn_protocol.secure.fixed_point import WeightedSum


class DividedByWhoCame(OpenRound):
    """The mean is of the reports that came, and the noise in it that of a mean of ``goal``: with
    one report in ten, a device's part is ten times as large, and the noise is not."""

    def _release(self, unmasked: WeightedSum | None) -> RoundRelease | None:
        assert self.rules.privacy is not None
        with _sum_times(self.rules.privacy.goal / len(self)):
            return super()._release(unmasked)


class ClippedAfterAveraging(OpenRound):
    """The mean is clipped, and not what it is the mean of: one long update is in it whole."""

    def add(self, reports: ReportColumns) -> None:
        super().add(replace(reports, weighed=()))  # so that no norm is looked at

    def _release(self, unmasked: WeightedSum | None) -> RoundRelease | None:
        rules, state = self.rules.privacy, self.state.privacy
        assert rules is not None
        assert state is not None
        total = add_up(self.sums.states[UPDATE])
        norm = float(np.linalg.norm(total)) / (rules.goal * rules.largest_weight)
        with _sum_times(min(1.0, state.clip / max(norm, 1e-30))):
            return super()._release(unmasked)


@contextmanager
def _sum_times(factor: float) -> Iterator[None]:
    with patch.object(open_round, "add_up", lambda total: factor * add_up(total)):
        yield


@contextmanager
def one_noise_for_all_sums() -> Iterator[None]:
    """Every release of a run has the same noise, whatever its number and its sum."""
    with patch.object(releases, "noise_secret", lambda *about, **parameters: bytes(32)):
        yield
