"""The helper's answers, over a real file: exact sums, and each cheat refused by name."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds
from fleetlearn_coordinator.secure.helper_store import HelperStore, make_helper_store
from fleetlearn_coordinator.storage.errors import StoreUnavailableError
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import SecureTask, Task, VectorReference
from fleetlearn_protocol.secure.about import MaskedUpdate, MaskTerms, about_update, signed_seed
from fleetlearn_protocol.secure.fixed_point import bits_for, sum_of, to_words
from fleetlearn_protocol.secure.helper_messages import (
    MaskSumAnswer,
    MaskSumRefusal,
    MaskSumRequest,
    RefusalName,
    write_message,
)
from fleetlearn_protocol.secure.masks import add_mask
from fleetlearn_protocol.secure.task_terms import training_digest
from helper_fleet import (
    BUNDLE,
    MINIMUM,
    SIZE,
    SecureDevice,
    exact_sum,
    fleet,
    model,
    ordinary,
    request_of,
    seeds_of,
    terms_of,
)

DEVICES = fleet([f"d{number}" for number in range(8)])
STRANGER = SecureDevice("stranger")
BOUNDS = HelperBounds(MINIMUM, 20, 100)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "helper.sqlite"
    make_helper_store(path, 1.0)
    with closing(HelperStore(path)) as store:
        store.enrol([(device.name, device.public) for device in DEVICES], 2.0)
    return path


@pytest.fixture
def helper(database: Path) -> Helper:
    return Helper(database, BOUNDS)


def ask(helper: Helper, request: MaskSumRequest) -> MaskSumAnswer | MaskSumRefusal:
    return helper.answer(write_message(request))


def answered(helper: Helper, request: MaskSumRequest) -> MaskSumAnswer:
    answer = ask(helper, request)
    assert isinstance(answer, MaskSumAnswer), answer
    return answer


def refused(helper: Helper, request: MaskSumRequest) -> MaskSumRefusal:
    refusal = ask(helper, request)
    assert isinstance(refusal, MaskSumRefusal)
    return refusal


def test_masked_updates_less_the_helper_s_sum_are_the_sum_of_the_updates(helper: Helper) -> None:
    """All of it: floats, fixed point, masks, seeds, the helper's sum, and floats again."""
    terms = terms_of(helper.card.key)
    request = ordinary(terms, DEVICES)
    draw = np.random.default_rng(37)
    updates = draw.uniform(-1, 1, (len(DEVICES), SIZE)).astype(np.float32)
    bits = bits_for(len(DEVICES))
    plain = [to_words(update, 1.0, bits, draw.random(SIZE)) for update in updates]
    total = np.zeros(SIZE, np.uint32)
    for words, seed in zip(plain, seeds_of(request), strict=True):
        masked = words.copy()
        add_mask(masked, seed)
        assert not (masked == words).all()
        total += masked
    total -= np.frombuffer(answered(helper, request).words, "<u4")
    assert total.tolist() == sum(words.astype(np.uint64) for words in plain).tolist()  # type: ignore[union-attr]
    step = 2.0 / (2**bits - 1)
    error = np.abs(sum_of(total, len(DEVICES), 1.0, bits) - updates.sum(0))
    assert error.max() <= step * len(DEVICES)


def test_the_same_set_is_answered_again_with_the_same_bytes(helper: Helper, database: Path) -> None:
    request = ordinary(terms_of(helper.card.key), DEVICES[:4])
    first = answered(helper, request)
    again = msgspec.structs.replace(request, reports=request.reports[::-1])
    assert answered(helper, again) == first
    assert answered(Helper(database, BOUNDS), request) == first, "after a restart"
    assert first.words == exact_sum(seeds_of(request), SIZE).tobytes()
    with closing(HelperStore(database)) as store:
        assert store.counts()[:4] == (len(DEVICES), 1, 1, 4)


def test_a_device_may_be_in_a_sum_twice_with_different_models(helper: Helper) -> None:
    """Asynchronous rounds: a quick device reports twice before the buffer is full."""
    terms = terms_of(helper.card.key)
    reports = [device.report(terms, 1) for device in DEVICES[:3]]
    answered(helper, request_of(terms, [*reports, DEVICES[0].report(terms, 2)]))


