"""What the vectors cannot say of the manifest. They hold the cases of what is refused."""

from __future__ import annotations

import time

import msgspec
import pytest
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import (
    ACTIVATIONS,
    EVAL,
    GRADIENT,
    INFER,
    MAX_MANIFEST_BYTES,
    OF_FEATURES,
    ORT_TRAINING,
    PARAMETERS,
    SPLIT_VERSION,
    TOP_STEP,
    TRAIN,
    TRAIN_MANY,
    Cut,
    File,
    Hyper,
    Input,
    LocalStep,
    Manifest,
    Parameter,
    Reference,
    SplitPart,
    State,
    TrainMany,
)
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from hypothesis import given
from hypothesis import strategies as st

FILES = {path: File("0" * 64, 100) for path in (TRAIN, EVAL, INFER, PARAMETERS)}
MANIFEST = Manifest(
    format="fleetlearn.bundle",
    version=1,
    name="m",
    parameters=(Parameter("w", (2, 3), 0, infer_offset=4), Parameter("s", (), 6)),
    batch=(Input("x", "float32", (3,)),),
    outputs=(Input("y", "float32", ()),),
    hyper=(Hyper("lr"),),
    step=LocalStep("sgd"),
    metrics=(),
    files=FILES,
)
replace = msgspec.structs.replace


def refused(manifest: Manifest) -> BundleError:
    with pytest.raises(BundleError) as caught:
        read_manifest(write_manifest(manifest))
    return caught.value


def test_round_trip_and_the_same_bytes_each_time() -> None:
    content = write_manifest(MANIFEST)
    assert read_manifest(content) == MANIFEST
    assert write_manifest(read_manifest(content)) == content
    assert write_manifest(replace(MANIFEST, files=dict(reversed(FILES.items())))) == content
    assert content.endswith(b"}\n")


def test_size_counts_scalars_as_one() -> None:
    assert MANIFEST.size == 7


def test_personal_rows_do_not_travel() -> None:
    body, head = MANIFEST.parameters[0], Parameter("head", (4,), 6, personal=True)
    manifest = replace(MANIFEST, parameters=(body, head, Parameter("s", (), 10, personal=True)))
    assert read_manifest(write_manifest(manifest)) == manifest
    assert (manifest.size, manifest.local_size, manifest.travelling) == (6, 11, (body,))
    assert (MANIFEST.size, MANIFEST.local_size, MANIFEST.travelling) == (7, 7, MANIFEST.parameters)


def test_the_state_is_a_table_of_its_own() -> None:
    manifest = replace(MANIFEST, state=(State("m.w", (2, 3), 0), State("t", (), 6, kept=True)))
    assert read_manifest(write_manifest(manifest)) == manifest
    assert (manifest.state_size, MANIFEST.state_size) == (7, 0)


def test_a_step_for_many_devices() -> None:
    manifest = replace(MANIFEST, many=TrainMany(128, 5), files=FILES | {TRAIN_MANY: FILES[TRAIN]})
    assert read_manifest(write_manifest(manifest)) == manifest


def test_features_are_left_out_where_a_bundle_has_none() -> None:
    """A bundle without features has the bytes that it had before there were any."""
    assert b"features" not in write_manifest(MANIFEST)
    features = (Input("features", "float32", (8,)), MANIFEST.batch[0])
    manifest = replace(
        MANIFEST, features=features, files=FILES | dict.fromkeys(OF_FEATURES, FILES[TRAIN])
    )
    assert read_manifest(write_manifest(manifest)) == manifest
    assert (manifest.computed_features, MANIFEST.computed_features) == (features[:1], ())


def test_normalisation_layers_are_left_out_where_a_bundle_has_none() -> None:
    assert b"normalisation" not in write_manifest(MANIFEST)
    manifest = replace(MANIFEST, normalisation=("s",))
    assert read_manifest(write_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    ("step", "references"),
    [
        (LocalStep(proximal=True), ("anchor",)),
        (LocalStep("momentum", correction=True), ("correction",)),
        (LocalStep("adam", contrastive=True), ("previous", "anchor")),
        (LocalStep("custom"), ("previous",)),
        (LocalStep("adamw", clip=True, weight_decay=True), ()),
    ],
)
def test_a_step_needs_the_references_of_its_switches(
    step: LocalStep, references: tuple[Reference, ...]
) -> None:
    manifest = replace(MANIFEST, step=step, references=references)
    assert read_manifest(write_manifest(manifest)) == manifest


