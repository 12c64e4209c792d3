"""Exceptions of code that is not ours, such as a user's data loader, for people who did not see
them happen."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from fleetlearn_protocol.errors import MAX_TEXT

_PYTHON = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {
    f"fleetlearn_{room}" for room in ("protocol", "device", "coordinator", "simulator", "export")
}
ANY_FAILURE = (Exception, SystemExit)
"""What calls of code that is not ours catch. A ``sys.exit()`` there must not end our process, with
all of its runs or devices; Ctrl-C must."""
_KEPT = "_own_traceback"
_BEGIN, _END = 300, 600
"""Characters that are kept of a long text. The end counts more: there is the innermost error of a
traceback that was sent from another process, as by a DataLoader with workers."""


def is_expected(error: BaseException) -> bool:
    """Return whether an exception is one that our code raises on purpose, with a text that is
    enough by itself."""
    if _package(type(error).__module__) in _OURS:
        return True
    return isinstance(error, ValueError | MemoryError) and _innermost(error) is None


def in_one_line(error: BaseException) -> str:
    """Return what an exception says, in one line of at most 1000 characters.

    For exceptions of code that is not ours also the type and the place:
    ``KeyError: 3 (in load, mydata.py line 12)``. The place is the innermost one in the user's code,
    or else in an installed package.
    """
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if is_expected(error):
        return _shortened(text or kind)
    described = _shortened(f"{kind}: {text}" if text else kind)
    at = _innermost(error)
    if at is None:
        return described
    frame, line = at
    where = f"(in {frame.f_code.co_name}, {Path(frame.f_code.co_filename).name} line {line})"
    return f"{described} {where}"[:MAX_TEXT]


def failure(what: str, error: BaseException) -> str:
    """Return that code which is not ours failed, and how, in one line. ``what``: it, in words, such
    as ``stop.rule`` or ``the function count``."""
    return f"{what} failed: {in_one_line(error)}"


def traceback_lines(error: BaseException) -> list[str]:
    """Return the exception's traceback as lines, without line ends."""
    return "".join(traceback.format_exception(error)).rstrip().splitlines()


def own_traceback(error: BaseException, modules: Iterable[str] = ()) -> list[str]:
    """Return the traceback of the first error of the user's code among an error and its causes, as
    lines; none where there is no such error. Frames of Python's and our code are left out.

    ``modules``: those that the user listed, which are the user's code where they are installed.
    """
    if _KEPT in vars(error):
        return list(vars(error)[_KEPT])
    listed = (*modules,)
    cause: BaseException | None = error
    while cause is not None:
        users = [_is_users(frame, listed) for frame, _ in traceback.walk_tb(cause.__traceback__)]
        # a module that cannot be parsed has no frame, and the error itself has its line
        if any(users) or isinstance(cause, SyntaxError):
            shown = traceback.TracebackException.from_exception(cause)
            shown.__cause__ = shown.__context__ = None
            kept = zip(shown.stack, users, strict=True)
            shown.stack = traceback.StackSummary.from_list([frame for frame, own in kept if own])
            return "".join(shown.format()).rstrip().splitlines()
        cause = cause.__cause__ or cause.__context__
    return []


def keep_own_traceback(error: BaseException, modules: Iterable[str]) -> None:
    """Let an error know its ``own_traceback``. An error that is sent to another process loses its
    traceback and its causes, and keeps this."""
    vars(error)[_KEPT] = own_traceback(error, modules)


def _is_users(frame: FrameType, listed: tuple[str, ...]) -> bool:
    if _is_python_or_ours(frame):
        return False
    module = frame.f_globals.get("__name__", "")
    return not _is_installed(frame) or any(
        module == each or module.startswith(f"{each}.") for each in listed
    )


def _innermost(error: BaseException) -> tuple[FrameType, int] | None:
    """Return the innermost frame, with its line, of the user's code, or else of installed
    packages."""
    frames = [
        frame
        for frame in traceback.walk_tb(error.__traceback__)
        if not _is_python_or_ours(frame[0])
    ]
    users = [frame for frame in frames if not _is_installed(frame[0])]
    return users[-1] if users else frames[-1] if frames else None


def _is_python_or_ours(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    of_python = file.startswith(("<frozen", *_PYTHON)) and not _is_installed(frame)
    return of_python or _package(frame.f_globals.get("__name__", "")) in _OURS


def _is_installed(frame: FrameType) -> bool:
    return not _INSTALLED.isdisjoint(Path(frame.f_code.co_filename).parts)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _shortened(text: str) -> str:
    return text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} … {text[-_END:]}"
