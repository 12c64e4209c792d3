"""Makes sessions of a bundle's graphs on ONNX Runtime, and runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import EVAL, EVAL_FROM_FEATURES, FROZEN, TRAIN_MANY, Manifest

from fleetlearn_device.runtimes.checks import Arrays
from fleetlearn_device.runtimes.import_onnxruntime import import_onnxruntime, ran_out_of_memory
from fleetlearn_device.runtimes.providers import Provider, borrow, open_provider, unusable

UNUSED_IN_A_PIECE = 2**16
"""Bytes by which a piece of the arena may be larger than the result in it."""
NOTHING_TO_FIND = (
    "DoubleQDQPairsRemover",
    "DynamicQuantizeMatMulFusion",
    "EnsureUniqueDQForNodeUnit",
    "MatMulIntegerToFloatFusion",
    "MatMulNBitsFusion",
    "QDQFinalCleanupTransformer",
    "QDQPropagationTransformer",
    "QDQS8ToU8Transformer",
    "QDQSelectorActionTransformer",
    "WeightBiasQuantization",
    "WhereDummyDq",
    "AttentionFusion",
    "EmbedLayerNormFusion",
    "GroupQueryAttentionFusion",
    "GroupQueryAttentionPreNormFusion",
)
"""ONNX Runtime's optimizers that look for quantized operators, for constant weights, or for
operators of its own.

