"""Mistakes that a private coordinator could make, planted in its rounds: an audit must find each of
them. Nothing in the packages can be set to do any of this."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from fleetlearn_coordinator.aggregation.exact_mean import add_up
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.privacy import release as releases
from fleetlearn_coordinator.aggregation.privacy.release import Released, release
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_protocol.messages import UPDATE


class DividedByWhoCame(OpenRound):
    """The mean is of the reports that came, and the noise in it that of a mean of ``goal``: with
    one report in ten, a device's part is ten times as large, and the noise is not."""

    def _release(self) -> Released | None:
        rules, state = self.rules.privacy, self.state.privacy
        assert rules is not None
        assert state is not None
        came = rules.goal / len(self)
        return release(rules, state, add_up(self.sums.states[UPDATE]) * came)


class ClippedAfterAveraging(OpenRound):
    """The mean is clipped, and not what it is the mean of: one long update is in it whole."""

    def add(self, reports: ReportColumns) -> None:
        super().add(replace(reports, weighed=()))  # so that no norm is looked at

    def _release(self) -> Released | None:
        rules, state = self.rules.privacy, self.state.privacy
        assert rules is not None
        assert state is not None
        total = add_up(self.sums.states[UPDATE])
        norm = float(np.linalg.norm(total)) / (rules.goal * rules.largest_weight)
        return release(rules, state, total * min(1.0, state.clip / max(norm, 1e-30)))


@contextmanager
def one_noise_for_all_sums() -> Iterator[None]:
    """Every release of a run has the same noise, whatever its number and its sum."""
    with patch.object(releases, "noise_secret", lambda *about, **parameters: bytes(32)):
        yield
