"""Names of other packages' functions: who may be named, what is imported, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleetlearn_protocol import extensions
from fleetlearn_protocol.extensions import ExtensionError, ExtensionPoint

NUMBER = ExtensionPoint("lucky number", int)
RULE = ExtensionPoint("rule", object, is_callable=True)
WHERE = "section.key"
SOURCE = """
imported = True

def plain(): return 7
def scaled(*, by: float, times: int = 2): return int(by * times)
def word(): return "seven"
def rule(): return lambda tau: tau
def broken(): raise KeyError("clip")
def picky(by: float = 1.0):
    if by <= 0: raise ValueError(f"by is {by}; it takes a number above 0")
    return 1
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the modules ``lucky_numbers``, ``lucky_package.inner`` and ``lucky_broken``."""
    (tmp_path / "lucky_numbers.py").write_text(SOURCE)
    (tmp_path / "lucky_package").mkdir()
    (tmp_path / "lucky_package" / "__init__.py").write_text("")
    (tmp_path / "lucky_package" / "inner.py").write_text("def plain(): return 8")
    (tmp_path / "lucky_broken.py").write_text("import lucky_that_is_not_there")
    with extensions.apart():
        yield tmp_path
    for name in [name for name in sys.modules if name.startswith("lucky_")]:
        del sys.modules[name]


def make(name: str, **parameters: object) -> object:
    return extensions.make(NUMBER, name, parameters, WHERE)


def test_a_module_is_imported_only_where_it_is_listed(folder: Path) -> None:
    extensions.allow([], folder)
    with pytest.raises(
        ExtensionError, match=r"module lucky_numbers is not allowed.*\[plugins\] mod"
    ):
        make("lucky_numbers:plain")
    extensions.allow(["lucky_package"])
    with pytest.raises(ExtensionError, match="not allowed"):
        make("lucky_numbers:plain")
    assert "lucky_numbers" not in sys.modules
    extensions.allow(["lucky_numbers"])
    assert "lucky_numbers" not in sys.modules
    assert make("lucky_numbers:plain") == 7


def test_what_is_listed_has_the_modules_within_it_and_no_neighbours(folder: Path) -> None:
    (folder / "lucky_package_of_others.py").write_text("def plain(): return 9")
    extensions.allow(["lucky_package"], folder)
    assert make("lucky_package.inner:plain") == 8
    with pytest.raises(ExtensionError, match="not allowed"):
        make("lucky_package_of_others:plain")


def test_parameters_come_in_the_types_of_the_signature(folder: Path) -> None:
    extensions.allow(["lucky_numbers"], folder)
    assert make("lucky_numbers:scaled", by=3) == 6
    assert make("lucky_numbers:scaled", by=1.5, times=4) == 6


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (
            {},
            "needs the parameters by too. The function takes parameters alone, and returns a lucky",
        ),
        ({"by": 1.0, "tims": 3}, "has no parameter tims; it takes by, times"),
        ({"by": "much"}, "the parameter by = 'much' is refused: Expected `float`, got `str`"),
        ({"by": 1.0, "times": 2.5}, "the parameter times = 2.5 is refused"),
    ],
)
def test_wrong_parameters_are_named(folder: Path, parameters: dict[str, object], says: str) -> None:
    extensions.allow(["lucky_numbers"], folder)
    with pytest.raises(ExtensionError, match=r"section\.key = 'lucky_numbers:scaled'") as caught:
        make("lucky_numbers:scaled", **parameters)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lucky_numbers:word", "word() returned a str; a lucky number is int"),
        ("lucky_numbers:broken", "cannot be made: KeyError: 'clip' (in broken, lucky_numbers.py"),
        ("lucky_numbers:none", "has no function none"),
        ("lucky_numbers:number", "has no function number"),
        (
            "lucky_broken:plain",
            "cannot be imported: ModuleNotFoundError: No module named 'lucky_th",
        ),
        (
            "lucky_numbers",
            "is no own algorithm's name; it takes one such as my_package:my_function",
        ),
        ("../evil:plain", "is no own algorithm's name"),
        ("lucky_numbers:plain.__globals__", "is no own algorithm's name"),
    ],
)
def test_what_cannot_be_had_says_why(folder: Path, name: str, says: str) -> None:
    extensions.allow(["lucky_numbers", "lucky_broken"], folder)
    with pytest.raises(ExtensionError) as caught:
        make(name)
    assert says in str(caught.value)


def test_a_factory_says_itself_what_it_does_not_take(folder: Path) -> None:
    extensions.allow(["lucky_numbers"], folder)
    with pytest.raises(ExtensionError, match=r"by is -1\.0; it takes a number above 0"):
        make("lucky_numbers:picky", by=-1)


def test_a_point_for_functions_takes_functions_alone(folder: Path) -> None:
    extensions.allow(["lucky_numbers"], folder)
    assert extensions.make(RULE, "lucky_numbers:rule", {}, WHERE)(3) == 3
    with pytest.raises(ExtensionError, match=r"plain\(\) returned a int; a rule is a function"):
        extensions.make(RULE, "lucky_numbers:plain", {}, WHERE)


def test_a_module_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with extensions.apart():
        with pytest.raises(ExtensionError, match="lucky_nowhere is not there") as caught:
            extensions.allow(["lucky_nowhere"], tmp_path)
        assert str(tmp_path) in str(caught.value)
        with pytest.raises(ExtensionError, match="is no module's name"):
            extensions.allow(["lucky_numbers:plain"])


def test_registered_factories_have_short_names_of_their_point() -> None:
    def nine() -> int:
        return 9

    with extensions.apart():
        extensions.register(NUMBER, "nine", nine)
        extensions.register(NUMBER, "nine", nine)  # twice the same is no harm
        assert make("nine") == 9
        assert extensions.names(NUMBER) == ["nine"]
        assert extensions.is_extension(NUMBER, "nine")
        assert not extensions.is_extension(RULE, "nine")
        with pytest.raises(ExtensionError, match="there is a lucky number nine already"):
            extensions.register(NUMBER, "nine", lambda: 10)
        with pytest.raises(ExtensionError, match="cannot be the name"):
            extensions.register(NUMBER, "my:nine", nine)
    assert extensions.names(NUMBER) == []


def test_entry_points_of_listed_modules_have_short_names(folder: Path) -> None:
    installed = folder / "lucky_dist-1.2.3.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lucky-dist\nVersion: 1.2.3\n")
    (installed / "top_level.txt").write_text("lucky_numbers\n")
    (installed / "entry_points.txt").write_text(
        "[fleetlearn.lucky-number]\n"
        "seven = lucky_numbers:plain\nother = lucky_package.inner:plain\n"
    )
    extensions.allow([], folder)
    assert extensions.names(NUMBER) == []
    assert extensions.is_extension(NUMBER, "seven")  # a plan is read before modules are listed
    assert not extensions.is_extension(NUMBER, "eight")
    with pytest.raises(ExtensionError, match="the module lucky_numbers is not allowed here"):
        make("seven")
    extensions.allow(["lucky_numbers"])
    assert extensions.names(NUMBER) == ["seven"]
    assert make("seven") == 7


def test_the_same_parameters_make_it_once(folder: Path) -> None:
    extensions.allow(["lucky_numbers"], folder)
    name, once = "lucky_numbers:rule", extensions.make_once
    rule = once(RULE, name, {}, WHERE)
    assert once(RULE, name, {}, WHERE) is rule
    assert extensions.make(RULE, name, {}, WHERE) is not rule
    scaled = "lucky_numbers:scaled"
    assert [once(NUMBER, scaled, {"by": by}, WHERE) for by in (2.0, 3.0)] == [4, 6]
    with extensions.apart(), pytest.raises(ExtensionError, match="not allowed here"):
        once(RULE, name, {}, WHERE)


SUM: ExtensionPoint[object] = ExtensionPoint(
    "sum", object, is_callable=True, arguments=("state", "rows")
)
OWN_SUMS = """
def total(state, rows, *, scale: float = 1.0): return scale * (state + rows)
def by_place(state, rows, scale): return scale * rows
def few(state): return state
"""


@pytest.fixture
def sums(folder: Path) -> Path:
    (folder / "lucky_sums.py").write_text(OWN_SUMS)
    extensions.allow(["lucky_sums"], folder)
    return folder


def test_where_a_point_has_arguments_the_extension_is_the_function_itself(sums: Path) -> None:
    made = extensions.make(SUM, "lucky_sums:total", {"scale": 3}, WHERE)
    assert made(1, 2) == 9  # type: ignore[operator]
    made = extensions.make(SUM, "lucky_sums:by_place", {"scale": 2}, WHERE)
    assert made(1, 5) == 10  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "parameters", "text"),
    [
        ("total", {"speed": 1}, "has no parameter speed; it takes scale"),
        ("total", {"state": 1}, "has no parameter state; it takes scale"),
        ("total", {"scale": "a"}, "the parameter scale = 'a' is refused"),
        ("by_place", {}, "needs the parameters scale too"),
        ("few", {}, "takes the arguments state; expected state, rows first"),
        ("none", {}, "has no function none; expected a sum of state, rows"),
    ],
)
def test_a_function_with_other_arguments_or_parameters_is_refused(
    sums: Path, name: str, parameters: dict[str, object], text: str
) -> None:
    with pytest.raises(ExtensionError) as caught:
        extensions.make(SUM, f"lucky_sums:{name}", parameters, WHERE)
    assert text in str(caught.value)


def test_what_has_no_signature_is_no_function() -> None:
    with pytest.raises(ExtensionError, match="what is no function that can be called"):
        extensions.bind(7, ("state",), {}, "what")  # type: ignore[arg-type]


def test_what_a_listed_module_only_uses_cannot_be_named(folder: Path) -> None:
    """Whoever writes plans could have any command run by Popen, of a module that imports it."""
    (folder / "lucky_user.py").write_text(
        "from functools import partial\nfrom subprocess import Popen\nfrom os import system\n"
        "from lucky_numbers import plain, scaled\nfrom lucky_package.inner import plain as inner\n"
        "thrice = partial(scaled, by=3)\n"
    )
    extensions.allow(["lucky_user"], folder)
    made = folder / "made"
    for name, parameters in (
        ("Popen", {"args": ["touch", str(made)]}),
        ("system", {"command": f"touch {made}"}),
        ("partial", {}),
        ("plain", {}),
        ("thrice", {}),
    ):
        with pytest.raises(ExtensionError, match=f"lucky_user imports {name} from"):
            extensions.make(ExtensionPoint("thing", object), f"lucky_user:{name}", parameters, "x")
    assert not made.exists()
    extensions.allow(["lucky_numbers", "lucky_package"])
    assert [make(f"lucky_user:{name}") for name in ("plain", "inner", "thrice")] == [7, 8, 6]


def test_a_script_that_ends_itself_ends_no_process(folder: Path) -> None:
    (folder / "lucky_script.py").write_text("import sys\nsys.exit()\ndef plain(): return 7\n")
    extensions.allow(["lucky_script"], folder)
    with pytest.raises(ExtensionError, match="lucky_script cannot be imported: SystemExit"):
        make("lucky_script:plain")