A graph without frozen weights has none of these, so a session runs the same without them. Loading
the train.onnx of DenseNet-121, 7,177 nodes, takes a tenth less CPU time, of MobileNetV3-small a
sixth. Versions that lack one ignore its name.
"""


class StepError(RuntimeError):
    """ONNX Runtime could not run a graph on a batch that fits the signature, such as a label out of
    range."""


def make_session(
    bundle: Bundle,
    file: str,
    threads: int,
    inputs: Iterable[str],
    outputs: Iterable[str],
    provider: str = "cpu",
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """Return an InferenceSession for a graph of the bundle.

    sizes: values of the graph's free sizes, by name. The session is for these sizes only, and
    records what it has a GPU do, if its provider can.

    Raises BundleError: it cannot be loaded, cannot be recorded, or has other names;
    RuntimeUnavailableError, MemoryError.
    """
    chosen = open_provider(provider)
    onnxruntime = import_onnxruntime()
    options = session_options(threads)
    if sizes is not None:
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        chosen = chosen._replace(options=chosen.options | (chosen.recording or {}))
    # Sums that many threads of a GPU make together are then added in the same order each time.
    options.use_deterministic_compute = chosen.memory is not None
    if file != TRAIN_MANY:
        # A memory pattern is one block for all results, beside the arena that the first step
        # filled. Reuse keeps the memory of a dead result until another of the same shape needs it.
        # Without both, a result's memory is free after its last reader: half the peak for
        # MobileNetV3 at 224 x 224, at the same speed (benchmarks/memory.py). A step of a few
        # microseconds takes 4 more, which a simulation, with many of them, would feel.
        options.enable_mem_pattern = False
        options.enable_mem_reuse = False
        if chosen.memory is None:
            share_arena()
            options.add_session_config_entry("session.use_env_allocators", "1")
    if FROZEN in bundle.manifest.files:
        _read_frozen_in_place(options, file)
    else:
        options.add_session_config_entry(
            "optimization.disable_specified_optimizers", ";".join(NOTHING_TO_FIND)
        )
    try:
        with _graph_source(bundle, file, chosen) as source:
            session = onnxruntime.InferenceSession(source, options, **chosen.session_arguments())
    except BundleError:
        raise
    except Exception as error:
        # Each of ONNX Runtime's exceptions derives from Exception itself.
        if ran_out_of_memory(error):
            raise MemoryError(f"there was not enough memory to load {file}: {error}") from error
        raise BundleError(
            Code.BAD_MESSAGE,
            f"{bundle.path}: ONNX Runtime {onnxruntime.__version__} cannot load {file}: {error}",
        ) from error
    # ONNX Runtime falls back to the CPU without an error.
    if session.get_providers()[0] != chosen.name:
        raise unusable(provider, f"ONNX Runtime gave a session on {session.get_providers()[0]}")
    for what, actual, expected in (
        ("inputs", session.get_inputs(), inputs),
        ("outputs", session.get_outputs(), outputs),
    ):
        differing = {value.name for value in actual} ^ set(expected)
        if differing:
            raise BundleError(
                Code.BAD_MESSAGE,
                f"{bundle.path}: {file} and the manifest differ in these {what}: "
                f"{sorted(differing)}",
            )
    return session


@cache
def share_arena() -> None:
    """Make one arena of the host's memory, for all sessions of this process that ask for it.

    Each session's own arena, ONNX Runtime's default, stays as large as its largest run: training's
    and evaluation's add up. And it gives a free piece whole to a result of more than half of it,
    where this one cuts off all but 64 KiB. MobileNetV2 at 224 x 224 takes 1,013 MiB, not 1,111, in
    the same time (benchmarks/memory.py).
    """
    onnxruntime = import_onnxruntime()
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    # No limit; -1 is ONNX Runtime's default, here for how the arena grows and for its first region.
    arena = onnxruntime.OrtArenaCfg(0, -1, -1, UNUSED_IN_A_PIECE)
    # older versions refuse a second arena: the program's own serves as well
    with suppress(RuntimeError):
        onnxruntime.create_and_register_allocator(
            onnxruntime.OrtMemoryInfo("Cpu", kind, 0, memory), arena
        )


def _read_frozen_in_place(options: Any, file: str) -> None:
    """Let a session read frozen constants where they are mapped, rather than from rearranged copies
    of its own.

    A frozen network of 13 million parameters (51 MiB), training and evaluation together, batch 16:
    40 MiB of private memory, not 136, and up to 8 % more time for a step. For evaluation, which
    runs once in a task, convolutions do not rearrange their weights either.
    """
    options.add_session_config_entry("session.disable_prepacking", "1")
    if file in (EVAL, EVAL_FROM_FEATURES):
        options.graph_optimization_level = (
            import_onnxruntime().GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        )


@contextmanager
def _graph_source(bundle: Bundle, file: str, provider: Provider) -> Iterator[str | bytes]:
    """Yield the graph's path, or its bytes; as the provider can run it.

    Given a path, ONNX Runtime reads the file itself, so that no copy stays in memory. It maps
    the file of frozen constants beside it, so that all sessions, and all processes, have one copy
    of these.
    """
    rewritten = provider.rewrite(bundle.read(file)) if provider.rewrite else None
    if bundle.path.is_dir() and rewritten is None:
        yield str(bundle.path / file)
    elif FROZEN not in bundle.manifest.files:
        yield rewritten or bundle.read(file)
    else:
        with TemporaryDirectory(prefix="fleetlearn-", ignore_cleanup_errors=True) as folder:
            paths = [Path(folder, PurePosixPath(name).name) for name in (file, FROZEN)]
            for path, name in zip(paths, (file, FROZEN), strict=True):
                path.write_bytes(rewritten if rewritten and name == file else bundle.read(name))
            yield str(paths[0])


def session_options(threads: int) -> Any:
    """Return the SessionOptions: one operator at a time, with this many threads, which sleep when
    they wait."""
    options = import_onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Errors are raised; without this they are printed as well.
    options.log_severity_level = 4
    # Spinning threads take a device's other cores, and its battery, to save microseconds.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def run(
    session: Any,
    binding: Any,
    file: str,
    arrays: Arrays,
    inputs: Mapping[str, Any] | None = None,
    wait: bool = False,
    options: Any = None,
) -> None:
    """Bind ``inputs`` too, and run. ``wait``: until what was bound has arrived in another memory.
    options: RunOptions.

    Raises StepError with ONNX Runtime's own words, MemoryError.
    """
    try:
        for name, value in (inputs or {}).items():
            binding.bind_ortvalue_input(name, value)
        if wait:
            binding.synchronize_inputs()
        session.run_with_iobinding(binding, options)
    except Exception as error:
        shapes = [array.shape for array in arrays]
        if ran_out_of_memory(error):
            text = (
                f"there was not enough memory to run {file} on a batch of shapes {shapes}: {error}"
            )
            raise MemoryError(text) from error
        raise StepError(
            f"ONNX Runtime could not run {file} on a batch of shapes {shapes}: {error}"
        ) from error


def batch_values(manifest: Manifest, arrays: Arrays) -> dict[str, Any]:
    """Return the batch as OrtValues in the arrays' own memory, by the graph's names."""
    return {
        f"batch.{row.name}": borrow(array)
        for row, array in zip(manifest.batch, arrays, strict=True)
    }
