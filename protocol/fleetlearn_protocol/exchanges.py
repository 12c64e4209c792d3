"""Kinds of exchanges: what a question of each kind holds, and what the reply to it does.

A `question` and a `reply` name their kind. Their ``content`` is an object whose fields are those of
that kind's struct here. PROTOCOL.md, section 4, "Exchanges", is the specification.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import (
    MAX_EXAMPLES,
    MAX_VECTORS,
    MODEL,
    Evaluation,
    Identifier,
    Number,
    Question,
    Reply,
)
from fleetlearn_protocol.quality_messages import QUALITY, QualityAnswer
from fleetlearn_protocol.secure.pairwise_messages import (
    PAIRWISE,
    PairwiseAnswer,
    PairwiseQuestion,
)

EVALUATION = "evaluation"
"""The device measures a model on its own data."""


FIT = "fit"
"""The device measures several models on its own data, and tells their losses."""


class FitQuestion(msgspec.Struct, frozen=True):
    """Which models are to be measured."""

    models: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_VECTORS)]
    """The names of the question's vectors, each of them a model of the question's bundle."""


class FitAnswer(msgspec.Struct, frozen=True):
    """How well each model fits the device's data."""

    examples: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)]
    """Examples that were measured."""
    losses: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MAX_VECTORS)]
    """The mean loss of each model, in the question's order. A loss that is not finite, or larger
    than 1e30, is 1e30."""


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
    listed: str | None = None
    """The field of a question's content that has the names of the vectors instead."""

    @property
    def sends_vectors(self) -> bool:
        """Whether its questions send vectors, and name a bundle."""
        return bool(self.vectors) or self.listed is not None

    def vectors_of(self, content: msgspec.Struct) -> tuple[str, ...]:
        """Return the names of the vectors that a question with this content sends."""
        return self.vectors if self.listed is None else getattr(content, self.listed)


EXCHANGE_KINDS: dict[str, ExchangeKind] = {
    EVALUATION: ExchangeKind(NoContent, Evaluation, (MODEL,)),
    PAIRWISE: ExchangeKind(PairwiseQuestion, PairwiseAnswer),
    FIT: ExchangeKind(FitQuestion, FitAnswer, listed="models"),
    QUALITY: ExchangeKind(NoContent, QualityAnswer, (MODEL,)),
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
