"""The tables of a run's ledger in SQL, and the statements that bring earlier versions up to date.

They are written for SQLite. postgres_database.py says how PostgreSQL's types are named.
"""

from __future__ import annotations

SCHEMA_VERSION = 11

DEVICES = """
CREATE TABLE devices(
    device TEXT PRIMARY KEY, given INTEGER NOT NULL, tasks INTEGER NOT NULL, labels TEXT NOT NULL,
    reported INTEGER, loss REAL, examples INTEGER, seconds REAL
) WITHOUT ROWID"""
TIED = """
CREATE TABLE tied(device TEXT PRIMARY KEY, task TEXT NOT NULL) WITHOUT ROWID"""
ACTIVITY = """
CREATE TABLE activity(
    device TEXT PRIMARY KEY, seen REAL, connected REAL, runtime TEXT, software TEXT, tier TEXT,
    tags TEXT, done INTEGER NOT NULL, failed INTEGER NOT NULL, lost INTEGER NOT NULL,
    error TEXT, error_at REAL
) WITHOUT ROWID"""
PARTICIPATIONS = """
CREATE TABLE participations(
    device TEXT PRIMARY KEY, last INTEGER NOT NULL, times INTEGER NOT NULL, since INTEGER NOT NULL
) WITHOUT ROWID"""
EXCHANGE_TABLES = (
    """CREATE TABLE exchanges(
    kind TEXT NOT NULL, number INTEGER NOT NULL, phase INTEGER NOT NULL, version INTEGER NOT NULL,
    members TEXT,                           -- JSON; NULL: every device that can answer
    request TEXT, opened REAL NOT NULL, closed REAL, outcome TEXT, summary TEXT,
    PRIMARY KEY(kind, number, phase)
) WITHOUT ROWID""",
    """CREATE TABLE answers(
    task TEXT PRIMARY KEY, kind TEXT NOT NULL, number INTEGER NOT NULL, phase INTEGER NOT NULL,
    device TEXT NOT NULL, note TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    content BLOB                            -- JSON
) WITHOUT ROWID""",
    "CREATE INDEX answers_of_exchange ON answers(kind, number, phase)",
)
EVALUATION_TABLES = (
    """CREATE TABLE evaluations(
    number INTEGER PRIMARY KEY, version INTEGER NOT NULL, request TEXT, opened REAL NOT NULL,
    closed REAL, outcome TEXT, summary TEXT
)""",
    """CREATE TABLE measurements(
    task TEXT PRIMARY KEY, evaluation INTEGER NOT NULL, device TEXT NOT NULL, tier TEXT NOT NULL,
    state TEXT NOT NULL, result BLOB
) WITHOUT ROWID""",
    "CREATE INDEX measurements_of_evaluation ON measurements(evaluation)",
)
"""Tables of earlier versions, which knew no other kind of exchange."""
FROM_EVALUATIONS = (
    *EXCHANGE_TABLES,
    "INSERT INTO exchanges(kind, number, phase, version, request, opened, closed, outcome, summary)"
    " SELECT 'evaluation', number, 1, version, request, opened, closed, outcome, summary"
    " FROM evaluations",
    "INSERT INTO answers"
    " SELECT task, 'evaluation', evaluation, 1, device, tier, state, result FROM measurements",
    "DROP TABLE evaluations",
    "DROP TABLE measurements",
)
"""Makes today's tables of those of earlier versions."""
SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE models(
    version INTEGER PRIMARY KEY, sha256 TEXT NOT NULL, round INTEGER NOT NULL,
    created REAL NOT NULL, restores INTEGER, optimizer TEXT, state_crc32 INTEGER
);
CREATE TABLE rounds(
    number INTEGER PRIMARY KEY, opened REAL NOT NULL, closed REAL, outcome TEXT, summary TEXT,
    goal INTEGER                            -- NULL: the plan's, as of all rounds
);
CREATE TABLE tasks(
    task TEXT PRIMARY KEY, round INTEGER NOT NULL, device TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    report BLOB, weight INTEGER,
    slot INTEGER,                           -- the spool file, while the update is in it alone
    version INTEGER, member TEXT,           -- of the model, and which of a family's
    staleness INTEGER, region TEXT,         -- the region in which it was given
    norm REAL, trained_norm REAL            -- of the accepted update, where the plan needs them
) WITHOUT ROWID;
CREATE INDEX tasks_of_round ON tasks(round);{DEVICES};{TIED};{ACTIVITY};{PARTICIPATIONS};
"""
"""A task's round is the one in which it was given while it runs, and then the one that its end
counts for."""
STATEMENTS = (*SCHEMA.strip().removesuffix(";").split(";\n"), *EXCHANGE_TABLES)
"""Make all tables of a new run."""
MIGRATIONS = {
    1: (
        "ALTER TABLE tasks ADD COLUMN version INTEGER",
        "ALTER TABLE tasks ADD COLUMN staleness INTEGER",
    ),
    2: (DEVICES, *EVALUATION_TABLES),
    3: (
        TIED,
        "ALTER TABLE tasks ADD COLUMN norm REAL",
        "ALTER TABLE tasks ADD COLUMN trained_norm REAL",
    ),
    4: (
        "ALTER TABLE models ADD COLUMN restores INTEGER",
        "ALTER TABLE models ADD COLUMN optimizer TEXT",
        "ALTER TABLE models ADD COLUMN state_crc32 INTEGER",
    ),
    5: (ACTIVITY,),
    6: FROM_EVALUATIONS,
    7: (PARTICIPATIONS,),
    8: ("ALTER TABLE tasks ADD COLUMN member TEXT",),
    9: ("ALTER TABLE tasks ADD COLUMN region TEXT",),
    10: ("ALTER TABLE rounds ADD COLUMN goal INTEGER",),
}
"""Version of the tables -> what makes the next one of it."""
