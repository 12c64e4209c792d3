"""Steps on tensors in another memory than the host's: on a GPU where this machine has one, and
always on a stand-in.

The stand-in is the CPU with tensors in memory of their own, whose results must be the same bit for
bit. It copies each input when it is bound, as ONNX Runtime does with what a session does not read
where it is.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import zoo
from bundle_cache import cached_export
from fleetlearn_device.runtimes import providers, runtime_onnx
from fleetlearn_device.runtimes.import_onnxruntime import (
    RuntimeUnavailableError,
    installed,
    ran_out_of_memory,
)
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.runtimes.providers import CPU, PROVIDERS, Provider, Tensors, open_provider
from fleetlearn_device.runtimes.runtime import Runtime
from fleetlearn_device.runtimes.runtime_onnx import OnnxRuntime
from fleetlearn_device.runtimes.sessions import StepError
from fleetlearn_device.training.kept_state import collect_kept_state
from fleetlearn_device.training.train import TrainingResult, train
from fleetlearn_export import export_bundle
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector, views
from line_bundle import line_data, write_line_bundle
from numpy.typing import NDArray

Cases = Callable[[str], Any]
HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
needs_cuda = pytest.mark.skipif(
    not HAS_CUDA,
    reason="needs onnxruntime-gpu and a GPU; ONNX Runtime here has no CUDAExecutionProvider",
)
TOLERANCE = {"stand-in": 0.0, "cuda": 1e-4}
"""Largest difference from the CPU's parameters."""
MODELS = [
    *(
        ("stand-in", name)
        for name in ("mcmahan", "resnet8-batchnorm", "transformer", "embedding-bag")
    ),
    *(pytest.param("cuda", name, marks=needs_cuda) for name in zoo.NAMES),
]


