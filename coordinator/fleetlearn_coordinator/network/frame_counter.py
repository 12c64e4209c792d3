"""Where frames end in a stream of bytes."""

from __future__ import annotations

from fleetlearn_coordinator.conversation.limits import LARGE_FRAME

_CONTINUATION, _BINARY = 0, 2


class FrameCounter:
    """Finds where frames end in a stream of bytes (RFC 6455, section 5.2), before anything is done
    with them."""

    __slots__ = ("_header", "_payload", "fragments")

    def __init__(self) -> None:
        self.fragments = 0
        """Frames of the arriving message, without its first."""
        self._header = b""
        """The beginning of a header that is not complete."""
        self._payload = 0
        """Bytes of the current frame that are still to come."""

    def advance(self, data: bytes, begin: int, frames: int, small: int) -> tuple[int, int]:
        """Go on from ``begin`` over at most ``frames`` frames, at most ``small`` of them smaller
        than LARGE_FRAME.

        Returns where they end, and how many of them are small. A frame counts when its header is
        complete.
        """
        at, size, counted = begin, len(data), 0
        while at < size:
            if self._payload:
                step = min(self._payload, size - at)
                at += step
                self._payload -= step
                continue
            if frames == 0 or counted == small:
                break
            header = self._header + data[at : at + 14 - len(self._header)]
            needed = _header_size(header)
            if len(header) < needed:
                self._header, at = header, size
                break
            at += needed - len(self._header)
            self._header = b""
            opcode, length = header[0] & 15, header[1] & 127
            if length > 125:
                length = int.from_bytes(header[2 : 4 if length == 126 else 10], "big")
            self._payload = length
            if opcode == _CONTINUATION:
                self.fragments += 1
            elif opcode <= _BINARY:
                self.fragments = 0
            frames -= 1
            counted += opcode != _BINARY or length < LARGE_FRAME
        return at, counted


def _header_size(header: bytes) -> int:
    if len(header) < 2:
        return 2
    length = header[1] & 127
    return 2 + (2 if length == 126 else 8 if length == 127 else 0) + (4 if header[1] & 128 else 0)
