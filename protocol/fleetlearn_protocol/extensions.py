"""Own algorithms: functions of other packages that a plan, a task, a scenario or a service names.

An *extension* is a function with keyword parameters, a factory. What it returns takes the place of
one of ours: an aggregator, a server optimizer, a function of staleness. At some points it is the
function itself, whose keyword parameters come after its arguments. An *extension point* is a place
that takes such an extension. It is named in one of three ways:

- ``my_package.rules:clipped_mean``: a module and a function in it. The module must be listed by the
  person who runs the process (``allow``).
- ``clipped_mean``: an entry point of this name, in the group ``fleetlearn.`` + the point's name, of
  an installed package whose module is listed.
- ``clipped_mean``: a factory that Python code gave to ``register``.

Plans and tasks may come from other people, so a name in one never imports a module that is not
listed, and a package that is only installed is never imported.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

import msgspec

from fleetlearn_protocol.user_errors import ANY_FAILURE, in_one_line

T = TypeVar("T")
Factory = Callable[..., Any]

GROUP = "fleetlearn"
"""What the groups of entry points begin with: ``fleetlearn.aggregator``."""
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_NAME = re.compile(rf"{_MODULE}:[A-Za-z_]\w*")
_SHORT = re.compile(r"[A-Za-z_][\w-]*")


class ExtensionError(ValueError):
    """An extension cannot be had, or does not do what its point expects. The text is for people."""


@dataclass(frozen=True)
class ExtensionPoint(Generic[T]):
    """A place that takes extensions."""

    name: str
    """In words, such as ``server optimizer``. Its group of entry points has dashes for spaces."""
    returns: type[T] | tuple[type, ...]
    """What a factory must return: an instance of one of these. ``object``: a function."""
    is_callable: bool = False
    """Whether a factory must return a function."""
    arguments: tuple[str, ...] = ()
    """Where there are any, the extension is the function itself, with these arguments first and its
    parameters as keywords. Empty: the extension is a factory."""

    @property
    def with_article(self) -> str:
        """The name with its article: an aggregator, a stop rule."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def group(self) -> str:
        """The group of its entry points."""
        return f"{GROUP}.{self.name.replace(' ', '-')}"

    @property
    def own(self) -> str:
        """What an own one is and how it is named, for errors."""
        return (
            f"an own {self.name}: my_package:my_function, or a short name that an installed "
            "package gives"
        )


@dataclass
class _Known:
    modules: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    registered: dict[tuple[str, str], Factory] = field(default_factory=dict)
    made: dict[tuple[str, str, bytes], Any] = field(default_factory=dict)
    """Point, name and parameters as JSON -> what was made of them."""


_known = _Known()


def allow(modules: Iterable[str], folder: Path | None = None) -> None:
    """Let extensions of these modules, and of the modules within them, be named from now on.

    ``folder``: where modules are looked for too, after all other places. Raises ExtensionError
    where a module's name is none, or no such module is there. Nothing is imported.
    """
    if folder is not None:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # last, so that a file there hides no installed module
        if folder not in _known.folders:
            _known.folders.append(folder)
    for module in modules:
        if not re.fullmatch(_MODULE, module):
            raise ExtensionError(
                f"{module!r} is no module's name; it takes one such as my_package or "
                "my_package.rules, without the function"
            )
        root = module.partition(".")[0]
        if root not in sys.modules and importlib.util.find_spec(root) is None:
            beside = "" if folder is None else f", and in {folder}"
            raise ExtensionError(
                f"the module {module} is not there: it is looked for among the installed ones"
                f"{beside}. Install its package in this environment ({sys.prefix})"
            )
        if module not in _known.modules:
            _known.modules.append(module)


def allowed_modules() -> tuple[str, ...]:
    """Return the listed modules."""
    return tuple(_known.modules)


def folders() -> tuple[Path, ...]:
    """Return where listed modules are looked for beside the installed ones."""
    return tuple(_known.folders)


def register(point: ExtensionPoint[Any], name: str, factory: Factory) -> None:
    """Let a plan name the factory by this short name, at this point, in this process.

    Raises ExtensionError where the name is not one of letters, digits, _ and -, or is taken by
    another factory.
    """
    if not _SHORT.fullmatch(name):
        raise ExtensionError(
            f"{name!r} cannot be the name of {point.with_article}: it takes letters, digits, _ "
            "and -"
        )
    there = _known.registered.setdefault((point.name, name), factory)
    if there is not factory:
        raise ExtensionError(
            f"there is {point.with_article} {name} already, {there.__module__}:"
            f"{there.__qualname__}; choose another name"
        )


