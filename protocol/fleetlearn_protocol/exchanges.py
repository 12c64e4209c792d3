"""Kinds of exchanges: what a question of each kind holds, and what the reply to it does.

A `question` and a `reply` name their kind. Their ``content`` is an object whose fields are those of
that kind's struct here. PROTOCOL.md, section 4, "Exchanges", is the specification.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import MODEL, Evaluation, Question, Reply
from fleetlearn_protocol.secure.pairwise_messages import (
    PAIRWISE,
    PairwiseAnswer,
    PairwiseQuestion,
)

EVALUATION = "evaluation"
"""The device measures a model on its own data."""


class NoContent(msgspec.Struct, frozen=True):
    """A content without fields."""


class ExchangeKind(NamedTuple):
    """What the messages of one kind hold."""

    question: type[msgspec.Struct]
    """The content of a `question`."""
    reply: type[msgspec.Struct]
    """The content of a `reply`."""
    vectors: tuple[str, ...] = ()
    """Names of the vectors that a question sends. If there are any, it names a bundle too."""


EXCHANGE_KINDS: dict[str, ExchangeKind] = {
    EVALUATION: ExchangeKind(NoContent, Evaluation, (MODEL,)),
    PAIRWISE: ExchangeKind(PairwiseQuestion, PairwiseAnswer),
}
"""Name of a kind -> what its messages hold."""


def content_of(message: Question | Reply) -> Any:
    """Return the message's content, of the struct that its kind says. Raises ProtocolError
    (bad-message)."""
    tag = message.__struct_config__.tag
    kind = EXCHANGE_KINDS.get(message.kind)
    if kind is None:
        known = ", ".join(EXCHANGE_KINDS)
        text = f"a {tag} of the kind {message.kind} came; known are {known}"
        raise ProtocolError(Code.BAD_MESSAGE, text)
    wanted = kind.question if isinstance(message, Question) else kind.reply
    try:
        return msgspec.convert(message.content, wanted)
    except msgspec.ValidationError as error:
        text = f"the content of a {tag} of the kind {message.kind} does not fit: {error}"
        raise ProtocolError(Code.BAD_MESSAGE, text) from None


def fields_of(content: msgspec.Struct) -> dict[str, Any]:
    """Return the content as the fields of a message. NaN becomes None, as in JSON: ``content_of``
    refuses it."""
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(content))
    return fields
