"""[selection] of a plan: what it means for the engine, and what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.rounds.selection_rules import Eligibility, Oort, SelectionRules
from fleetlearn_protocol import extensions

SMALL = 'name = "a"\nbundle = "a.bundle"\n'
ROUND = "[round]\ngoal = 10\nover_selection = 1.0\ndeadline = 100.0\n"
BUFFER = 'recipe = "fedbuff"\n'


def parse(selection: str, before: str = SMALL + ROUND) -> Plan:
    return Plan.parse(f"{before}[selection]\n{selection}", Path("/base"), file="my.toml")


def rules(selection: str) -> SelectionRules | None:
    return parse(selection).engine_settings(15.0).selection


def test_without_rules_the_engine_has_none() -> None:
    assert rules("") is None
    assert rules('strategy = "uniform"\nleast_examples = 1') is None


def test_what_the_keys_mean() -> None:
    found = rules(
        'least_examples = 9\nleast_memory = 0.5\nruntimes = ["onnx"]\ntags = ["eu"]\nwithout_tags '
        '= ["beta"]\ntiers = ["phone"]\ncharging = true\nunmetered = true\nweighting = '
        '"examples"\ntier_weights = {phone = 2}\ntag_weights = {eu = 0.5}\ntier_quotas = {phone = '
        "0.5}\ntag_quotas = {eu = 1.0}\nonce_in = 3"
    )
    assert found == SelectionRules(
        eligibility=Eligibility(
            9,
            2**19,
            frozenset({"onnx"}),
            frozenset({"tag:eu"}),
            frozenset({"tag:beta"}),
            frozenset({"tier:phone"}),
            True,
            True,
        ),
        by_examples=True,
        most_examples=10**6,
        weights={"tier:phone": 2.0, "tag:eu": 0.5},
        quotas={"tier:phone": 0.5, "tag:eu": 1.0},
        once_in=3,
    )
    assert found.remember


def test_power_of_choice_draws_by_examples() -> None:
    found = rules('strategy = "power-of-choice"\ncandidates = 4')
    assert found is not None
    assert (found.strategy, found.candidates, found.by_examples) == ("power-of-choice", 4.0, True)


def test_oort_s_constants_are_the_paper_s() -> None:
    found = rules('strategy = "oort"')
    assert found is not None
    assert found.oort == Oort(10.0, 10.0, 20, 2.0, 0.9, 0.98, 0.2, 0.95, 0.95, 10)
    found = rules(
        'strategy = "oort"\n[selection.oort]\npreferred_seconds = 3\npenalty = 1\nmost_tasks = 99'
    )
    assert found is not None
    assert found.oort == Oort(3.0, 10.0, 20, 1.0, 0.9, 0.98, 0.2, 0.95, 0.95, 99)


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (
            'strategy = "oort"\ntier_weights = {a = 2}',
            "selection.tier_weights = {'a': 2.0}: strategy \"oort\" has",
        ),
        (
            'strategy = "power-of-choice"\nweighting = "examples"',
            "selection.weighting = 'examples': strategy \"power",
        ),
        (
            "candidates = 2",
            (
                'selection.candidates = 2.0 is for strategy "power-of-choice" and for own ones; '
                'selection.strategy is "unif'
            ),
        ),
        (
            "[selection.oort]\nwindow = 3",
            '[selection.oort] is for strategy "oort"; selection.strategy is "uniform"',
        ),
        ('tags = ["a"]\nwithout_tags = ["a"]', "both name a: no device could be eligible"),
        (
            'tiers = ["a"]\ntier_quotas = {b = 0.5}',
            "selection.tier_quotas.b: selection.tiers keeps this tier from all",
        ),
        (
            "tag_quotas = {eu = 0.05}",
            "selection.tag_quotas.eu = 0.05 of the 10 tasks of a round is less than one",
        ),
        (
            "tag_quotas = {eu = 0}",
            "selection.tag_quotas.eu = 0 is refused: it takes a number, above 0 and at most 1",
        ),
        ('tags = ["a b"]', "selection.tags[0] = 'a b' is refused"),
        (
            'strategy = "ort"',
            'selection.strategy = "ort" is not known; did you mean oort? It takes',
        ),
        (
            "parameters = {share = 0.5}",
            "selection.parameters = {'share': 0.5} are for an own strategy; selection.strategy is",
        ),
        (
            'strategy = "mine:first"\nweighting = "examples"',
            "selection.weighting = 'examples': strategy \"mine:first\" has weights of its own",
        ),
        ("least_example = 3", "did you mean selection.least_examples or"),
        (
            'strategy = "random"',
            'selection.strategy = "random" is not known. It takes uniform, power-of-choice, oort,',
        ),
        ("once_in = 0", "selection.once_in = 0 is refused"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(selection: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(selection)
    assert said in refused.value.text
    assert refused.value.text.startswith("my.toml: ")


def test_oort_is_for_synchronous_rounds() -> None:
    with pytest.raises(PlanError, match='"oort" is for synchronous rounds'):
        parse('strategy = "oort"', SMALL + BUFFER)
    assert (
        parse('strategy = "power-of-choice"', SMALL + BUFFER).engine_settings(15.0).selection
        is not None
    )


@pytest.mark.parametrize("selection", ['weighting = "examples"', 'strategy = "power-of-choice"'])
def test_large_devices_that_count_twice_are_remarked(selection: str) -> None:
    plan = parse(selection)
    assert "count twice" in str(plan.selection.remark("examples"))
    assert plan.selection.remark("uniform") is None
    assert parse("").selection.remark("examples") is None


OWN = """
def first(share: float = 1.0):
    return lambda choice: [device.name for device in choice.devices][: int(choice.wanted * share)]