class CopyingSession:
    """A session whose bindings copy what they are given, at that moment. Inputs only: outputs are
    written in place."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def io_binding(self) -> Any:
        return CopyingBinding(self.session.io_binding())

    def run_with_iobinding(self, binding: CopyingBinding, options: Any) -> None:
        self.session.run_with_iobinding(binding.binding, options)


class CopyingBinding:
    def __init__(self, binding: Any) -> None:
        self.binding = binding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        array = value.numpy().copy()
        copied = providers.allocate(array.shape, array.dtype, "cpu")
        copied.update_inplace(array)
        self.binding.bind_ortvalue_input(name, copied)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in in the place of the provider ``cuda``."""
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu"))
    make = runtime_onnx.make_session

    def copying(*arguments: Any) -> Any:
        session = make(*arguments)
        return CopyingSession(session) if arguments[-1] == "cuda" else session

    monkeypatch.setattr(runtime_onnx, "make_session", copying)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=needs_cuda)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the provider ``cuda`` computes."""
    if request.param == "stand-in":
        request.getfixturevalue("stand_in")
    return str(request.param)


def both(path: Any) -> Iterator[Runtime]:
    return (open_runtime(path, provider=provider) for provider in ("cpu", "cuda"))


def check_alike(place: str, found: Vector, expected: Vector) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[place])


def check_results_alike(place: str, found: TrainingResult, expected: TrainingResult) -> None:
    check_alike(place, found.update, expected.update)
    check_alike(place, found.kept_state, expected.kept_state)
    rough = {"rel": 1e-4, "abs": 1e-4} if place == "cuda" else {"rel": 0, "abs": 0}
    assert found.loss == pytest.approx(expected.loss, **rough)
    assert found.metrics == pytest.approx(expected.metrics, **rough)
    assert (found.evaluation is None) == (expected.evaluation is None)
    if found.evaluation is not None and expected.evaluation is not None:
        assert found.evaluation.examples == expected.evaluation.examples
        assert found.evaluation.loss_sum == pytest.approx(expected.evaluation.loss_sum, **rough)
        assert found.evaluation.metric_sums == pytest.approx(
            expected.evaluation.metric_sums, **rough
        )


@pytest.mark.parametrize(("place", "name"), MODELS, indirect=["place"])
def test_five_steps_of_a_model_are_the_cpus(place: str, name: str, tmp_path: Path) -> None:
    case = zoo.make(name)
    path = tmp_path / f"{name}.bundle"
    # recurrent models cannot be found again
    export = export_bundle if place == "cuda" else cached_export
    export(case.module, case.loss, case.batch(4), path, metrics=case.metrics, targets=case.targets)
    expected, found = both(path)
    for step in range(5):
        batch = tuple(array.numpy() for array in case.batch(8, step))
        losses = [runtime.step(batch, lr=0.05, seed=step) for runtime in (expected, found)]
        assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE[place], abs=TOLERANCE[place])
        assert found.metrics == pytest.approx(
            expected.metrics, rel=TOLERANCE[place], abs=TOLERANCE[place]
        )
    assert np.abs(expected.parameters - expected.anchor).max() > 1e-3
    check_alike(place, found.local, expected.local)
    check_alike(place, found.state, expected.state)


@pytest.mark.parametrize("name", ["cnn", "personal", "own"])
def test_two_tasks_are_the_cpus(cases: Cases, name: str, place: str) -> None:
    """The second begins with another model, with what the first left, and with MOON's previous
    model."""
    case = cases(name)
    hyper = {"own": {"lr": 0.05, "mu": 0.1, "temperature": 0.5}}.get(name, {"lr": 0.05})
    results = []
    for runtime in both(case.path):
        model = open_bundle(case.path).parameters()[: runtime.manifest.size]
        tasks = []
        for seed in (3, 4):
            previous = (
                {"previous": model + tasks[0].update}
                if "previous" in runtime.manifest.references and tasks
                else {}
            )
            runtime.load(model + np.float32(0.01 * seed), **previous)
            data = case.x[:100], case.y[:100]
            tasks.append(
                train(runtime, data, hyper=hyper, epochs=2, batch_size=16, seed=seed, evaluate=True)
            )
        results.append(tasks)
    for expected, found in zip(*results, strict=True):
        check_results_alike(place, found, expected)


@pytest.mark.parametrize("keeps", [True, False])
def test_all_that_a_step_can_read_and_carry(keeps: bool, place: str, tmp_path: Path) -> None:
    """Scalars, references, state that is kept and state that is not, a personal part, a seed."""
    bundle = write_line_bundle(
        tmp_path / "line.bundle",
        personal=True,
        state=keeps,
        references=("anchor", "correction", "previous"),
        random=True,
    )
    x, y = line_data(20)
    model = np.arange(4, dtype=np.float32)
    found = []
    for runtime in both(bundle):
        parts = [np.float32(runtime.step((x, y), seed=1, lr=0.1, mu=0.3))]
        runtime.load(model, anchor=model + 1, correction=model / 8, previous=model - 1)
        # Other values of the scalars and the seed in each step.
        losses = [
            runtime.step((x, y), seed=step, lr=0.1 / (1 + step), mu=0.1 * step) for step in range(3)
        ]
        parts += [np.array(losses, np.float32)]
        parts += [runtime.local.copy(), runtime.state.copy(), collect_kept_state(runtime).copy()]
        runtime.load(runtime.parameters)  # its own vector; the personal and the kept part stay
        parts.append(np.float32(runtime.step((x, y), seed=5, lr=0.1)))
        runtime.load(model)  # after a step, with nothing read
        parts += [runtime.local.copy(), runtime.state.copy(), runtime.anchor.copy()]
        found.append(np.concatenate([np.ravel(part) for part in parts]))
    check_alike(place, found[1], found[0])


def test_a_step_that_fails_changes_nothing(cases: Cases, stand_in: None) -> None:
    case = cases("softmax")
    runtime = open_runtime(case.path, provider="cuda")
    batch = case.x[:20], case.y[:20]
    runtime.step(batch, lr=0.1)
    with pytest.raises(
        StepError,
        match=r"could not run graphs/train.onnx on a batch of shapes \[\(20, 64\), \(20,\)\]: ",
    ):
        runtime.step((case.x[:20], np.full(20, 10)), lr=0.1)
    again = open_runtime(case.path)
    again.step(batch, lr=0.1)
    np.testing.assert_array_equal(runtime.parameters, again.parameters)
    assert runtime.step(batch, lr=0.1) == again.step(batch, lr=0.1)


def test_parameters_stay_where_they_are_until_they_are_read(
    cases: Cases, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[[Tensors], None]:
        method = getattr(Tensors, name)

        def call(self: Tensors) -> None:
            calls[name] += bool(self._copied)
            method(self)

        return call

    for name in ("send", "fetch"):
        monkeypatch.setattr(Tensors, name, counted(name))
    case = cases("cnn")
    runtime = open_runtime(case.path, provider="cuda")
    assert isinstance(runtime, OnnxRuntime)
    sent = {"send": 2}  # the model and the anchor
    assert calls == sent
    buffers = set()
    for _ in range(4):
        runtime.step((case.x[:20], case.y[:20]), lr=0.1)
        buffers.add(runtime._now.values["param.0.weight"].data_ptr())
    runtime.evaluate((case.x[:20], case.y[:20]))
    assert len(buffers) == 2
    assert calls == sent
    vector = runtime.parameters
    assert np.array_equal(vector, runtime.local)
    assert calls == sent | {"fetch": 1}
    assert not np.array_equal(vector, runtime.anchor)


def test_on_the_cpu_nothing_is_copied() -> None:
    vector = np.arange(6, dtype=np.float32)
    tensors = Tensors(vector, {"a": vector[:2], "b": vector[2:].reshape(2, 2)}, None)
    tensors.values["b"].update_inplace(np.full((2, 2), 9, np.float32))
    assert vector.tolist() == [0, 1, 9, 9, 9, 9]
    vector[0] = 7
    assert tensors.values["a"].numpy().tolist() == [7, 1]


def test_tensors_elsewhere_are_copied_when_they_are_sent_and_fetched() -> None:
    vector = np.arange(3, dtype=np.float32)
    tensors = Tensors(vector, {"a": vector[:2], "scalar": vector[2:].reshape(())}, "cpu")
    tensors.send()
    vector[:] = 0
    tensors.fetch()
    assert vector.tolist() == [0, 1, 2]


# What cannot be used


def test_an_unknown_provider_is_refused(cases: Cases) -> None:
    with pytest.raises(ValueError, match="provider 'tpu'; expected one of cpu, cuda"):
        open_runtime(cases("softmax").path, provider="tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="provider 'tpu'; expected one of cpu, cuda"):
        open_provider("tpu")


def test_ort_training_computes_on_the_cpu_only(cases: Cases) -> None:
    with pytest.raises(
        ValueError, match="provider 'cuda'; the runtime 'ort-training' computes on the CPU"
    ):
        open_runtime(cases("softmax").path, "ort-training", provider="cuda")


@pytest.mark.skipif(HAS_CUDA, reason="ONNX Runtime here has the provider")
def test_a_build_without_the_provider_says_what_to_install(cases: Cases) -> None:
    with pytest.raises(RuntimeUnavailableError) as caught:
        open_runtime(cases("softmax").path, provider="cuda")
    text, (package,) = str(caught.value), installed()
    assert text.startswith(
        f"the provider 'cuda' is ONNX Runtime's CUDAExecutionProvider, which is not in {package} "
        f"{onnxruntime.__version__}; it has "
    )
    assert (
        f'pip uninstall {package}, then pip install "onnxruntime-gpu[cuda,cudnn]"; on a Jetson, '
        "NVIDIA's"
    ) in text


@pytest.mark.skipif(HAS_CUDA, reason="memory of a GPU can be had")
def test_a_gpu_that_cannot_be_used_is_told_before_the_graph_is_loaded(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider is there, and no memory of a GPU."""
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cuda"))
    path = tmp_path / "damaged.bundle"
    shutil.copytree(cases("softmax").path, path)
    (path / "graphs/train.onnx").write_bytes(b"no graph at all")
    with pytest.raises(
        RuntimeUnavailableError,
        match=r"the provider 'cuda' does not work here, with .*: .*CUDA.*driver",
    ):
        open_runtime(open_bundle(path, files=()), provider="cuda")