def test_has_ort_training() -> None:
    assert not MANIFEST.has_ort_training
    both = replace(
        MANIFEST, files=FILES | {f"ort_training/{name}": File("1" * 64, 1) for name in ORT_TRAINING}
    )
    assert read_manifest(write_manifest(both)).has_ort_training


def test_file() -> None:
    assert MANIFEST.file(TRAIN) == FILES[TRAIN]
    with pytest.raises(
        BundleError, match="bundle m has no ort_training/checkpoint; it has"
    ) as caught:
        MANIFEST.file("ort_training/checkpoint")
    assert caught.value.code is Code.UNKNOWN_CONTENT


def test_unknown_fields_are_ignored() -> None:
    content = write_manifest(MANIFEST).replace(b'"format"', b'"later": [{"x": null}], "format"')
    assert read_manifest(content) == MANIFEST


@pytest.mark.parametrize(
    ("version", "advice"), [(0, "Export the model again"), (7, "Update fleetlearn")]
)
def test_another_version_is_told_from_damage_whatever_else_it_holds(
    version: int, advice: str
) -> None:
    with pytest.raises(BundleError, match=f"reads versions 1 to 6. {advice}") as caught:
        read_manifest(
            b'{"format": "fleetlearn.bundle", "version": %d, "parameters": "elsewhere"}' % version
        )
    assert caught.value.code is Code.BAD_VERSION


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (replace(MANIFEST, format="zip"), "is of format 'zip'; expected 'fleetlearn.bundle'"),
        (
            replace(MANIFEST, parameters=(Parameter("a", (2,), 0), Parameter("b", (2,), 3))),
            "parameter b begins at element 3; the ones before it end at 2",
        ),
        (
            replace(MANIFEST, parameters=(Parameter("a", (2,), 0), Parameter("a", (2,), 2))),
            "parameter a is there twice",
        ),
        (
            replace(MANIFEST, files=FILES | {"../x": FILES[TRAIN]}),
            r"file path '\.\./x' is not a plain path",
        ),
        (
            replace(MANIFEST, files=FILES | {"GRAPHS/Eval.onnx": FILES[TRAIN]}),
            "file graphs/eval.onnx is there twice",
        ),
        (
            replace(MANIFEST, files=FILES | {"graphs": FILES[TRAIN]}),
            "graphs is a file and a folder",
        ),
        (
            replace(MANIFEST, files=FILES | {f"ort_training/{ORT_TRAINING[0]}": FILES[TRAIN]}),
            "ort_training/eval_model.onnx is missing",
        ),
        (
            replace(MANIFEST, parameters=(Parameter("w", (2, 3), 0, infer_offset=77),)),
            "the parameters' bytes end at 101 in graphs/infer.onnx, which has 100",
        ),
        (
            replace(
                MANIFEST,
                parameters=(
                    Parameter("a", (2,), 0, infer_offset=8),
                    Parameter("b", (2,), 2, infer_offset=1),
                ),
            ),
            "the bytes of parameter a in graphs/infer.onnx overlap another's",
        ),
        (
            replace(
                MANIFEST,
                parameters=(Parameter("a", (2,), 0, personal=True), Parameter("b", (2,), 2)),
            ),
            "every parameter is personal: nothing travels",
        ),
        (
            replace(
                MANIFEST,
                parameters=(
                    Parameter("a", (2,), 0),
                    Parameter("b", (2,), 2, personal=True),
                    Parameter("c", (2,), 4),
                ),
            ),
            "parameter c comes after b, which is personal; those are the last",
        ),
        (
            replace(MANIFEST, state=(State("m", (2,), 0), State("v", (2,), 3))),
            "state v begins at element 3; the ones before it end at 2",
        ),
        (
            replace(MANIFEST, state=(State("m", (2,), 0), State("m", (2,), 2))),
            "state m is there twice",
        ),
        (replace(MANIFEST, references=("anchor", "anchor")), "reference anchor is there twice"),
        (
            replace(MANIFEST, step=LocalStep(contrastive=True), references=("anchor",)),
            r"a contrastive step reads the reference previous, which is not among \('anchor',\)",
        ),
        (
            replace(MANIFEST, many=TrainMany(8, 2)),
            "graphs/train_many.onnx and the entry `many` belong together; one of them is missing",
        ),
    ],
)
def test_the_error_says_what_contradicts_what(manifest: Manifest, text: str) -> None:
    error = refused(manifest)
    assert error.code is Code.BAD_MESSAGE
    assert error.text.startswith("manifest.json ")
    with pytest.raises(BundleError, match=text):
        raise error