def names(point: ExtensionPoint[Any]) -> list[str]:
    """Return the short names that the point takes beside ours, sorted. Nothing is imported."""
    return sorted({*_registered(point), *_entry_points(point)})


def is_extension(point: ExtensionPoint[Any], name: object) -> bool:
    """Return whether the name is an extension's: one with a colon, or a known short one. That of
    an installed package is known before its module is listed, so that a plan can be read without
    the service file; ``find`` refuses it then. Nothing is imported."""
    if not isinstance(name, str):
        return False
    return ":" in name or name in _registered(point) or name in installed(point)


def make(point: ExtensionPoint[T], name: str, parameters: Mapping[str, Any], where: str) -> T:
    """Return what the extension's factory returns for these parameters.

    ``where`` is the key that names it, for errors, such as ``aggregation.aggregator``; parameters
    are in the table ``parameters`` beside that key. Raises ExtensionError.
    """
    factory = find(point, name, where)
    if point.arguments:
        return cast(T, bind(factory, point.arguments, parameters, f"{where} = {name!r}"))
    return made_by(point, factory, parameters, f"{where} = {name!r}")


def made_by(
    point: ExtensionPoint[T], factory: Factory, parameters: Mapping[str, Any], what: str
) -> T:
    """Return what the factory returns for these parameters. ``what`` names the factory in errors.
    Raises ExtensionError."""
    try:
        hint = f". The function takes parameters alone, and returns {point.with_article}"
        values = _checked(factory, parameters, what, hint=hint)
    except ExtensionError:
        raise
    except (ValueError, TypeError):
        raise ExtensionError(f"{what} is no function that can be called") from None
    try:
        made = factory(**values)
    except ANY_FAILURE as error:
        raise ExtensionError(f"{what} cannot be made: {in_one_line(error)}") from error
    if not isinstance(made, point.returns) or (point.is_callable and not callable(made)):
        kinds = point.returns if isinstance(point.returns, tuple) else (point.returns,)
        wanted = "a function" if point.is_callable else " or ".join(k.__name__ for k in kinds)
        called = getattr(factory, "__qualname__", type(factory).__name__)
        raise ExtensionError(
            f"{what}: {called}() returned a {type(made).__name__}; {point.with_article} is {wanted}"
        )
    return cast(T, made)


def make_once(point: ExtensionPoint[T], name: str, parameters: Mapping[str, Any], where: str) -> T:
    """Return what ``make`` returns, and the same object for the same name and parameters in this
    process: for what is without state, and is asked for often. Raises ExtensionError."""
    encoded = msgspec.json.encode(parameters, enc_hook=str, order="deterministic")
    key = point.name, name, encoded
    if key not in _known.made:
        _known.made[key] = make(point, name, parameters, where)
    return cast(T, _known.made[key])


def bind(
    function: Factory, arguments: tuple[str, ...], parameters: Mapping[str, Any], what: str
) -> Factory:
    """Return a function of these arguments, by place, that calls ``function`` with the parameters
    as keywords.

    ``what`` names the function in errors. Raises ExtensionError where it takes other arguments, or
    other parameters.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        raise ExtensionError(f"{what} is no function that can be called") from None
    kinds = inspect.Parameter
    by_place = [
        name
        for name, each in signature.parameters.items()
        if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    if len(by_place) < len(arguments):
        takes = ", ".join(by_place) or "none"
        raise ExtensionError(
            f"{what} takes the arguments {takes}; expected {', '.join(arguments)} first, and its "
            "parameters after them"
        )
    values = _checked(function, parameters, what, skip=by_place[: len(arguments)])
    return partial(function, **values)


def find(point: ExtensionPoint[Any], name: str, where: str) -> Factory:
    """Return the extension's factory, which imports its module. ``where`` is for errors. Raises
    ExtensionError."""
    registered = _registered(point)
    if name in registered:
        return registered[name]
    target = _target(point, name)
    if not _NAME.fullmatch(target):
        takes = "one such as my_package:my_function"
        raise ExtensionError(f"{where} = {name!r} is no own algorithm's name; it takes {takes}")
    module_name, _, function = target.partition(":")
    if not _is_allowed(module_name):
        raise ExtensionError(
            f"{where} = {name!r}: the module {module_name} is not allowed here. Whoever "
            f'runs this process lists it: [plugins] modules = ["{module_name}"] in the '
            f"coordinator's service file, --plugin {module_name} for fleetlearn-simulate"
        )
    try:
        module = importlib.import_module(module_name)
    except ANY_FAILURE as error:  # a script may end itself as it is imported
        raise ExtensionError(
            f"{where} = {name!r}: the module {module_name} cannot be imported: {in_one_line(error)}"
        ) from error
    factory = getattr(module, function, None)
    if not callable(factory):
        file = getattr(module, "__file__", None) or module_name
        raise ExtensionError(
            f"{where} = {name!r}: {file} has no function {function}; expected {_expected(point)}"
        )
    defined = home(factory)
    if not _is_allowed(defined):  # subprocess.Popen, say, which the module uses
        raise ExtensionError(
            f"{where} = {name!r}: {module_name} imports {function} from {defined or 'elsewhere'}, "
            "which is not listed: a plan could call whatever a listed module uses. Define a "
            "function in the module, or list that one too"
        )
    return factory  # type: ignore[no-any-return]  # callable() says no more


def module_of(point: ExtensionPoint[Any], name: str) -> str | None:
    """Return the module that the name says; None: it is a registered one's. Nothing is imported."""
    return None if name in _registered(point) else _target(point, name).partition(":")[0]


