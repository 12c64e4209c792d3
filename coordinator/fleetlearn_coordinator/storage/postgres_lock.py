"""The lock of a run in PostgreSQL: one coordinator at a time, wherever coordinators run.

The lock is an advisory lock of a session. A process that dies loses its session at once. One that
is paused or cut off gives no sign of life: the server ends its session after SILENCE seconds, and
another coordinator may take the run over. What the first one does when it wakes up must not count,
so two things are asked before anything is changed:

* Rows: who takes the run over raises its *epoch*, and each batch compares that in its transaction
  (postgres_ledger.py).
* Bytes: ``PostgresLock.check`` raises once LEASE seconds have passed since the last sign of life
  was sent, by this process's own clock. The server waits longer than that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fleetlearn_protocol.errors import Code, FleetError, in_words

from fleetlearn_coordinator.storage.errors import StoreAwayError, StoreError
from fleetlearn_coordinator.storage.postgres_database import PostgresDatabase, PostgresRun

SILENCE = 10.0
"""Seconds without a sign of life after which the server ends the session that has the lock."""
LEASE = 8.0
"""Seconds after which a process that has sent none takes the lock for lost."""
PULSE = 0.5
"""Seconds between signs of life."""
PATIENCE = 0.5
"""Seconds to wait for the lock: the server may not have noticed yet that a process died."""
ANSWER = 5.0
"""Seconds to wait for the server's answer to a sign of life."""
PLACE = (
    "CREATE TABLE IF NOT EXISTS owner(one BOOLEAN PRIMARY KEY CHECK (one), epoch BIGINT NOT NULL, "
    "tables BIGINT NOT NULL, evaluation TEXT, roll_back TEXT)",
    "INSERT INTO owner VALUES(true, 0, 0, NULL, NULL) ON CONFLICT DO NOTHING",
    "CREATE TABLE IF NOT EXISTS held_out(version BIGINT PRIMARY KEY, result TEXT NOT NULL)",
)
"""What a schema has beside the ledger's tables. ``epoch``: how often a coordinator took the run.
``tables``: the version of the ledger's tables; 0: there are none yet. The other two are requests.
Each statement changes nothing where it was carried out before."""


class PostgresLock:
    """The lock, held from the moment that this is made until ``release``. ``check`` may be called
    in any thread."""

    def __init__(self, run: PostgresRun) -> None:
        """Take the lock, and make the run's schema if it does not exist. Raises StoreError (busy),
        StoreUnavailableError."""
        self.run = run
        self.beaten: Callable[[], object] | None = None
        """Called after each sign of life that was answered, in a thread of its own. May raise
        OSError."""
        self.requests: tuple[str | None, str | None] = (None, None)
        """What people asked for when the last sign of life was answered: an evaluation, a roll
        back."""
        self.db = PostgresDatabase(run, application="fleetlearn lock", answer=ANSWER)
        try:
            self.db.set("idle_session_timeout", f"{SILENCE:.0f}s")
            self._take()
            self._make_place()
            # A process that was paused within a batch still holds its rows.
            self.db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                "current_database() AND usename = current_user AND application_name = ?",
                (run.schema,),
            )
            raised = self.db.execute("UPDATE owner SET epoch = epoch + 1 RETURNING epoch")
            self.epoch = int(raised.fetchone()[0])
            self._lost = ""
            self._beat()
        except BaseException:
            self.db.close()
            raise
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._live, name="run-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise StoreAwayError where another coordinator may have the run by now."""
        lost = self._lost
        if not lost and time.monotonic() - self._sent > LEASE:
            lost = f"this process gave no sign of life for more than {LEASE:.0f} s"
        if lost:
            self._lost = lost
            raise StoreAwayError(Code.BUSY, lost_text(self.run, lost))

    def release(self) -> None:
        """Let another coordinator have the run."""
        self._end.set()
        self._thread.join()
        try:
            if not self._lost:
                self.db.execute("SELECT pg_advisory_unlock(?)", (self.run.lock_key,)).fetchone()
        except FleetError:
            pass  # the server ends the session, or has
        finally:
            self.db.close()

    def _take(self) -> None:
        until = time.monotonic() + PATIENCE
        while not self.db.execute(
            "SELECT pg_try_advisory_lock(?)", (self.run.lock_key,)
        ).fetchone()[0]:
            if time.monotonic() > until:
                text = f"{self.run.where} is in use by another coordinator; stop that one first"
                raise StoreError(Code.BUSY, text)
            time.sleep(PULSE / 10)

    def _make_place(self) -> None:
        if not has_schema(self.db):
            self.db.execute(f"CREATE SCHEMA {self.run.quoted}")
        for statement in PLACE:
            self.db.execute(statement)

    def _beat(self) -> None:
        sent = time.monotonic()
        row = self.db.execute("SELECT epoch, evaluation, roll_back FROM owner").fetchone()
        if row[0] != self.epoch:
            raise StoreAwayError(Code.BUSY, "another coordinator took the run over")
        self.requests = row[1], row[2]
        self._sent = sent

    def _live(self) -> None:
        while not self._end.wait(PULSE):
            try:
                self._beat()
                beaten = self.beaten
                if beaten is not None:
                    beaten()
            except (FleetError, OSError) as error:
                self._lost = in_words(error)
                return


def lost_text(run: PostgresRun, why: str) -> str:
    """Return what to say where the lock is lost."""
    return (
        f"{run.where}: the lock of the run is lost, and another coordinator may have it ({why}). "
        "This one stops; start it again, and it goes on or is told that another runs"
    )


def has_schema(db: PostgresDatabase) -> bool:
    """Return whether the run has a schema, with the tables of PLACE."""
    found = db.execute("SELECT to_regclass(?) IS NOT NULL", (f"{db.run.quoted}.owner",))
    return bool(found.fetchone()[0])


def is_locked(run: PostgresRun) -> bool:
    """Return whether a coordinator holds the run."""
    key = run.lock_key % 2**64
    db = PostgresDatabase(run, application="fleetlearn reader")
    try:
        found = db.execute(
            "SELECT EXISTS(SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND "
            "classid::bigint = ? AND objid::bigint = ? AND objsubid = 1 AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database()))",
            (key >> 32, key % 2**32),
        )
        return bool(found.fetchone()[0])
    finally:
        db.close()
