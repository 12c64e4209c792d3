"""The command ``fleetlearn-simulate audit``."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_terms import epsilon_after
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import FleetError, in_words
from fleetlearn_protocol.typer_app import fail, show_table

from fleetlearn_simulator.audit.audit_report import (
    AuditFinding,
    AuditReport,
    canary_finding,
    membership_findings,
)
from fleetlearn_simulator.audit.canary_run import CanaryAttack, run_canaries
from fleetlearn_simulator.audit.membership import MembershipAttack, run_membership
from fleetlearn_simulator.audit.trained_canaries import run_trained_canaries
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.scenario.scenario import Scenario

app = typer.Typer()


@app.command()
def audit(
    file: Annotated[
        Path, typer.Argument(metavar="PLAN.toml|SCENARIO.toml", help="A plan with [privacy].")
    ],
    canaries: Annotated[
        int, typer.Option(help="Most devices that are made up and guessed.", min=1, max=10_000)
    ] = 1000,
    releases: Annotated[
        int, typer.Option(help="Most rounds in which the canaries take part.", min=1, max=1000)
    ] = 20,
    reports: Annotated[
        float,
        typer.Option(
            help="The share of round.goal that reports; the others vanish.", min=1e-6, max=1.0
        ),
    ] = 1.0,
    train: Annotated[
        bool,
        typer.Option(help="Put the canaries among the scenario's devices, which train."),
    ] = False,
    shadow_runs: Annotated[
        int | None,
        typer.Option(
            help=(
                "Simulations for the membership attack; 0: there is none. Default: 32 of a "
                "scenario, 0 of a plan."
            ),
            min=0,
        ),
    ] = None,
    targets: Annotated[
        int, typer.Option(help="Devices of the scenario that it is asked about.", min=1)
    ] = 20,
    seconds: Annotated[
        float, typer.Option(help="No simulation begins after so many seconds.", min=0.0)
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="Of coins, directions and noise.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack a plan's privacy, and compare what that proves with what is accounted for. The end is
    1 if an attack proves more."""
    try:
        plan, scenario = read_audited(file)
        if shadow_runs is None:
            shadow_runs = 0 if scenario is None else MembershipAttack().shadow_runs
        report = audit_plan(
            plan,
            scenario,
            CanaryAttack(canaries, releases, reports=reports, seed=seed),
            MembershipAttack(shadow_runs, targets, seconds, seed),
            train=train,
        )
    except (FleetError, OSError) as error:
        fail("fleetlearn-simulate", in_words(error, file=True))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show_table(report.table())
        print(report.verdict())
    if not report.holds:
        raise typer.Exit(1)


def read_audited(file: Path) -> tuple[Plan, Scenario | None]:
    """Return the plan to audit, and the scenario if the file is one. Raises PlanError and
    SimulatorError."""
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SimulatorError(f"{file} cannot be read: {in_words(error)}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SimulatorError(f"{file}: this is not TOML: {error}") from None
    if "plan" not in tables:
        return Plan.load(file), None
    scenario = Scenario.load(file)
    return scenario.plan, scenario


def audit_plan(
    plan: Plan,
    scenario: Scenario | None,
    canaries: CanaryAttack,
    membership: MembershipAttack,
    *,
    train: bool = False,
) -> AuditReport:
    """Audit a plan: by canaries, alone or (``train``) among the scenario's devices, and by the
    membership attack if shadow runs are asked for. Raises SimulatorError where there is nothing to
    audit, PlanError and PrivacyError."""
    privacy = plan.privacy
    if privacy is None:
        raise SimulatorError(f"{plan.file}: this plan has no [privacy]: there is nothing to audit")
    if plan.algorithm.computes:
        raise SimulatorError(
            f'{plan.file}: recipe = "{plan.recipe}" releases sums, and the audit\'s canaries are '
            "updates of a model. What bounds a device's sums, and what their noise is, tests hold "
            "against closed forms (docs/privacy.md)"
        )
    if privacy.mechanism == "local":
        raise SimulatorError(
            f'{plan.file}: with privacy.mechanism = "local" each device adds its own noise, and '
            "what is released is every single update: an audit of sums says nothing about it"
        )
    if (membership.shadow_runs or train) and scenario is None:
        raise SimulatorError(
            f"{plan.file}: --shadow-runs and --train simulate a fleet and its data: give a "
            "scenario, which names this plan"
        )
    manifest = open_bundle(plan.bundle).manifest
    rules = plan.round_rules(manifest).privacy
    assert rules is not None
    findings, rounds = list[AuditFinding](), plan.stop.rounds
    accounted = epsilon_after(plan, rounds, rules.noise)
    if train and scenario is not None:
        found = run_trained_canaries(scenario, canaries)
        findings.append(canary_finding("canaries in training", found, rounds, accounted))
    elif privacy.sampling == "none":  # canaries would be in every sample
        count = min(canaries.releases, rounds)
        try:
            found = run_canaries(plan, manifest, canaries)
        except ValueError as error:
            raise SimulatorError(f"{plan.file}: {error}") from None
        own = epsilon_after(plan, count, rules.noise)
        findings.append(canary_finding("canaries", found, count, own))
    if membership.shadow_runs and scenario is not None:
        findings += membership_findings(run_membership(scenario, membership), rounds, accounted)
    if not findings:
        raise SimulatorError(
            f'{plan.file}: with privacy.sampling = "poisson" the audit is of a simulated '
            "fleet: give a scenario, and --shadow-runs or --train"
        )
    return AuditReport(
        plan.name, rules.mechanism, rules.noise, privacy.delta, plan.stop.rounds, findings
    )
