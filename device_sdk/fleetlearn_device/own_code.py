"""What a device's owner lets runs use of the owner's own code, by name.

Nothing of a bundle or a task is code: it names what is listed here, and nothing else is imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from fleetlearn_protocol.algorithms import LOCAL_ALGORITHM
from fleetlearn_protocol.computations.function_settings import DEVICE_FUNCTION
from fleetlearn_protocol.extensions import installed
from fleetlearn_protocol.own_encodings import ENCODING
from fleetlearn_protocol.user_errors import ANY_FAILURE, in_one_line

OwnFunction: TypeAlias = Callable[..., Mapping[str, Any]]
OwnFunctions: TypeAlias = Mapping[str, OwnFunction]
"""Name -> the function that a device's owner allows by this name."""
NO_FUNCTIONS: OwnFunctions = MappingProxyType({})
Given: TypeAlias = Mapping[str, OwnFunction | str] | Iterable[str]
"""What an owner gives: name -> a function, or ``module:function``; or texts, each
``module:function``, ``name=module:function`` or a short name that an installed package gives."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
KINDS = (LOCAL_ALGORITHM, DEVICE_FUNCTION, ENCODING)
"""What installed packages give short names to that devices run."""
MOST = 64
"""How many functions a device may allow: a check-in names them."""


class FunctionError(ValueError):
    """An own function is not there, or does not do what the bundle declares."""


def read_functions(given: Given) -> OwnFunctions:
    """Return the functions that an owner allows. Modules are imported; they may be in the current
    folder. Raises FunctionError."""
    if isinstance(given, str):
        raise FunctionError(f"the functions {given!r} are one text; expected several, in a list")
    rows: dict[str, OwnFunction | str] = {}
    for name, target in given.items() if isinstance(given, Mapping) else map(_named, given):
        if name in rows:
            raise FunctionError(f"the function {name} is there twice")
        rows[name] = target
    if len(rows) > MOST:
        raise FunctionError(f"{len(rows)} functions are allowed; a device can have {MOST}")
    found = {}
    for name, target in rows.items():
        if not _NAME.fullmatch(name):
            raise FunctionError(
                f"{name!r} is no function's name; expected letters, digits, ._- or MODULE:FUNCTION"
            )
        found[name] = _imported(name, target) if isinstance(target, str) else target
        if not callable(found[name]):
            raise FunctionError(f"the function {name} is a {type(target).__name__}")
    return found


def _named(text: str) -> tuple[str, str]:
    """Return name and target of ``[name=]module:function``, or of the short name that an installed
    package gives."""
    name, equals, target = text.partition("=")
    return (name, target) if equals else (text, text if ":" in text else _installed(text))


def _installed(name: str) -> str:
    """Return the function that an installed package gives this short name, or the name itself where
    none does. Raises FunctionError where packages give it to several."""
    found = sorted({names[name] for names in map(installed, KINDS) if name in names})
    if len(found) > 1:
        raise FunctionError(
            f"the function {name}: installed packages give this name to {' and '.join(found)}; "
            f"choose one: {name}={found[0]}"
        )
    return found[0] if found else name


def _imported(name: str, target: str) -> OwnFunction:
    if not _TARGET.fullmatch(target):
        raise FunctionError(
            f"the function {name}: {target!r} is no function that can be imported; expected "
            "MODULE:FUNCTION, NAME=MODULE:FUNCTION, or a short name that an installed package gives"
        )
    module_name, _, function_name = target.partition(":")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)  # last, so that a file there hides no installed module
    try:
        module = importlib.import_module(module_name)
    except ANY_FAILURE as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        why = f"it is neither installed nor in {here}" if missing else in_one_line(error)
        raise FunctionError(
            f"the function {name}: the module {module_name} cannot be imported: {why}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", None) or module_name
        raise FunctionError(f"the function {name}: {where} has no function {function_name}")
    return function  # type: ignore[no-any-return]  # callable() says no more
