"""Selection by a plan's rules: who may be given a task, with which probability, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, fsum, inf

from sortedcontainers import SortedList

from fleetlearn_coordinator.rounds.lease_book import LeaseBook
from fleetlearn_coordinator.rounds.random_draws import stream
from fleetlearn_coordinator.rounds.selection import Selection
from fleetlearn_coordinator.rounds.selection_rules import NOTHING_STATED, SelectionRules, Stated
from fleetlearn_coordinator.rounds.settings import RoundSize
from fleetlearn_coordinator.rounds.strategies import oort, own_strategy
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceMemory
from fleetlearn_coordinator.rounds.strategies.pools import Pools
from fleetlearn_coordinator.rounds.strategies.quotas import Quotas

WEIGHT_UNIT = 2**16
"""Weights are whole numbers of 1 / this, so that sums of them are exact."""
MAX_WEIGHT = 2**43
"""The largest such number. With a million devices, sums stay below 2**64, the range of a draw."""


@dataclass(slots=True)
class RuledSelection(Selection):
    """``Selection`` for a plan with rules. Besides the places there, a device may be ineligible, or
    barred because it took part lately: it then waits, and is given nothing.

    What is remembered of devices (``memory``) is also in the ledger, where the rules need it."""

    rules: SelectionRules = field(init=False)
    quotas: Quotas = field(init=False)
    stated: dict[str, Stated] = field(default_factory=dict)
    """Device -> what it states. The driver sets it before the device checks in, and removes it when
    it has left."""
    ineligible: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Connected device -> the plan's keys that keep it from tasks."""
    barred: dict[str, int] = field(default_factory=dict)
    """Connected device that took part lately -> the round in which it may again."""
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    pacer: oort.Pacer | None = field(init=False)
    _order: list[str] = field(default_factory=list)
    """Oort: the admitted devices in the order in which they are drawn in this round, the last
    first."""

    def __post_init__(self) -> None:
        rules = self.settings.selection
        assert rules is not None
        self.rules = rules
        size = self.settings.goal if self.settings.asynchronous else self.settings.cohort
        self.quotas = Quotas(rules.quotas, size)
        self.pacer = None if rules.oort is None else oort.Pacer(rules.oort)
        self.idle = self._no_names()

    # --- where devices are ---

    def _no_names(self) -> SortedList[str]:
        return Pools(self._kind_of)  # it has what ``Selection`` needs of a SortedList

    def _kind_of(self, device: str) -> tuple[bool, tuple[str, ...], int]:
        stated = self.stated.get(device, NOTHING_STATED)
        record = self.memory.records.get(device)
        labels = self.quotas.labels_of(stated.labels)
        return record is not None and record.reported is not None, labels, self._weight(stated)

    def _weight(self, stated: Stated) -> int:
        rules, weight = self.rules, float(WEIGHT_UNIT)
        if rules.by_examples:
            weight *= min(stated.examples, rules.most_examples)
        for label, factor in rules.weights.items():
            if label in stated.labels:
                weight *= factor
        return min(max(1, round(weight)), MAX_WEIGHT)

    def ready(self) -> int:
        return self._pools(self.idle).most(self.quotas)

    def waiting(self) -> int:
        """Return how many devices a new round could give tasks, in doubt or not."""
        everywhere = (self.idle, *self.doubted.values())
        return sum(self._pools(names).most(self.quotas) for names in everywhere)

    def resize(self, size: RoundSize) -> None:
        Selection.resize(self, size)
        self.quotas.size = size.cohort

    def _pools(self, names: Iterable[str]) -> Pools:
        if isinstance(names, Pools):
            return names
        pools = Pools(self._kind_of)
        for name in names:
            pools.add(name)
        return pools

    def add(self, device: str) -> None:
        self.idle.discard(device)  # what it states may have changed since it came
        self._forget_exclusion(device)
        if failed := self.rules.eligibility.refusals(self.stated.get(device, NOTHING_STATED)):
            Selection.remove(self, device)
            self.ineligible[device] = tuple(failed)
        elif (again := self._may_again(device)) > self.next_round:
            Selection.remove(self, device)
            self.barred[device] = again
        else:
            Selection.add(self, device)

    def _may_again(self, device: str) -> int:
        """Return the first round in which the device may be given a task."""
        record = self.memory.records.get(device)
        if self.rules.once_in is None or record is None:
            return 0
        return record.given + self.rules.once_in

    def _forget_exclusion(self, device: str) -> None:
        self.ineligible.pop(device, None)
        self.barred.pop(device, None)

    def may_serve(self, device: str) -> bool:
        if device in self.ineligible or device in self.barred:
            return False
        return Selection.may_serve(self, device)

    def remove(self, device: str) -> None:
        self._forget_exclusion(device)
        Selection.remove(self, device)

    def _waits(self, device: str) -> bool:
        return device in self.ineligible or device in self.barred or Selection._waits(self, device)

    def _end_rest_of_all(self) -> None:
        for device in sorted(self.resting):
            self.add(device)

    def end_round(self, reported: Collection[str]) -> None:
        self.quotas.begin_round()
        self._order.clear()
        Selection.end_round(self, reported)
        for device in [device for device, again in self.barred.items() if again <= self.next_round]:
            self.add(device)

    def go_on(self, devices: Iterable[str]) -> None:
        for device in devices:
            record = self.memory.records.get(device)
            self.quotas.count(() if record is None else record.labels)

    # --- who is chosen ---

    def choose(
        self, most: int, round: int, first: int, book: LeaseBook, region: str | None = None
    ) -> list[str]:
        devices = self._choose_with_care(most, round, first, book)
        for device in devices:
            labels = self.quotas.labels_of(self.stated.get(device, NOTHING_STATED).labels)
            self.memory.give(device, round, labels)
        if not self.settings.asynchronous:
            self.had_turn.update(devices)
        return devices

    def _may_try_again(self, device: str, round: int) -> bool:
        """Return whether the rules let the device have another task in the round. It is then
        counted as given."""
        stated = self.stated.get(device, NOTHING_STATED)
        labels = self.quotas.labels_of(stated.labels)
        if (
            self.rules.once_in is not None
            or self.rules.eligibility.refusals(stated)
            or not self.quotas.has_room(labels)
        ):
            return False
        self.quotas.count(labels)
        self.memory.give(device, round, labels)
        return True

    def _take(self, names: SortedList[str], draws: Sequence[int]) -> list[str]:
        pools = self._pools(names)
        if not draws:
            return []
        match self.rules.strategy:
            case "power-of-choice":
                return self._take_by_loss(pools, draws)
            case "oort":
                return self._take_by_utility(pools, draws)
        if self.rules.own is not None:
            return self._take_by_own(self.rules.own, pools, draws)
        return pools.take(draws, self.quotas)

    def _choose_trials(self, draws: Iterable[int]) -> list[str]:
        chosen = list[str]()
        for number in draws:
            place = number % max(1, sum(map(len, self.doubted.values())))
            for level, names in sorted(self.doubted.items()):
                if place < len(names):
                    if number >> (64 - level) == 0:
                        chosen += self._pools(names).take([number], self.quotas)
                    break
                place -= len(names)
        return chosen

    def _all_quotas(self) -> Quotas | None:
        """Return what keeps devices from being candidates at all. None: nothing."""
        return None

    def _take_by_loss(self, pools: Pools, draws: Sequence[int]) -> list[str]:
        """Power-of-choice after Cho, Wang and Joshi, "Towards Understanding Biased Client Selection
        in Federated Learning" (arXiv 2010.01243), the variant rpow-d: candidates are drawn in
        proportion to their examples, and those are taken whose last reported losses are the
        largest. A device that has not reported comes first."""
        assert self.rules.candidates is not None
        count = ceil(self.rules.candidates * len(draws))
        drawn = pools.take(list(islice(stream(draws[0]), count)), self._all_quotas())
        losses = {device: self._last_loss(device) for device in drawn}
        chosen = list[str]()
        # stable: the first drawn of equals
        for device in sorted(drawn, key=losses.__getitem__, reverse=True):
            labels = self._kind_of(device)[1]
            if len(chosen) < len(draws) and self.quotas.has_room(labels):
                self.quotas.count(labels)
                chosen.append(device)
            else:
                pools.add(device)
        # where quotas kept candidates out
        return chosen + pools.take(draws[len(chosen) :], self.quotas)

    def _take_by_own(
        self, strategy: own_strategy.SelectionStrategy, pools: Pools, draws: Sequence[int]
    ) -> list[str]:
        """Let an own strategy choose, of all that wait or of candidates that are drawn."""
        numbers, kept_out = stream(draws[0]), self._all_quotas()
        if self.rules.candidates is None:
            offered = [
                name for name in pools if kept_out is None or kept_out.has_room(pools.labels(name))
            ]
        else:
            most = ceil(self.rules.candidates * len(draws))
            offered = sorted(pools.take([*islice(numbers, most)], kept_out))
            for device in offered:
                pools.add(device)
        if not offered:
            return []
        devices = [
            own_strategy.WaitingDevice(
                name, self.stated.get(name, NOTHING_STATED), self.memory.records.get(name)
            )
            for name in offered
        ]
        random = own_strategy.fractions(numbers)
        choice = own_strategy.Choice(devices, len(draws), self.next_round, random)
        chosen = list[str]()
        for device in own_strategy.choose(strategy, choice):
            if len(chosen) == len(draws):
                break
            labels = pools.labels(device)
            if self.quotas.has_room(labels):
                self.quotas.count(labels)
                pools.discard(device)
                chosen.append(device)
        return chosen

    def _last_loss(self, device: str) -> float:
        record = self.memory.records.get(device)
        return inf if record is None or record.loss is None else record.loss

    def _take_by_utility(self, pools: Pools, draws: Sequence[int]) -> list[str]:
        """Oort's Algorithm 1. The share of exploration is rounded at random where it is not a whole
        number of tasks. Where too few are left to explore or to exploit, the others fill the slots,
        last those that had the most tasks."""
        rules = self.rules.oort
        assert rules is not None
        share = oort.exploration(self.next_round, rules) * len(draws)
        explore = int(share + (draws[0] >> 11) / 2**53)
        chosen = self._exploit(pools, len(draws) - explore, draws[0])
        chosen += pools.take(draws[len(chosen) :], self.quotas, explored=False)
        if len(chosen) < len(draws):
            chosen += self._exploit(pools, len(draws) - len(chosen), draws[len(chosen)])
        return chosen + pools.take(draws[len(chosen) :], self.quotas)

    def _exploit(self, pools: Pools, count: int, draw: int) -> list[str]:
        """Take explored devices of a high utility. Those that were admitted in this round and not
        taken stay admitted for the slots that come free later."""
        chosen = list[str]()
        for attempt in range(2):
            if attempt:
                self._order = self._admit(pools, count - len(chosen), draw)
            over = list[str]()  # their quotas are
            while self._order and len(chosen) < count:
                device = self._order.pop()
                if device in pools and not self.quotas.has_room(labels := pools.labels(device)):
                    over.append(device)
                elif device in pools:
                    pools.discard(device)
                    self.quotas.count(labels)
                    chosen.append(device)
            self._order += reversed(over)
            if len(chosen) == count:
                break
        return chosen

    def _admit(self, pools: Pools, count: int, draw: int) -> list[str]:
        rules, records = self.rules.oort, self.memory.records
        assert rules is not None
        assert self.pacer is not None
        kept_out = self._all_quotas()
        usable = {
            name: records[name]
            for name in pools.explored()
            if records[name].tasks < rules.most_tasks
            and (kept_out is None or kept_out.has_room(pools.labels(name)))
        }
        found = oort.utilities(
            usable, self.next_round, self.pacer.preferred, rules, self.rules.most_examples
        )
        admitted = oort.admitted(found, count, rules.cutoff)
        order = oort.sampling_order(admitted, list(islice(stream(draw), len(admitted))))
        return order[::-1]

    # --- what is learnt of devices ---

    def learn(
        self, device: str, round: int, loss: float, examples: int, seconds: float | None
    ) -> None:
        """A report of the device is safe, which counts in this round. Tell this before the engine
        counts it."""
        self.memory.learn(device, round, loss, examples, seconds)

    def utility_of(self, devices: Iterable[str]) -> dict[str, float]:
        """Return what a committed round's summary says of the choice of its devices: nothing,
        unless the rules are Oort's: their utility and the preferred seconds of a task."""
        if self.pacer is None:
            return {}
        records = [
            record for device in devices if (record := self.memory.records.get(device)) is not None
        ]
        found = [oort.statistical_utility(record, self.rules.most_examples) for record in records]
        most = oort.limit(found, self.pacer.rules.clip)
        return {
            "utility": fsum(min(value, most) for value in found),
            "preferred_seconds": self.pacer.preferred,
        }

    def committed(self, version: int, summary: dict[str, float]) -> None:
        """A round was committed that made this model version; ``summary`` as ``utility_of``
        returned it. Tell this before the engine hears of it."""
        if self.pacer is not None and summary:
            self.pacer.preferred = summary["preferred_seconds"]
            self.pacer.end_round(version, summary["utility"])

    def live(self) -> dict[str, object]:
        """Return what a status shows: how many connected devices are kept from tasks, and by which
        of the plan's keys."""
        causes = Counter(f"selection.{key}" for keys in self.ineligible.values() for key in keys)
        return {
            "ineligible": len(self.ineligible),
            "ineligible_by": dict(causes),
            "barred": len(self.barred),
        }
