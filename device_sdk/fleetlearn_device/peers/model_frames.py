"""A neighbour's model as it comes in: one message that announces it, and its chunks. No more is
held in memory than one model of the agreed size."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_protocol.encodings import Encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer, unpack_chunk
from fleetlearn_protocol.peer_messages import PeerModel
from fleetlearn_protocol.vector import Vector, checksum


class ArrivedModel(NamedTuple):
    """A complete model."""

    number: int
    vector: Vector | None
    """Float32, shape (P,). None: it cannot be used."""
    why: str = ""
    """Why not, for people."""


class IncomingModel:
    """What one connection brings of models of ``elements`` float32."""

    def __init__(self, encoding: Encoding, elements: int) -> None:
        self._encoding, self._elements = encoding, elements
        self._size = encoding.size(elements)
        self._model: PeerModel | None = None
        self._content = bytearray()
        self._last = 0

    def begin(self, model: PeerModel) -> None:
        """A model is announced; what came of another one is dropped. Raises ProtocolError."""
        if model.encoding != self._encoding.name:
            raise ProtocolError(
                Code.BAD_ENCODING,
                f"a model in {model.encoding} was announced; expected {self._encoding.name}",
            )
        if model.size != self._size:
            raise ProtocolError(
                Code.WRONG_LENGTH,
                f"a model of {model.size} bytes was announced; {self._elements} elements of "
                f"{self._encoding.name} have {self._size}",
            )
        if model.number <= self._last:
            raise ProtocolError(
                Code.DUPLICATE,
                f"model {model.number} was announced after {self._last} on one connection",
            )
        self._model, self._content, self._last = model, bytearray(), model.number

    def chunk(self, frame: Buffer) -> ArrivedModel | None:
        """Take a chunk in. Returns the model when it is complete. Raises ProtocolError."""
        chunk, model = unpack_chunk(frame), self._model
        if model is None or chunk.transfer != model.transfer:
            raise ProtocolError(
                Code.OUT_OF_TURN, f"a chunk of transfer {chunk.transfer}, which was not announced"
            )
        if chunk.offset != len(self._content):
            raise ProtocolError(
                Code.WRONG_OFFSET,
                f"a chunk begins at {chunk.offset}; expected {len(self._content)}",
            )
        if chunk.offset + len(chunk.payload) > self._size:
            raise ProtocolError(Code.WRONG_LENGTH, f"a chunk ends behind {self._size} bytes")
        self._content += chunk.payload
        if len(self._content) < self._size:
            return None
        content, self._model, self._content = self._content, None, bytearray()
        if checksum(content) != model.crc32:
            return ArrivedModel(model.number, None, "its checksum is wrong")
        try:
            self._encoding.check(content, self._elements)
        except ProtocolError as error:
            return ArrivedModel(model.number, None, error.text)
        return ArrivedModel(model.number, self._encoding.decode(content, self._elements))
