"""Both runtimes against PyTorch by hand, against each other, and against another version of ONNX
Runtime."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleetlearn_device.runtimes import import_onnxruntime as ort
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_protocol import BundleError, Code, open_bundle, pack_bundle
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.vector import Vector, flatten, views
from torch.func import functional_call
from torch.nn import functional

KINDS = ["onnx", pytest.param("ort-training", marks=pytest.mark.ort_training)]
MODELS = ["softmax", "mlp", "cnn"]
STEPS = 50
Cases = Callable[[str], Any]


def batches(case: Any, steps: int = STEPS) -> Iterator[tuple[Any, Any]]:
    """Batches of 20 and of 7, the same each time."""
    rng = np.random.default_rng(11)
    for step in range(steps):
        chosen = rng.choice(len(case.x), 7 if step % 3 == 2 else 20, replace=False)
        yield case.x[chosen], case.y[chosen]


def away(start: Vector) -> Vector:
    """An anchor that is not where training begins."""
    return start + np.random.default_rng(12).normal(scale=0.1, size=start.shape).astype(np.float32)


def by_hand(
    case: Any, start: Vector, anchor: Vector, lr: float, mu: float
) -> tuple[Vector, list[float]]:
    """SGD in PyTorch on the loss plus mu/2 * ||w - anchor||^2; the losses without the penalty."""
    table = open_bundle(case.path).manifest.parameters
    weights = {name: torch.from_numpy(array.copy()) for name, array in views(start, table).items()}
    pulled = {name: torch.from_numpy(array.copy()) for name, array in views(anchor, table).items()}
    losses = []
    for x, y in batches(case):
        tracked = {name: tensor.requires_grad_() for name, tensor in weights.items()}
        loss = functional.cross_entropy(
            functional_call(case.model, tracked, torch.from_numpy(x)), torch.from_numpy(y)
        )
        penalty = sum(((tracked[name] - pulled[name]) ** 2).sum() for name in tracked)
        gradients = torch.autograd.grad(loss + mu / 2 * penalty, list(tracked.values()))
        with torch.no_grad():
            weights = {
                name: w - lr * g for (name, w), g in zip(tracked.items(), gradients, strict=True)
            }
        losses.append(loss.item())
    return flatten({name: tensor.numpy() for name, tensor in weights.items()}, table), losses


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_equal_pytorch_with_the_penalty_added_by_hand(
    cases: Cases, kind: Any, name: str, mu: float
) -> None:
    case = cases(name)
    runtime = open_runtime(case.path, kind)
    start = runtime.parameters.copy()
    anchor = away(start)
    runtime.load(start, anchor=anchor)
    losses = [runtime.step(batch, lr=0.1, mu=mu) for batch in batches(case)]
    expected, expected_losses = by_hand(case, start, anchor, 0.1, mu)
    np.testing.assert_allclose(runtime.parameters, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(runtime.anchor, anchor)


def test_the_check_by_hand_would_see_a_missing_half(cases: Cases) -> None:
    case = cases("softmax")
    start = open_bundle(case.path).parameters()
    right, _ = by_hand(case, start, away(start), 0.1, 0.5)
    doubled, _ = by_hand(case, start, away(start), 0.1, 1.0)
    assert np.abs(right - doubled).max() > 1e-2


@pytest.mark.ort_training
@pytest.mark.parametrize("name", [*MODELS, "plain"])
def test_both_runtimes_give_the_same_numbers(cases: Cases, name: str) -> None:
    case = cases(name)
    runtimes = [open_runtime(case.path, kind) for kind in ("onnx", "ort-training")]
    for runtime in runtimes:
        runtime.load(runtime.parameters, anchor=away(runtime.parameters))
    for step, batch in enumerate(batches(case)):
        hyper = {"lr": 0.1} if name == "plain" else {"lr": 0.1, "mu": 0.1 * (step % 2)}
        losses = [runtime.step(batch, **hyper) for runtime in runtimes]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        assert runtimes[0].metrics == pytest.approx(runtimes[1].metrics)
        assert set(runtimes[0].metrics) == {"accuracy"}
    np.testing.assert_allclose(runtimes[0].parameters, runtimes[1].parameters, rtol=0, atol=1e-5)
    first, second = (runtime.evaluate((case.x, case.y)) for runtime in runtimes)
    assert first.loss_sum == pytest.approx(second.loss_sum, rel=1e-4)
    assert (first.examples, first.metric_sums) == (second.examples, second.metric_sums)


STEPS_ELSEWHERE = """
import sys, json
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Blocked())
import numpy as np
from fleetlearn_device.runtimes.open_runtime import open_runtime

