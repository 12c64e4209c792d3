"""[secure] of a plan: the coordinator knows the sum of a round's updates, and none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from fleetlearn_protocol.messages import MOST_NEIGHBOURS, MOST_REPORTS
from fleetlearn_protocol.secure.fixed_point import PART_BITS, bits_for
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


MOST_WAIT = 300.0
"""Seconds for an exchange by default, unless the round's deadline is shorter."""


class SecureSection(Section, frozen=True, kw_only=True):
    """[secure]: secure aggregation (docs/internals/secure-helper.md)."""

    mode: Literal["helper", "pairwise"]
    """helper: a process of another operator adds the masks up, which devices send one message
    for. pairwise: devices agree on masks that cancel each other out, in three exchanges beside
    each round's training; it needs nobody else."""
    helper: Annotated[str, Meta(pattern="^https://[^/]+/?$", max_length=300)] = ""
    """Where the helper is: ``https://host:port``."""
    key: Hex32 = ""
    """The helper's public key (X25519), 64 hexadecimal digits, which ``helper status`` prints.
    Devices seal their masks' seeds for it."""
    certificate: Hex32 = ""
    """SHA-256 of the helper's certificate, which ``helper status`` prints too."""
    minimum: Annotated[int, Meta(ge=2, le=MOST_REPORTS)]
    """The fewest devices whose updates are added up; devices sign it. Default: round.minimum."""
    bits: Literal[12, 16, 18, 20]
    """Of an element. Default: the most with which round.goal updates can be added: 20 up to 4,096
    of them, 18 up to 16,384, 16 up to 65,536; half as many where devices add noise. With 12, which
    is never the default, an update travels in 3 bytes an element in place of 4, up to 4,097 can be
    added, and rounding adds more noise to each. Sums of a computation are whole, in words of
    16."""
    clip: Annotated[float, Meta(gt=0, le=1e30)] | None = None
    """C: the device multiplies a longer update by clip / its norm (L2 norm of the whole update).
    The coordinator cannot check it. Default: privacy.clip. Sums of a computation have none."""

    adversaries: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """pairwise: the largest share of a round's devices that may work together with the coordinator
    to see another one's update. Default: 0.05."""
    dropouts: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """pairwise: the largest share of a round's devices that may vanish once its exchanges have
    begun; with more, the round is abandoned. Default: 0.1."""
    server: Literal["semi-honest", "semi-malicious"] | None = None
    """pairwise: semi-honest: the coordinator tells all devices the same. semi-malicious: it may
    tell them different things about who was lost: all devices are neighbours, of which more must
    stay. At most 97 devices. Default: semi-honest."""
    degree: Annotated[int, Meta(ge=2, le=MOST_NEIGHBOURS, multiple_of=2)] | None = None
    """pairwise: how many neighbours each device has; those of a round of no more devices are all
    neighbours. Default: the fewest with which the two shares hold."""
    threshold: Annotated[int, Meta(ge=2, le=MOST_NEIGHBOURS)] | None = None
    """pairwise: how many of them together give a device's secrets. Default: goes with ``degree``.
    """
    deadline: Annotated[float, Meta(gt=0, le=1e7)] | None = None
    """pairwise: seconds that devices have for each of the three exchanges. Default: round.deadline,
    and 300 at most."""
    roster: Path | None = None
    """pairwise: a list of devices and their own keys (``fleetlearn-device public-key`` prints a
    line), as a helper has one. A device that is not in it takes no part, and one that signed its
    keys otherwise either. Default: anybody takes part."""


def prepare_secure_rounds(local: dict[str, Any], round_: dict[str, Any]) -> None:
    """Put in what a plan with [secure] has by default: all updates weigh the same, and devices
    measure nothing, as it would not be looked at."""
    if round_.get("weighting") == "examples" and "max_weight" not in round_:
        raise ValueError(
            'round.weighting = "examples" with [secure] needs round.max_weight, the most examples '
            "that count: a device writes its update times its share of them in whole numbers, and "
            'if that is a thousandth, nearly nothing of it is left. Or round.weighting = "uniform"'
        )
    round_.setdefault("weighting", "uniform")
    local.setdefault("evaluate", False)


def fill_secure(
    secure: dict[str, Any], round_: object, privacy: object, *, computes: bool = False
) -> None:
    """Put in what depends on other values. Leaves what has a wrong type for the conversion to
    refuse. ``computes``: whether devices compute sums in place of training."""
    if computes:
        secure.setdefault("bits", PART_BITS)
    if isinstance(privacy, dict) and "clip" in privacy:
        secure.setdefault("clip", privacy["clip"])
    if not isinstance(round_, dict):
        return
    if secure.get("mode") == "pairwise":
        _fill_pairwise(secure, round_)
    if isinstance(minimum := round_.get("minimum"), int):
        secure.setdefault("minimum", max(2, minimum))  # if the round's is 1, that is refused
    # Half of the room is for noise that devices add: for most noise that is far more than it takes.
    noisy = isinstance(privacy, dict) and privacy.get("mechanism") == "distributed"
    if noisy and secure.get("mode") == "pairwise":
        _fill_colluding(privacy, secure, round_)
    goal = round_.get("goal")
    if isinstance(goal, int) and 1 <= goal * (1 + noisy) <= MOST_REPORTS:
        secure.setdefault("bits", bits_for(goal * (1 + noisy)))
    else:
        secure.setdefault("bits", 16)  # such a goal is refused


def _fill_colluding(privacy: Any, secure: dict[str, Any], round_: dict[str, Any]) -> None:
    """Who works together with the coordinator against masks does so against noise: at worst all of
    them are among the fewest of a sum."""
    of_round = [round_.get(key) for key in ("goal", "over_selection")]
    given = [secure.get(key) for key in ("adversaries", "minimum")]
    numbers = [value for value in (*of_round, *given) if isinstance(value, int | float)]
    if len(numbers) == 4 and min(numbers) > 0:
        goal, over_selection, share, minimum = numbers
        privacy.setdefault("colluding", min(0.99, share * goal * over_selection / minimum))


def _fill_pairwise(secure: dict[str, Any], round_: dict[str, Any]) -> None:
    secure.setdefault("adversaries", 0.05)
    secure.setdefault("dropouts", 0.1)
    secure.setdefault("server", "semi-honest")
    if isinstance(deadline := round_.get("deadline", MOST_WAIT), int | float):
        secure.setdefault("deadline", min(float(deadline), MOST_WAIT))
