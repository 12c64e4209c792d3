"""One ONNX file of a split model's bottoms and top, made of the files of its parts.

Neither parties nor coordinators have the onnx package: the files are taken apart and put together
as the protobuf messages of ONNX's onnx.proto that they are, and weights are copied as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fleetlearn_protocol.protobuf import (
    ReadField,
    read_fields,
    write_message,
    write_number,
    write_text,
)

TOP = "top"
"""What the names of values inside the top begin with."""
BUNDLE_KEY, STEP_KEY = "fleetlearn.bundle", "fleetlearn.step"
"""Keys of a file's metadata."""

# Numbers of fields in onnx.proto.
_IR_VERSION, _PRODUCER, _GRAPH, _OPSET, _METADATA, _FUNCTIONS = 1, 2, 7, 8, 14, 25
_NODE, _GRAPH_NAME, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 2, 5, 11, 12, 13
_READS, _MAKES, _NODE_NAME, _ATTRIBUTE = 1, 2, 3, 5
_SUBGRAPH, _SUBGRAPHS = 6, 11
_TENSOR_NAME, _VALUE_NAME = 8, 1

Rename = Callable[[str], str]


class PartOrigin(NamedTuple):
    """Which part of a model a file is, and when."""

    bundle: str
    """SHA-256 of the part's manifest."""
    step: int
    """Steps that were done."""


class PartModel(NamedTuple):
    """A bottom's file."""

    party: str
    content: bytes


def with_origin(model: bytes, origin: PartOrigin) -> bytes:
    """Return an ONNX file whose metadata say which part it is."""
    rows = {BUNDLE_KEY: origin.bundle, STEP_KEY: str(origin.step)}
    pairs = (write_text(1, key) + write_text(2, value) for key, value in rows.items())
    return model + b"".join(write_message(_METADATA, pair) for pair in pairs)


def origin_of(model: bytes) -> PartOrigin | None:
    """Return which part a file is, or None where its metadata do not say so. Raises ValueError
    where the bytes are no ONNX file."""
    found = {}
    for field in read_fields(model):
        if field.number == _METADATA:
            pair = {row.number: row.content.decode() for row in read_fields(field.content)}
            found[pair.get(1, "")] = pair.get(2, "")
    step = found.get(STEP_KEY, "")
    if BUNDLE_KEY not in found or not step.isdecimal():
        return None
    return PartOrigin(found[BUNDLE_KEY], int(step))


def joined_model(bottoms: Sequence[PartModel], activations: Mapping[str, str], top: bytes) -> bytes:
    """Return an ONNX file that computes the top's outputs from the arrays of all parties.

    bottoms: each party's file, in the order in which their arrays are to be the file's inputs.
    activations: party -> the top's input that takes the output of its bottom. The input x of the
    party bank is ``bank.x``; of a single bottom it is ``x``. Outputs have the top's names. Raises
    ValueError: bytes that are no ONNX file, parts that do not fit together.
    """
    parts = [_Part.read(bottom.party, bottom.content) for bottom in bottoms]
    whole = _Part.read(TOP, top)
    made_of = {activations[part.name]: part for part in parts}
    if set(made_of) != set(whole.inputs):
        raise ValueError(
            f"the top takes {', '.join(whole.inputs)}; the bottoms make {', '.join(made_of)}"
        )
    single = len(parts) == 1
    for part in parts:
        if len(part.outputs) != 1:
            raise ValueError(
                f"the bottom of {part.name} has {len(part.outputs)} outputs; expected one"
            )
    renames: dict[str, Rename] = {}
    for part in parts:
        kept = set(part.inputs) - set(whole.outputs) if single else set[str]()
        renames[part.name] = _renaming(part.name, {name: name for name in kept})
    given = {name: renames[part.name](part.outputs[0]) for name, part in made_of.items()}
    renames[TOP] = _renaming(TOP, given | {name: name for name in whole.outputs})
    every = [*parts, whole]
    inputs = [
        _renamed(field, _VALUE_NAME, renames[part.name])
        for part in parts
        for field in part.fields(_INPUT)
        if _name(field, _VALUE_NAME) in part.inputs
    ]
    graph = b"".join(
        [
            *(_nodes(part, renames[part.name]) for part in every),
            write_text(_GRAPH_NAME, "split model"),
            *(_tensors(part, renames[part.name]) for part in every),
            *inputs,
            *(field.raw for field in whole.fields(_OUTPUT)),
            *(_values(part, renames[part.name]) for part in every),
        ]
    )
    return b"".join(
        [
            write_number(_IR_VERSION, max(part.ir_version for part in every)),
            write_text(_PRODUCER, "fleetlearn"),
            write_message(_GRAPH, graph),
            *_opsets(every),
        ]
    )


