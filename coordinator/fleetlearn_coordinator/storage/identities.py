"""Who may speak for which device: tokens to enrol with, devices' credentials, and what happened to
them. In SQLite.

A *credential* is 256 random bits that a device makes for itself. A *token* is what an operator
gives to a person who sets devices up: with it a device's credential becomes known here. Only the
SHA-256 of either is kept. Every change of who is enrolled is a row of the audit log, in the same
transaction. A device that shows a *certificate* in place of a credential is enrolled when it first
connects. Each row has the hash of the one before, so that a row that is changed or removed
afterwards shows (``broken_at``). Whoever can write to the database can also replace the whole log:
to find that, keep the newest hash elsewhere.

The coordinator and an operator's commands may have the database open at the same time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from fleetlearn_coordinator.storage.database import Tables, open_shared
from fleetlearn_coordinator.storage.wal_check import check_wal

DATABASE = "identities.sqlite3"
BUSY_TIMEOUT = 1.0
"""Seconds to wait for another process's transaction."""
_BY = "certificate of "
"""What a device with a certificate has, before its name, in place of a credential's hash."""
FIRST = "0" * 64
"""What the first row of the audit log has as the hash before."""
RUN = "run:"
"""Begins the tag of a device that may serve only the run named after it. No device can state such a
tag itself: a colon is in none of theirs."""
COMMAND = "command"
"""Who did something, in the audit log: whoever may write to the folder, by a command."""
_TABLES = Tables(
    1,
    (
        (
            "CREATE TABLE tokens(hash TEXT PRIMARY KEY, uses INTEGER NOT NULL, until REAL NOT "
            "NULL, tags TEXT NOT NULL)"
        ),
        "CREATE TABLE devices(device TEXT PRIMARY KEY, hash TEXT NOT NULL UNIQUE, next TEXT "
        "UNIQUE, tags TEXT NOT NULL, enrolled REAL NOT NULL)",
        "CREATE TABLE audit(number INTEGER PRIMARY KEY, at REAL NOT NULL, what TEXT NOT NULL, "
        "about TEXT NOT NULL, hash TEXT NOT NULL)",
    ),
    # When a device was last revoked: certificates that were valid before are not any more.
    ("CREATE TABLE IF NOT EXISTS revoked(device TEXT PRIMARY KEY, at REAL NOT NULL)",),
)


class Known(NamedTuple):
    """A device whose credential or certificate is known."""

    device: str
    tags: tuple[str, ...]
    """What its operator calls it by."""
    enrolled: float
    """Unix time. Another enrolment under the same name has another."""


class EnrolmentError(Exception):
    """The device cannot have this credential. The text says why, to people."""


class AuditEvent(NamedTuple):
    """A row of the audit log."""

    number: int
    """From 1 on."""
    at: float
    """Unix time."""
    what: str
    about: dict[str, Any]
    hash: str
    """SHA-256, in hexadecimal, of the hash before and of this row's other fields."""


def open_identities(folder: Path) -> Identities:
    """Open the database. Raises StoreError where it has lost what was committed, too. Call it while
    this process does not have the database open, as ``check_wal``."""
    check_wal(folder / DATABASE)
    return Identities(folder)


