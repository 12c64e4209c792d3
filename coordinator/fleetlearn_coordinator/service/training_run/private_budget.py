"""The privacy budget of one run, in its ledger: what was released, and what may still be.

The account is written in the batch of rows that makes a release's model count. So a release is in
the ledger exactly when its spending is, whenever the process is killed. What was spent stays spent:
a roll back, a restart or a changed plan gives nothing back.

A copy of a run cannot know what the original releases later. So a copy is not served before
somebody has said how many releases that were (``count_releases``). A backup is marked as a copy; a
folder that was copied by hand is known by its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import msgspec
from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.errors import Code, many
from fleetlearn_protocol.messages import Held
from fleetlearn_protocol.secure.pairwise_messages import UNMASKING

from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.privacy_budget import account_of, budget_of, digest_of
from fleetlearn_coordinator.privacy.budget import MOST, PrivacyAccount, make_account
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import ReleaseBudget
from fleetlearn_coordinator.service.backup_contents import is_path
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.saved_mask_set import asked_round
from fleetlearn_coordinator.service.training_run.saved_privacy import end_noise
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import PRIVACY, PRIVACY_COPIED, Ledger, Metadata, Row
from fleetlearn_coordinator.storage.store import Store
from fleetlearn_coordinator.storage.stored_json import decode

PLACE, TO_LOG = "privacy_place", "privacy_to_log"
"""Keys of the metadata: where the run was served last; what the audit log may not have yet."""
WHAT = "what the database says of the privacy budget"
AuditPrivacy = Callable[[float, Mapping[str, Any]], None]
"""Writes a change of the privacy budget into the audit log, unless it is there: when (Unix time),
and what."""


def read_account(text: str | None) -> PrivacyAccount | None:
    """Return the account that a ledger has under PRIVACY. None: the run has no [privacy]. Raises
    StoreError (damaged)."""
    return None if text is None else decode(text, PrivacyAccount, WHAT)


def account_row(account: PrivacyAccount) -> Metadata:
    """Return the row that remembers the account."""
    return Metadata(PRIVACY, msgspec.json.encode(account).decode())


class PrivateBudget:
    """What a run has spent, and what it may still spend. Without [privacy]: nothing to count."""

    def __init__(
        self, plan: Plan, rules: PrivacyRules | None, store: Store, wall: float, log: RunLog
    ) -> None:
        """``rules``: the plan's. ``wall``: Unix time.

        Raises PlanError where [privacy] was taken away or came too late, StoreError where the run
        is a copy that does not know what was released since, PrivacyError without the extra.
        """
        self.account: PrivacyAccount | None = None
        """None: the plan has no [privacy]."""
        self.rows: list[Row] = []
        """What is to be written at the start."""
        self.seen: int | None = None
        """The round whose sum of updates the coordinator has seen, or may have seen in an earlier
        process. Where devices add the noise, it spends whether or not it comes to a model."""
        self._abandoned: tuple[int, list[Row]] | None = None
        """The last round that was abandoned and has spent something, and its rows."""
        self.audit: AuditPrivacy | None = None
        """None while it is not known."""
        self._store, self._log = store, log
        self._is_old = False
        """Whether a device knows of rounds that this data directory does not."""
        self._to_log = _to_log(store.ledger)
        before = read_account(store.ledger.get(PRIVACY))
        if plan.privacy is None or rules is None:
            if before is not None:
                _refuse_copy(store, before)
                if before.rounds:
                    raise PlanError(Code.BAD_MESSAGE, _taken_away(plan, before))
                self.rows = [Metadata(PRIVACY, None)]  # nothing was released: nothing is promised
            return
        if before is None and (told := _told_before(store.ledger)):
            raise PlanError(Code.BAD_MESSAGE, _too_late(plan, told))
        self.seen = asked_round(store.ledger)
        if before is not None:
            _refuse_copy(store, before)
            if before.segments[-1].rules != digest_of(rules):
                # A round that is open is given up, whose updates were sent under the old rules.
                before = before.after_abandoned(seen=self.seen is not None)
                self.seen = None
        self.account = account_of(plan.privacy, rules, () if before is None else before.segments)
        self.rows = [account_row(self.account), Metadata(PLACE, _place_of(store.storage.where))]
        change = None if before is None else _change(before, self.account)
        if change is not None:
            log.warning("the plan's [privacy] has changed: %s", change)
            self._to_log.append({"at": wall, "change": change})
            self.rows.append(_to_log_row(self._to_log))

    @property
    def limit(self) -> ReleaseBudget | None:
        """After how many releases the engine stops. None: no budget limits them."""
        return None if self.account is None else budget_of(self.account)

    @property
    def rounds(self) -> int:
        """How many rounds have spent something."""
        return 0 if self.account is None else self.account.rounds

    def abandoned(self, number: int) -> list[Row]:
        """This round is abandoned. Returns what is to be written with its end: nothing where it has
        spent nothing. Harmless when repeated."""
        if self._abandoned is not None and self._abandoned[0] == number:
            return self._abandoned[1]
        seen = self.seen == number
        if self.account is None or not self.account.spends_abandoned(seen=seen):
            return []
        self.account = self.account.after_abandoned(seen=seen)
        self._abandoned = number, [account_row(self.account)]
        if seen:
            self._log.warning(
                "round %d: the sum of its updates may have been seen, and counts towards epsilon "
                "as much as a release that every device was part of: epsilon %s is spent",
                number,
                spent_text(self.account.epsilon, self.account.budget),
                extra=said("privacy-sum-seen", round=number, epsilon=self.account.epsilon),
            )
        return self._abandoned[1]

    def begin_unmasking(self, number: int, phase: int, engine: Engine) -> None:
        """An exchange of this round's pairwise masks begins, or goes on after a restart. Once
        devices are asked to unmask the sum, somebody may see it whatever becomes of the round: the
        engine must count the round where it is abandoned, if that spends."""
        if self.account is None:
            return
        self.seen = number if phase == UNMASKING else None
        limit = self.limit
        if self.seen is not None and self.account.spends_abandoned(seen=True):
            # It may leave fewer releases than one less, and a limit where there was none.
            after = budget_of(self.account.after_abandoned(seen=True))
            if after is not None:
                limit = limit or after._replace(releases=MOST)
                limit = limit._replace(abandoned=True, if_abandoned=after)
        engine.settings = engine.settings._replace(budget=limit)

    def give_up(self, number: int, engine: Engine) -> None:
        """The engine is about to give this round up: if that spends more than it counts by itself,
        it must know before it decides whether another round opens."""
        if self.seen == number and self.abandoned(number):
            engine.releases = self.rounds
            engine.settings = engine.settings._replace(budget=self.limit)

    def look_at_held(self, held: Held, newest_round: int) -> None:
        """Warn, once, where a device has an update for a round that is not known here: the data
        directory is older than what the run has released, such as after a file system was set back.
        Only a warning, since a device may say anything."""
        of_this_run = held.task.startswith(f"{self._store.run}-")
        if self.account is None or not of_this_run or held.round <= newest_round or self._is_old:
            return
        self._is_old = True
        self._log.warning(
            "a device has an update for round %d of this private run, whose newest round here is "
            "%d: this data directory was set back to an earlier state, or is a copy. What the run "
            "released since counts towards epsilon. Unless that was counted already, stop the run "
            "and count it: `fleetlearn-coordinator count-releases %s NUMBER`",
            held.round,
            newest_round,
            self._store.storage.where,
            extra=said("privacy-set-back", round=held.round, newest=newest_round),
        )

    def log_changes(self) -> None:
        """Let the audit log have the changes of [privacy] that it does not have yet: the process
        that made them may have died before."""
        if not self._to_log or self.audit is None:
            return
        try:
            for change in self._to_log:
                about = {key: value for key, value in change.items() if key != "at"}
                self.audit(change["at"], about)
        except StoreUnavailableError as error:
            self._log.error(
                "the audit log will have the change of [privacy] after the next start: %s",
                error.text,
            )
        else:
            self._to_log = []
            self._store.write([Metadata(TO_LOG, None)])


def summary_of(account: PrivacyAccount) -> dict[str, Any]:
    """Return what a round's summary says of the account after its release."""
    return {
        "release": account.releases,
        "epsilon": account.epsilon,
        "delta": account.delta,
        "of": account.budget,
        "left": account.left,
    }


