"""Locations in the user's code, and errors that name them."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import onnxscript
import torch
import torch.fx.proxy
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.proxy import TracerBase

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.advice import cause_of

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_FILES = (torch.__file__, np.__file__, onnx.__file__, onnxscript.__file__)
_LIBRARIES = (_PACKAGE, *(f"{Path(file).parent}/" for file in _FILES))
_IN_A_LIBRARY = (
    ". This is a library's line: look for a setting that leaves it out, such as layerdrop=0 for "
    "layers that are skipped at random, apply_spec_augment=False for inputs that are masked at "
    "random, or validate_args=False for distributions. If there is none, override this method in a "
    "subclass"
)
_VMAP = str(Path("torch", "_functorch", "vmap.py"))
_conditions_in_vmap: set[str] = set()
"""Where conditions on the number of examples arose inside torch.vmap, in the last tracing."""
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"


def fixed_size_error(what: str, location: str) -> ExportError:
    in_vmap = (
        ". Here PyTorch's torch.vmap fixes it, as it does for gather, scatter and cross_entropy: "
        "index instead (row[label]), or call the operator on the whole batch"
    )
    return ExportError(
        f"{what}: the number of examples is fixed{location}. Take it from the shape of the input, "
        "as x.shape[0] or len(x); int(...), a loop over the examples or a number written out fix it"
        f"{in_vmap if location in _conditions_in_vmap else ''}{hint_of_library(location)}"
    )


def hint_of_library(location: str) -> str:
    """Return what else an error says if the location is a library's."""
    return _IN_A_LIBRARY if "site-packages" in location else ""


def location_of_error(error: BaseException) -> str:
    """Return `` at FILE:LINE in FUNCTION``: the innermost line of the user's code that the
    exception passed through."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in reversed(chain):
        frames = traceback.extract_tb(link.__traceback__)
        location = _location([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])
        if location:
            return location
    return ""


def location_of_node(node: torch.fx.Node) -> str:
    """Return where the user's code called an exported operator: the module's path in the model, and
    the line."""
    frames = [
        (file, int(line), name)
        for file, line, name in _FRAME.findall(node.meta.get("stack_trace") or "")
    ]
    # Frames before the exporter's are the call of the exporter; the model's come after them. Behind
    # the model's there are frames of the exporter again where it replaces random operators.
    own = [number for number, frame in enumerate(frames) if frame[0].startswith(_PACKAGE)]
    end = len(frames)
    while own and own[-1] == end - 1:
        end = own.pop()
    location = _location(
        frames[own[-1] + 1 : end] if own else frames[:end] if end == len(frames) else []
    )
    module = ""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        if path.startswith("model."):
            module = f" in {path.removeprefix('model.')} ({str(kind).rsplit('.', 1)[-1]})"
    return module + location


def location_of_fixed_size(error: BaseException) -> str | None:
    """Return where tracing fixed the number of examples to the example's own. Returns None for any
    other error.

    PyTorch keeps the location beside the size's symbol. Only the exception's frames still hold that
    symbol.
    """
    if "specialized it to be a constant" not in str(error):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        location = location_of_replaced_size(
            getattr(frame.f_locals.get("fake_mode"), "shape_env", None)
        )
        if location:
            return location
    return ""


def case_of_sizes(error: BaseException) -> tuple[str, str] | None:
    """Return the condition on the number of examples ``n`` that tracing assumed, and where. Returns
    None for any other error."""
    found = re.search(r"generated guard (.+)", str(error))
    if found is None:
        return None
    condition = re.sub(r"L\['\w+'\](\[\d+\])*\.size\(\)\[0\]", "n", found[1]).removesuffix(".")
    for guard in _guards(error):
        line = guard.sloc.framework_loc
        if (
            line is not None
            and is_user_code(line.filename)
            and not _holds_for_all_sizes(guard.expr)
        ):
            return condition.removesuffix(" and n <= IntInfinity()"), _location(
                [(line.filename, line.lineno, line.name)]
            )
    return condition, ""


def is_without_cause(error: BaseException) -> bool:
    """Whether tracing assumed conditions on the number of examples that hold for any number, but
    could not prove it."""
    if "specialized it to be a constant" in str(error) or "generated guard" not in str(error):
        return False
    guards = list(_guards(error))
    return bool(guards) and all(_holds_for_all_sizes(guard.expr) for guard in guards)


def _guards(error: BaseException) -> Iterator[Any]:
    """Yield the conditions that tracing assumed, with their places."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield from getattr(
            getattr(frame.f_locals.get("fake_mode"), "shape_env", None), "guards", []
        )


def _holds_for_all_sizes(condition: Any) -> bool:
    """Whether a condition holds for some small, large, even and odd sizes. All free sizes are given
    the same one."""
    found = [
        condition.subs(dict.fromkeys(condition.free_symbols, size))
        for size in (2, 3, 4, 5, 8, 100, 1000, 10**6 + 1)
    ]
    return all(value == True for value in found)  # noqa: E712  # sympy's own True


def location_of_replaced_size(shapes: object) -> str:
    """Return where tracing replaced a size by a number or, if it says of none, by another size."""
    for row in getattr(shapes, "guards", []):
        line = row.sloc.framework_loc
        if (
            row.expr.is_Equality
            and row.expr.rhs.is_number
            and line is not None
            and is_user_code(line.filename)
        ):
            return _location([(line.filename, line.lineno or 0, line.name)])
    for row in getattr(shapes, "replacements_slocs", {}).values():
        frame = row.framework_loc
        if isinstance(frame, traceback.FrameSummary) and is_user_code(frame.filename):
            return _location([(frame.filename, frame.lineno or 0, frame.name)])
    return ""


