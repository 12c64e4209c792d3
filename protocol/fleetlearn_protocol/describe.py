"""The tables of PROTOCOL.md, made from the types themselves:
``python -m fleetlearn_protocol.describe PROTOCOL.md``.

Without a file it prints the tables. With one it rewrites what stands there between
``<!-- described: NAME -->`` and ``<!-- end -->``; a test holds the document to what this writes.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from fleetlearn_protocol import (
    errors,
    exchanges,
    frames,
    manifest,
    messages,
    peer_messages,
    preprocessing,
    quality_messages,
)
from fleetlearn_protocol.computations import function_settings
from fleetlearn_protocol.computations import settings as computations
from fleetlearn_protocol.computations.boosting_settings import BoostColumn
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.secure import pairwise_messages
from fleetlearn_protocol.vertical import messages as vertical_messages
from fleetlearn_protocol.vertical.arrays import ArrayPart

_BLOCK = re.compile(r"(<!-- described: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ALIASES = {
    name: types.type_info(vars(messages)[name])
    for name in (
        "Identifier",
        "Digest",
        "Bytes32",
        "Bytes64",
        "Bytes80",
        "Bytes82",
        "Name",
        "Text",
        "Label",
        "Number",
        "Positive",
        "Share",
        "Numbers",
        "Seconds",
        "Offset",
        "Count",
    )
}
"""Types that have a name in the tables."""
_LIMITS = {
    "PROTOCOL_VERSION": messages,
    "OLDEST_PROTOCOL_VERSION": messages,
    "MAX_CONTROL_BYTES": messages,
    "MAX_VECTOR_BYTES": messages,
    "MAX_VECTORS": messages,
    "CHUNK_BYTES": frames,
    "MAX_FRAME_BYTES": frames,
    "MAX_PIECES": messages,
    "MOST_ROWS": messages,
    "MAX_SELECTED_BYTES": messages,
    "MAX_SIGNED": messages,
    "MAX_KEYS": messages,
    "MOST_NEIGHBOURS": messages,
    "MAX_REFUSALS": messages,
    "SILENT_HEARTBEATS": messages,
    "MAX_TEXT": errors,
    "MAX_MANIFEST_BYTES": manifest,
    "MAX_ELEMENTS": manifest,
}


def tables() -> dict[str, str]:
    """Return name of a block -> its Markdown."""
    return {
        "limits": _table(
            ("limit", "value", "meaning"),
            [
                (f"`{name}`", _amount(vars(at)[name]), _notes(at)[name])
                for name, at in _LIMITS.items()
            ],
        ),
        "types": _table(
            ("type", "what", "meaning"),
            [
                (name.lower(), _kind(kind, alias=False), _notes(messages)[name])
                for name, kind in _ALIASES.items()
            ],
        ),
        "from-device": "\n".join(_message(kind) for kind in get_args(messages.FromDevice)),
        "from-coordinator": "\n".join(
            _message(kind) for kind in get_args(messages.FromCoordinator)
        ),
        "parts": "\n".join(
            _struct(kind, "### ")
            for kind in (
                messages.Held,
                messages.VectorReference,
                messages.ContentSelection,
                messages.Piece,
                messages.SharedModel,
                messages.PrivacyNote,
                messages.SecureTask,
                messages.StepSchedule,
                messages.Part,
                messages.Evaluation,
            )
        ),
        "pairwise": "\n".join(
            _struct(kind, "### ")
            for kind in (pairwise_messages.PairwiseQuestion, pairwise_messages.PairwiseAnswer)
        ),
        "fit": "\n".join(
            _struct(kind, "### ") for kind in (exchanges.FitQuestion, exchanges.FitAnswer)
        ),
        "from-peer": "\n".join(_message(kind) for kind in get_args(peer_messages.FromPeer)),
        "quality": _struct(quality_messages.QualityAnswer, "### "),
        "from-party": "\n".join(_message(kind) for kind in get_args(vertical_messages.FromParty)),
        "to-party": "\n".join(
            (
                *(_message(kind) for kind in get_args(vertical_messages.ToParty)),
                _struct(ArrayPart, "### "),
            )
        ),
        "codes": _table(
            ("code", "meaning"),
            [(f"`{code.value}`", _notes(errors)[f"Code.{code.name}"]) for code in errors.Code],
        ),
        "manifest": "\n".join(
            _struct(kind, "### ")
            for kind in (
                manifest.Manifest,
                manifest.Parameter,
                manifest.Input,
                manifest.Hyper,
                manifest.State,
                manifest.LocalStep,
                manifest.TrainMany,
                manifest.SplitPart,
                manifest.Cut,
                manifest.PublicExamples,
                manifest.SparseRows,
                manifest.File,
                preprocessing.Preprocessing,
                preprocessing.Resampling,
                preprocessing.Windowing,
                preprocessing.Preparation,
            )
        ),
        "computations": "\n".join(
            [
                *(_message(kind.settings) for kind in KINDS.values()),
                *(
                    _struct(part, "### ")
                    for part in (
                        computations.NumberColumn,
                        computations.CategoryColumn,
                        BoostColumn,
                        function_settings.RowArray,
                        function_settings.StateArray,
                        function_settings.SumArray,
                    )
                ),
            ]
        ),
        "operations": "\n".join(_message(kind) for kind in get_args(preprocessing.Operation)),
    }


def rewrite(document: str) -> str:
    """Return the document with its blocks as ``tables`` has them. Raises KeyError on an unknown
    block."""
    made = tables()
    return _BLOCK.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n{found[3]}", document)


def _message(kind: type[msgspec.Struct]) -> str:
    return _struct(kind, "### ", f"`{kind.__struct_config__.tag}`")


def _struct(kind: type[msgspec.Struct], heading: str, name: str | None = None) -> str:
    notes = _notes(sys.modules[kind.__module__])
    struct = types.type_info(kind)
    assert isinstance(struct, types.StructType)
    rows = [
        (
            f"`{field.encode_name}`",
            _kind(field.type),
            _default(field),
            notes[f"{kind.__name__}.{field.name}"],
        )
        for field in struct.fields
    ]
    return f"{heading}{name or kind.__name__}\n\n{notes[kind.__name__]}\n\n" + _table(
        ("field", "type", "default", "meaning"), rows
    )


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "left out"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(default).decode()}`"


def _kind(kind: types.Type, alias: bool = True) -> str:
    """Return the type in JSON's words, with its bounds."""
    if alias:
        for name, meant in _ALIASES.items():
            if kind == meant:
                return name.lower()
    match kind:
        case types.UnionType(types=several):
            return " or ".join(_kind(one) for one in several)
        case types.AnyType():
            return "any value"
        case types.NoneType():
            return "null"
        case types.BoolType():
            return "true or false"
        case types.StrType(min_length=low, max_length=high, pattern=pattern):
            if pattern is not None:
                return f"string, `{pattern.replace(chr(92) + 'Z', '$')}`"
            return "string" + _bounds(low, high, " characters")
        case types.IntType(ge=low, le=high, multiple_of=step):
            return "integer" + _bounds(low, high) + (f", a multiple of {step}" if step else "")
        case types.FloatType(ge=low, le=high):
            return "number" + _bounds(low, high)
        case types.LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case types.EnumType():
            return "code"
        case types.DictType(key_type=key, value_type=types.AnyType(), max_length=high):
            return f"object, {_within(key)} to any value" + _bounds(None, high, " entries")
        case types.DictType(key_type=key, value_type=value, min_length=low, max_length=high):
            return f"object, {_within(key)} to {_within(value)}" + _bounds(low, high, " entries")
        case types.VarTupleType(item_type=item, min_length=low, max_length=high):
            return f"array of {_within(item)}" + _bounds(low, high, " entries")
        case types.TupleType(item_types=items):
            return f"array of {len(items)}: {', '.join(map(_kind, items))}"
        case types.StructType(cls=cls, tag=tag):
            return cls.__name__ if tag is None else f"`{tag}`"
    raise TypeError(f"the document has no words for {kind}")