def _taken_away(plan: Plan, before: PrivacyAccount) -> str:
    made = many(before.releases, "release")
    return (
        f"{plan.file}: the run has made {made} under [privacy], and the plan "
        "has no [privacy] any more. A model without noise would tell what the others were not to "
        "tell: it ends what was promised to the devices. Put [privacy] back, or begin another run "
        "(another name and data_dir)"
    )


def _told_before(ledger: Ledger) -> str:
    """Return what a run without [privacy] has told of its devices, for people; empty if nothing. A
    round tells what its devices measured, whether or not it comes to a model."""
    version, _ = ledger.newest_model() or (0, "")
    if ledger.last_committed() is not None:
        return f"has released models without it, up to version {version}"
    if ledger.last_round():
        return "has opened rounds without it, which show what their devices measured"
    if ledger.last_series(EVALUATION) is not None:
        return "has evaluated its model on devices without it"
    return ""


def _too_late(plan: Plan, told: str) -> str:
    return (
        f"{plan.file}: the plan has [privacy], and the run {told}. The promise is about all that a "
        "device does in the run: noise in later models takes nothing back of what was told before, "
        "so that no epsilon is true of the run. Take [privacy] out again, or begin another run "
        "(another name and data_dir)"
    )


def _change(before: PrivacyAccount, after: PrivacyAccount) -> str | None:
    """Return what has changed, for people. None: nothing has."""
    was, now = ((each.budget, each.delta, each.segments[-1].rules) for each in (before, after))
    if was == now:
        return None
    old, new = (_terms(each) for each in (before, after))
    text = f"{old} before, {new} now" if old != new else f"{new}, and other rules of the releases"
    return (
        f"{text}; epsilon {spent_text(after.epsilon, after.budget)} is spent by "
        f"{many(after.releases, 'release')}, and stays spent"
    )


