"""Checks of values in a user's code, and in PyTorch's own: ``assert``, and an ``if`` that raises.

No graph can raise an error by the values of tensors. The checks ran before, with the example. While
a step is traced, they pass.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

Place = tuple[int | None, int | None, int | None, int | None]
"""Where an expression is in its file: first line, last line, and the columns in these."""


@contextmanager
def checks_passed() -> Iterator[None]:
    """While active, a condition on values that no graph can have is what lets the check pass in
    which it stands."""
    boolean: Any = Tensor.__bool__
    condition: Any = torch.SymBool.__bool__

    def of_tensor(value: Tensor) -> bool:
        passing = None if type(value) in (Tensor, nn.Parameter) else passing_value(sys._getframe(1))
        return boolean(value) if passing is None else passing

    def of_condition(value: torch.SymBool) -> bool:
        passing = passing_value(sys._getframe(1)) if free_unbacked_symbols(value) else None
        return condition(value) if passing is None else passing

    Tensor.__bool__ = of_tensor  # type: ignore[assignment, method-assign]
    torch.SymBool.__bool__ = of_condition  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.__bool__  # PyTorch's is its base class's
        torch.SymBool.__bool__ = condition  # type: ignore[method-assign]


def passing_value(frame: FrameType) -> bool | None:
    """Return what the condition that the frame asks for must be for a check to pass; None if it is
    in no check."""
    known = _conditions_of_checks(frame.f_code.co_filename)
    now = frame.f_lasti // 2
    # The instruction before a jump has the place of the condition. The jump itself may have another
    # condition's.
    places = list(frame.f_code.co_positions())[max(now - 1, 0) : now + 1]
    return next((known[place] for place in places if place in known), None)


@cache
def _conditions_of_checks(file: str) -> dict[Place, bool]:
    """Return each condition of a check, and each part of one, with the value that lets the check
    pass."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    conditions: dict[Place, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            # pytest's own form of an assert has only the place of the statement
            conditions[_place(node)] = True
            _add(conditions, node.test, True)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            _add(conditions, node.test, False)
    return conditions


def _add(found: dict[Place, bool], test: ast.expr, passing: bool) -> None:
    found[_place(test)] = passing
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _add(found, test.operand, not passing)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            _add(found, value, passing)


def _place(node: ast.expr | ast.stmt) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