def _location(frames: list[tuple[str, int, str]]) -> str:
    own = [frame for frame in frames if is_user_code(frame[0])]
    return " at {}:{} in {}".format(*own[-1]) if own else ""


def is_user_code(file: str) -> bool:
    """Whether a file is neither PyTorch's, nor NumPy's, nor ONNX's, nor the standard library's, nor
    this package's."""
    if file.startswith(("<", *_LIBRARIES)):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


@cache
def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE) or is_user_code(file)


@contextmanager
def user_frames_recorded() -> Iterator[None]:
    """Let tracing record all frames of the user's code with each operator, not only those named
    forward.

    An operator of the backward pass gets the frames of the forward pass's operator that it
    differentiates. Autograd numbers those in the order in which they run, and a node of the
    backward pass has the same number.
    """
    forward: dict[int, traceback.StackSummary] = {}

    def frames_of_interest(tracer: object, own: traceback.StackSummary) -> traceback.StackSummary:
        node = torch._C._current_autograd_node()
        if node is not None:
            return forward.get(node._sequence_nr(), own)
        # The operator that autograd numbered comes first; others, which have no derivative, may
        # follow it.
        forward.setdefault(torch.autograd._get_sequence_nr() - 1, own)
        return own

    def place_of_condition(shapes: ShapeEnv) -> FrameType | None:
        if any(frame.f_code.co_filename.endswith(_VMAP) for frame, _ in traceback.walk_stack(None)):
            _conditions_in_vmap.add(location_of_running_line())
        return _model_frame() or frame_of_shapes(shapes)

    _conditions_in_vmap.clear()
    proxies: Any = torch.fx.proxy
    originals = TracerBase._filter_traceback_frames, proxies.CapturedTraceback
    frame_of_shapes = ShapeEnv._get_user_frame
    TracerBase._filter_traceback_frames = frames_of_interest  # type: ignore[assignment, method-assign]
    proxies.CapturedTraceback = _OwnFrames
    ShapeEnv._get_user_frame = place_of_condition  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames, proxies.CapturedTraceback = originals  # type: ignore[method-assign]
        ShapeEnv._get_user_frame = frame_of_shapes  # type: ignore[method-assign]


def location_of_running_line() -> str:
    """Return the line of the user's code that runs now, as this package runs the model."""
    frame = _model_frame()
    return (
        _location([(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)])
        if frame
        else ""
    )


def _model_frame() -> FrameType | None:
    """Return the innermost frame of the user's code that this package called, as it calls the
    model."""
    frame: FrameType | None = sys._getframe(1)
    nearest = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            if nearest is not None:
                return nearest
        elif nearest is None and _is_own(file):
            nearest = frame
        frame = frame.f_back
    return None


class _OwnFrames:
    """The frames of this package and of the user's code, in place of PyTorch's
    ``CapturedTraceback``.

    That one looks up the source line of each of some 40 frames, which is a fifth of the time that
    tracing takes.
    """

    def __init__(self) -> None:
        self._frames: list[traceback.FrameSummary] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if _is_own(file):
                self._frames.append(
                    traceback.FrameSummary(
                        file, frame.f_lineno, frame.f_code.co_name, lookup_line=False, line=""
                    )
                )
            frame = frame.f_back

    @classmethod
    def extract(cls) -> _OwnFrames:
        return cls()

    def summary(self) -> traceback.StackSummary:
        """Return the frames, the innermost last."""
        return traceback.StackSummary.from_list(self._frames[::-1])


@contextmanager
def as_export_error(what: str, *but: type[Exception]) -> Iterator[None]:
    """Turn exceptions, except ``but``, into an ExportError that says what failed, and where in the
    user's code."""
    passed: tuple[type[Exception], ...] = (ExportError, *but)
    try:
        yield
    except passed:
        raise
    except GuardOnDataDependentSymNode as error:
        where = location_of_error(error)
        raise ExportError(
            f"{what}: control flow depends on the values of tensors{where}. A graph takes one way "
            "for all data: choose between values with torch.where instead, and compute with "
            f"tensors, not with float(...){hint_of_library(where)}"
        ) from error
    except Exception as error:
        fixed = location_of_fixed_size(error)
        if fixed is not None:
            raise fixed_size_error(what, fixed) from error
        case = case_of_sizes(error)
        if case is not None:
            condition, where = case
            raise ExportError(
                f"{what}: the number n of examples decides what is computed{where}; on the example "
                f"{condition}. A graph computes the same for any number: take this condition "
                f"out{hint_of_library(where)}"
            ) from error
        line, where, cause = first_line(error), location_of_error(error), cause_of(error)
        if cause is not None:
            raise ExportError(
                f"the model or its loss cannot be exported{where}: {cause}. PyTorch says: {line}"
            ) from error
        raise ExportError(f"{what}: {line}{where}") from error


def first_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def location_of_operator(name: str, located: torch.fx.Graph) -> str:
    """Return where the user's code called what became ``name``, such as
    aten.grid_sampler_2d_backward.default.

    Decomposition and differentiation lose an operator's location, but its name stays recognisable.
    So this looks for the name among the operators that the user's code called.
    """
    wanted = _base_name(name)
    best = ""
    for node in located.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            known = _base_name(str(node.target))
            if known == wanted:
                return location_of_node(node)
            if known in wanted or wanted in known:
                best = best or location_of_node(node)
    return best


def _base_name(name: str) -> str:
    plain = name.split(".")[1].strip("_")
    return plain.removesuffix("_backward").removesuffix("_forward").removeprefix("native_")