def enough(reports: int):
    return lambda rounds: "enough" if sum(each.reports for each in rounds) >= reports else None
"""


def test_an_own_strategy_and_an_own_stop_rule(tmp_path: Path) -> None:
    """A plan that names them is read anywhere, and run where its modules are listed."""
    (tmp_path / "own_rules_of_plans.py").write_text(OWN)
    text = 'strategy = "own_rules_of_plans:first"\nparameters = {share = 0.5}\ncandidates = 3\n'
    stop = '[stop]\nrule = "own_rules_of_plans:enough"\nparameters = {reports = 40}\n'
    plan = parse(text + stop)
    service = ServiceSettings.read({"plugins": {"modules": ["own_rules_of_plans"]}}, tmp_path)
    with extensions.apart():
        with pytest.raises(PlanError, match=r"my\.toml: .*own_rules_of_plans is not allowed here"):
            plan.check_served(ServiceSettings())
        plan.check_served(service)
        found, again = plan.engine_settings(15.0).selection, plan.engine_settings(15.0).selection
        assert found is not None
        assert found == again, "its function is made once"
        assert (found.strategy, found.candidates) == ("own_rules_of_plans:first", 3.0)
        assert found.own is not None
        assert not found.by_examples
        rule = plan.own_stop_rule()
        assert rule is not None
        assert rule.rounds == []
        rule.add(1, {"reports": 40, "change": 0.1}, {})
        assert rule.finish() is not None
        assert plan.own_stop_rule() is not rule
        wrong = parse(text + stop.replace("reports", "updates"))
        with pytest.raises(PlanError, match=r"stop\.rule = .* has no parameter updates"):
            wrong.check_served(service)
    with (
        extensions.apart(),
        pytest.raises(PlanError, match=r"\[plugins\] of the service: .*not there"),
    ):
        plan.check_served(ServiceSettings.read({"plugins": {"modules": ["no_such_rules"]}}))


def test_an_own_stop_rule_has_a_name_and_parameters() -> None:
    with pytest.raises(PlanError, match=r"stop\.parameters = \{'a': 1\} need stop\.rule"):
        parse("[stop]\nparameters = {a = 1}\n")
    with pytest.raises(PlanError, match=r'stop\.rule = "plateau" is not known'):
        parse('[stop]\nrule = "plateau"\n')
