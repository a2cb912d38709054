CREATE TABLE {versions} (
    version integer NOT NULL PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Events that are not settled, and nothing else.
--
-- A claim, a renewal and a release write lease_token, lease_expires_at, claimed_by, attempts and
-- failures. None of them is in an index or in an index predicate, and most of each page is left free
-- for a second copy of its rows, which a lease makes a little longer, so that these writes are HOT:
-- they make no index entry. A lease index would cost a sixth of the throughput.
--
-- payload is json, not jsonb: what went in comes out to the byte (jsonb drops duplicate keys, the
-- order of keys and the text of numbers), and people can still read it with ->>.
--
-- name is in the C collation: names are compared for equality only, and the order of an index must
-- not change with the operating system's locale library.
CREATE SEQUENCE {events_id_seq};

CREATE TABLE {events} (
    id bigint NOT NULL DEFAULT pg_catalog.nextval({events_id_seq_literal}::regclass),
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    payload json NOT NULL,
    headers json,
    dedup_key text COLLATE "C",
    ordering_key text COLLATE "C",
    priority smallint NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL,
    retention interval NOT NULL,
    lease_token uuid,
    lease_expires_at timestamptz,
    claimed_by text,
    due_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_error text,
    failures jsonb,
    PRIMARY KEY (id),
    CONSTRAINT name_is_not_empty CHECK (name <> ''),
    CONSTRAINT version_is_positive CHECK (version >= 1),
    CONSTRAINT priority_is_a_level CHECK (priority BETWEEN 0 AND 3),
    CONSTRAINT attempts_are_within_their_limit
        CHECK (max_attempts >= 1 AND attempts BETWEEN 0 AND max_attempts),
    CONSTRAINT retention_is_not_negative CHECK (retention >= interval '0'),
    CONSTRAINT lease_is_whole_or_absent CHECK (
        (lease_token IS NULL) = (lease_expires_at IS NULL)
        AND (lease_token IS NULL) = (claimed_by IS NULL)
    ),
    CONSTRAINT lease_has_an_attempt CHECK (lease_token IS NULL OR attempts >= 1),
    CONSTRAINT times_are_finite CHECK (
        isfinite(created_at)
        AND (due_at IS NULL OR isfinite(due_at))
        AND (lease_expires_at IS NULL OR isfinite(lease_expires_at))
    ),
    CONSTRAINT failures_are_a_list CHECK (failures IS NULL OR jsonb_typeof(failures) = 'array')
) WITH (
    fillfactor = 35,
    -- Every settled row leaves a dead one. The default, a fifth of the table, comes too late for a
    -- table that is mostly empty or mostly waiting.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000
);

ALTER SEQUENCE {events_id_seq} OWNED BY {events}.id;

-- Due at once. due_at is set by a delay or a retry, never by a claim.
--
-- id + 0, so that the primary key cannot stand in for this index where a claim asks for its order:
-- it holds the rows of every priority, and those that wait.
CREATE INDEX {index_ready} ON {events} (priority DESC, (id + 0)) WHERE due_at IS NULL;

-- Waiting for a delay or a retry: outside the ready index, so that a claim does not step over them.
CREATE INDEX {index_waiting} ON {events} (priority DESC, due_at, id) WHERE due_at IS NOT NULL;

-- Processed events that are kept for a while. By the day on which a row expires, so that retention
-- can drop partitions; the default partition takes what no other one covers, so that settling an
-- event never fails for want of one.
CREATE TABLE {history} (
    id bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    payload json NOT NULL,
    headers json,
    dedup_key text COLLATE "C",
    ordering_key text COLLATE "C",
    priority smallint NOT NULL,
    attempts integer NOT NULL,
    max_attempts integer NOT NULL,
    claimed_by text,
    created_at timestamptz NOT NULL,
    settled_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    last_error text,
    failures jsonb,
    output json
) PARTITION BY RANGE (expires_at);

CREATE TABLE {history_default} PARTITION OF {history} DEFAULT;

CREATE INDEX {index_history_id} ON {history} (id);
CREATE INDEX {index_history_expiry} ON {history} (expires_at);

-- Events that nobody will try again unless a person asks. Nothing removes them by age.
CREATE TABLE {dead} (
    id bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    payload json NOT NULL,
    headers json,
    dedup_key text COLLATE "C",
    ordering_key text COLLATE "C",
    priority smallint NOT NULL,
    attempts integer NOT NULL,
    max_attempts integer NOT NULL,
    retention interval NOT NULL,
    claimed_by text,
    created_at timestamptz NOT NULL,
    settled_at timestamptz NOT NULL,
    dead_reason text NOT NULL,
    last_error text NOT NULL,
    failures jsonb,
    PRIMARY KEY (id)
);

-- Dedup keys: a table of their own, because a unique index on the hot table would be paid by every
-- claim, and because a row on its way from the hot table to the history would be in neither for a
-- publisher that waits for it.
--
-- state, output and expires_at are set when the event is processed. A key without expires_at is
-- never removed: its event is unsettled or dead.
CREATE TABLE {keys} (
    name text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    event_id bigint NOT NULL DEFAULT pg_catalog.nextval({events_id_seq_literal}::regclass),
    retention interval NOT NULL,
    state text,
    output json,
    expires_at timestamptz,
    PRIMARY KEY (name, key),
    CONSTRAINT only_a_settled_key_expires CHECK (
        (state IS NULL) = (expires_at IS NULL) AND (state IS NOT NULL OR output IS NULL)
    )
);

CREATE INDEX {index_keys_expiry} ON {keys} (expires_at) WHERE expires_at IS NOT NULL;

-- One row: what makes an event's id unique across databases.
CREATE TABLE {installation} (
    only_row boolean NOT NULL DEFAULT true PRIMARY KEY CHECK (only_row),
    id uuid NOT NULL
);

INSERT INTO {installation} (id) VALUES (gen_random_uuid());

-- The whole story, for somebody with psql. An event whose lease has ended without an outcome is
-- pending again, whoever's token is still in the row.
CREATE VIEW {all} AS
SELECT
    id, replace((SELECT i.id::text FROM {installation} AS i), '-', '') || '-' || id AS event_id,
    name, version, payload, headers, dedup_key, ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END
        AS priority,
    CASE
        WHEN lease_expires_at > clock_timestamp() THEN 'in_progress'
        WHEN lease_token IS NULL AND due_at IS NOT NULL AND attempts > 0 THEN 'failed'
        ELSE 'pending'
    END AS status,
    attempts, max_attempts, lease_token, lease_expires_at, claimed_by, due_at, created_at,
    NULL::timestamptz AS settled_at, last_error, NULL::text AS dead_reason, NULL::json AS output,
    failures
FROM {events}
UNION ALL
SELECT
    id, replace((SELECT i.id::text FROM {installation} AS i), '-', '') || '-' || id,
    name, version, payload, headers, dedup_key, ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END,
    'processed',
    attempts, max_attempts, NULL, NULL, claimed_by, NULL, created_at,
    settled_at, last_error, NULL, output, failures
FROM {history}
UNION ALL
SELECT
    id, replace((SELECT i.id::text FROM {installation} AS i), '-', '') || '-' || id,
    name, version, payload, headers, dedup_key, ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END,
    'dead_letter',
    attempts, max_attempts, NULL, NULL, claimed_by, NULL, created_at,
    settled_at, last_error, dead_reason, NULL, failures
FROM {dead};

INSERT INTO {versions} (version) VALUES (1);
