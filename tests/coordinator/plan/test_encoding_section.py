"""encoding.up = "my_package:my_format": what the plan says of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator import ServiceSettings
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_protocol import extensions
from fleetlearn_protocol.encodings import RESIDUAL, find_encoding
from fleetlearn_protocol.messages import OwnEncoding
from fleetlearn_protocol.own_encodings import ENCODING
from line_bundle import write_line_bundle
from own_formats import BLOCKS, signs

HEAD = 'name = "a"\nbundle = "a.bundle"\n'
OWN = '[encoding]\nup = "thin_updates:signs"\n'
KEEPS = f"{OWN}residual = true\n"
SECURE = '[secure]\nmode = "pairwise"\nclip = 1.0\n'
PRIVACY = "[privacy]\npopulation = 100000\ndelta = 1e-6\nclip = 1.0\nnoise = 1.0\n"
MEDIAN = '[aggregation]\naggregator = "median"\n'


def plan(text: str) -> Plan:
    return Plan.parse(f"{HEAD}{text}[round]\ngoal = 5\n", Path())


def test_tasks_ask_for_it_by_its_name_on_the_wire(tmp_path: Path) -> None:
    (tmp_path / "thin_updates.py").write_text(BLOCKS["thin_updates"])
    manifest = write_line_bundle(tmp_path / "a.bundle").manifest
    found = plan(f"{KEEPS}parameters = {{ block = 64 }}\n")
    assert found.encoding.own == OwnEncoding("thin_updates:signs", {"block": 64.0})
    assert found.tied == (RESIDUAL,)
    with extensions.apart():
        with pytest.raises(PlanError, match="the module thin_updates is not allowed here"):
            found.parts(manifest)
        found.check_served(
            ServiceSettings.read(
                {"plugins": {"modules": ["thin_updates"], "folder": str(tmp_path)}}
            )
        )
        name = found.parts(manifest)["update"]
        assert name.startswith("own-12-")
        assert name.endswith("-residual")
        assert find_encoding(name).size(130) == 12 + 12 + 5
        assert found.update_bytes(manifest) >= find_encoding(name).size(manifest.size)
        assert found.exact_parts(manifest)["update"] == "float32"
        assert [each.key for each in found.own_names()] == ["encoding.up"]
        with pytest.raises(PlanError, match="has no parameter blok; it takes block"):
            plan(f"{OWN}parameters = {{ blok = 64 }}\n").check_served(ServiceSettings())
        with pytest.raises(PlanError, match="block = 65; expected a power of two"):
            plan(f"{OWN}parameters = {{ block = 65 }}\n").check_served(ServiceSettings())


def test_a_short_name_is_one_too() -> None:
    with extensions.apart():
        extensions.register(ENCODING, "signs", signs)
        found = plan('[encoding]\nup = "signs"\n')
        assert found.encoding.own == OwnEncoding("signs", {})
        assert find_encoding(found.up.name) is found.up
        extensions.register(ENCODING, "int8", signs)
        assert plan('[encoding]\nup = "int8"\n').encoding.own is None, "ours come first"
    with pytest.raises(PlanError, match="there is no encoding signs"):
        plan('[encoding]\nup = "signs"\n')


def test_ours_are_as_they_were() -> None:
    for name in ("float32", "int4", "topk-0.01-int8"):
        found = plan(f'[encoding]\nup = "{name}"\n')
        assert found.up is find_encoding(name)
        assert found.encoding.own is None
        assert found.tied == ((RESIDUAL,) if name.startswith("topk") else ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{OWN}parameters = {{ block = 'a' }}\n", "parameters"),
        (f"{OWN}{SECURE}", 'encoding.up = "thin_updates:signs" with [secure]: updates are words'),
        (f"{OWN}{PRIVACY}", "nobody has shown that an own encoding keeps the bound"),
        (f"{KEEPS}{MEDIAN}", "leaves a part of each update out"),
        ('[encoding]\nup = "a b:c"\n', "it is no function's name"),
        ('[encoding]\nup = "int8"\nresidual = true\n', "encoding.residual is for an own encoding"),
        ("[encoding]\nparameters = { a = 1 }\n", "encoding.parameters is for an own encoding"),
        ('[encoding]\nup = "int9"\n', "or an own encoding, such as my_package:my_format"),
        ('[encoding]\nup = "own-12-000000000000"\n', "is not known in this process"),
        ('[encoding]\nup = "masked"\n', "updates are masked where the plan has [secure]"),
        ('[encoding]\nup = "int64"\n', "updates are floats"),
        ('[encoding]\nup = "a:b"\ndown = "c:d"\n', "down"),
    ],
)
def test_what_is_refused(text: str, expected: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan(text)
    assert expected in refused.value.text


def test_other_aggregators_take_one_without_a_residual() -> None:
    assert plan(f"{OWN}{MEDIAN}").tied == ()
