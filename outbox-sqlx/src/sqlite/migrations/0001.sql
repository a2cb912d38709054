-- Events that are not settled, and nothing else. The number of a row that was committed never comes
-- again (AUTOINCREMENT), because an event id outlives its row. Times are microseconds since the
-- epoch. What can be large comes last, in every table: SQLite walks over it to read a column behind
-- it, and most of what is asked for stands before.
CREATE TABLE {events} (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL CHECK (name <> ''),
    -- The handler that the row belongs to, once it was split among several, and the row it was split
    -- from, if it was added by that.
    handler TEXT CHECK (handler <> ''),
    origin INTEGER,
    version INTEGER NOT NULL CHECK (version BETWEEN 1 AND 4294967295),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 0 AND 3),
    dedup_key TEXT,
    ordering_key TEXT,
    -- Whether it keeps later events of its ordering key waiting once it is a dead letter.
    blocks INTEGER NOT NULL DEFAULT 0 CHECK (blocks IN (0, 1)),
    fingerprint TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL CHECK (max_attempts BETWEEN 1 AND 4294967295),
    -- NULL: due at once. Set: waits for a delay or a retry. A claim leaves it as it is.
    due_at INTEGER,
    -- Until when it is worth handling.
    expires_at INTEGER,
    lease_token TEXT,
    lease_expires_at INTEGER,
    claimed_by TEXT,
    created_at INTEGER NOT NULL,
    retention INTEGER NOT NULL CHECK (retention >= 0),
    key_retention INTEGER NOT NULL CHECK (key_retention >= 0),
    failures TEXT NOT NULL DEFAULT '[]'
        CHECK (json_valid(failures) AND json_type(failures) = 'array'),
    headers TEXT,
    payload TEXT NOT NULL,
    CONSTRAINT only_a_part_has_an_origin CHECK (origin IS NULL OR handler IS NOT NULL),
    CONSTRAINT only_an_ordered_event_blocks CHECK (blocks = 0 OR ordering_key IS NOT NULL),
    CONSTRAINT attempts_within_budget CHECK (attempts BETWEEN 0 AND max_attempts),
    CONSTRAINT lease_is_whole CHECK (
        (lease_token IS NULL) = (lease_expires_at IS NULL)
        AND (lease_token IS NULL) = (claimed_by IS NULL)
    ),
    CONSTRAINT lease_is_charged CHECK (lease_token IS NULL OR attempts >= 1)
) STRICT;

CREATE INDEX {ready} ON {events} (priority DESC, id) WHERE due_at IS NULL;
CREATE INDEX {waiting} ON {events} (priority DESC, due_at, id) WHERE due_at IS NOT NULL;

-- What is in the way of an event: earlier ones of its ordering key, by their place in its order. A
-- part of an event has the place of the whole.
CREATE INDEX {order} ON {events} (ordering_key, coalesce(origin, id), id)
WHERE ordering_key IS NOT NULL;

-- The parts of an event, which keep its dedup key.
CREATE INDEX {parts} ON {events} (origin) WHERE origin IS NOT NULL;

-- Events that were processed or cancelled, or that were dead letters and a person discarded, until
-- their retention has passed.
CREATE TABLE {history} (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    handler TEXT,
    origin INTEGER,
    version INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('processed', 'discarded', 'cancelled')),
    dedup_key TEXT,
    ordering_key TEXT,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    claimed_by TEXT,
    created_at INTEGER NOT NULL,
    settled_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    -- Why a discarded event had been a dead letter.
    reason TEXT,
    failures TEXT NOT NULL,
    headers TEXT,
    output TEXT,
    payload TEXT NOT NULL
) STRICT;

CREATE INDEX {history_end} ON {history} (expires_at);

-- Events nobody will try again unless a person asks. Never removed by age alone.
CREATE TABLE {dead} (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    handler TEXT,
    origin INTEGER,
    version INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    dedup_key TEXT,
    ordering_key TEXT,
    blocks INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    claimed_by TEXT,
    created_at INTEGER NOT NULL,
    settled_at INTEGER NOT NULL,
    retention INTEGER NOT NULL,
    key_retention INTEGER NOT NULL,
    reason TEXT NOT NULL CHECK (reason <> ''),
    failures TEXT NOT NULL,
    headers TEXT,
    payload TEXT NOT NULL
) STRICT;

CREATE INDEX {dead_order} ON {dead} (ordering_key, coalesce(origin, id)) WHERE blocks;
CREATE INDEX {dead_parts} ON {dead} (origin) WHERE origin IS NOT NULL;

