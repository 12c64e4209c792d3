"""Where in the user's code something happened."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnxscript
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fleetlearn_export.errors import ExportError

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LIBRARIES = (_PACKAGE, *(f"{Path(file).parent}/" for file in (torch.__file__, onnx.__file__, onnxscript.__file__)))
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/"


def fixed_size(what: str, place: str) -> ExportError:
    return ExportError(
        f"{what}: the number of examples is fixed{place}. Take it from the shape of the input, as x.shape[0]; "
        "len(x), int(...) or a number written out fix it"
    )


def place_of_error(error: BaseException) -> str:
    """The innermost line of the user's own code that the exception came through, as `` at FILE:LINE in FUNCTION``."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in reversed(chain):
        frames = traceback.extract_tb(link.__traceback__)
        place = _place([(frame.filename, frame.lineno or 0, frame.name) for frame in frames])
        if place:
            return place
    return ""


def place_of_node(node: torch.fx.Node) -> str:
    """Where the user's code made an exported operator: the module's path in the model, and the line."""
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(node.meta.get("stack_trace") or "")]
    # What stands before the exporter's own frames is the call of the exporter, not the model.
    ours = [place for place, frame in enumerate(frames) if frame[0].startswith(_PACKAGE)]
    place = _place(frames[ours[-1] + 1 :] if ours else frames)
    module = ""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        if path.startswith("model."):
            module = f" in {path.removeprefix('model.')} ({str(kind).rsplit('.', 1)[-1]})"
    return module + place


def place_of_fixed_size(error: BaseException) -> str | None:
    """Where tracing found that only the example's own number of rows fits; None where that is not the error.

    PyTorch keeps the place beside the size's symbol, which only the frames that the exception left still hold.
    """
    if "specialized it to be a constant" not in str(error):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = place_of_replacement(getattr(frame.f_locals.get("fake_mode"), "shape_env", None))
        if place:
            return place
    return ""


def place_of_replacement(shapes: object) -> str:
    """Where tracing put a number, or another size, in the place of a size."""
    for location in getattr(shapes, "replacements_slocs", {}).values():
        found = location.framework_loc
        if isinstance(found, traceback.FrameSummary) and _is_own(found.filename):
            return _place([(found.filename, found.lineno or 0, found.name)])
    return ""


def _place(frames: list[tuple[str, int, str]]) -> str:
    own = [frame for frame in frames if _is_own(frame[0])]
    return " at {}:{} in {}".format(*own[-1]) if own else ""


def _is_own(file: str) -> bool:
    if file.startswith(("<", *_LIBRARIES)):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


class _OwnFrames(set[tuple[str, str]]):
    """Holds (file, function) of all the user's code."""

    def __contains__(self, frame: object) -> bool:
        return isinstance(frame, tuple) and _is_own(frame[0])


@contextmanager
def own_frames_recorded() -> Iterator[None]:
    """Have tracing note all frames of the user's code with each operator; by itself it notes those named forward."""
    kept = torch.fx.proxy._STACK_TRACE_ANCHORS
    torch.fx.proxy._STACK_TRACE_ANCHORS = _OwnFrames()
    try:
        yield
    finally:
        torch.fx.proxy._STACK_TRACE_ANCHORS = kept


@contextmanager
def explained(what: str, *but: type[Exception]) -> Iterator[None]:
    """Turn any exception ``but`` these into an ExportError that says what failed and where in the user's code."""
    passed: tuple[type[Exception], ...] = (ExportError, *but)
    try:
        yield
    except passed:
        raise
    except GuardOnDataDependentSymNode as error:
        raise ExportError(
            f"{what}: control flow depends on the values of tensors{place_of_error(error)}. A graph takes one way for "
            "all data: choose between values with torch.where instead, and compute with tensors, not with float(...)"
        ) from error
    except Exception as error:
        fixed = place_of_fixed_size(error)
        if fixed is not None:
            raise fixed_size(what, fixed) from error
        raise ExportError(f"{what}: {first_line(error)}{place_of_error(error)}") from error


def first_line(error: BaseException) -> str:
    """The exception's kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def place_of_operator(name: str, origin: torch.fx.Graph) -> str:
    """Where the user's code made the operator that became ``name``, such as aten.grid_sampler_2d_backward.default.

    Decomposing and differentiating leave an operator's name recognisable, but not its place: the place is looked up
    by name among the operators that the user's code called.
    """
    wanted = _plain(name)
    best = ""
    for node in origin.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            known = _plain(str(node.target))
            if known == wanted:
                return place_of_node(node)
            if known in wanted or wanted in known:
                best = best or place_of_node(node)
    return best


def _plain(name: str) -> str:
    plain = name.split(".")[1].strip("_")
    return plain.removesuffix("_backward").removesuffix("_forward").removeprefix("native_")
