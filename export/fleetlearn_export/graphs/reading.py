"""What a node of an ONNX graph reads: its inputs, and what its subgraphs read from outside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx
from onnx import NodeProto


def reads(node: NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, those that its subgraphs read from outside them
    included."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        own = {described.name for described in (*graph.input, *graph.initializer)}
        own |= {name for inner in graph.node for name in inner.output}
        read = (
            *(output.name for output in graph.output),
            *(name for inner in graph.node for name in reads(inner)),
        )
        yield from (name for name in read if name not in own)


def ancestors(
    nodes: Sequence[NodeProto], wanted: Iterable[str], stop: Collection[str] = ()
) -> list[NodeProto]:
    """Return the nodes that make the wanted results, in order; what is in ``stop`` need not be
    made."""
    needed, found = {name for name in wanted if name not in stop}, []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            found.append(node)
            needed |= {name for name in reads(node) if name not in stop}
    return found[::-1]


def rename_reads(node: NodeProto, names: Mapping[str, str]) -> None:
    """Let the node, and its subgraphs, read other values: name -> the other's. No name may be one
    within a subgraph."""
    node.input[:] = [names.get(name, name) for name in node.input]
    for graph in subgraphs(node):
        for inner in graph.node:
            rename_reads(inner, names)


def rename(node: NodeProto, names: Mapping[str, str]) -> None:
    """Do the same for what the node and its subgraphs read and make."""
    rename_reads(node, names)
    node.output[:] = [names.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        for inner in graph.node:
            rename(inner, names)
        for output in graph.output:
            output.name = names.get(output.name, output.name)


def subgraphs(node: NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
