"""A bundle's manifest, and manifests that a reader refuses."""

from __future__ import annotations

from typing import Any

import msgspec
from fleetlearn_protocol import manifest as bundle
from fleetlearn_protocol.manifest_file import write_manifest
from fleetlearn_protocol.vector import digest

A, B = "a" * 64, "0123456789abcdef" * 4
BAD_PATHS = (
    *(
        "",
        "/",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "./a",
        "a/./b",
        "a//b",
        "a/",
        ".",
        "..",
        ".hidden",
        "~/x",
    ),
    *(
        "a\\b",
        "..\\x",
        "\\\\host\\share",
        "C:/x",
        "C:x",
        "a:stream",
        "a.",
        "a ",
        " a",
        "$HOME",
        "%2e%2e/x",
    ),
    *("a\x00b", "a\nb", "\n", "é", "\u2215etc", "\u202ea", "x" * 201),
)


def prepared(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Preprocessing of the arrays x and y, with these steps for x."""
    x = {"columns": ["ax", "ay", "az", "gx"], "steps": list(steps)}
    return {"arrays": {"x": x, "y": {"columns": "label"}}, **more}


WRONG_PREPROCESSING: list[tuple[str, dict[str, Any]]] = [
    ("no arrays", {"arrays": {}}),
    ("an array too few", {"arrays": {"x": {"columns": "x"}}}),
    ("another array", {"arrays": {"x": {"columns": "x"}, "z": {"columns": "z"}}}),
    ("no columns", {"arrays": {"x": {"columns": []}, "y": {"columns": "y"}}}),
    ("an unknown operation", prepared({"op": "fourier"})),
    ("an unknown field of an operation", prepared({"op": "log", "base": 2})),
    ("an unknown field", prepared(filter="low-pass")),
    ("a std of 0", prepared({"op": "standardise", "mean": 0, "std": [1, 0]})),
    ("means and stds", prepared({"op": "standardise", "mean": [1, 2], "std": [1, 2, 3]})),
    ("low above high", prepared({"op": "clip", "low": 1, "high": 0})),
    ("a value twice", prepared({"op": "index", "values": ["a", "b", "a"]})),
    ("texts and numbers", prepared({"op": "index", "values": ["a", 1]})),
    ("a number beyond 2^53", prepared({"op": "index", "values": [2**53]})),
    ("a window of 0", prepared(windows={"length": 0, "hop": 1})),
    ("a window without a hop", prepared(windows={"length": 8})),
    ("a rate of 0", prepared(resample={"time": "t", "rate": 0})),
    (
        "a label without windows",
        {"arrays": {"x": {"columns": "x"}, "y": {"columns": "y", "label": "last"}}},
    ),
]
"""What it is, and preprocessing that a reader refuses."""


ACCEPTED: list[dict[str, Any]] = [
    {"name": "preprocessing of rows", "change": {"version": 3, "preprocessing": prepared()}},
    {
        "name": "preprocessing of a stream, with every operation",
        "change": {
            "version": 3,
            "preprocessing": prepared(
                {"op": "standardise", "mean": [0, 0, 9.81, 0.5], "std": 2, "axis": -1},
                {"op": "scale", "factor": 0.5, "offset": 1},
                {"op": "clip", "low": -3, "high": 3},
                {"op": "log", "offset": 4},
                {"op": "cast", "dtype": "uint8"},
                {"op": "index", "values": [3, 1, 2]},
                {"op": "one_hot", "classes": 4},
                {"op": "channels_first"},
                resample={"time": "t", "rate": 50},
                windows={"length": 128, "hop": 64},
                streams="recording",
            ),
        },
    },
]
"""The valid manifest with changes with which it is valid as well."""


def manifest() -> dict[str, Any]:
    files = {
        bundle.TRAIN: bundle.File(A, 2000),
        bundle.EVAL: bundle.File(B, 1000),
        bundle.INFER: bundle.File("1" * 64, 500),
        bundle.PARAMETERS: bundle.File("2" * 64, 200),
    }
    example = bundle.Manifest(
        format="fleetlearn.bundle",
        version=1,
        name="softmax",
        parameters=(
            bundle.Parameter("linear.weight", (3, 4), 0, infer_offset=100),
            bundle.Parameter("linear.bias", (3,), 12, infer_offset=148),
            bundle.Parameter("norm.running_mean", (), 15, buffer=True, personal=True),
        ),
        batch=(bundle.Input("x", "float32", (4,)), bundle.Input("y", "int64", (), 3, -100)),
        outputs=(bundle.Input("logits", "float32", (3,)),),
        hyper=(bundle.Hyper("lr", 0.1), bundle.Hyper("mu")),
        step=bundle.LocalStep("sgd", proximal=True),
        metrics=("accuracy",),
        files=files,
        state=(
            bundle.State("momentum.linear.weight", (3, 4), 0),
            bundle.State("momentum.linear.bias", (3,), 12),
            bundle.State("t", (), 15, kept=True),
        ),
        references=("anchor",),
        random=True,
        opset=18,
        ir_version=10,
        made_by="fleetlearn-export 0.1.0",
    )
    content = write_manifest(example)
    full: dict[str, Any] = msgspec.to_builtins(example)
    rows, paths = full["parameters"], full["files"]
    file = paths[bundle.EVAL]
    feature = {"name": "features", "dtype": "float32", "shape": [8]}

    def table(*changes: dict[str, Any]) -> dict[str, Any]:
        return {"parameters": [row | change for row, change in zip(rows, changes, strict=False)]}

    def added(*names: str) -> dict[str, Any]:
        return {"files": paths | dict.fromkeys(names, file)}

    changes: list[tuple[str, dict[str, Any], str]] = [
        ("another format", {"format": "other.bundle"}, "bad-message"),
        ("a newer version", {"version": 7}, "bad-version"),
        ("an older version", {"version": 0}, "bad-version"),
        ("an enormous version", {"version": 2**70}, "bad-version"),
        ("no parameters", {"parameters": []}, "bad-message"),
        ("a parameter twice", table({}, {"name": "linear.weight"}, {}), "bad-message"),
        ("a gap", table({}, {"offset": 13}, {"offset": 16}), "bad-message"),
        ("an overlap", table({}, {"offset": 11}, {"offset": 14}), "bad-message"),
        ("not from 0", table({"offset": 1}, {"offset": 13}, {"offset": 16}), "bad-message"),
        ("another order", {"parameters": rows[::-1]}, "bad-message"),
        ("an axis of 0", table({"shape": [0, 4]}, {"offset": 0}, {"offset": 3}), "bad-message"),
        ("a negative axis", table({"shape": [-3, -4]}, {}, {}), "bad-message"),
        ("2^62 elements", table({"shape": [2**31, 2**31]}, {"offset": 2**31}), "bad-message"),
        (
            "2^64 elements, 0 in 64 bits",
            table({"shape": [2**16] * 4}, {"offset": 0}),
            "bad-message",
        ),
        ("33 axes", table({"shape": [1] * 33}, {"offset": 1}), "bad-message"),
        (
            "a range of 0",
            {"batch": [full["batch"][0], full["batch"][1] | {"below": 0}]},
            "bad-message",
        ),
        (
            "a range of floats",
            {"batch": [full["batch"][0] | {"below": 3}, full["batch"][1]]},
            "bad-message",
        ),
        ("a hyper-parameter twice", {"hyper": [{"name": "lr"}, {"name": "lr"}]}, "bad-message"),
        (
            "a hyper-parameter named seed",
            {"hyper": [{"name": "lr"}, {"name": "seed"}]},
            "bad-message",
        ),
        ("a metric twice", {"metrics": ["accuracy", "accuracy"]}, "bad-message"),
        ("a state twice", {"state": [{"name": "t", "shape": [], "offset": 0}] * 2}, "bad-message"),
        (
            "a gap between states",
            {"state": [{"name": "t", "shape": [], "offset": 1}]},
            "bad-message",
        ),
        ("a reference twice", {"references": ["anchor", "anchor"]}, "bad-message"),
        ("an unknown reference", {"references": ["compass"]}, "bad-message"),
        ("proximal without an anchor", {"references": ["previous"]}, "bad-message"),
        ("corrected without a correction", {"step": {"correction": True}}, "bad-message"),
        ("contrastive without the previous model", {"step": {"contrastive": True}}, "bad-message"),
        ("all personal", table(*[{"personal": True}] * 3), "bad-message"),
        (
            "a personal one that is not last",
            table({}, {"personal": True}, {"personal": False}),
            "bad-message",
        ),
        (
            "a parameter twice of normalisation layers",
            {"normalisation": ["norm.running_mean"] * 2},
            "bad-message",
        ),
        (
            "a normalisation layer's unknown parameter",
            {"normalisation": ["norm.weight"]},
            "bad-message",
        ),
        ("no parameter of a normalisation layer", {"normalisation": []}, "bad-message"),
        ("many without its graph", {"many": {"devices": 8, "steps": 2}}, "bad-message"),
        ("a frozen part in version 1", added(bundle.FROZEN), "bad-message"),
        ("preprocessing in version 2", {"version": 2, "preprocessing": prepared()}, "bad-message"),
        *(
            (f"preprocessing: {what}", {"version": 3, "preprocessing": made}, "bad-message")
            for what, made in WRONG_PREPROCESSING
        ),
        ("the graph of many alone", added(bundle.TRAIN_MANY), "bad-message"),
        ("features without their graphs", {"features": [feature]}, "bad-message"),
        ("the graphs of features alone", added(*bundle.OF_FEATURES), "bad-message"),
        ("no features", added(*bundle.OF_FEATURES) | {"features": []}, "bad-message"),
        (
            "a feature twice",
            added(*bundle.OF_FEATURES) | {"features": [feature] * 2},
            "bad-message",
        ),
        (
            "features of which none is computed",
            added(*bundle.OF_FEATURES) | {"features": full["batch"]},
            "bad-message",
        ),
        (
            "a feature that is another array of the batch",
            added(*bundle.OF_FEATURES) | {"features": [feature, full["batch"][0] | {"shape": [5]}]},
            "bad-message",
        ),
        ("a batch array twice", {"batch": [full["batch"][0]] * 2}, "bad-message"),
        ("an output twice", {"outputs": full["outputs"] * 2}, "bad-message"),
        ("an optimizer of another time", {"step": {"optimizer": "lion"}}, "bad-message"),
        ("infer.onnx: beyond its end", table({}, {"infer_offset": 489}, {}), "bad-message"),
        ("infer.onnx: two in one place", table({}, {"infer_offset": 147}, {}), "bad-message"),
        ("a part of ort_training", added("ort_training/checkpoint"), "bad-message"),
        (
            "a hash in capitals",
            {"files": paths | {bundle.EVAL: file | {"sha256": "A" * 64}}},
            "bad-message",
        ),
        ("a negative length", {"files": paths | {bundle.EVAL: file | {"size": -1}}}, "bad-message"),
        ("the manifest itself", added("manifest.json"), "bad-message"),
        ("the manifest itself, in capitals", added("MANIFEST.JSON"), "bad-message"),
        ("two files that differ in case", added("Graphs/train.onnx"), "bad-message"),
        ("a file and a folder", added("graphs"), "bad-message"),
        ("below a file", added("graphs/train.onnx/x"), "bad-message"),
        ("65 files", added(*(f"f{i}" for i in range(61))), "bad-message"),
        *(
            (
                f"without {path}",
                {"files": {k: v for k, v in paths.items() if k != path}},
                "bad-message",
            )
            for path in paths
        ),
        *((f"path {path!r}", added(path), "bad-message") for path in BAD_PATHS),
    ]
    invalid: list[dict[str, Any]] = [
        {"name": name, "change": change, "code": code} for name, change, code in changes
    ]
    invalid += [
        {"name": f"without {field}", "without": field, "code": "bad-message"}
        for field in full
        if field not in ("state", "references", "random", "many", "opset", "ir_version", "made_by")
    ]
    invalid += [
        {"name": "nothing", "text": "", "code": "bad-message"},
        {"name": "an array", "text": "[]", "code": "bad-message"},
        {"name": "cut short", "text": content.decode()[:-10], "code": "bad-message"},
        {"name": "30,000 levels", "pieces": [['{"x":', 1], ["[", 30000]], "code": "bad-message"},
        {
            "name": "not UTF-8",
            "hex": content.replace(b"softmax", b"\xff").hex(),
            "code": "bad-message",
        },
    ]
    return {
        "valid": {
            "text": content.decode(),
            "sha256": digest(content),
            "elements": 15,
            "local_elements": 16,
        },
        "accepted": ACCEPTED,
        "invalid": invalid,
    }
