"""Bundles of computations: written and read, and what contradicts itself in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import BundleError, open_bundle
from fleetlearn_protocol.computations.boosting_settings import BoostColumn, BoostedTrees
from fleetlearn_protocol.computations.bundle import (
    STATE_NAME,
    read_questions,
    write_computation_bundle,
)
from fleetlearn_protocol.computations.settings import CategoryColumn, NumberColumn, Statistics
from fleetlearn_protocol.computations.statistics import first_state, sums_layout
from fleetlearn_protocol.manifest import File, Input, Manifest, Parameter
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from fleetlearn_protocol.preprocessing import Numeric, Preparation, Preprocessing

ASKED = Statistics(
    numbers=(NumberColumn("age"),), categories=(CategoryColumn("city", values=("Ulm", "Rom")),)
)
QUESTIONS = """
name = "who is there"
kind = "statistics"
[[numbers]]
name = "age"
[[categories]]
name = "city"
values = ["Ulm", "Rom"]
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("bundle") / "a.bundle"
    return open_bundle(write_computation_bundle(path, "who is there", ASKED)).manifest


def test_a_bundle_has_its_first_state_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "questions.toml").write_text(QUESTIONS)
    name, settings, told = read_questions(tmp_path / "questions.toml")
    assert (name, settings) == ("who is there", ASKED)
    one = write_computation_bundle(tmp_path / "one.bundle", name, settings, told)
    two = write_computation_bundle(tmp_path / "two.bundle", name, settings)
    assert one.read_bytes() == two.read_bytes()
    bundle = open_bundle(one)
    assert bundle.manifest.computation == ASKED
    assert bundle.parameters().tobytes() == first_state(ASKED).tobytes()
    assert [*bundle.manifest.files] == ["parameters.safetensors"]
    assert bundle.manifest.parameters == (Parameter(STATE_NAME, first_state(ASKED).shape, 0),)
    assert bundle.manifest.sums == sums_layout(ASKED).size
    assert bundle.manifest.batch == (Input("age", "float64", ()), Input("city", "uint8", (24,)))
    assert bundle.state().size == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "this is not TOML"),
        ('kind = "statistics"', "name, the computation's for people"),
        ('name = "a"\nkind = "histograms"', "kind is 'histograms'; expected one of"),
        ('name = "a"\nkind = "statistics"\nbins = 3', "bins is not a key"),
        ('name = "a"\nkind = "statistics"', "there is no column"),
        (f"{QUESTIONS}range = 3", "range is not a key"),
    ],
)
def test_a_file_of_questions_that_makes_no_sense_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "questions.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_questions(tmp_path / "questions.toml")
    with pytest.raises(ValueError, match="it cannot be read"):
        read_questions(tmp_path / "gone.toml")
    with pytest.raises(ValueError, match="there is no column"):
        write_computation_bundle(tmp_path / "a.bundle", "a", Statistics())


GRAPH = File("0" * 64, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 3}, "it needs version 4"),
        ({"computation": Statistics()}, "computation: there is no column"),
        ({"parameters": (Parameter(STATE_NAME, (3,), 0),)}, "the table has 3"),
        ({"sums": 3}, "the manifest says 3"),
        ({"sums": msgspec.UNSET}, "the manifest says 0"),
        ({"batch": (Input("age", "float32", ()),)}, "not those of its computation"),
        ({"files": {"parameters.safetensors": GRAPH, "graphs/train.onnx": GRAPH}}, "beside it"),
        ({"files": {}}, "parameters.safetensors is missing"),
        ({"computation": msgspec.UNSET}, "operation numeric, which is for computations alone"),
    ],
)
def test_what_contradicts_itself_is_refused(
    written: Manifest, changes: dict[str, Any], said: str
) -> None:
    assert read_manifest(write_manifest(written)) == written
    if "batch" in changes:
        changes = {**changes, "preprocessing": msgspec.UNSET}
    with pytest.raises(BundleError) as refused:
        read_manifest(write_manifest(msgspec.structs.replace(written, **changes)))
    assert said in refused.value.text, refused.value.text


def test_another_preprocessing_may_be_given(tmp_path: Path) -> None:
    told = Preprocessing({"age": Preparation("years", steps=(Numeric(),))})
    asked = Statistics(numbers=(NumberColumn("age"),))
    bundle = open_bundle(write_computation_bundle(tmp_path / "a.bundle", "a", asked, told))
    assert bundle.manifest.preprocessing == told
    assert np.isfinite(bundle.parameters()).all()


def test_settings_whose_state_no_bundle_could_hold_are_refused(tmp_path: Path) -> None:
    """Memory for 305 GiB was asked for."""
    columns = tuple(BoostColumn(f"c{number}") for number in range(20))
    large = BoostedTrees(columns, loss="softmax", classes=1000, rounds=10_000, depth=12)
    with pytest.raises(ValueError, match=r"its state or its sums have .* Ask for less"):
        write_computation_bundle(tmp_path / "x.bundle", "x", large)
