BEGIN TRANSACTION;
CREATE TABLE devices(
    device TEXT PRIMARY KEY, given INTEGER NOT NULL, tasks INTEGER NOT NULL, labels TEXT NOT NULL,
    reported INTEGER, loss REAL, examples INTEGER, seconds REAL
) WITHOUT ROWID;
CREATE TABLE evaluations(
    number INTEGER PRIMARY KEY, version INTEGER NOT NULL, request TEXT, opened REAL NOT NULL,
    closed REAL, outcome TEXT, summary TEXT
);
INSERT INTO "evaluations" VALUES(1,1,'asked',12.0,13.0,'valid','{"devices":1,"metrics":{"loss":0.25}}');
INSERT INTO "evaluations" VALUES(2,1,NULL,14.0,NULL,NULL,NULL);
CREATE TABLE measurements(
    task TEXT PRIMARY KEY, evaluation INTEGER NOT NULL, device TEXT NOT NULL, tier TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    result BLOB
) WITHOUT ROWID;
INSERT INTO "measurements" VALUES('r-e1-1',1,'a','phone','accepted',X'7B226578616D706C6573223A342C226C6F73735F73756D223A312E302C226D65747269635F73756D73223A7B226163637572616379223A332E307D7D');
INSERT INTO "measurements" VALUES('r-e2-1',2,'a','phone','accepted',X'7B226578616D706C6573223A352C226C6F73735F73756D223A322E302C226D65747269635F73756D73223A7B226163637572616379223A342E307D7D');
INSERT INTO "measurements" VALUES('r-e2-2',2,'b','','lost',NULL);
INSERT INTO "measurements" VALUES('r-e2-3',2,'c','','assigned',NULL);
CREATE TABLE meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "meta" VALUES('bundle','b');
INSERT INTO "meta" VALUES('run','r');
INSERT INTO "meta" VALUES('sum',NULL);
CREATE TABLE models(
    version INTEGER PRIMARY KEY, sha256 TEXT NOT NULL, round INTEGER NOT NULL,
    created REAL NOT NULL, restores INTEGER, optimizer TEXT, state_crc32 INTEGER
);
INSERT INTO "models" VALUES(1,'1111111111111111111111111111111111111111111111111111111111111111',1,11.0,NULL,NULL,NULL);
CREATE TABLE rounds(
    number INTEGER PRIMARY KEY, opened REAL NOT NULL, closed REAL, outcome TEXT, summary TEXT
);
INSERT INTO "rounds" VALUES(1,10.0,11.0,'committed','{"reports":2}');
CREATE TABLE tasks(
    task TEXT PRIMARY KEY, round INTEGER NOT NULL, device TEXT NOT NULL,
    state TEXT NOT NULL,                    -- assigned, accepted, or the cause of its end
    report BLOB, weight INTEGER,
    slot INTEGER,                           -- the spool file, while the update is in it alone
    version INTEGER, staleness INTEGER,
    norm REAL, trained_norm REAL            -- of the accepted update, where the plan needs them
) WITHOUT ROWID;
CREATE TABLE tied(device TEXT PRIMARY KEY, task TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX tasks_of_round ON tasks(round);
CREATE INDEX measurements_of_evaluation ON measurements(evaluation);
COMMIT;
