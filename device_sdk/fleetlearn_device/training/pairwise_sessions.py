"""Secure aggregation without a helper: sessions in which the device agrees on masks with others.

A session is for one round. Its secrets are in memory alone: where the process dies, the device is a
dropped one for the others, and says nothing more of this round. Each thing is said once; where the
coordinator did not hear it, the same is said again.

The package cryptography is imported with the first session, and not before.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import MODEL, Question, Task
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.pairwise_messages import (
    KEYS,
    KEYS_BYTES,
    SHARES,
    PairwiseAnswer,
    PairwiseQuestion,
    bytes_of,
    hex_of,
    signed_keys,
)
from fleetlearn_protocol.secure.task_terms import pairwise_about
from fleetlearn_protocol.task_names import run_of

from fleetlearn_device.session.abilities import SECURE_NEEDS
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.summed_models import SummedModels
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.train import TrainingError

if TYPE_CHECKING:
    from fleetlearn_protocol.secure.pairwise import PairwiseDevice


class UntrustedError(TrainingError):
    """The device was asked for what would give its update away. It says nothing more in this
    round."""


class LostSessionError(TrainingError):
    """The process that had the session's secrets is gone."""


class _Session:
    """The session of one round."""

    def __init__(self, run: str, round: int, device: PairwiseDevice) -> None:
        self.run, self.round, self.device = run, round, device
        self.name: str | None = None
        """As the coordinator calls it, from phase 2 on."""
        self.said: dict[int, tuple[PairwiseQuestion, PairwiseAnswer]] = {}
        """Phase -> what was asked and answered."""
        self.model: str | None = None
        """SHA-256 of the model whose update was masked."""
        self.over = False
        """Whether the device says nothing more in it."""


@contextmanager
def _refusals(session: _Session) -> Iterator[None]:
    """Say what the session's device refuses in the words of this module."""
    from fleetlearn_protocol.secure.pairwise import SessionRefusedError

    try:
        yield
    except SessionRefusedError as error:
        session.over = True
        raise UntrustedError(f"round {session.round}: {error}") from None


class NeighbourRules(NamedTuple):
    """What the device's owner wants of sessions."""

    roster: Mapping[str, bytes] | None = None
    """The devices that may be neighbours, with their own public keys (Ed25519). None: any."""
    minimum: int | None = None
    """The fewest updates in a sum, the device's own one included. None: any."""


ANY = NeighbourRules()