def _terms(account: PrivacyAccount) -> str:
    last = account.segments[-1]
    budget = "no budget" if account.budget is None else f"epsilon {budget_text(account.budget)}"
    return (
        f"{budget} at delta {account.delta:g} ({last.mechanism}, noise {last.noise:.4g}, "
        f"separation {last.separation}, participations {last.participations})"
    )


# Copies


def _place_of(where: str) -> str:
    """Return a name of the place that stays the same while nobody moves or copies it."""
    return os.path.realpath(where) if is_path(where) else where


def uncounted_copy(where: str, marked: object, place: str | None) -> str:
    """Return what became of a run's data directory since it was served last, where nobody has said
    what its original released since; empty: nothing. ``marked``: what the ledger has of
    PRIVACY_COPIED; ``place``: what it has of PLACE."""
    if marked:
        return f"{where} was restored from a backup"
    if place is not None and place != _place_of(where):
        return f"{where} was moved or copied from {place}"
    return ""


def _refuse_copy(store: Store, before: PrivacyAccount) -> None:
    """Raise StoreError where the run is a copy of which nobody has said what the original released
    since."""
    where, ledger = store.storage.where, store.ledger
    what = uncounted_copy(where, ledger.get(PRIVACY_COPIED), ledger.get(PLACE))
    if not what:
        return
    made = many(before.releases, "release")
    raise StoreError(
        Code.BAD_MESSAGE,
        f"{what}, with {made} of a private run. What the original has released "
        "since is not known here, and counts towards epsilon. Say how many releases that were, 0 "
        f"if none: `fleetlearn-coordinator count-releases {where} NUMBER`. The original's status "
        "and log number its releases; if you cannot know, give the most that there can have been",
    )


def count_releases(
    place: str | os.PathLike[str], releases: int, wall: float, who: str
) -> PrivacyAccount:
    """Count what the original of the run in this data directory has released since it was copied,
    as many releases as these, under the rules of the last ones here. The run may be served then.
    ``place``: as for ``find_storage``. ``wall``: Unix time. ``who``: for the audit log.

    Returns its account. The releases that follow are a segment of their own: who took part in those
    of the original is not known here, and correlated noise begins from the beginning. Raises
    StoreError where there is no private run, or it is being served; ValueError where ``releases``
    is negative.
    """
    if releases < 0:
        raise ValueError(f"{releases} releases were given; it takes 0 or more: none is taken back")
    storage = find_storage(place)
    with storage.read_ledger() as reader:
        if reader.metadata().get(PRIVACY) is None:
            text = f"{storage.where} has no private run: there are no releases to count"
            raise StoreError(Code.UNKNOWN_CONTENT, text)
    with storage.lock(), closing(storage.open_ledger(power=True, any_thread=False)) as ledger:
        account = read_account(ledger.get(PRIVACY))
        assert account is not None
        text = f"{many(releases, 'release')} of the original counted"
        counted = {"at": wall, "change": text, "who": who}
        rows: list[Row] = [
            Metadata(PRIVACY_COPIED, None),
            Metadata(PLACE, _place_of(storage.where)),
            _to_log_row([*_to_log(ledger), counted]),
        ]
        if releases:
            *earlier, last = account.segments
            ended = msgspec.structs.replace(last.after(releases), rules="")
            segments = [*earlier, ended, msgspec.structs.replace(last, releases=0, abandoned=0)]
            account = make_account(segments, account.budget, account.delta)
            rows += [account_row(account), *end_noise(ledger, account.releases)]
        ledger.write(rows)
    return account


# The audit log


def _to_log(ledger: Ledger) -> list[dict[str, Any]]:
    """Return the changes that the audit log may not have yet: ``at`` (Unix time), and what."""
    kept = ledger.get(TO_LOG)
    return [] if kept is None else decode(kept, list[dict[str, Any]], WHAT)


def _to_log_row(changes: list[dict[str, Any]]) -> Metadata:
    return Metadata(TO_LOG, msgspec.json.encode(changes).decode())