class _Part(NamedTuple):
    """A file that was taken apart."""

    name: str
    ir_version: int
    opsets: dict[str, int]
    graph: list[ReadField]
    inputs: list[str]
    """Names of the arrays that it takes; parameters are none of them."""
    outputs: list[str]

    @classmethod
    def read(cls, name: str, content: bytes) -> _Part:
        """Read a file. Raises ValueError."""
        try:
            model = list(read_fields(content))
            graph = [row for field in model if field.number == _GRAPH
                     for row in read_fields(field.content)]  # fmt: skip
            opsets = {}
            for field in model:
                if field.number == _OPSET:
                    rows = {row.number: row for row in read_fields(field.content)}
                    domain = rows[1].content.decode() if 1 in rows else ""
                    opsets[domain] = rows[2].value
            constants = [_name(row, _TENSOR_NAME) for row in graph if row.number == _INITIALIZER]
            inputs = [_name(row, _VALUE_NAME) for row in graph if row.number == _INPUT]
            outputs = [_name(row, _VALUE_NAME) for row in graph if row.number == _OUTPUT]
        except (ValueError, KeyError) as error:
            raise ValueError(f"the file of {name} is no ONNX model: {error}") from None
        if not graph or not outputs:
            raise ValueError(f"the file of {name} is no ONNX model: it has no graph")
        if any(field.number == _FUNCTIONS for field in model):
            raise ValueError(f"the model of {name} has functions of its own, which no part has")
        version = next((field.value for field in model if field.number == _IR_VERSION), 0)
        taken = [row for row in inputs if row not in constants]
        return cls(name, version, opsets, graph, taken, outputs)

    def fields(self, number: int) -> list[ReadField]:
        return [field for field in self.graph if field.number == number]


def _renaming(part: str, given: Mapping[str, str]) -> Rename:
    """Return what a part's values are called in the whole model. An empty name is an input that is
    left out."""
    return lambda name: given.get(name, f"{part}.{name}") if name else name


def _opsets(parts: Sequence[_Part]) -> list[bytes]:
    """Return the operator sets of all parts. Raises ValueError where two are of other versions."""
    found: dict[str, int] = {}
    for part in parts:
        for domain, version in part.opsets.items():
            if found.setdefault(domain, version) != version:
                raise ValueError(
                    f"the part of {part.name} is written in version {version} of the operators "
                    f"{domain or 'ai.onnx'}, another in version {found[domain]}: export all parts "
                    "of a model at once"
                )
    rows = (write_text(1, domain) + write_number(2, found[domain]) for domain in found)
    return [write_message(_OPSET, row) for row in rows]


def _name(field: ReadField, place: int) -> str:
    """Return the name in a tensor or a value."""
    return next((row.content.decode() for row in read_fields(field.content)
                 if row.number == place), "")  # fmt: skip


def _renamed(field: ReadField, place: int, rename: Rename) -> bytes:
    """Return a tensor or a value with its name, which is in this field of it, replaced."""
    content = b"".join(
        write_text(place, rename(row.content.decode())) if row.number == place else row.raw
        for row in read_fields(field.content)
    )
    return write_message(field.number, content)


def _nodes(part: _Part, rename: Rename) -> bytes:
    return b"".join(_node(field, rename) for field in part.fields(_NODE))


def _tensors(part: _Part, rename: Rename) -> bytes:
    tensors = part.fields(_INITIALIZER)
    return b"".join(_renamed(field, _TENSOR_NAME, rename) for field in tensors)


def _values(part: _Part, rename: Rename) -> bytes:
    values = part.fields(_VALUE_INFO)
    return b"".join(_renamed(field, _VALUE_NAME, rename) for field in values)


def _node(field: ReadField, rename: Rename) -> bytes:
    found = []
    for row in read_fields(field.content):
        if row.number in (_READS, _MAKES, _NODE_NAME):
            found.append(write_text(row.number, rename(row.content.decode())))
        elif row.number == _ATTRIBUTE:
            found.append(_attribute(row, rename))
        else:
            found.append(row.raw)
    return write_message(field.number, b"".join(found))


def _attribute(field: ReadField, rename: Rename) -> bytes:
    """Return an attribute; the graphs of If, Loop and Scan read values of the graph around them."""
    rows = list(read_fields(field.content))
    if not any(row.number in (_SUBGRAPH, _SUBGRAPHS) for row in rows):
        return field.raw
    content = b"".join(
        write_message(row.number, _subgraph(row.content, rename))
        if row.number in (_SUBGRAPH, _SUBGRAPHS)
        else row.raw
        for row in rows
    )
    return write_message(field.number, content)


def _subgraph(content: bytes, rename: Rename) -> bytes:
    found = []
    for row in read_fields(content):
        if row.number == _NODE:
            found.append(_node(row, rename))
        elif row.number == _INITIALIZER:
            found.append(_renamed(row, _TENSOR_NAME, rename))
        elif row.number in (_INPUT, _OUTPUT, _VALUE_INFO):
            found.append(_renamed(row, _VALUE_NAME, rename))
        else:
            found.append(row.raw)
    return b"".join(found)