bundle, kind, file, out = sys.argv[1:]
given = np.load(file)
runtime = open_runtime(bundle, kind)
runtime.load(runtime.parameters, anchor=given["anchor"])
sizes = given["sizes"]
ends = np.cumsum(sizes)
losses = [
    runtime.step((given["x"][end - size : end], given["y"][end - size : end]), lr=0.1, mu=0.05)
    for size, end in zip(sizes, ends)
]
evaluation = runtime.evaluate((given["x"], given["y"]))
np.save(out, runtime.parameters)
foreign = sorted({"torch", "onnx"} & {name.split(".")[0] for name in sys.modules})
print(json.dumps({"version": runtime.version, "losses": losses, "loss_sum": evaluation.loss_sum,
                  "foreign": foreign}))
"""


def elsewhere(
    python: str | Path, case: Any, kind: str, folder: Path, anchor: Vector
) -> tuple[dict[str, Any], Vector]:
    """The same fifty steps in another process, in which importing torch or onnx fails the test."""
    given = list(batches(case))
    np.savez(
        folder / "given.npz",
        x=np.concatenate([x for x, _ in given]),
        y=np.concatenate([y for _, y in given]),
        sizes=[len(y) for _, y in given],
        anchor=anchor,
    )
    command = [
        python,
        "-W",
        "error",
        "-c",
        STEPS_ELSEWHERE,
        case.path,
        kind,
        folder / "given.npz",
        folder / "out.npy",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout), np.load(folder / "out.npy")


def stock_python() -> Path:
    """Return the Python of the environment around the one with the training build."""
    return Path(sys.prefix).parent / "bin" / "python"


def here(case: Any, anchor: Vector) -> tuple[list[float], Runtime]:
    runtime = open_runtime(case.path)
    runtime.load(runtime.parameters, anchor=anchor)
    return [runtime.step(batch, lr=0.1, mu=0.05) for batch in batches(case)], runtime


@pytest.mark.ort_training
@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_with_artifacts_gives_the_same_numbers_on_the_stock_runtime(
    cases: Cases, tmp_path: Path, name: str
) -> None:
    case = cases(name)
    anchor = away(open_bundle(case.path).parameters())
    losses, runtime = here(case, anchor)
    there, parameters = elsewhere(stock_python(), case, "onnx", tmp_path, anchor)
    assert there["foreign"] == []
    assert there["version"] != runtime.version
    np.testing.assert_allclose(there["losses"], losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(parameters, runtime.parameters, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_torch_nor_onnx_is_imported_where_both_are_installed(
    cases: Cases, tmp_path: Path, kind: Any
) -> None:
    case = cases("mlp")
    anchor = away(open_bundle(case.path).parameters())
    losses, runtime = here(case, anchor)
    there, parameters = elsewhere(sys.executable, case, kind, tmp_path, anchor)
    assert there["foreign"] == []
    np.testing.assert_allclose(there["losses"], losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(parameters, runtime.parameters, rtol=0, atol=1e-5)


@pytest.mark.skipif(ort.installed() != ["onnxruntime"], reason="the training build has it")
def test_the_stock_runtime_says_what_ort_training_needs() -> None:
    with pytest.raises(RuntimeUnavailableError) as caught:
        ort.import_training_api()
    assert str(caught.value) == (
        "the runtime 'ort-training' needs onnxruntime-training-cpu; this environment has "
        "['onnxruntime']. Use the runtime 'onnx'; or, in an environment apart (x86-64, Python 3.11 "
        'or 3.12), pip install "fleetlearn[ort-training]"'
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_a_zip_and_an_open_bundle_give_the_same_runtime(
    cases: Cases, tmp_path: Path, kind: Any
) -> None:
    case = cases("softmax")
    packed = pack_bundle(case.path, tmp_path / "softmax.zip")
    batch = next(batches(case))
    results = []
    for bundle in (case.path, str(packed), open_bundle(case.path), open_bundle(packed)):
        runtime = open_runtime(bundle, kind)
        loss = runtime.step(batch, lr=0.1)
        results.append((loss, runtime.parameters.tobytes(), runtime.evaluate(batch)))
    assert results.count(results[0]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_runtime_begins_with_the_bundles_own_model(cases: Cases, kind: Any) -> None:
    case = cases("mlp")
    runtime = open_runtime(case.path, kind)
    assert runtime.kind == kind
    expected = flatten(
        {name: t.detach().numpy() for name, t in case.model.named_parameters()},
        runtime.manifest.parameters,
    )
    np.testing.assert_array_equal(runtime.parameters, expected)
    np.testing.assert_array_equal(runtime.anchor, expected)
    assert runtime.metrics == {}


@pytest.mark.parametrize("kind", KINDS)
def test_load_sets_model_and_anchor_and_copies(cases: Cases, kind: Any) -> None:
    case = cases("softmax")
    runtime = open_runtime(case.path, kind)
    model = away(runtime.parameters)
    given = model.copy()
    runtime.load(given)
    given[:] = 0
    np.testing.assert_array_equal(runtime.parameters, model)
    np.testing.assert_array_equal(runtime.anchor, model)
    # At the anchor the proximal term is zero, whatever mu is.
    batch = next(batches(case))
    runtime.step(batch, lr=0.1, mu=100.0)
    pulled = runtime.parameters.copy()
    runtime.load(model)
    runtime.step(batch, lr=0.1, mu=0.0)
    np.testing.assert_allclose(runtime.parameters, pulled, rtol=0, atol=1e-6)
    # Its own vectors can be loaded too: on from here, with the model as the new anchor.
    runtime.load(runtime.parameters)
    np.testing.assert_array_equal(runtime.anchor, runtime.parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_the_runtimes_vectors_cannot_be_written_to(cases: Cases, kind: Any) -> None:
    runtime = open_runtime(cases("softmax").path, kind)
    for vector in (runtime.parameters, runtime.anchor):
        with pytest.raises(ValueError, match="read-only"):
            vector[0] = 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_done_changes_nothing(cases: Cases, kind: Any) -> None:
    case = cases("softmax")
    runtime = open_runtime(case.path, kind)
    start = runtime.parameters.copy()
    x, y = next(batches(case))
    for batch, hyper, error, words in (
        (
            (x, y.astype(np.float32)),
            {"lr": 0.1},
            DataError,
            "array y has dtype float32; expected int64",
        ),
        ((x[:, :5], y), {"lr": 0.1}, DataError, "array x has shape"),
        ((x[:0], y[:0]), {"lr": 0.1}, DataError, "there are no examples"),
        ((x, y), {}, ValueError, "were not given"),
        ((x, y), {"lr": 0.1, "momentum": 0.9}, ValueError, "are not the bundle's"),
    ):
        with pytest.raises(error, match=words):
            runtime.step(batch, **hyper)
    with pytest.raises(DataError, match="array x has shape"):
        runtime.evaluate((x[:, :5], y))
    with pytest.raises(
        ValueError, match=r"is float64 of shape \(650,\); expected float32 of shape \(650,\)"
    ):
        runtime.load(start.astype(np.float64))
    with pytest.raises(ValueError, match="the anchor is float32 of shape"):
        runtime.load(np.zeros_like(start), anchor=start[:-1])
    np.testing.assert_array_equal(runtime.parameters, start)
    np.testing.assert_array_equal(runtime.anchor, start)


@pytest.mark.parametrize("kind", KINDS)
def test_safe_casts_are_done(cases: Cases, kind: Any) -> None:
    case = cases("softmax")
    runtime = open_runtime(case.path, kind)
    start = runtime.parameters.copy()
    x, y = next(batches(case))
    loss = runtime.step((x, y), lr=0.1)
    runtime.load(start)
    assert runtime.step({"y": y.astype(np.int32), "x": x.astype(np.float64)}, lr=0.1) == loss


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_without_proximal_term_has_no_mu(cases: Cases, kind: Any) -> None:
    case = cases("plain")
    runtime = open_runtime(case.path, kind)
    runtime.step(next(batches(case)), lr=0.1)
    with pytest.raises(ValueError, match=r"\['mu'\] are not the bundle's; it has \['lr'\]"):
        runtime.step(next(batches(case)), lr=0.1, mu=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_more_threads_give_the_same_numbers(cases: Cases, kind: Any) -> None:
    case = cases("cnn")
    results = []
    for threads in (1, 2):
        runtime = open_runtime(case.path, kind, threads=threads)
        for batch in batches(case, 5):
            runtime.step(batch, lr=0.1)
        results.append(runtime.parameters.copy())
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-6)


def test_auto_is_onnx(cases: Cases) -> None:
    assert open_runtime(cases("softmax").path).kind == "onnx"
    assert isinstance(
        open_runtime(cases("softmax").path).evaluate(next(batches(cases("softmax")))), Evaluation
    )


def test_bad_arguments_are_refused(cases: Cases, tmp_path: Path) -> None:
    path = cases("softmax").path
    with pytest.raises(
        ValueError, match="runtime kind 'tflite'; expected one of auto, onnx, ort-training"
    ):
        open_runtime(path, "tflite")
    with pytest.raises(ValueError, match="0 threads; expected at least 1"):
        open_runtime(path, threads=0)
    with pytest.raises(BundleError, match="does not exist") as caught:
        open_runtime(tmp_path / "none.bundle")
    assert caught.value.code == Code.UNKNOWN_CONTENT


def test_runtime_unavailable_is_a_runtime_error() -> None:
    assert issubclass(RuntimeUnavailableError, RuntimeError)


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_model_takes_the_place_of_the_bundles_own(
    cases: Cases, kind: Any, tmp_path: Path
) -> None:
    case = cases("softmax")
    bare = tmp_path / "bare.bundle"
    shutil.copytree(case.path, bare, ignore=shutil.ignore_patterns("parameters.safetensors"))
    model = away(open_bundle(case.path).parameters())
    runtime = open_runtime(bare, kind, model=model)
    np.testing.assert_array_equal(runtime.parameters, model)
    np.testing.assert_array_equal(runtime.anchor, model)
    runtime.step((case.x[:8], case.y[:8]), lr=0.1, mu=0.01)
    np.testing.assert_array_equal(model, away(open_bundle(case.path).parameters()))  # it was copied
    with pytest.raises(BundleError, match=r"parameters\.safetensors"):
        open_runtime(bare, kind)
    with pytest.raises(ValueError, match="shape"):
        open_runtime(bare, kind, model=model[:-1])


def test_momentum_with_a_personal_head_equals_pytorch(cases: Cases) -> None:
    """Two tasks: the model that travels is another, the head goes on, the momentum begins at 0."""
    case = cases("personal")
    runtime = open_runtime(case.path)
    model, table = copy.deepcopy(case.model), runtime.manifest.parameters
    assert [row.name for row in table if row.personal] == ["2.weight", "2.bias"]
    for shift in (0.0, 0.01):
        moved = runtime.parameters + np.float32(shift)
        runtime.load(moved)
        with torch.no_grad():
            for name, array in views(moved, runtime.manifest.travelling).items():
                model.get_parameter(name).copy_(torch.from_numpy(array))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for x, y in batches(case, 25):
            loss = runtime.step((x, y), lr=0.05)
            optimizer.zero_grad()
            expected = functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            expected.backward()
            optimizer.step()
            assert loss == pytest.approx(expected.item(), abs=1e-5)
        trained = flatten(
            {name: value.detach().numpy() for name, value in model.named_parameters()}, table
        )
        np.testing.assert_allclose(runtime.local, trained, rtol=0, atol=1e-5)
    assert runtime.parameters.shape == (64 * 24 + 24,)


TRAINED_ELSEWHERE = """
import sys
import numpy as np
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.train import train

