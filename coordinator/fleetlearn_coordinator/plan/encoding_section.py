"""[encoding] of a plan: how updates and models become bytes."""

from __future__ import annotations

from typing import Literal

import msgspec
from fleetlearn_protocol import extensions
from fleetlearn_protocol.encodings import (
    FAMILIES,
    MASKED_NAMES,
    Encoding,
    find_encoding,
    is_known,
    leaves_residual,
)
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import FunctionName, Name, Number, OwnEncoding
from fleetlearn_protocol.own_encodings import ENCODING, listed_encoding

from fleetlearn_coordinator.plan.toml_errors import Section

KEY = "encoding.up"


class EncodingSection(Section, frozen=True, kw_only=True):
    """[encoding]: how updates and models become bytes (docs/algorithms/encodings.md)."""

    up: str = "float32"
    """How updates are encoded: float32, float16, bfloat16, int8, int4, top-k with its share
    (topk-0.01, topk-0.01-float16, topk-0.01-int8), or an own encoding such as
    my_package:my_format. Devices that do not know it send float32."""
    parameters: dict[Name, Number] = msgspec.field(default_factory=dict)
    """Of an own encoding: the parameters of its function, by name."""
    residual: bool = False
    """Whether devices add what an own encoding leaves out of an update to their next one. Top-k
    always does."""
    down: Literal["float32", "float16", "delta"] = "float32"
    """How the model is encoded: float32, float16 (devices train from the rounded model), or
    "delta": float32 as the difference from an earlier model, for devices that still have one of the
    last two."""

    @property
    def own(self) -> OwnEncoding | None:
        """The own encoding that ``up`` names; None: it names one of ours, or none."""
        if is_known(self.up, FAMILIES) or not extensions.is_extension(ENCODING, self.up):
            return None
        return OwnEncoding(self.up, self.parameters)

    @property
    def leaves_residual(self) -> bool:
        """Whether devices add what the encoding leaves out of an update to their next one."""
        return self.residual or leaves_residual(self.up)

    def find(self) -> Encoding:
        """Return the encoding ``up``. Raises ExtensionError where an own one cannot be had."""
        own = self.own
        if own is None:
            return find_encoding(self.up)
        return listed_encoding(own, KEY, residual=self.residual)

    def fault(self) -> str | None:
        """Return why ``up`` is no encoding of updates; None: it is one."""
        if self.own is not None:
            try:
                msgspec.convert(self.up, FunctionName)
            except msgspec.ValidationError:
                return "it is no function's name; expected one such as my_package:my_format"
            return None
        if self.parameters or self.residual:
            key = "parameters" if self.parameters else "residual"
            return f"encoding.{key} is for an own encoding, such as my_package:my_format"
        if self.up in MASKED_NAMES:
            return "updates are masked where the plan has [secure], which says how"
        if not is_known(self.up, FAMILIES):
            try:
                find_encoding(self.up)
            except ProtocolError as error:
                return f"{error.text}; or an own encoding, such as my_package:my_format"
            return "updates are floats, and this encoding is of integers"
        return None
