"""What an audit found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fleetlearn_protocol.epsilon_text import spent_text
from rich.table import Table

from fleetlearn_simulator.audit.canary_devices import Guesses
from fleetlearn_simulator.audit.epsilon_bounds import CONFIDENCE, one_run_bound
from fleetlearn_simulator.audit.membership import MembershipResult


class AuditFinding(NamedTuple):
    """What one attack proves."""

    attack: str
    releases: int
    """Of the run that was attacked."""
    seen: str
    """What the attack saw, for people."""
    epsilon: float
    """No mechanism with a smaller epsilon would have been guessed so often, at ``CONFIDENCE``."""
    accounted: float
    """The epsilon that these releases are accounted for."""
    numbers: dict[str, Any]
    """What the attack counted, by name."""

    @property
    def holds(self) -> bool:
        """Whether the attack proves no more than is accounted for."""
        return self.epsilon <= self.accounted


class AuditReport(NamedTuple):
    """What an audit found."""

    name: str
    """Of the plan."""
    mechanism: str
    noise: float
    """The noise multiplier."""
    delta: float
    planned: int
    """Releases that the plan has."""
    findings: Sequence[AuditFinding]

    @property
    def holds(self) -> bool:
        """Whether no attack proves more than is accounted for."""
        return all(finding.holds for finding in self.findings)

    def table(self) -> Table:
        """Return the findings as a table."""
        title = (
            f"audit of {self.name}: {self.mechanism}, noise multiplier {self.noise:.4g}, "
            f"delta {self.delta:g}, {self.planned:,} releases planned"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("attack")
        table.add_column("releases", justify="right")
        table.add_column("what it saw", overflow="fold")
        table.add_column("proves at least", justify="right")
        table.add_column("accounted", justify="right")
        table.add_column("")
        for row in self.findings:
            verdict = "below" if row.holds else "ABOVE"
            proved, accounted = f"epsilon {row.epsilon:.3g}", spent_text(row.accounted)
            table.add_row(row.attack, f"{row.releases:,}", row.seen, proved, accounted, verdict)
        return table

    def verdict(self) -> str:
        """Return what follows, in a sentence or two."""
        if self.holds:
            return (
                "No attack proves more than is accounted for. That is what a sound mechanism looks "
                f"like; it is no proof of one.{self._weakness()}"
            )
        return (
            f"An attack proves more than is accounted for (confidence {100 * CONFIDENCE:g} %): the "
            "noise does not protect devices as the plan says. Do not release these models."
        )

    def _weakness(self) -> str:
        """Return a sentence where the canaries are too few to find a mistake; empty elsewhere."""
        for row in self.findings:
            bits = row.numbers.get("bits", 0)
            if row.attack.startswith("canaries") and bits:
                counts = [bits >> power for power in range(bits.bit_length())]
                most = max(one_run_bound(bits, count, count, self.delta) for count in counts)
                if most < row.accounted:
                    return (
                        f" {bits:,} canaries prove epsilon {most:.3g} at most, even if no guess "
                        "were wrong: a mistake shows with a larger round.goal, or with more noise."
                    )
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return all of it for programs."""
        return {
            "plan": self.name,
            "mechanism": self.mechanism,
            "noise": self.noise,
            "delta": self.delta,
            "planned": self.planned,
            "confidence": CONFIDENCE,
            "holds": self.holds,
            "attacks": [
                {
                    "attack": row.attack,
                    "releases": row.releases,
                    "epsilon": row.epsilon,
                    "accounted": row.accounted,
                    "holds": row.holds,
                    **row.numbers,
                }
                for row in self.findings
            ],
        }


def canary_finding(attack: str, found: Guesses, releases: int, accounted: float) -> AuditFinding:
    """Return what an attack on canaries proves. ``attack``: what it is called."""
    seen = f"of {found.bits:,} canaries {found.guesses:,} guessed, {found.correct:,} right"
    numbers = {"bits": found.bits, "guesses": found.guesses, "correct": found.correct}
    return AuditFinding(attack, releases, seen, found.epsilon, accounted, numbers)


def membership_findings(
    found: MembershipResult, releases: int, accounted: float
) -> list[AuditFinding]:
    """Return what the membership attack proves, by both bounds."""
    guesses, rates = found.guesses, found.true_positives
    told = ", ".join(f"TPR {rate:.1%} at FPR {at:.0%}" for at, rate in rates.items())
    seen = (
        f"{found.runs} shadow runs; of {guesses.bits:,} coins {guesses.guesses:,} guessed, "
        f"{guesses.correct:,} right; {told}"
    )
    numbers = {
        "shadow_runs": found.runs,
        "bits": guesses.bits,
        "guesses": guesses.guesses,
        "correct": guesses.correct,
        "true_positive_rates": {f"{at:g}": rate for at, rate in rates.items()},
    }
    one = "one target of each attacked run, by Clopper and Pearson"
    return [
        AuditFinding("membership", releases, seen, guesses.epsilon, accounted, numbers),
        AuditFinding("membership, rates", releases, one, found.rates_epsilon, accounted, {}),
    ]