def task_with(lr: float) -> Task:
    """A device's task, with this learning rate."""
    return Task(
        task="run-2-1",
        round=2,
        bundle=BUNDLE,
        vectors=(VectorReference("model", model(2), 16, "float32"),),
        parts={"update": "masked"},
        hyper={"lr": lr},
        epochs=1,
        batch_size=20,
        seed=1,
        deadline=60.0,
        clip=1.0,
        secure=SecureTask("helper", MINIMUM, 20, helper="00" * 32),
    )


def test_a_set_of_one_round_and_one_model_is_answered(helper: Helper) -> None:
    terms = terms_of(helper.card.key, one_model=True)
    request = ordinary(terms, DEVICES[:4])
    assert answered(helper, request).words == exact_sum(seeds_of(request), SIZE).tobytes()


class Cheat:
    """What a coordinator asks, after an honest round 1 of the devices 0 to 5."""

    def __init__(self, helper: Helper, database: Path) -> None:
        self.helper, self.database = helper, database
        self.terms = terms_of(helper.card.key)
        self.honest = ordinary(self.terms, DEVICES[:6])
        answered(helper, self.honest)

    def next_round(self) -> MaskSumRequest:
        return ordinary(self.terms, DEVICES[:6], round=2)

    # Sets that were chosen to know one update

    def subset(self) -> MaskSumRequest:
        """All but one, so that the difference is one update."""
        return msgspec.structs.replace(self.honest, reports=self.honest.reports[1:])

    def one_more(self) -> MaskSumRequest:
        reports = (*self.honest.reports, DEVICES[6].report(self.terms, 1))
        return msgspec.structs.replace(self.honest, reports=reports)

    def one_other(self) -> MaskSumRequest:
        reports = (*self.honest.reports[1:], DEVICES[6].report(self.terms, 1))
        return msgspec.structs.replace(self.honest, reports=reports)

    def used_in_a_later_round(self) -> MaskSumRequest:
        new = self.next_round()
        return msgspec.structs.replace(new, reports=(*new.reports[1:], self.honest.reports[0]))

    def masked_again(self) -> MaskSumRequest:
        """The devices were told that their reports were lost, and masked the same updates with new
        seeds. One is left out."""
        draws = [
            device.report(self.terms, 1, seed=bytes([number + 1]) * 32)
            for number, device in enumerate(DEVICES[1:6])
        ]
        return request_of(self.terms, draws)

    def trained_again(self) -> MaskSumRequest:
        """The devices were given the same model again, as other tasks. One is left out."""
        reports = [device.report(self.terms, 1, task=f"{device.name}-b") for device in DEVICES[1:6]]
        return request_of(self.terms, reports)

    def named_twice(self) -> MaskSumRequest:
        new = self.next_round()
        return msgspec.structs.replace(new, reports=(*new.reports, new.reports[0]))

    def one_seed_of_two_devices(self) -> MaskSumRequest:
        """Two devices under the coordinator's thumb."""
        reports = [device.report(self.terms, 2) for device in DEVICES[:4]]
        reports += [device.report(self.terms, 2, seed=bytes(32)) for device in DEVICES[4:6]]
        return request_of(self.terms, reports)

    def a_used_seed_sealed_again(self) -> MaskSumRequest:
        seed = seeds_of(self.honest)[0]
        reports = [device.report(self.terms, 2) for device in DEVICES[1:6]]
        reports.append(DEVICES[6].report(self.terms, 2, seed=seed))
        return request_of(self.terms, reports)

    # Small sets

    def small(self) -> MaskSumRequest:
        return ordinary(self.terms, DEVICES[: MINIMUM - 1], round=2)

    def small_by_what_the_devices_signed(self) -> MaskSumRequest:
        return ordinary(self.terms._replace(minimum=7), DEVICES[:6], round=2)

    def smaller_than_what_the_devices_signed(self) -> MaskSumRequest:
        new = ordinary(self.terms._replace(minimum=7), DEVICES[:6], round=2)
        return msgspec.structs.replace(new, minimum=MINIMUM)

    def small_and_filled_up_with_one_device(self) -> MaskSumRequest:
        reports = [DEVICES[6].report(self.terms, round) for round in range(2, 8)]
        return request_of(self.terms, [*reports, DEVICES[7].report(self.terms, 2)])

    # Devices that are none

    def sybils(self) -> MaskSumRequest:
        sybils = fleet([f"sybil{number}" for number in range(5)])
        return ordinary(self.terms, [DEVICES[0], *sybils], round=2)

    def sybils_under_devices_names(self) -> MaskSumRequest:
        reports = [device.report(self.terms, 2, signer=STRANGER) for device in DEVICES[1:6]]
        return request_of(self.terms, [DEVICES[0].report(self.terms, 2), *reports])

    def revoked(self) -> MaskSumRequest:
        with closing(HelperStore(self.database)) as store:
            assert store.revoke(DEVICES[1].name, 3.0)
        return self.next_round()

    def one_device_signs_for_another(self) -> MaskSumRequest:
        reports = [device.report(self.terms, 2) for device in DEVICES[:5]]
        reports.append(DEVICES[5].report(self.terms, 2, signer=DEVICES[6]))
        return request_of(self.terms, reports)

    # Something else than what the devices signed

    def another_run(self) -> MaskSumRequest:
        return msgspec.structs.replace(self.honest, run="run-2")

    def another_bundle(self) -> MaskSumRequest:
        return msgspec.structs.replace(self.next_round(), bundle="c" * 64)

    def another_size(self) -> MaskSumRequest:
        return msgspec.structs.replace(self.next_round(), size=SIZE - 1)

    def another_round(self) -> MaskSumRequest:
        return self._changed(round=3)

    def another_model(self) -> MaskSumRequest:
        return self._changed(model=model(3))

    def another_task(self) -> MaskSumRequest:
        return self._changed(task="other")

    def another_device_s_seed(self) -> MaskSumRequest:
        new = self.next_round()
        return self._changed(sealed=new.reports[1].sealed)

    def one_bit_of_a_seed(self) -> MaskSumRequest:
        sealed = self.next_round().reports[0].sealed
        return self._changed(sealed=sealed[:-1] + bytes([sealed[-1] ^ 1]))

    def _changed(self, **fields: object) -> MaskSumRequest:
        new = self.next_round()
        first = msgspec.structs.replace(new.reports[0], **fields)
        return msgspec.structs.replace(new, reports=(first, *new.reports[1:]))

    # One device singled out by its task

    def no_learning_rate_for_the_others(self) -> MaskSumRequest:
        """The sum would be the one device's update: the others' tasks had lr = 0."""
        others = self.terms._replace(training=training_digest(task_with(lr=0.0)))
        reports = [device.report(others, 2) for device in DEVICES[1:6]]
        terms = self.terms._replace(training=training_digest(task_with(lr=0.1)))
        return request_of(terms, [DEVICES[0].report(terms, 2), *reports])

    def another_model_for_one(self) -> MaskSumRequest:
        terms = self.terms._replace(one_model=True)
        reports = [device.report(terms, 2) for device in DEVICES[1:6]]
        return request_of(terms, [DEVICES[0].report(terms, 2, start=model(9)), *reports])

    def another_round_of_the_same_model_for_one(self) -> MaskSumRequest:
        terms = self.terms._replace(one_model=True)
        reports = [device.report(terms, 2) for device in DEVICES[1:6]]
        return request_of(terms, [DEVICES[0].report(terms, 3, start=model(2)), *reports])

    def another_model_for_one_and_said_otherwise(self) -> MaskSumRequest:
        return msgspec.structs.replace(self.another_model_for_one(), one_model=False)

    # Keys

    def sealed_for_another_key(self) -> MaskSumRequest:
        """The devices were told a false key of the helper, whose owner the coordinator knows."""
        other = X25519PrivateKey.generate().public_key().public_bytes_raw()
        return ordinary(self.terms._replace(helper=other), DEVICES[:6], round=2)

    def sealed_for_another_key_and_said_otherwise(self) -> MaskSumRequest:
        return msgspec.structs.replace(self.sealed_for_another_key(), helper=self.helper.card.key)

    def signed_and_not_a_seed(self) -> MaskSumRequest:
        """A device under the coordinator's thumb signs bytes that are no sealed seed."""
        false = MaskTerms(
            X25519PrivateKey.generate().public_key().public_bytes_raw(), *self.terms[1:]
        )
        bad = DEVICES[5].report(false, 2)
        update = MaskedUpdate(bad.device, bad.task, bad.round, bad.model)
        signature = DEVICES[5].private.sign(
            signed_seed(about_update(self.terms, update), bad.sealed)
        )
        reports = [device.report(self.terms, 2) for device in DEVICES[:5]]
        reports.append(msgspec.structs.replace(bad, signature=signature))
        return request_of(self.terms, reports)

    # The run's own terms, and this helper's

    def another_bundle_that_devices_signed(self) -> MaskSumRequest:
        return ordinary(self.terms._replace(bundle="c" * 64), DEVICES[:6], round=2)

    def another_size_that_devices_signed(self) -> MaskSumRequest:
        return ordinary(self.terms._replace(size=SIZE + 1), DEVICES[:6], round=2)

    def too_many_elements(self) -> MaskSumRequest:
        size = BOUNDS.most_elements + 1
        return ordinary(self.terms._replace(size=size), DEVICES[:6], round=2)

    def too_many_devices(self) -> MaskSumRequest:
        reports = [DEVICES[0].report(self.terms, round) for round in range(BOUNDS.most_devices + 1)]
        return request_of(self.terms, reports)