class Identities:
    """The database. All calls are synchronous and take well below a millisecond. Raises StoreError
    when it is made by a newer version, StoreUnavailableError where the disk is full or the file is
    no database."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's database, which is made if there is none, readable by its owner
        alone."""
        self.path = folder / DATABASE
        self._db = open_shared(self.path, _TABLES, timeout=BUSY_TIMEOUT, mode=0o600)
        self._seen = self._data_version()

    def close(self) -> None:
        self._db.close()

    def copy_to(self, folder: Path) -> None:
        """Write a copy of the database, as it is now, into another folder. Raises StoreError
        (damaged), OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._db.copy_to(folder / DATABASE)

    # Tokens and enrolment

    def make_token(
        self, uses: int, until: float, tags: Sequence[str], now: float, who: str = COMMAND
    ) -> str:
        """Return a new token for ``uses`` devices, which get these tags. It is good up to the Unix
        time ``until``, and shown once: only its hash is kept. ``who`` asks for it: an
        administrator's name, for the audit log."""
        # in hexadecimal: on a command line, what begins with - would be an option
        token = token_hex(32)
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO tokens VALUES(?, ?, ?, ?)",
                (hash_of(token), uses, until, " ".join(tags)),
            )
            about = {
                "token": _short(token),
                "uses": uses,
                "until": until,
                "tags": [*tags],
                "who": who,
            }
            self._log(now, "token", about)
        return token

    def enrol(self, device: str, secret: str, token: str, now: float) -> Known:
        """Make the credential of a device known. Raises EnrolmentError, and changes nothing."""
        with self._db.transaction():
            row = self._db.execute(
                "SELECT uses, until, tags FROM tokens WHERE hash=?", (hash_of(token),)
            ).fetchone()
            if row is None:
                raise EnrolmentError("this token is not known here")
            uses, until, tags = row
            if now > until:
                raise EnrolmentError("this token has expired: ask for a new one")
            if uses < 1:
                raise EnrolmentError("this token is used up: ask for a new one")
            if self._db.execute("SELECT 1 FROM devices WHERE device=?", (device,)).fetchone():
                raise EnrolmentError(
                    f"a device called {device} is enrolled already, with another credential: take "
                    "another name, or let an operator revoke that one"
                )
            self._db.execute("UPDATE tokens SET uses=uses-1 WHERE hash=?", (hash_of(token),))
            self._db.execute(
                "INSERT INTO devices VALUES(?, ?, NULL, ?, ?)", (device, hash_of(secret), tags, now)
            )
            self._log(now, "enrolled", {"device": device, "token": _short(token)})
        return Known(device, tuple(tags.split()), now)

    # Credentials

    def find(
        self, secret: str, now: float, count: Callable[[str], None] = lambda device: None
    ) -> Known | None:
        """Return the device whose credential this is, or None. If it is the one that the device
        changes to, the one before is not valid any more. ``count`` is called with the device's name
        before anything is written, which takes milliseconds and a row of the audit log; it may
        raise."""
        found = hash_of(secret)
        row = self._db.execute(
            "SELECT device, tags, enrolled, next=?1 FROM devices WHERE hash=?1 OR next=?1", (found,)
        ).fetchone()
        if row is None:
            return None
        device, tags, enrolled, changes = row
        count(device)
        if changes:
            with self._db.transaction():
                self._db.execute(
                    "UPDATE devices SET hash=next, next=NULL WHERE device=? AND next=?",
                    (device, found),
                )
                self._log(now, "rotated", {"device": device})
        return Known(device, tuple(tags.split()), enrolled)

    def announce_next(self, device: str, secret: str) -> None:
        """The device will change to this credential. Both are valid until the new one is used.
        Raises EnrolmentError if it is another device's."""
        if self._db.execute(
            "SELECT 1 FROM devices WHERE device=? AND next=?", (device, hash_of(secret))
        ).fetchone():
            return  # it says so at each connection, until it is used
        with self._db.transaction():
            others = "SELECT 1 FROM devices WHERE (hash=?1 OR next=?1) AND device<>?2"
            if self._db.execute(others, (hash_of(secret), device)).fetchone():
                raise EnrolmentError(
                    f"the credential that {device} would change to is another device's"
                )
            self._db.execute("UPDATE devices SET next=? WHERE device=?", (hash_of(secret), device))

    def certified(self, device: str, begin: float, now: float) -> Known:
        """Return the device that showed a certificate, valid from ``begin`` on, and make it known
        if it was not. Raises EnrolmentError where it was revoked since, or the name is of a device
        with a credential."""
        known = self._certified(device, begin)
        if known is None:
            with self._db.transaction():
                # another process may have enrolled or revoked it just now
                known = self._certified(device, begin)
                if known is None:
                    self._db.execute(
                        "INSERT INTO devices VALUES(?, ?, NULL, '', ?)", (device, _BY + device, now)
                    )
                    self._log(now, "enrolled", {"device": device, "certificate": begin})
                    known = Known(device, (), now)
        return known

    def _certified(self, device: str, begin: float) -> Known | None:
        revoked = self._db.execute("SELECT at FROM revoked WHERE device=?", (device,)).fetchone()
        if revoked is not None and begin <= revoked[0]:
            raise EnrolmentError(
                f"the certificate of {device} was revoked; a new one would let it in again"
            )
        row = self._db.execute(
            "SELECT hash, enrolled FROM devices WHERE device=?", (device,)
        ).fetchone()
        if row is not None and row[0] != _BY + device:
            raise EnrolmentError(
                f"a device called {device} is enrolled already, with a credential: certify this "
                "one under another name, or let an operator revoke that one"
            )
        return None if row is None else Known(device, (), row[1])

    def revoke(
        self, device: str, now: float, *, certified: bool = False, who: str = COMMAND
    ) -> bool:
        """The device's credential is not valid any more, nor are its certificates. Returns whether
        it was enrolled; if not, nothing changes unless it is ``certified``: it may have a
        certificate and not have connected yet. ``who``: as for ``make_token``."""
        with self._db.transaction():
            found = self._db.execute("DELETE FROM devices WHERE device=?", (device,)).rowcount > 0
            if found or certified:
                self._db.execute("INSERT OR REPLACE INTO revoked VALUES(?, ?)", (device, now))
                self._log(now, "revoked", {"device": device, "who": who})
        return found

    def changed(self) -> bool:
        """Return whether another process has changed something since the last call."""
        before, self._seen = self._seen, self._data_version()
        return before != self._seen

    def enrolled(self) -> dict[str, float]:
        """Return the devices that are enrolled, and since when (``Known.enrolled``). One query for
        each of 20,000 devices would take thirty times as long."""
        return dict(self._db.execute("SELECT device, enrolled FROM devices"))

    def devices(self, only: Collection[str] | None = None) -> list[Known]:
        """Return the devices that are enrolled, by name. ``only``: of these names, a thousand at
        most; None: all."""
        which = "" if only is None else f"WHERE device IN ({', '.join('?' * len(only))})"
        rows = self._db.execute(
            f"SELECT device, tags, enrolled FROM devices {which} ORDER BY device", (*(only or ()),)
        )
        return [Known(device, tuple(tags.split()), enrolled) for device, tags, enrolled in rows]

    def names(self, prefix: str, most: int) -> list[str]:
        """Return names of enrolled devices that begin so, the first ``most`` by the alphabet."""
        rows = self._db.execute(
            "SELECT device FROM devices WHERE device>=?1 AND substr(device, 1, length(?1))=?1 "
            "ORDER BY device LIMIT ?2",
            (prefix, most),
        )
        return [device for (device,) in rows]

    def count(self) -> int:
        """Return how many devices are enrolled."""
        (found,) = self._db.execute("SELECT COUNT(*) FROM devices").fetchone()
        return int(found)

    def device_tags(self) -> dict[str, str]:
        """Return device -> its tags, with spaces between them, of each that is enrolled."""
        return dict(self._db.execute("SELECT device, tags FROM devices"))

    def revoked(self) -> dict[str, float]:
        """Return device -> when it was last revoked, in Unix time. It may be enrolled again."""
        return dict(self._db.execute("SELECT device, at FROM revoked"))

    def _data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # The audit log

    def log(self, now: float, what: str, about: dict[str, Any]) -> None:
        """Add a row to the audit log."""
        with self._db.transaction():
            self._log(now, what, about)

    def log_once(self, at: float, what: str, about: dict[str, Any]) -> None:
        """Add a row to the audit log unless it is there: who wrote it may have died before it could
        note that."""
        row = (at, what, json.dumps(about, sort_keys=True))
        with self._db.transaction():
            if not self._db.execute(
                "SELECT 1 FROM audit WHERE at=? AND what=? AND about=?", row
            ).fetchone():
                self._log(at, what, about)

    def _log(self, now: float, what: str, about: dict[str, Any]) -> None:
        last = self._db.execute(
            "SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1"
        ).fetchone()
        number, before = (1, FIRST) if last is None else (last[0] + 1, last[1])
        text = json.dumps(about, sort_keys=True)
        self._db.execute(
            "INSERT INTO audit VALUES(?, ?, ?, ?, ?)",
            (number, now, what, text, _chain(before, number, now, what, text)),
        )

    def events(self, end: int | None = None) -> list[AuditEvent]:
        """Return the audit log, the oldest row first, up to the row before ``end``. A row that was
        changed may be no ``AuditEvent`` any more."""
        rows = self._db.execute(
            "SELECT number, at, what, about, hash FROM audit WHERE ?1 IS NULL OR number<?1 ORDER "
            "BY number",
            (end,),
        )
        return [
            AuditEvent(number, at, what, json.loads(about), hash)
            for number, at, what, about, hash in rows
        ]

    def last_events(self, most: int) -> list[AuditEvent]:
        """Return the newest rows of the audit log, at most this many, the oldest of them first.
        Whether one was changed is not checked."""
        rows = self._db.execute(
            "SELECT number, at, what, about, hash FROM audit ORDER BY number DESC LIMIT ?", (most,)
        )
        found = [
            AuditEvent(number, at, what, json.loads(about), hash)
            for number, at, what, about, hash in rows
        ]
        return found[::-1]

    def broken_at(self) -> int | None:
        """Return the number of the first row of the audit log that was changed, or that follows on
        a removed one, or None if there is none. Rows that were removed at the end do not show."""
        before = FIRST
        rows = self._db.execute("SELECT number, at, what, about, hash FROM audit ORDER BY number")
        for expected, (number, at, what, about, hash) in enumerate(rows, start=1):
            try:
                intact = number == expected and hash == _chain(before, number, at, what, about)
            except TypeError:  # a field is bytes now
                intact = False
            if not intact:
                return int(number)
            before = hash
        return None


