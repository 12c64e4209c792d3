"""The errors of messages, frames and bundles, and the codes that name what was wrong."""

from __future__ import annotations

import copyreg
from enum import Enum
from typing import Any


class Code(str, Enum):
    """Why something was refused. The words travel on the wire and never change their meaning."""

    # As StrEnum has it, which Python 3.10 lacks: a code is printed as its word.
    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    # the message itself
    BAD_MESSAGE = "bad-message"
    """Not JSON, a missing field, a field of the wrong type or outside its bounds."""
    UNKNOWN_TYPE = "unknown-type"
    """The message's ``type`` is not one that this side receives."""
    TOO_LARGE = "too-large"
    """A message, chunk or update above its limit."""
    BAD_VERSION = "bad-version"
    """Another version of the protocol or of the bundle format."""
    BAD_FRAME = "bad-frame"
    """A binary frame whose header cannot be read."""
    # its place in the conversation
    OUT_OF_TURN = "out-of-turn"
    """A message that the sender's state does not allow now."""
    DUPLICATE = "duplicate"
    """A second message of a kind that the sender may send only once in its state."""
    UNKNOWN_TASK = "unknown-task"
    """No such task was given, or not to this device."""
    STALE_ROUND = "stale-round"
    """The task's round is over."""
    NOT_WANTED = "not-wanted"
    """The round is open, but the task's slot was given to another device."""
    UNKNOWN_CONTENT = "unknown-content"
    """Nothing with that hash is served here."""
    # the bytes
    WRONG_OFFSET = "wrong-offset"
    """A chunk that does not begin where the last one ended, or a start beyond the end."""
    WRONG_LENGTH = "wrong-length"
    """More or fewer bytes than announced, or than the model has."""
    WRONG_HASH = "wrong-hash"
    """The bytes do not have the announced SHA-256 or CRC-32."""
    WRONG_PARTS = "wrong-parts"
    """A report's parts or their encodings are not those that its task asked for."""
    BAD_ENCODING = "bad-encoding"
    """An encoding that does not exist, or bytes that no encoder of theirs writes."""
    NOT_FINITE = "not-finite"
    """NaN or infinity in a number or a vector."""
    OUT_OF_RANGE = "out-of-range"
    """A finite value so large that the exact sum cannot hold it."""
    NORM_TOO_LARGE = "norm-too-large"
    """The update's L2 norm is above the plan's bound."""
    # the other side's condition
    BUSY = "busy"
    """The other side is at a limit; try again later."""
    REPLACED = "replaced"
    """The same device has connected again."""
    ROUND_OVER = "round-over"
    """The round reached its goal or its deadline without this task."""


MAX_TEXT = 1000
"""Longest text for people in a message, in characters."""


def clip(text: str) -> str:
    """Return the text as a message may carry it: at most MAX_TEXT characters, no lone
    surrogates."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def many(count: int, what: str) -> str:
    """Return a number of things, for people: ``1 release``, ``2 releases``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def in_words(error: BaseException, *, file: bool = False) -> str:
    """Return what an error says, for people: without the number of a system's error, and without
    the code of a FleetError. ``file``: begin with the file that a system's error is about."""
    if isinstance(error, FleetError):
        return error.text
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        # "No such file" stands in the middle of a sentence here; "EOF occurred" of OpenSSL stays.
        text = text[0].lower() + text[1:] if text[1:2].islower() else text
        return f"{error.filename}: {text}" if file and error.filename else text
    if isinstance(error, UnicodeDecodeError):
        return f"it is no UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
    return str(error) or type(error).__name__


class FleetError(Exception):
    """Something given was refused. ``code`` is for programs, ``text`` (clipped) for people."""

    def __init__(self, code: Code, text: str) -> None:
        self.code = code
        self.text = clip(text)
        super().__init__(f"{self.text} [{code.value}]")

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled as a call with its `args`, which are not what __init__ takes here:
        # it would not come back from another process, or with its code in its text.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ProtocolError(FleetError):
    """A message or a frame that breaks the protocol (PROTOCOL.md)."""


class BundleError(FleetError):
    """A training bundle that is damaged, foreign, incomplete or too new."""
