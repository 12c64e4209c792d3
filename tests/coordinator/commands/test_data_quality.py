"""fleetlearn-coordinator data-quality: what a look and the updates' worth are for people."""

from __future__ import annotations

from fleetlearn_coordinator.commands.data_quality import (
    WORTH_LINES,
    ContributionFinding,
    FeatureFinding,
    QualityView,
    quality_lines,
)


def view(features: list[FeatureFinding], found: list[ContributionFinding]) -> QualityView:
    return QualityView(3, 8, "valid", 0.0, 6, 0.01, features, [], [], found)


def test_a_feature_s_probability_is_said_as_it_is() -> None:
    for log10_p, text in ((-2.0, "p = 0.01)"), (-4.2584, "p = 5.5e-05)"), (-400.4, "p = 1e-400)")):
        found = FeatureFinding("device-c", 1, "mean", 4.4, 0.5, 91.9, log10_p)
        (_, line) = quality_lines(view([found], []))
        assert line.startswith("device-c: feature 1 has the mean 4.4, the others' is 0.5 (91.9 ")
        assert line.endswith(text)


def test_what_updates_are_worth_is_printed_also_where_nobody_is_named() -> None:
    one = ContributionFinding("device-a", 4, -0.0082, 0.0018, -0.0034, -0.9)
    lines = quality_lines(view([], [one]))
    assert lines[1] == "no device's data are unlike the others'"
    assert lines[3] == "device-a: -0.0082 a round (+- 0.0018), left out -0.0034; 4 rounds"
    many = quality_lines(view([], [one] * (WORTH_LINES + 2)))
    assert len(many) == 2 + 1 + WORTH_LINES + 1
    assert many[-1] == "and 2 more, worth more: --json has them"
    harmful = ContributionFinding("b", 9, -1.0, 0.1, 0.0, -3.0)
    hurts = quality_lines(view([], [harmful]))
    assert "b: its updates make the held-out loss worse, by 1 a round" in hurts[1]
