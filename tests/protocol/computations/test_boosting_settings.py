from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.computations.boosting_settings import (
    BoostColumn,
    BoostedComponents,
    BoostedTrees,
)
from fleetlearn_protocol.computations.bundle import read_questions, write_computation_bundle
from fleetlearn_protocol.computations.components_layout import base_learners
from fleetlearn_protocol.computations.trees_layout import bin_table

A, B = BoostColumn("a"), BoostColumn("b", categories=("x", "y"))
RANGED = BoostColumn("r", range=(0.0, 8.0))
LINEAR = ("linear",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BoostedTrees(columns=(A,), loss="softmax"), "softmax takes 2 or more classes"),
        (BoostedTrees(columns=(A,), classes=3), "the other losses take 0"),
        (BoostedTrees(columns=(A, A)), "column 'a' is there twice"),
        (BoostedTrees(columns=(A,), label="a"), "column 'a' is there twice"),
        (BoostedTrees(columns=(A, B)), "column 'b' has texts as categories"),
        (
            BoostedTrees(columns=(BoostColumn("b", ("x", "x")),), label="y"),
            "has a category twice",
        ),
        (
            BoostedTrees(columns=(A,), loss="logistic", label="y", label_values=("no",)),
            "one for each of the 2 classes",
        ),
        (BoostedTrees(columns=(A,), label_values=("no", "yes")), "each of the 0 classes"),
        (BoostedTrees(columns=(A, RANGED)), "column 'a' has no range, and others have"),
        (BoostedTrees(columns=(BoostColumn("c", 3, (0.0, 1.0)),)), "categories and a range"),
        (BoostedTrees(columns=(BoostColumn("c", range=(1.0, 1.0)),)), "the range 1 to 1"),
        (BoostedComponents(columns=(RANGED,)), "which is for the bins of trees alone"),
        (
            BoostedComponents(columns=(A,), learners=("linear", "linear")),
            "base learner linear is there twice",
        ),
        (BoostedComponents(columns=(A,), learners=("spline",)), "more than 2 and less than 24"),
        (BoostedComponents(columns=(A,), degrees_of_freedom=30), "more than 0 and less than 22"),
    ],
)
def test_what_cannot_be_is_said(settings: BoostedTrees | BoostedComponents, words: str) -> None:
    assert settings.contradiction is not None
    assert words in settings.contradiction


@pytest.mark.parametrize(
    "settings",
    [
        BoostedTrees(columns=(A, B), label="y", loss="softmax", classes=3),
        BoostedTrees(columns=(RANGED, BoostColumn("b", 2))),
        BoostedComponents(columns=(A,), degrees_of_freedom=30, learners=LINEAR),
        BoostedComponents(columns=(B,), label="y", degrees_of_freedom=1),
    ],
)
def test_what_can_be_has_no_contradiction(settings: BoostedTrees | BoostedComponents) -> None:
    assert settings.contradiction is None


def test_bins_and_base_learners_of_columns() -> None:
    table = bin_table(BoostedTrees(columns=(A, B), bins=4, label="y"))
    assert table.counts.tolist() == [4, 3]  # two categories, and what is none of them
    assert table.missing.tolist() == [4, 8]
    assert table.column_of.tolist() == [0] * 5 + [1] * 4
    learners = base_learners(BoostedComponents(columns=(A, B), knots=3, label="y"))
    assert [(learner.kind, learner.size) for learner in learners] == [
        ("linear", 2),
        ("spline", 7),
        ("category", 2),
    ]
    assert learners[-1].coefficients == slice(9, 11)


def test_a_file_of_questions_becomes_a_bundle(tmp_path: Path) -> None:
    text = """
name = "ills"
kind = "boosted-trees"
label = "ill"
loss = "logistic"
label_values = ["no", "yes"]
[[columns]]
name = "age"
[[columns]]
name = "ward"
categories = ["east", "west"]
"""
    (tmp_path / "q.toml").write_text(text)
    name, settings, preprocessing = read_questions(tmp_path / "q.toml")
    bundle = open_bundle(write_computation_bundle(tmp_path / "b", name, settings, preprocessing))
    assert [row.name for row in bundle.manifest.batch] == ["x", "y"]
    assert bundle.manifest.preprocessing.raw == ("age", "ward", "ill")
    assert np.isfinite(bundle.parameters()).all()