def test_a_session_that_fell_back_to_the_cpu_is_refused(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        PROVIDERS, "cuda", Provider(CPU, {}, None)._replace(name="CUDAExecutionProvider")
    )
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU]
    )
    monkeypatch.setattr(Provider, "session_arguments", lambda self: {"providers": [CPU]})
    with pytest.raises(RuntimeUnavailableError, match=f"ONNX Runtime gave a session on {CPU}"):
        open_runtime(cases("softmax").path, provider="cuda")


@pytest.mark.skipif(sys.platform != "linux", reason="the name and the format of a library")
def test_a_library_that_the_system_cannot_load_is_named(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself says only that there is no provider."""
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi/libonnxruntime_providers_cuda.so").write_bytes(b"no library at all")
    monkeypatch.setattr(onnxruntime, "__path__", [str(tmp_path)])
    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "no such memory"))
    with pytest.raises(
        RuntimeUnavailableError, match=r"with .*: .*libonnxruntime_providers_cuda\.so: "
    ):
        open_provider("cuda")


def test_a_gpu_without_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> NDArray[Any]:
        raise RuntimeError(
            "CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);"
        )

    monkeypatch.setitem(PROVIDERS, "cuda", Provider(CPU, {}, "cpu"))
    monkeypatch.setattr(providers, "allocate", full)
    with pytest.raises(MemoryError, match="the provider 'cuda' has no memory left: CUDA failure 2"):
        open_provider("cuda")


@pytest.mark.parametrize(
    "text",
    [
        (
            "CUDA failure 2: out of memory ; GPU=0 ; hostname=jetson ; expr=cudaMalloc((void**)&p, "
            "size);"
        ),
        (
            "BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested "
            "buffer of size 1073741824"
        ),
        "CUDNN failure 4: CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
    ],
)
def test_a_gpus_errors_for_too_little_memory_are_known(text: str) -> None:
    assert ran_out_of_memory(RuntimeError(text))


def test_views_of_a_model_are_tensors_of_it(cases: Cases, stand_in: None) -> None:
    """What the evaluation reads are the buffer's tensors, not the host's vector."""
    case = cases("softmax")
    runtime = open_runtime(case.path, provider="cuda")
    assert isinstance(runtime, OnnxRuntime)
    runtime.step((case.x[:20], case.y[:20]), lr=0.1)
    for name, view in views(runtime._now.vector, runtime.manifest.parameters).items():
        assert not np.array_equal(view, runtime._now.values[f"param.{name}"].numpy())
    expected = open_runtime(case.path)
    expected.step((case.x[:20], case.y[:20]), lr=0.1)
    assert runtime.evaluate((case.x, case.y)) == expected.evaluate((case.x, case.y))
