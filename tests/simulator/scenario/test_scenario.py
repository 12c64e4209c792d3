"""Scenarios: what is read, what is filled in, what a sweep makes, and what is said about each
mistake."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario import toml
from fleetlearn_simulator.scenario.peers_section import PeersSection
from fleetlearn_simulator.scenario.scenario import KEYS, SECTIONS, Scenario, expand, init_text
from fleetlearn_simulator.scenario.sections import (
    AVAILABILITY,
    DATA,
    PRESETS,
    Corrupt,
    Outage,
    Tier,
    TierFailures,
    Weibull,
    Zone,
)

PLAN = 'name = "p"\nbundle = "a.bundle"\nseed = 9\n[round]\ngoal = 4\n[local]\nlr = 0.1\n'
SMALL = 'plan = "my.plan"\n[population]\nsize = 100\n'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "my.plan").write_text(PLAN)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "bad.plan").write_text("name = ")
    (tmp_path / "t.csv").write_text("device,on,off\na,0,100\n")
    return tmp_path


def parse(text: str, base: Path) -> Scenario:
    return Scenario.parse(text, base, file="my.toml")


def same(one: Scenario, other: Scenario) -> bool:
    """But for where they came from."""
    return all(
        getattr(one, key) == getattr(other, key) for key in KEYS if key not in ("plan", "sweep")
    ) and one.plan == msgspec.structs.replace(other.plan, file=one.plan.file)


def test_the_smallest_scenario(base: Path) -> None:
    found = parse(SMALL, base)
    assert (found.name, found.seed, found.setting, found.sweep) == ("my", 9, {}, {})
    assert found.plan == msgspec.structs.replace(Plan.load(base / "my.plan"), file=found.plan.file)
    assert (found.population.size, found.population.connected) == (100, 100)
    assert (found.data.kind, found.data.seed, found.data.alpha, found.data.iid) == (
        "synthetic",
        9,
        0.0,
        False,
    )
    assert found.tiers == {"device": Tier()}
    assert (found.availability.kind, found.availability.share) == ("always", None)
    assert (found.failures.crash, found.failures.outages, found.coordinator.crashes) == (
        0.0,
        (),
        (),
    )
    assert found.compute.step_seconds == 0.02


FAMILY = (
    PLAN.replace('bundle = "a.bundle"\n', "")
    + """