class PairwiseSessions:
    """The sessions of a device: the last one counts."""

    def __init__(
        self,
        device: str,
        folder: Path,
        owner: NeighbourRules = ANY,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """``folder``: the state directory. ``draw``: n -> n bytes that nobody else knows."""
        self._device, self._folder, self._owner, self._draw = device, folder, owner, draw
        self._session: _Session | None = None
        self._summed: SummedModels | None = None

    @property
    def _models(self) -> SummedModels:
        if self._summed is None:
            self._summed = SummedModels(self._folder)
        return self._summed

    def answer(self, question: Question) -> PairwiseAnswer:
        """Return what the device answers in an exchange. Raises UntrustedError, LostSessionError,
        UnsupportedError, StateError."""
        asked: PairwiseQuestion = content_of(question)
        run, phase, session = run_of(question.task), question.phase, self._session
        begins = session is None or (session.run, session.round) != (run, asked.round)
        if begins and phase == KEYS:
            session = self._session = self._begin(run, asked.round)
        else:
            session = self._session_of(run, asked.round)
        if phase not in session.said:
            with _refusals(session):
                answer = self._answer(session, phase, asked)
            session.said[phase] = asked, answer
        before, answer = session.said[phase]
        if before != asked:
            self._refuse(session, f"phase {phase} was asked for twice, and not the same")
        return answer

    def _answer(self, session: _Session, phase: int, asked: PairwiseQuestion) -> PairwiseAnswer:
        if phase == KEYS:
            return self._keys(session)
        return self._shares(session, asked) if phase == SHARES else self._unmasking(session, asked)

    def check(self, task: Task) -> None:
        """Raise what ``masked`` would raise, before the task is trained."""
        self._of_task(task)

    def masked(self, task: Task, words: Words) -> Words:
        """Return a task's update with its masks: uint32, (P + 1,). ``words``: the same without,
        which stay as they are. Each session masks once. Raises as ``answer`` does."""
        session = self._of_task(task)
        assert task.secure is not None
        with _refusals(session):
            about = pairwise_about(task, len(words))
            found = session.device.masked(words, bytes_of(task.secure.shares), about)
        session.model = task.vector(MODEL).sha256
        return found

    # One step each

    def _begin(self, run: str, round: int) -> _Session:
        try:
            from fleetlearn_protocol.secure.pairwise import PairwiseDevice
        except ImportError as error:
            raise UnsupportedError(f"{SECURE_NEEDS} ({error})") from None
        return _Session(run, round, PairwiseDevice(self._device, self._draw))

    def _keys(self, session: _Session) -> PairwiseAnswer:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        keys = b"".join(session.device.keys())
        own = Ed25519PrivateKey.from_private_bytes(device_key(self._folder))
        signature = own.sign(signed_keys(session.run, session.round, self._device, keys))
        return PairwiseAnswer((keys + signature).hex())

    def _shares(self, session: _Session, asked: PairwiseQuestion) -> PairwiseAnswer:
        from fleetlearn_protocol.secure.pairwise import Keys

        if asked.session is None:
            self._refuse(session, "no session was named")
        neighbours = {}
        for name, shown in asked.neighbours.items():
            content = bytes.fromhex(shown)
            keys, half = content[:KEYS_BYTES], KEYS_BYTES // 2
            self._check_neighbour(session, name, keys, content[KEYS_BYTES:])
            neighbours[name] = Keys(keys[:half], keys[half:])
        own = self._owner.minimum
        if own is not None and asked.threshold + 1 < own:
            self._refuse(
                session,
                f"{asked.threshold} other devices are to unmask the sum, so that it could be of "
                f"{asked.threshold + 1} updates, and this device's owner wants at least {own} "
                "(secure.minimum)",
            )
        sealed = session.device.shares(bytes.fromhex(asked.session), neighbours, asked.threshold)
        session.name = asked.session
        return PairwiseAnswer(shares=hex_of(sealed), commitment=session.device.commitment().hex())

    def _check_neighbour(self, session: _Session, name: str, keys: bytes, signature: bytes) -> None:
        """Refuse keys that the owner's list of devices does not have signed."""
        if self._owner.roster is None:
            return
        from fleetlearn_protocol.secure.signatures import is_signed

        public = self._owner.roster.get(name)
        if public is None:
            self._refuse(session, f"{name} is not in this device's list of devices (secure.roster)")
        if not is_signed(public, signature, signed_keys(session.run, session.round, name, keys)):
            self._refuse(
                session,
                f"the keys that are said to be {name}'s are not signed by the key that this "
                "device's list has for it (secure.roster)",
            )

    def _unmasking(self, session: _Session, asked: PairwiseQuestion) -> PairwiseAnswer:
        if session.model is None:
            self._refuse(session, "shares were asked for before the device masked its update")
        told = session.device.unmasking(
            bytes.fromhex(asked.session or ""), asked.survivors, asked.dropped
        )
        self._models.add(session.run, session.model)
        return PairwiseAnswer(seeds=hex_of(told.seeds), masking_keys=hex_of(told.keys))

    # Which session it is

    def _of_task(self, task: Task) -> _Session:
        assert task.secure is not None
        session = self._session_of(run_of(task.task), task.round)
        if task.secure.session is None or task.secure.session != session.name:
            self._refuse(session, "the task is of another session than the device's shares")
        if session.model is not None:
            self._refuse(session, "the device has masked an update in this session already")
        if self._models.has(session.run, task.vector(MODEL).sha256):
            self._refuse(
                session,
                "the device has let a sum of updates of this very model be unmasked: of two such "
                "sums the difference could be one device's update",
            )
        return session

    def _session_of(self, run: str, round: int) -> _Session:
        session = self._session
        if session is None or (session.run, session.round) != (run, round):
            has = "none" if session is None else f"one of round {session.round}"
            raise LostSessionError(
                f"the device has no session of round {round} (it has {has}): the process that sent "
                "its keys has ended, or they were never asked for"
            )
        if session.over:
            raise UntrustedError(
                f"the device says nothing more in round {round}: it refused before"
            )
        return session

    def _refuse(self, session: _Session, why: str) -> NoReturn:
        session.over = True
        raise UntrustedError(f"round {session.round}: {why}")
