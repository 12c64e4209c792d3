"""[secure] of a plan: the coordinator knows the sum of a round's updates, and none of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fleetlearn_protocol.messages import MOST_REPORTS
from fleetlearn_protocol.secure.fixed_point import bits_for
from msgspec import Meta

from fleetlearn_coordinator.plan.toml_errors import Section

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class SecureSection(Section, frozen=True, kw_only=True):
    """[secure]: secure aggregation (docs/internals/secure-helper.md)."""

    mode: Literal["helper"]
    """helper: a process of another operator adds the masks up, which devices send one message
    for."""
    helper: Annotated[str, Meta(pattern="^https://[^/]+/?$", max_length=300)]
    """Where the helper is: ``https://host:port``."""
    key: Hex32
    """The helper's public key (X25519), 64 hexadecimal digits, which ``helper status`` prints.
    Devices seal their masks' seeds for it."""
    certificate: Hex32
    """SHA-256 of the helper's certificate, which ``helper status`` prints too."""
    minimum: Annotated[int, Meta(ge=2, le=MOST_REPORTS)]
    """The fewest devices whose updates are added up; devices sign it. Default: round.minimum."""
    bits: Literal[16, 18, 20]
    """Of an element. Default: the most with which round.goal updates can be added: 20 up to 4,096
    of them, 18 up to 16,384, 16 up to 65,536; half as many where devices add noise."""
    clip: Annotated[float, Meta(gt=0, le=1e30)]
    """C: the device multiplies a longer update by clip / its norm (L2 norm of the whole update).
    The coordinator cannot check it. Default: privacy.clip."""


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


def fill_secure(secure: dict[str, Any], round_: object, privacy: object) -> None:
    """Put in what depends on other values. Leaves what has a wrong type for the conversion to
    refuse."""
    if isinstance(privacy, dict) and "clip" in privacy:
        secure.setdefault("clip", privacy["clip"])
    if not isinstance(round_, dict):
        return
    if isinstance(minimum := round_.get("minimum"), int):
        secure.setdefault("minimum", max(2, minimum))  # if the round's is 1, that is refused
    # Half of the room is for noise that devices add: for most noise that is far more than it takes.
    noisy = isinstance(privacy, dict) and privacy.get("mechanism") == "distributed"
    goal = round_.get("goal")
    if isinstance(goal, int) and 1 <= goal * (1 + noisy) <= MOST_REPORTS:
        secure.setdefault("bits", bits_for(goal * (1 + noisy)))
    else:
        secure.setdefault("bits", 16)  # such a goal is refused