bundle, file, out = sys.argv[1:]
given = np.load(file)
runtime = open_runtime(bundle)
runtime.load(given["model"], previous=given["previous"])
hyper = {"lr": 0.05, "mu": 0.1, "temperature": 0.5}
outcome = train(runtime, (given["x"], given["y"]), hyper=hyper, epochs=2, batch_size=16, seed=3)
np.savez(out, update=outcome.update, kept=outcome.kept_state, loss=outcome.loss)
"""


@pytest.mark.ort_training
def test_a_task_with_everything_gives_the_same_on_the_stock_runtime(
    cases: Cases, tmp_path: Path
) -> None:
    """Momentum, MOON's term, dropout and a personal head; the training build is of another
    version."""
    case = cases("own")
    manifest = open_bundle(case.path).manifest
    assert (manifest.random, manifest.references) == (True, ("anchor", "previous"))
    model = open_bundle(case.path).parameters()[: manifest.size]
    np.savez(
        tmp_path / "given.npz", x=case.x[:100], y=case.y[:100], model=model, previous=away(model)
    )
    found = []
    for name, python in (("stock", stock_python()), ("here", sys.executable)):
        command = [
            python,
            "-W",
            "error",
            "-c",
            TRAINED_ELSEWHERE,
            case.path,
            tmp_path / "given.npz",
            tmp_path / name,
        ]
        subprocess.run(command, check=True, timeout=120)
        found.append(np.load(tmp_path / f"{name}.npz"))
    for part in ("update", "kept", "loss"):
        np.testing.assert_allclose(found[0][part], found[1][part], rtol=0, atol=1e-5)
    assert np.abs(found[0]["update"]).max() > 1e-3
    assert found[0]["kept"].shape == (24 * 10 + 10 + manifest.size,)
