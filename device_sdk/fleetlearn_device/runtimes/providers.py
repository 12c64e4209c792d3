"""Where a session computes, chosen by name: on the CPU or on a GPU. And tensors in the memory that
it computes in."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.runtimes.cuda.graphs import for_cuda
from fleetlearn_device.runtimes.import_onnxruntime import (
    RuntimeUnavailableError,
    import_onnxruntime,
    installed,
    ran_out_of_memory,
)

ProviderName = Literal["cpu", "cuda"]
CPU = "CPUExecutionProvider"


class Provider(NamedTuple):
    """One of ONNX Runtime's execution providers. Operators that it does not have run on the CPU."""

    name: str
    """ONNX Runtime's name for it."""
    options: dict[str, str]
    memory: str | None
    """The memory that it computes in, by ONNX Runtime's name. None: the host's."""
    rewrite: Callable[[bytes], bytes | None] | None = None
    """Returns a graph (an encoded ModelProto) without what it cannot run; None where the graph has
    nothing of that."""
    recording: dict[str, str] | None = None
    """Options with which a session records what it has a GPU do, and replays it. None: it
    cannot."""

    def session_arguments(self) -> dict[str, Any]:
        """Return the arguments of an InferenceSession that choose this provider."""
        others = [] if self.name == CPU else [CPU]
        # Without the last one, ONNX Runtime prints an error and goes on with the CPU.
        return {
            "providers": [self.name, *others],
            "provider_options": [self.options, *({} for _ in others)],
            "enable_fallback": 0,
        }


PROVIDERS: dict[str, Provider] = {
    "cpu": Provider(CPU, {}, None),
    "cuda": Provider(
        "CUDAExecutionProvider",
        {
            # TensorFloat-32 rounds the factors of a product to 11 bits: errors of 5e-4, where
            # float32 has 6e-8.
            "use_tf32": "0",
            # By default cuDNN's algorithms are timed for each new shape, and another one may win at
            # the next start.
            "cudnn_conv_algo_search": "HEURISTIC",
        },
        "cuda",
        for_cuda,
        {"enable_cuda_graph": "1"},
    ),
}


def check_provider_name(name: str) -> None:
    """Raise ValueError unless it is the name of a provider."""
    if name not in PROVIDERS:
        raise ValueError(f"provider {name!r}; expected one of {', '.join(PROVIDERS)}")


def open_provider(name: str) -> Provider:
    """Return the provider, once it has shown that it works here.

    Raises ValueError on an unknown name, RuntimeUnavailableError where ONNX Runtime lacks the
    provider or cannot use a GPU, MemoryError where the GPU has no memory left.
    """
    check_provider_name(name)
    provider, onnxruntime = PROVIDERS[name], import_onnxruntime()
    here = f"{' and '.join(installed()) or 'onnxruntime'} {onnxruntime.__version__}"
    available = onnxruntime.get_available_providers()
    if provider.name not in available:
        raise RuntimeUnavailableError(
            f"the provider {name!r} is ONNX Runtime's {provider.name}, which is not in {here}; it "
            f"has {', '.join(available)}. Replace it: pip uninstall {' '.join(installed())}, then "
            'pip install "onnxruntime-gpu[cuda,cudnn]"; on a Jetson, NVIDIA\'s wheel of '
            "onnxruntime-gpu for its JetPack"
        )
    if provider.memory is not None:
        _load_libraries(onnxruntime)
        try:
            # The first tensor there loads CUDA and opens the GPU: a session would fall back to the
            # CPU, and only log it.
            allocate((), np.dtype(np.float32), provider.memory)
        except Exception as error:
            # ONNX Runtime's exceptions derive from Exception, or from RuntimeError.
            if ran_out_of_memory(error):
                raise MemoryError(f"the provider {name!r} has no memory left: {error}") from error
            raise unusable(name, _missing_library(onnxruntime) or str(error).strip()) from error
    return provider


def unusable(name: str, why: str) -> RuntimeUnavailableError:
    """Return the error for a provider that is installed and does not work."""
    here = f"{' and '.join(installed()) or 'onnxruntime'} {import_onnxruntime().__version__}"
    return RuntimeUnavailableError(
        f"the provider {name!r} does not work here, with {here}: {why}. It needs an NVIDIA GPU "
        "with its driver, and CUDA and cuDNN in the versions of that package: pip install "
        '"onnxruntime-gpu[cuda,cudnn]" brings these two'
    )


def _load_libraries(onnxruntime: ModuleType) -> None:
    """Load CUDA and cuDNN from their wheels, if they are installed: ONNX Runtime does not find them
    by itself."""
    if hasattr(onnxruntime, "preload_dlls"):  # since 1.21
        with redirect_stdout(io.StringIO()):  # it prints what it does not find
            onnxruntime.preload_dlls()


def _missing_library(onnxruntime: ModuleType) -> str:
    """Return why the system cannot load ONNX Runtime's part for CUDA, or nothing: ONNX Runtime only
    logs it."""
    library = Path(onnxruntime.__path__[0], "capi", "libonnxruntime_providers_cuda.so")
    if library.exists():
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            return str(error)
    return ""


def borrow(array: NDArray[Any]) -> Any:
    """Return an OrtValue in the array's own memory. It does not keep the array alive: the caller
    must."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array)


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any], memory: str) -> Any:
    """Return an OrtValue in new memory, whose values are not set."""
    return import_onnxruntime().OrtValue.ortvalue_from_shape_and_type(
        list(shape), dtype.type, memory
    )


class Tensors:
    """The tensors of a flat vector, by a graph's names, as OrtValues in the memory that a session
    computes in.

    In the host's memory (``memory`` is None) they are the vector's own memory, and nothing is ever
    copied. Elsewhere each has its own memory: ``send`` copies the vector there, ``fetch`` copies
    the tensors back into the vector.
    """

    def __init__(
        self, vector: Vector, views: Mapping[str, NDArray[Any]], memory: str | None
    ) -> None:
        """``views``: the tensors as views of the vector."""
        self.vector = vector
        """Must outlive the values that borrow its memory."""
        self.values: dict[str, Any] = {
            name: borrow(view) if memory is None else allocate(view.shape, view.dtype, memory)
            for name, view in views.items()
        }
        self._copied = {} if memory is None else views

    def send(self) -> None:
        """Copy the vector to the tensors."""
        for name, view in self._copied.items():
            self.values[name].update_inplace(view)

    def fetch(self) -> None:
        """Copy the tensors to the vector."""
        for name, view in self._copied.items():
            view[...] = self.values[name].numpy()
