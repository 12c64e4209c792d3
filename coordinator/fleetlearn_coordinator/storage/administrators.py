"""Who may operate a coordinator over the network: administrators, apart from devices. In the
database of identities.

An administrator has a token of 256 random bits, kept as its SHA-256 alone, and a role: one who
*views* may look, one who *operates* may also change. There is none by default. Every change is a
row of the audit log.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from secrets import token_urlsafe
from typing import Literal, NamedTuple, TypeAlias

from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.identities import COMMAND, Identities, hash_of

Role: TypeAlias = Literal["view", "operate"]
_TABLE = (
    "CREATE TABLE IF NOT EXISTS administrators(name TEXT PRIMARY KEY, hash TEXT NOT NULL, role "
    "TEXT NOT NULL, added REAL NOT NULL, until REAL)"
)


_SESSIONS = (
    "CREATE TABLE IF NOT EXISTS sessions(hash TEXT PRIMARY KEY, name TEXT NOT NULL, administrator "
    "TEXT NOT NULL, until REAL NOT NULL)"
)
SESSION = 12 * 3600.0
"""Seconds for which somebody who signed in on the page is known there."""


class Administrator(NamedTuple):
    """Somebody who may operate the coordinator, or look at it."""

    name: str
    role: Role
    added: float
    """Unix time."""
    until: float | None
    """Unix time after which the token is not valid; None: it does not expire."""


class Administrators(Identities):
    """The database of identities, with its administrators. All calls are synchronous, as those of
    ``Identities``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._db.execute(_TABLE)
        self._db.execute(_SESSIONS)

    def add(self, name: str, role: Role, until: float | None, now: float) -> str:
        """Return the token of a new administrator. It is shown once. Raises StoreError if there is
        one of this name."""
        token = token_urlsafe(32)
        with self._db.transaction():
            if self._db.execute("SELECT 1 FROM administrators WHERE name=?", (name,)).fetchone():
                text = (
                    f"there is an administrator called {name} already: take another name, or "
                    "remove that one"
                )
                raise StoreError(Code.DUPLICATE, text)
            self._db.execute(
                "INSERT INTO administrators VALUES(?, ?, ?, ?, ?)",
                (name, hash_of(token), role, now, until),
            )
            about = {"administrator": name, "role": role, "until": until, "who": COMMAND}
            self._log(now, "administrator added", about)
        return token

    def remove(self, name: str, now: float) -> bool:
        """The administrator's token is not valid any more. Returns whether there was one of this
        name."""
        with self._db.transaction():
            found = (
                self._db.execute("DELETE FROM administrators WHERE name=?", (name,)).rowcount > 0
            )
            if found:
                self._log(now, "administrator removed", {"administrator": name, "who": COMMAND})
        return found

    def administrators(self) -> list[Administrator]:
        """Return all administrators, by name, the expired ones included."""
        rows = self._db.execute("SELECT name, role, added, until FROM administrators ORDER BY name")
        return [Administrator(*row) for row in rows]

    def find_administrator(self, token: str, now: float) -> Administrator | None:
        """Return whose token this is, or None: nobody's, or it has expired. Takes as long for any
        token."""
        wanted, found = hash_of(token), None
        for name, kept, role, added, until in self._db.execute(
            "SELECT name, hash, role, added, until FROM administrators"
        ):
            if hmac.compare_digest(kept, wanted):
                found = Administrator(name, role, added, until)
        return None if found is None or (found.until is not None and now > found.until) else found

    # Sessions of the page. A secret of 256 random bits, kept as its SHA-256, stands for the token.

    def begin_session(self, token: str, now: float) -> tuple[str, Administrator] | None:
        """Return the secret of a new session, and whose it is. None: the token is nobody's, or has
        expired."""
        who = self.find_administrator(token, now)
        if who is None:
            return None
        secret = token_urlsafe(32)
        until = now + SESSION if who.until is None else min(who.until, now + SESSION)
        with self._db.transaction():
            self._db.execute("DELETE FROM sessions WHERE until<?", (now,))
            self._db.execute(
                "INSERT INTO sessions VALUES(?, ?, ?, ?)",
                (hash_of(secret), who.name, hash_of(token), until),
            )
            self._log(now, "signed in", {"who": who.name})
        return secret, who

    def find_session(self, secret: str, now: float) -> Administrator | None:
        """Return whose session this is. None: nobody's, it is over, or the administrator was
        removed."""
        row = self._db.execute(
            "SELECT a.name, a.role, a.added, a.until FROM sessions s JOIN administrators a ON "
            "a.name=s.name AND a.hash=s.administrator WHERE s.hash=? AND s.until>=?",
            (hash_of(secret), now),
        ).fetchone()
        return None if row is None else Administrator(*row)

    def end_session(self, secret: str) -> None:
        """Forget a session. Harmless where there is none."""
        self._db.execute("DELETE FROM sessions WHERE hash=?", (hash_of(secret),))