-- Who holds a dedup key. `state` is NULL while the event is not settled; a key ends only once its
-- event is processed, discarded or cancelled.
CREATE TABLE {keys} (
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    event_id INTEGER NOT NULL,
    fingerprint TEXT,
    state TEXT,
    output TEXT,
    expires_at INTEGER,
    PRIMARY KEY (name, key),
    CONSTRAINT key_state_is_whole CHECK (
        CASE state
            WHEN 'processed' THEN expires_at IS NOT NULL
            WHEN 'discarded' THEN expires_at IS NOT NULL AND output IS NULL
            WHEN 'cancelled' THEN expires_at IS NOT NULL AND output IS NULL
            WHEN 'dead_letter' THEN expires_at IS NULL AND output IS NULL
            ELSE state IS NULL AND expires_at IS NULL AND output IS NULL
        END
    )
) STRICT, WITHOUT ROWID;

CREATE INDEX {keys_end} ON {keys} (expires_at) WHERE expires_at IS NOT NULL;

-- The key is taken by the statement that inserts the event, so that neither is ever there without
-- the other, whatever transaction the publisher is in, or none. A row that comes back under its old
-- number takes its own key again; somebody else's key is refused.
CREATE TRIGGER {take_key} AFTER INSERT ON {events} WHEN NEW.dedup_key IS NOT NULL
BEGIN
    SELECT RAISE(ABORT, 'the dedup key is taken')
    FROM {keys}
    WHERE name = NEW.name AND key = NEW.dedup_key AND event_id <> NEW.id;

    INSERT INTO {keys} (name, key, event_id, fingerprint)
    VALUES (NEW.name, NEW.dedup_key, NEW.id, NEW.fingerprint)
    ON CONFLICT (name, key) DO UPDATE SET state = NULL, output = NULL, expires_at = NULL;
END;

-- What is paused: an event, where handler is empty, or one of its handlers. Few rows, read by every
-- claim.
CREATE TABLE {paused} (
    name TEXT NOT NULL,
    handler TEXT NOT NULL,
    since INTEGER NOT NULL,
    PRIMARY KEY (name, handler)
) STRICT, WITHOUT ROWID;

-- Who has an exclusive lock of the application, and until when unless it is kept. The row of one that
-- was not released stays until somebody takes the lock over.
CREATE TABLE {locks} (
    name TEXT PRIMARY KEY NOT NULL,
    token TEXT NOT NULL,
    instance TEXT NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- With a row's number this makes an event id that no other database gives.
CREATE TABLE {installation} (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    uuid TEXT NOT NULL CHECK (length(uuid) = 32)
) STRICT;

INSERT INTO {installation} (one, uuid) VALUES (1, lower(hex(randomblob(16))));

-- Everything about every event, for people. Columns that end in `_utc` are for reading, the others
-- for comparing.
CREATE VIEW {all} AS
SELECT
    id,
    (SELECT uuid FROM {installation}) || '-' || id AS event_id,
    name,
    handler,
    origin,
    version,
    payload,
    headers,
    dedup_key,
    ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END
        AS priority,
    status,
    attempts,
    max_attempts,
    lease_token,
    lease_expires_at,
    claimed_by,
    due_at,
    expires_at,
    created_at,
    settled_at,
    CASE dead_reason
        WHEN 'expired' THEN {expired}
        ELSE json_extract(failures, '$[#-1].error')
    END AS last_error,
    dead_reason,
    output,
    failures,
    strftime('%Y-%m-%d %H:%M:%f', lease_expires_at / 1e6, 'unixepoch') AS lease_expires_utc,
    strftime('%Y-%m-%d %H:%M:%f', due_at / 1e6, 'unixepoch') AS due_utc,
    strftime('%Y-%m-%d %H:%M:%f', created_at / 1e6, 'unixepoch') AS created_utc,
    strftime('%Y-%m-%d %H:%M:%f', settled_at / 1e6, 'unixepoch') AS settled_utc
FROM (
    SELECT
        id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, priority,
        {status} AS status,
        attempts, max_attempts, lease_token, lease_expires_at, claimed_by,
        CASE WHEN lease_token IS NULL THEN due_at END AS due_at, expires_at,
        created_at, NULL AS settled_at, NULL AS dead_reason, NULL AS output, failures
    FROM {events}
    UNION ALL
    SELECT
        id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, priority, state,
        attempts, max_attempts, NULL, NULL, claimed_by, NULL, NULL,
        created_at, settled_at, reason, output, failures
    FROM {history}
    UNION ALL
    SELECT
        id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, priority, 'dead_letter',
        attempts, max_attempts, NULL, NULL, claimed_by, NULL, NULL,
        created_at, settled_at, reason, NULL, failures
    FROM {dead}
);