def first_broken(events: Iterable[AuditEvent]) -> int | None:
    """Return the number of the first of these rows, which follow each other, that was changed or
    whose predecessor was removed. None: there is none. Of the first row only number 1 can be
    checked, since a hash covers the row before."""
    before: AuditEvent | None = None
    for event in events:
        number, hash = (0, FIRST) if before is None else (before.number, before.hash)
        if before is not None or event.number == 1:
            text = json.dumps(event.about, sort_keys=True)
            expected = _chain(hash, event.number, event.at, event.what, text)
            if event.number != number + 1 or event.hash != expected:
                return event.number
        before = event
    return None


class SecretHash(str):
    """What ``hash_of`` returns. It may take the place of the secret itself: a gateway on another
    machine says no secrets."""

    __slots__ = ()


def hash_of(secret: str) -> SecretHash:
    """Return what is kept of a token or credential: its SHA-256 in hexadecimal."""
    if isinstance(secret, SecretHash):
        return secret
    return SecretHash(hashlib.sha256(secret.encode()).hexdigest())


def _short(token: str) -> str:
    """Return what tells a token from others in the log, and is of no use to anybody."""
    return hash_of(token)[:12]


def _chain(before: str, number: int, at: float, what: str, about: str) -> str:
    return hashlib.sha256(json.dumps([before, number, at, what, about]).encode()).hexdigest()