def home(factory: Any) -> str:
    """Return the module in which a function, a class or what a class calls was defined."""
    while isinstance(factory, partial):
        factory = factory.func
    return getattr(factory, "__module__", None) or ""


@contextmanager
def apart() -> Iterator[None]:
    """Within the block nothing is allowed or registered but what the block allows and registers.
    For tests."""
    global _known
    before, _known = _known, _Known()
    path = [*sys.path]
    try:
        yield
    finally:
        _known, sys.path[:] = before, path


def _expected(point: ExtensionPoint[Any]) -> str:
    if point.arguments:
        return f"{point.with_article} of {', '.join(point.arguments)}"
    return f"one with keyword parameters that returns {point.with_article}"


def _target(point: ExtensionPoint[Any], name: str) -> str:
    """Return the name as ``module:function``, or itself where it is none."""
    return _entry_points(point).get(name) or installed(point).get(name, name)


def installed(point: ExtensionPoint[Any], of_listed: bool = False) -> dict[str, str]:
    """Return the short names that installed packages give: name -> ``module:function``. Nothing is
    imported. ``of_listed``: those of listed modules alone."""
    return {
        each.name: each.value
        for each in metadata.entry_points(group=point.group)
        if not of_listed or _is_allowed(each.module)
    }


def _registered(point: ExtensionPoint[Any]) -> dict[str, Factory]:
    return {name: made for (of, name), made in _known.registered.items() if of == point.name}


def _entry_points(point: ExtensionPoint[Any]) -> dict[str, str]:
    """Return short name -> module:function, of installed packages whose modules are listed."""
    return installed(point, of_listed=True) if _known.modules else {}


def is_within(module: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of these, or within one."""
    return any(module == each or module.startswith(f"{each}.") for each in modules)


def _is_allowed(module: str) -> bool:
    return is_within(module, _known.modules)


def _checked(
    factory: Factory,
    parameters: Mapping[str, Any],
    what: str,
    skip: Iterable[str] = (),
    hint: str = "",
) -> dict[str, Any]:
    """Return the parameters in the types of the factory's signature. ``skip``: arguments of it that
    are no parameters. ``hint``: what is said where some are missing. Raises ExtensionError."""
    signature = {
        name: each
        for name, each in inspect.signature(factory).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and name not in skip
    }
    takes = ", ".join(signature) or "none"
    if surplus := sorted(set(parameters) - set(signature)):
        raise ExtensionError(f"{what} has no parameter {', '.join(surplus)}; it takes {takes}")
    missing = [
        name
        for name, each in signature.items()
        if each.default is each.empty and name not in parameters
    ]
    if missing:
        raise ExtensionError(f"{what} needs the parameters {', '.join(missing)} too{hint}")
    try:
        hints = get_type_hints(factory, include_extras=True)
    except Exception:  # names that exist for type checkers alone: the function itself must check
        hints = {}
    values = {}
    for name, given in parameters.items():
        try:
            values[name] = msgspec.convert(given, hints.get(name, Any))
        except msgspec.ValidationError as error:
            raise ExtensionError(
                f"{what}: the parameter {name} = {given!r} is refused: {error}"
            ) from None
    return values