def _within(kind: types.Type) -> str:
    text = _kind(kind)
    return f"({text})" if "," in text else text


def _bounds(low: float | None, high: float | None, unit: str = "") -> str:
    if low is None and high is None:
        return ""
    if low is None:
        return f", at most {_amount(high)}{unit}"
    return f", {_amount(low)} to {_amount(high)}{unit}"


def _amount(value: Any) -> str:
    """Return a long power of two as ``2^n``, other numbers in digits."""
    if isinstance(value, int) and value >= 2**16:
        for plus in (0, 1):
            if (value + plus).bit_count() == 1:
                return f"2^{(value + plus).bit_length() - 1}" + (" - 1" if plus else "")
    return f"{value:.12g}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


@cache
def _notes(module: ModuleType) -> dict[str, str]:
    """Return name, ``Class`` or ``Class.field`` -> the docstring that follows it in the source, on
    one line."""
    return {name: " ".join(text.replace("``", "`").split()) for name, text in _docstrings(module)}


def _docstrings(module: ModuleType) -> Iterator[tuple[str, str]]:
    tree = ast.parse(inspect.getsource(module))
    scopes = [("", tree.body)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, ast.get_docstring(node) or ""
            scopes.append((f"{node.name}.", node.body))
    for prefix, body in scopes:
        for node, after in pairwise(body):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))) if isinstance(
                        target, ast.Name
                    ):
                        yield prefix + target.id, text


def main(arguments: list[str]) -> None:
    """Print the tables, or rewrite the files named."""
    for argument in arguments:
        path = Path(argument)
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
    if not arguments:
        print(
            "\n".join(
                f"<!-- described: {name} -->\n\n{text}\n<!-- end -->"
                for name, text in tables().items()
            )
        )


if __name__ == "__main__":  # pragma: no cover
    main(sys.argv[1:])