def test_bytes_in_infer_may_end_where_the_file_ends() -> None:
    manifest = replace(MANIFEST, parameters=(Parameter("w", (2, 3), 0, infer_offset=76),))
    assert read_manifest(write_manifest(manifest)) == manifest


def test_parameters_up_to_the_limit_and_one_beyond() -> None:
    most = (Parameter("a", (2**15, 2**16 - 1), 0), Parameter("b", (2**15,), 2**31 - 2**15))
    assert read_manifest(write_manifest(replace(MANIFEST, parameters=most))).size == 2**31
    more = (*most, Parameter("c", (), 2**31))
    assert (
        "up to parameter c there are 2147483649 elements"
        in refused(replace(MANIFEST, parameters=more)).text
    )


def test_enormous_shapes_are_refused_at_once() -> None:
    parameters = tuple(Parameter(f"p{i}", (2**31,) * 32, 0) for i in range(1000))
    content = write_manifest(replace(MANIFEST, parameters=parameters))
    start = time.process_time()
    with pytest.raises(BundleError):
        read_manifest(content)
    assert time.process_time() - start < 1


def test_too_large() -> None:
    content = write_manifest(MANIFEST)
    assert read_manifest(content + b" " * (MAX_MANIFEST_BYTES - len(content))) == MANIFEST
    with pytest.raises(
        BundleError, match="a manifest of 16777217 bytes; the limit is 16777216"
    ) as caught:
        read_manifest(content + b" " * (MAX_MANIFEST_BYTES - len(content) + 1))
    assert caught.value.code is Code.TOO_LARGE


@given(
    st.binary(max_size=100) | st.integers(0, 2000).map(lambda cut: write_manifest(MANIFEST)[:cut])
)
def test_other_bytes_are_refused(content: bytes) -> None:
    # without its last newline it is the same JSON
    if content.strip() != write_manifest(MANIFEST).strip():
        with pytest.raises(BundleError) as caught:
            read_manifest(content)
        assert caught.value.code is Code.BAD_MESSAGE


@given(st.integers(0, 1200), st.binary(min_size=1, max_size=2))
def test_a_changed_manifest_is_another_good_one_or_refused(place: int, change: bytes) -> None:
    content = bytearray(write_manifest(MANIFEST))
    content[place : place + len(change)] = change
    try:
        manifest = read_manifest(bytes(content))
    except BundleError:
        return
    assert read_manifest(write_manifest(manifest)) == manifest


CUT = Cut("bank", Input("activations_bank", "float32", (2,)))
BOTTOM = replace(
    MANIFEST,
    version=SPLIT_VERSION,
    split=SplitPart("bottom", (CUT,)),
    batch=(*MANIFEST.batch, Input(GRADIENT, "float32", (2,))),
    files=FILES | {ACTIVATIONS: FILES[TRAIN]},
)
TOP = replace(
    MANIFEST,
    version=SPLIT_VERSION,
    split=SplitPart("top", (replace(CUT, bundle="0" * 64),)),
    batch=(CUT.activations, Input("y", "float32", ())),
    files=FILES | {TOP_STEP: FILES[TRAIN]},
)


@pytest.mark.parametrize("manifest", [BOTTOM, TOP])
def test_the_parts_of_a_split_model_are_read(manifest: Manifest) -> None:
    assert read_manifest(write_manifest(manifest)) == manifest


def test_a_bottoms_gradient_does_not_come_from_data() -> None:
    assert BOTTOM.data_arrays == MANIFEST.batch
    assert TOP.data_arrays == TOP.batch


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (replace(BOTTOM, version=3), "it needs version 5"),
        (replace(BOTTOM, split=msgspec.UNSET), "belong together"),
        (replace(BOTTOM, files=FILES), "belong together"),
        (replace(TOP, files=BOTTOM.files), "belong together"),
        (replace(BOTTOM, batch=MANIFEST.batch), "the batch of a bottom ends with gradient"),
        (replace(TOP, batch=TOP.batch[1:]), "begins with the parties' activations"),
        (replace(TOP, split=SplitPart("top", (CUT,))), "names the bundle of each party's bottom"),
        (
            replace(TOP, split=SplitPart("top", (TOP.split.cuts[0],) * 2)),  # type: ignore[union-attr]
            "a party is there twice",
        ),
        (
            replace(
                BOTTOM,
                split=SplitPart("bottom", (replace(CUT, activations=Input("a", "float64", (2,))),)),
            ),
            "activations are float32",
        ),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(manifest: Manifest, said: str) -> None:
    assert said in refused(manifest).text
