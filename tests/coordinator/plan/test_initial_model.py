"""A warm start: what a run begins with, by a safetensors file, and what is said of one that does
not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.plan.initial_model import initial_model
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.vector import views
from safetensors.numpy import save, save_file

Tensors = dict[str, np.ndarray]  # type: ignore[type-arg]


def plan_for(folder: Path, bundle: Path, more: str = "") -> Plan:
    text = (
        f'name = "a"\nbundle = "{bundle}"\ninitial = "weights.safetensors"\n[local]\nlr = 0.1\n'
        f"[round]\ngoal = 2\n{more}"
    )
    return Plan.parse(text, folder, file="my.toml")


def tensors_of(bundle: Bundle) -> Tensors:
    """Those of the model, as other values."""
    model = np.arange(1, bundle.manifest.size + 1, dtype=np.float32)
    return {name: value.copy() for name, value in views(model, bundle.manifest.travelling).items()}


def refusal(folder: Path, path: Path) -> str:
    with pytest.raises(PlanError) as raised:
        initial_model(plan_for(folder, path), open_bundle(path))
    assert raised.value.text.startswith(f"my.toml: initial = '{folder}/weights.safetensors': ")
    return raised.value.text


def test_each_tensor_is_taken_by_its_name(tmp_path: Path, bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    tensors = tensors_of(bundle)
    backwards = {name: tensors[name] for name in reversed(tensors)}
    save_file({"of another head": np.ones(3), **backwards}, tmp_path / "weights.safetensors")
    found = initial_model(plan_for(tmp_path, bundle_path), bundle)
    assert found.dtype == np.float32
    assert found.tolist() == list(range(1, bundle.manifest.size + 1))


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_widths(tmp_path: Path, bundle_path: Path, kind: type[np.floating]) -> None:  # type: ignore[type-arg]
    bundle = open_bundle(bundle_path)
    given = {name: (value % 1000).astype(kind) / 3 for name, value in tensors_of(bundle).items()}
    save_file(given, tmp_path / "weights.safetensors")
    found = initial_model(plan_for(tmp_path, bundle_path), bundle)
    whole = (np.arange(1, bundle.manifest.size + 1) % 1000).astype(kind) / 3
    assert found.tobytes() == whole.astype(np.float32).tobytes()


def test_bfloat16(tmp_path: Path, bundle_path: Path) -> None:
    """Of 1, 2, 3, ... its 8 bits of precision hold all up to 256 exactly."""
    bundle = open_bundle(bundle_path)
    tensors = {
        name: (np.minimum(value, 256).view(np.uint32) >> 16).astype(np.uint16)
        for name, value in tensors_of(bundle).items()
    }
    content = save(tensors).replace(b'"U16"', b'"BF16"')
    length = int.from_bytes(content[:8], "little") + len(tensors)
    (tmp_path / "weights.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
    found = initial_model(plan_for(tmp_path, bundle_path), bundle)
    assert found.tolist() == [min(each, 256) for each in range(1, bundle.manifest.size + 1)]


def without_first(tensors: Tensors) -> Tensors:
    return dict([*tensors.items()][1:])


def renamed(tensors: Tensors) -> Tensors:
    return {f"module.{name}": value for name, value in tensors.items()}


def of_integers(tensors: Tensors) -> Tensors:
    return {name: value.astype(np.int64) for name, value in tensors.items()}


def flat(tensors: Tensors) -> Tensors:
    return {name: value.reshape(-1)[:, None, None] for name, value in tensors.items()}


def not_finite(tensors: Tensors) -> Tensors:
    return {name: np.full_like(value, np.nan) for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_first, "of the model is missing"),
        (renamed, "Tensors: module."),
        (of_integers, "is of I64; expected one of F32, F16, BF16, F64"),
        (flat, "; the bundle's model has ("),
        (not_finite, "nan"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, bundle_path: Path, change: Callable[[Tensors], Tensors], words: str
) -> None:
    tensors = change(tensors_of(open_bundle(bundle_path)))
    save_file(tensors, tmp_path / "weights.safetensors")
    assert words.lower() in refusal(tmp_path, bundle_path).lower()


def test_what_is_no_such_file_is_named(tmp_path: Path, bundle_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    assert "no such file" in refusal(tmp_path, bundle_path)
    path.write_bytes(b"short")
    assert "fewer than 8 bytes" in refusal(tmp_path, bundle_path)
    path.write_bytes(b"PK\3\4" + bytes(range(100)))
    assert "says that its header ends at" in refusal(tmp_path, bundle_path)
    path.write_bytes((6).to_bytes(8, "little") + b"{nojs}")
    assert "JSON" in refusal(tmp_path, bundle_path)
    content = save(tensors_of(open_bundle(bundle_path)))
    path.write_bytes(content[:-4])
    assert "not written to its end" in refusal(tmp_path, bundle_path)


def test_without_it_a_run_begins_with_the_bundle_s(tmp_path: Path, bundle_path: Path) -> None:
    plan = msgspec.structs.replace(plan_for(tmp_path, bundle_path), initial=None)
    bundle = open_bundle(bundle_path)
    found = initial_model(plan, bundle)
    assert found.tobytes() == bundle.parameters()[: bundle.manifest.size].tobytes()