[family.a]
bundle = "a.bundle"
memory = 100_000_000
[family.b]
bundle = "a.bundle"
tags = ["gate", "region-1"]
"""
)


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (
            "",
            r"no tier has devices that fit a member.*a asks for 95\.3674 MiB of RAM; b asks for "
            r"the tag gate and the tag region-1",
        ),
        ('[tiers.x]\ntags = ["gate"]', "no tier has devices that fit a member"),
        ("[tiers.x]\nmemory = 95", "no tier has devices that fit a member"),
        (
            "[tiers.x]\nmemory = 96\n[compute]\nstep_seconds = {a = 1.0}",
            r"compute\.step_seconds has a; it takes the seconds of each member.*: a, b",
        ),
    ],
)
def test_a_family_needs_devices_that_fit_it(base: Path, more: str, refusal: str) -> None:
    (base / "family.plan").write_text(FAMILY)
    with pytest.raises(SimulatorError, match=refusal):
        parse(SMALL.replace("my.plan", "family.plan") + more, base)


def test_devices_fit_a_family_by_memory_and_tags(base: Path) -> None:
    (base / "family.plan").write_text(FAMILY)
    small = SMALL.replace("my.plan", "family.plan")
    parse(small + "[tiers.x]\nmemory = 96", base)
    parse(small + '[tiers.x]\ntags = ["gate"]\n[failures]\nregions = 2', base)


@pytest.mark.parametrize("name", ["family_rehearsal", "damaged_rehearsal", "regions_rehearsal"])
def test_the_examples_are_scenarios(name: str) -> None:
    found = Scenario.load(Path(__file__).parents[3] / "examples" / f"{name}.toml")
    assert found.name == name.replace("_", "-")
    assert bool(found.plan.family) == (name == "family_rehearsal")


def test_seconds_of_members_need_a_family(base: Path) -> None:
    with pytest.raises(SimulatorError, match=r"a table of members, and the plan has no \[family\]"):
        parse(SMALL + "[compute]\nstep_seconds = {a = 1.0}", base)


def test_the_example_is_read_and_has_every_key(base: Path) -> None:
    found = parse(init_text(), base)
    assert (found.name, found.population.size, list(found.tiers)) == (
        "fleet",
        1000,
        ["pi", "other"],
    )
    assert found.tiers["other"].failures == TierFailures(
        download=0.001, train=Weibull(rate=0.001, shape=2.0), upload=0.002, crash=0.05
    )
    assert found.availability.zones == (Zone(hours=0.0, share=2.0), Zone(hours=-6.0))
    assert found.failures.outages == (Outage(region=1, begin=7200, end=9000),)
    assert found.failures.corrupt == (Corrupt(share=0.01, kind="flipped"),)
    assert len(expand(found)) == 18
    sections = [*SECTIONS.values(), Tier, TierFailures]
    for key in [*KEYS, *(key for section in sections for key in section.__struct_fields__)]:
        where = rf"^(# )?{key} = |^\[(\w+\.)?{key}[.\]]|[{{ ,]{key} = "
        assert re.search(where, init_text(), re.MULTILINE), f"{key} is not in the example"
    for kind in [*DATA, *AVAILABILITY, *PRESETS]:
        assert re.search(rf"\b{kind}\b", init_text()), f"{kind} is not in the example"


def test_the_defaults_that_the_example_states_are_the_defaults(base: Path) -> None:
    stated: dict[str, Any] = {}
    section = ""
    for line in init_text().splitlines():
        if header := re.match(r"\[(\w+)", line):
            section = "tiers" if header[1] == "tiers" else header[1]
        if found := re.match(r"(?:# )?(\w+) = .*#.*?default ([\d.]+|true|false)(?=[;,]|$)", line):
            stated[f"{section}.{found[1]}"] = found[2]
    small = parse(SMALL, base)
    defaults: dict[str, Any] = {
        f"tiers.{key}": getattr(Tier(), key) for key in Tier.__struct_fields__
    }
    for name in ("population", "data", "compute", "failures", "coordinator"):
        defaults |= {
            f"{name}.{key}": value
            for key, value in msgspec.structs.asdict(getattr(small, name)).items()
        }
    peers = msgspec.structs.asdict(PeersSection())
    defaults |= {f"peers.{key}": value for key, value in peers.items()}
    for kinds, name in ((AVAILABILITY, "availability"), (DATA, "data")):
        for keys in kinds.values():
            defaults |= {
                f"{name}.{key}": value
                for key, value in keys.items()
                if defaults.get(f"{name}.{key}") is None
            }
    assert len(stated) >= 25
    for key, value in stated.items():
        assert str(defaults[key]).lower().removesuffix(".0") == value, key


@pytest.mark.parametrize(
    "more",
    [
        "",
        (
            '[tiers.a]\nlike = "phone"\nfailures.train = {rate = 0.1, shape = '
            '2}\n[tiers."b.c"]\nmemory = 3.5'
        ),
        '[availability]\nkind = "diurnal"\nzones = [{hours = 3}]\n'
        "[failures]\noutages = [{region = 0, begin = 1, end = 2.5}]",
        '[data]\nkind = "function"\nfunction = "mine:examples"',
        (
            '[data]\nkind = "dirichlet"\narrays = "x.npz"\npower = 1.5\nexamples = '
            "3\n[coordinator]\ncrashes = [3, 4.5]"
        ),
        '[availability]\nkind = "trace"\nfile = "t.csv"\n[compute]\nstep_seconds = "measure"',
    ],
)
def test_a_resolved_scenario_is_the_same_anywhere(more: str, base: Path) -> None:
    found = parse(SMALL + more, base)
    assert same(parse(found.to_toml(), Path("/elsewhere")), found)


def test_a_run_of_the_version_before_has_the_service_in_its_plan(
    base: Path, tmp_path: Path
) -> None:
    found = parse(SMALL + "[service]\nuploads = 3\n", base)
    tables = tomllib.loads(found.to_toml())
    tables["plan"]["service"] = tables.pop("service") | {"durable": tables["plan"].pop("durable")}
    (tmp_path / "scenario.toml").write_text(toml.dump(tables))
    again = Scenario.load_of_run(tmp_path / "scenario.toml")
    assert same(again, found)
    assert again.service.uploads == 3
    (tmp_path / "scenario.toml").write_text("seed = 1\n")
    with pytest.raises(SimulatorError, match=r"scenario\.toml"):
        Scenario.load_of_run(tmp_path / "scenario.toml")


def test_paths_are_relative_to_the_file_that_has_them(base: Path) -> None:
    (base / "plans").mkdir()
    (base / "plans" / "x.toml").write_text(PLAN)
    found = parse(
        'plan = "plans/x.toml"\n[population]\nsize = 9\n[data]\nkind = "iid"\narrays = "x.npz"',
        base,
    )
    assert (found.plan.bundle, found.data.arrays) == (base / "plans" / "a.bundle", base / "x.npz")
    found = parse(
        '[plan]\nfile = "plans/x.toml"\nbundle = "b.bundle"\n[population]\nsize = 9', base
    )
    assert found.plan.bundle == base / "b.bundle"


def test_a_plan_in_the_scenario(base: Path) -> None:
    whole = parse('[plan]\nbundle = "b"\nround.goal = 3\n[population]\nsize = 9', base)
    assert (whole.plan.name, whole.plan.bundle, whole.plan.round.goal, whole.seed) == (
        "my",
        base / "b",
        3,
        0,
    )
    changed = parse(
        '[plan]\nfile = "my.plan"\nlocal.mu = 0.5\nround.goal = 5\n[population]\nsize = 9', base
    )
    assert (changed.plan.local.lr, changed.plan.local.mu, changed.plan.round.goal) == (0.1, 0.5, 5)


def test_one_seed_for_all_but_the_data(base: Path) -> None:
    found = parse(f"seed = 3\n{SMALL}", base)
    assert (found.seed, found.plan.seed, found.data.seed) == (3, 3, 3)
    found = parse(f"seed = 3\n{SMALL}[data]\nseed = 4", base)
    assert (found.plan.seed, found.data.seed) == (3, 4)


def test_a_tier_may_be_like_a_preset(base: Path) -> None:
    tiers = parse(
        f'{SMALL}[tiers.a]\nlike = "pi-5"\nspeed = 0.1\n[tiers.b]\nlike = "jetson"', base
    ).tiers
    assert (tiers["a"].speed, tiers["a"].upload, tiers["a"].memory) == (0.1, 2.5e6, 2048)
    assert (tiers["b"].speed, tiers["b"].share) == (0.28, 1.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_tiers(preset: str) -> None:
    assert msgspec.convert(PRESETS[preset], Tier).speed < 1


@pytest.mark.parametrize("kind", DATA)
def test_each_kind_of_data_fills_in_its_own_keys(kind: str, base: Path) -> None:
    needed = {
        "arrays": 'arrays = "x"\n',
        "column": 'column = "w"\n',
        "function": 'function = "m:f"\n',
        "partition": 'partition = "m:f"\n',
    }
    text = "".join(line for key, line in needed.items() if key in DATA[kind])
    found = msgspec.structs.asdict(parse(f'{SMALL}[data]\nkind = "{kind}"\n{text}', base).data)
    given = {key for key, value in found.items() if value is not None}
    assert given == {
        "kind",
        "seed",
        "test",
        *(key for key, value in DATA[kind].items() if value is not None),
    }


def test_a_sweep_is_every_combination(base: Path) -> None:
    text = f'{SMALL}[sweep]\nseed = [1, 2]\nplan.local.mu = [0, 0.5]\n"tiers.a.speed" = [3]'
    found = parse(text, base)
    runs = expand(found)
    assert found.sweep == {"seed": [1, 2], "plan.local.mu": [0, 0.5], "tiers.a.speed": [3]}
    assert [(run.seed, run.plan.seed, run.plan.local.mu, run.tiers["a"].speed) for run in runs] == [
        (1, 1, 0.0, 3.0),
        (1, 1, 0.5, 3.0),
        (2, 2, 0.0, 3.0),
        (2, 2, 0.5, 3.0),
    ]
    assert runs[1].setting == {"seed": 1, "plan.local.mu": 0.5, "tiers.a.speed": 3}
    assert [run.name for run in runs[:2]] == ["my-seed-1-mu-0-speed-3", "my-seed-1-mu-0.5-speed-3"]
    assert same(found, msgspec.structs.replace(runs[0], name="my"))
    assert all(expand(run) == [run] for run in runs)
    assert parse(runs[3].to_toml(), base).plan.local.mu == 0.5


def test_a_sweep_may_give_what_is_otherwise_missing_and_lists(base: Path) -> None:
    text = (
        'plan = "my.plan"\n[sweep]\npopulation.size = [10, 20]\ncoordinator.crashes = [[], [5, 6]]'
    )
    runs = expand(parse(text, base))
    assert [(run.population.size, run.coordinator.crashes) for run in runs] == [
        (10, ()),
        (10, (5.0, 6.0)),
        (20, ()),
        (20, (5.0, 6.0)),
    ]
    assert len({run.name for run in runs}) == 4


def test_names_of_a_sweep_are_numbers_where_words_would_be_too_long_or_the_same(base: Path) -> None:
    text = f'name = "{"n" * 60}"\n{SMALL}[sweep]\nseed = [1, 2]'
    assert [run.name for run in expand(parse(text, base))] == ["n" * 59 + "-0", "n" * 59 + "-1"]
    text = f'{SMALL}[sweep]\ndata.kind = ["iid"]\ndata.arrays = ["a+b", "a b"]'
    assert [run.name for run in expand(parse(text, base))] == ["my-0", "my-1"]


def test_a_mistake_in_one_combination_is_named(base: Path) -> None:
    found = parse(
        f"{SMALL}[sweep]\npopulation.size = [100, 50]\npopulation.connected = [10, 60]", base
    )
    with pytest.raises(SimulatorError) as refused:
        expand(found)
    assert refused.value.text == (
        "my.toml (sweep: population.size = 50, population.connected = 60): population.connected = "
        "60 is more than population.size = 50"
    )


DIURNAL = '[availability]\nkind = "diurnal"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name = ", ["this is not TOML", "Invalid value"]),
        ("name = " + "[" * 5000, ["this is not TOML"]),
        (
            "[population]\nsize = 1",
            ["plan is missing; it takes the path of a plan file, or a table [plan]"],
        ),
        ("plan = 3", ["plan = 3 is refused: it takes the path of a plan file"]),
        ('plan = "no.plan"', ["plan = 'no.plan' cannot be read"]),
        (
            'plan = "~no-such-user/p"',
            ["~no-such-user/p begins with ~no-such-user, and no home folder is known for it"],
        ),
        ('plan = "bad.plan"', ["plan = 'bad.plan' is not TOML", "Invalid value"]),
        ("[plan]\nfile = 3", ["plan.file = 3 is refused"]),
        (
            '[plan]\nfile = "my.plan"\nround.gaol = 3',
            ["my.plan: round.gaol is not a key of a plan", "round.goal?"],
        ),
        (
            '[plan]\nfile = "my.plan"\nround.goal = 0',
            ["my.plan: round.goal = 0 is refused", "at least 1"],
        ),
        ('[plan]\nbundle = "b"', ["my.toml, plan: round.goal is missing"]),
        (
            'seed = 1\n[plan]\nfile = "my.plan"\nseed = 2',
            ["plan.seed = 2 and seed = 1: both seeds are one"],
        ),
        ('plan = "my.plan"', ["population.size is missing; a scenario must have it"]),
        (
            f"sed = 3\n{SMALL}",
            [
                "sed is not a key of a scenario; did you mean seed?",
                "Allowed here: name, seed, plan",
            ],
        ),
        (f"size = 3\n{SMALL}", ["size is not a key of a scenario; did you mean population.size?"]),
        (f'file = "x"\n{SMALL}', ["file is not a key"]),
        (f"tables = {{}}\n{SMALL}", ["tables is not a key"]),
        (f"seed = -1\n{SMALL}", ["seed = -1 is refused: it takes an integer, at least 0"]),
        (f'name = "a/b"\n{SMALL}', ["name = 'a/b'", "matching"]),
        (
            f"{SMALL}conected = 3",
            ["population.conected", "did you mean population.connected?", "size, connected."],
        ),
        (
            'plan = "my.plan"\npopulation = 3',
            ["population = 3 is refused: it takes a table of size, connected"],
        ),
        (
            'plan = "my.plan"\n[population]\nsize = 10000001',
            ["population.size = 10000001", "at most 10000000"],
        ),
        (
            'plan = "my.plan"\n[population]\nsize = 1',
            ["population.size = 1 is less than plan.round.minimum = 2"],
        ),
        (
            f"{SMALL}connected = 101",
            ["population.connected = 101 is more than population.size = 100"],
        ),
        (f"{SMALL}connected = 1", ["population.connected = 1 is less than plan.round.minimum = 2"]),
        (
            (
                'plan = "my.plan"\nservice = {max_connections = 7}\n[population]\nsize = '
                "9\nconnected = 8"
            ),
            ["population.connected = 8 is more than service.max_connections = 7"],
        ),
        (
            f'{SMALL}[data]\nkind = "dirichlett"',
            ["data.kind = 'dirichlett' is not known", "did you mean dirichlet?"],
        ),
        (f"{SMALL}[data]\nkind = []", ["data.kind = []", "Kinds: synthetic, hospitals"]),
        (f'{SMALL}[data]\nkind = "iid"', ['data.arrays is missing; kind "iid" needs it']),
        (
            f'{SMALL}[data]\nkind = "column"\narrays = "x"',
            ['data.column is missing; kind "column" needs it'],
        ),
        (
            f'{SMALL}[data]\nkind = "iid"\narrays = "x"\nalpha = 1',
            [
                'data.alpha = 1: kind "iid" takes arrays, examples, power, largest',
                'alpha is for kind "synthetic" or "dirichlet"',
            ],
        ),
        (
            f'{SMALL}[data]\narrays = "x"',
            ["data.arrays = 'x': kind \"synthetic\" takes alpha, beta, iid"],
        ),
        (
            f'{SMALL}[data]\nkind = "dirichlet"\narrays = "x"\nalpha = 0',
            ["data.alpha = 0", "above 0"],
        ),
        (
            f'{SMALL}[data]\nkind = "iid"\narrays = 3',
            ["data.arrays = 3 is refused: it takes a path"],
        ),
        (
            f'{SMALL}[data]\nkind = "hospitals"\nsetup = "x"',
            ["data.setup = 'x'", '"balanced" or "damaged"'],
        ),
        (f'{SMALL}[data]\nkind = "function"\nfunction = "x"', ["data.function = 'x'", "matching"]),
        (f"{SMALL}[data]\npower = 2.0", ["data.power = 2.0 needs data.examples"]),
        (
            f"{SMALL}[data]\nexamples = 2\nlargest = 3",
            ["data.largest = 3 needs sizes that differ: data.power"],
        ),
        (
            f'{SMALL}[data]\nkind = "iid"\narrays = "x"\nlargest = 3',
            ["data.largest = 3 needs sizes that differ"],
        ),
        (
            f"{SMALL}[data]\nexamples = 9\npower = 2\nlargest = 3",
            ["data.largest = 3 is less than data.examples = 9"],
        ),
        (f"{SMALL}[data]\niid = true\nbeta = 1", ["data.iid = true", "data.beta = 1.0"]),
        (
            f"{SMALL}[data]\ntest = 1",
            ["data.test = 1 is refused: it takes a number, at least 0 and at most 0.9"],
        ),
        (
            f'{SMALL}[compute]\nstep_seconds = "mesure"',
            [
                "compute.step_seconds = 'mesure' is refused: it takes a number, at least 0",
                'or "measure"',
            ],
        ),
        (
            f"{SMALL}[compute]\nmemory = 5000\n[tiers.a]\nmemory = 99\n[tiers.b]\nlike = 'phone'",
            ["compute.memory = 5000.0 MiB is more than any tier has: 1024.0; none could train"],
        ),
        (f"{SMALL}[tiers]\nx = 3", ["tiers.x = 3 is refused: it takes a table of like, share"]),
        (f"tiers = 3\n{SMALL}", ["tiers = 3 is refused: it takes tables [tiers.NAME]"]),
        (f'{SMALL}[tiers."a b"]', ["tiers.'a b' is refused: a tier's name is letters"]),
        (
            f'{SMALL}[tiers.x]\nlike = "pi4"',
            ["tiers.x.like = 'pi4' is not known; did you mean pi-4?", "jetson"],
        ),
        (
            f"{SMALL}[tiers.x]\nspeed = 0",
            ["tiers.x.speed = 0 is refused: it takes a number, above 0"],
        ),
        (
            f"{SMALL}[tiers.x]\nsped = 1",
            ["tiers.x.sped is not a key of a scenario", "did you mean tiers.x.speed"],
        ),
        (
            f"{SMALL}[tiers.x.failures]\ntrain = -1",
            ["tiers.x.failures.train = -1", "a table of rate, shape"],
        ),
        (
            f"{SMALL}[tiers.x.failures]\ntrian = 1",
            ["tiers.x.failures.trian", "did you mean tiers.x.failures.train"],
        ),
        (
            f"{SMALL}[tiers.x.failures.train]\nrate = -1",
            ["tiers.x.failures.train.rate = -1", "at least 0"],
        ),
        (f"{SMALL}[tiers.x.failures.train]\nshape = 1", ["tiers.x.failures.train.rate is missing"]),
        (
            f"{SMALL}[failures.train]\nrat = 1",
            ["failures.train.rat is not a key", "did you mean failures.train.rate"],
        ),
        (
            f'{SMALL}[availability]\nkind = "diurn"',
            ["availability.kind = 'diurn'", "did you mean diurnal?", "trace."],
        ),
        (
            f"{SMALL}[availability]\nshare = 1",
            ['kind "always" takes no other key', '"bernoulli" or "diurnal"'],
        ),
        (
            f'{SMALL}[availability]\nkind = "markov"\nslot = 3',
            ['kind "markov" takes on, off; slot is for kind'],
        ),
        (
            f'{SMALL}[availability]\nkind = "trace"',
            ['availability.file is missing; kind "trace" needs it'],
        ),
        (
            f'{SMALL}[availability]\nkind = "trace"\nfile = "no.csv"',
            ["availability.file = ", "no.csv' cannot be read"],
        ),
        (
            f'{SMALL}[availability]\nkind = "trace"\nfile = "t.csv"\nrepeat = 50',
            ["t.csv, line 2: 'a,0,100'", "off <= availability.repeat = 50"],
        ),
        (
            f"{SMALL}{DIURNAL}share = 0.7",
            [
                "availability.share = 0.7 with availability.swing = 4.0 has 1.12 of the devices",
                "at most 0.625",
            ],
        ),
        (
            f"{SMALL}{DIURNAL}zones = [{{hours = 15}}]",
            ["availability.zones[0].hours = 15", "at most 14"],
        ),
        (
            f"{SMALL}{DIURNAL}zones = [{{hour = 5}}]",
            ["availability.zones.hour is not", "availability.zones.hours?"],
        ),
        (f"{SMALL}{DIURNAL}zones = 5", ["availability.zones = 5"]),
        (f"{SMALL}[failures]\ncrash = 1.5", ["failures.crash = 1.5", "at least 0 and at most 1"]),
        (
            f"{SMALL}[failures]\noutages = [{{region = 0, begin = 5, end = 5}}]",
            ["failures.outages[0].end = 5.0 is not after its begin = 5.0"],
        ),
        (
            f"{SMALL}[failures]\nregions = 3\noutages = [{{region = 3, begin = 5, end = 6}}]",
            [
                "failures.outages[0].region = 3 is not a region",
                "failures.regions = 3 they are 0 to 2",
            ],
        ),
        (
            f"{SMALL}[failures]\noutages = [{{region = 0}}]",
            ["failures.outages[0].begin is missing"],
        ),
        (
            f'{SMALL}[failures]\ncorrupt = [{{share = 0.1, kind = "flip"}}]',
            ["failures.corrupt[0].kind = 'flip'", '"flipped"'],
        ),
        (
            (
                f'{SMALL}[failures]\ncorrupt = [{{share = 0.7, kind = "stale"}}, {{share = 0.4, '
                'kind = "stale"}]'
            ),
            ["failures.corrupt: the shares add up to 1.1; it takes at most 1"],
        ),
        (f"{SMALL}[coordinator]\ncrashes = [5, -1]", ["coordinator.crashes[1] = -1"]),
        (f"sweep = 3\n{SMALL}", ["sweep = 3 is refused: it takes a list of values"]),
        (f"{SMALL}[sweep]\nseed = 3", ["sweep.seed = 3 is refused: it takes a list of values"]),
        (f"{SMALL}[sweep]\nseed = []", ["sweep.seed = [] is refused"]),
        (
            f"{SMALL}[sweep]\nsed = [3]",
            ["(sweep: sed = 3): sed is not a key of a scenario; did you mean seed?"],
        ),
        (f"{SMALL}[sweep]\npopulation.sizes = [3]", ["did you mean population.size?"]),
        (f"{SMALL}[sweep]\nseed.x = [3]", ["(sweep: seed.x = 3): seed = {'x': 3} is refused"]),
        (f"seed = 1\n{SMALL}[sweep]\nseed.x = [3]", ["(sweep: seed.x = 3): seed is not a table"]),
        (
            f"{SMALL}[sweep]\nseed = {list(range(101))}\ndata.seed = {list(range(100))}",
            ["10100 combinations", "10000"],
        ),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(
    text: str, expected: list[str], base: Path
) -> None:
    with pytest.raises(SimulatorError) as refused:
        parse(text, base)
    assert refused.value.text.startswith("my.toml")
    for part in expected:
        assert part in refused.value.text


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        SimulatorError,
        match=r"the scenario cannot be read: the path ~no-such-user/s\.toml begins with",
    ):
        Scenario.load("~no-such-user/s.toml")
    with pytest.raises(SimulatorError, match=r"no\.toml: the scenario cannot be read"):
        Scenario.load(tmp_path / "no.toml")


def test_a_file_is_named_after_itself(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "night.toml").write_text(SMALL)
    monkeypatch.chdir(base)
    found = Scenario.load("night.toml")
    assert (found.name, found.file, found.base) == ("night", "night.toml", base)