Ask = Callable[[Cheat], MaskSumRequest]
CHEATS: list[tuple[Ask, RefusalName, tuple[str, ...]]] = [
    (Cheat.subset, RefusalName.SEED_USED, ("d1", "d2", "d3", "d4", "d5")),
    (Cheat.one_more, RefusalName.SEED_USED, ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.one_other, RefusalName.SEED_USED, ("d1", "d2", "d3", "d4", "d5")),
    (Cheat.used_in_a_later_round, RefusalName.SEED_USED, ("d0",)),
    (Cheat.masked_again, RefusalName.DEVICE_TWICE, ("d1", "d2", "d3", "d4", "d5")),
    (Cheat.trained_again, RefusalName.DEVICE_TWICE, ("d1", "d2", "d3", "d4", "d5")),
    (Cheat.named_twice, RefusalName.DEVICE_TWICE, ("d0",)),
    (Cheat.one_seed_of_two_devices, RefusalName.SEED_USED, ("d4", "d5")),
    (Cheat.a_used_seed_sealed_again, RefusalName.SEED_USED, ("d6",)),
    (Cheat.small, RefusalName.TOO_FEW_DEVICES, ()),
    (Cheat.small_by_what_the_devices_signed, RefusalName.TOO_FEW_DEVICES, ()),
    (Cheat.smaller_than_what_the_devices_signed, RefusalName.BAD_SIGNATURE,
     ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.small_and_filled_up_with_one_device, RefusalName.TOO_FEW_DEVICES, ()),
    (Cheat.sybils, RefusalName.UNKNOWN_DEVICE,
     ("sybil0", "sybil1", "sybil2", "sybil3", "sybil4")),
    (Cheat.sybils_under_devices_names, RefusalName.BAD_SIGNATURE, ("d1", "d2", "d3", "d4", "d5")),
    (Cheat.revoked, RefusalName.UNKNOWN_DEVICE, ("d1",)),
    (Cheat.one_device_signs_for_another, RefusalName.BAD_SIGNATURE, ("d5",)),
    (Cheat.another_run, RefusalName.BAD_SIGNATURE, ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.another_bundle, RefusalName.BAD_SIGNATURE, ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.another_size, RefusalName.BAD_SIGNATURE, ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.another_round, RefusalName.BAD_SIGNATURE, ("d0",)),
    (Cheat.another_model, RefusalName.BAD_SIGNATURE, ("d0",)),
    (Cheat.another_task, RefusalName.BAD_SIGNATURE, ("d0",)),
    (Cheat.another_device_s_seed, RefusalName.BAD_SIGNATURE, ("d0",)),
    (Cheat.one_bit_of_a_seed, RefusalName.BAD_SIGNATURE, ("d0",)),
    (Cheat.no_learning_rate_for_the_others, RefusalName.BAD_SIGNATURE,
     ("d1", "d2", "d3", "d4", "d5")),
    (Cheat.another_model_for_one, RefusalName.MODELS_DIFFER, ()),
    (Cheat.another_round_of_the_same_model_for_one, RefusalName.MODELS_DIFFER, ()),
    (Cheat.another_model_for_one_and_said_otherwise, RefusalName.BAD_SIGNATURE,
     ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.sealed_for_another_key, RefusalName.WRONG_HELPER, ()),
    (Cheat.sealed_for_another_key_and_said_otherwise, RefusalName.BAD_SIGNATURE,
     ("d0", "d1", "d2", "d3", "d4", "d5")),
    (Cheat.signed_and_not_a_seed, RefusalName.NOT_OPENED, ("d5",)),
    (Cheat.another_bundle_that_devices_signed, RefusalName.RUN_CHANGED, ()),
    (Cheat.another_size_that_devices_signed, RefusalName.RUN_CHANGED, ()),
    (Cheat.too_many_elements, RefusalName.TOO_LARGE, ()),
    (Cheat.too_many_devices, RefusalName.TOO_LARGE, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cheat", "name", "devices"), CHEATS, ids=[cheat.__name__ for cheat, _, _ in CHEATS]
)
def test_each_cheat_is_refused_by_name(
    helper: Helper, database: Path, cheat: Ask, name: RefusalName, devices: tuple[str, ...]
) -> None:
    table = Cheat(helper, database)
    with closing(HelperStore(database)) as store:
        before = store.counts()[1:]
    refusal = refused(helper, cheat(table))
    assert (refusal.name, refusal.devices) == (name, devices), refusal.text
    with closing(HelperStore(database)) as store:
        assert store.counts()[1:] == before, "a refusal uses no seed"


def test_every_cheat_of_the_class_is_in_the_table() -> None:
    named = {name for name in vars(Cheat) if not name.startswith("_") and name != "next_round"}
    assert named == {cheat.__name__ for cheat, _, _ in CHEATS}
    assert {name for _, name, _ in CHEATS} == {*RefusalName} - {
        RefusalName.BAD_REQUEST, RefusalName.BUSY
    }  # fmt: skip


def test_the_honest_rest_of_a_refused_set_is_answered(helper: Helper, database: Path) -> None:
    """One device that sent rubbish costs its own update alone."""
    table = Cheat(helper, database)
    bad = table.signed_and_not_a_seed()
    faulty = refused(helper, bad).devices
    rest = tuple(each for each in bad.reports if each.device not in faulty)
    request = msgspec.structs.replace(bad, reports=rest)
    assert answered(helper, request).words == exact_sum(seeds_of(request), SIZE).tobytes()


def test_a_set_is_answered_again_after_one_of_its_devices_was_revoked(
    helper: Helper, database: Path
) -> None:
    """The coordinator may have lost the answer. Without this the other devices' updates of this
    model would be lost with it: no seed is in two sets, and no device in two of one model."""
    request = ordinary(terms_of(helper.card.key), DEVICES)
    before = answered(helper, request)
    with closing(HelperStore(database)) as store:
        assert store.revoke(DEVICES[0].name, 3.0)
    assert answered(helper, request) == before
    reports = (msgspec.structs.replace(request.reports[0], signature=bytes(64)),)
    forged = msgspec.structs.replace(request, reports=reports + request.reports[1:])
    assert refused(helper, forged).name is RefusalName.BAD_SIGNATURE
    later = ordinary(terms_of(helper.card.key), DEVICES, 2)
    assert refused(helper, later).devices == (DEVICES[0].name,)


def test_two_helpers_of_one_file_answer_one_of_two_sets(helper: Helper, database: Path) -> None:
    """Two processes were started by mistake, and are asked at the same time."""
    terms, other = terms_of(helper.card.key), Helper(database, BOUNDS)
    with ThreadPoolExecutor(2) as pool:
        for round in range(1, 9):
            whole = ordinary(terms, DEVICES, round)
            rest = msgspec.structs.replace(whole, reports=whole.reports[1:])
            asked = [pool.submit(ask, helper, whole), pool.submit(ask, other, rest)]
            kinds = [type(each.result()) for each in asked]
            assert sorted(kinds, key=str) == [MaskSumAnswer, MaskSumRefusal]


def test_bytes_that_are_no_request(helper: Helper) -> None:
    terms = terms_of(helper.card.key)
    whole = write_message(ordinary(terms, DEVICES[:3]))
    for body in (b"", whole[:-1], b"\xc1", whole + b"\x00", b"\x91" * 100_000):
        refusal = helper.answer(body)
        assert isinstance(refusal, MaskSumRefusal)
        assert refusal.name is RefusalName.BAD_REQUEST


def test_a_helper_that_cannot_write_says_nothing(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ordinary(terms_of(helper.card.key), DEVICES)
    with monkeypatch.context() as patched:
        full = StoreUnavailableError(Code.BUSY, "the disk is full")
        patched.setattr(HelperStore, "record", _raises(full))
        assert refused(helper, request).name is RefusalName.BUSY
    answered(helper, request)


def _raises(error: Exception) -> Callable[..., None]:
    def raising(*arguments: object) -> None:
        raise error

    return raising
