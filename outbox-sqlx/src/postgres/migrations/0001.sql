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
    -- The handler that the row belongs to, once it was split among several, and the row it was split
    -- from, if it was added by that.
    handler text COLLATE "C",
    origin bigint,
    version integer NOT NULL,
    payload json NOT NULL,
    headers json,
    dedup_key text COLLATE "C",
    ordering_key text COLLATE "C",
    -- Whether it keeps later events of its ordering key waiting once it is a dead letter.
    blocks boolean NOT NULL DEFAULT false,
    priority smallint NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL,
    retention interval NOT NULL,
    lease_token uuid,
    lease_expires_at timestamptz,
    claimed_by text,
    due_at timestamptz,
    expires_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_error text,
    failures jsonb,
    PRIMARY KEY (id),
    CONSTRAINT name_is_not_empty CHECK (name <> ''),
    CONSTRAINT handler_is_not_empty CHECK (handler <> ''),
    CONSTRAINT only_a_part_has_an_origin CHECK (origin IS NULL OR handler IS NOT NULL),
    CONSTRAINT only_an_ordered_event_blocks CHECK (NOT blocks OR ordering_key IS NOT NULL),
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
        AND (expires_at IS NULL OR isfinite(expires_at))
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

-- What is in the way of an event: earlier ones of its ordering key, by their place in its order. A
-- part of an event has the place of the whole.
CREATE INDEX {index_order} ON {events} (ordering_key, coalesce(origin, id), id)
WHERE ordering_key IS NOT NULL;

-- The parts of an event, which keep its dedup key.
CREATE INDEX {index_parts} ON {events} (origin) WHERE origin IS NOT NULL;

-- Processed, discarded and cancelled events that are kept for a while. By the day, in UTC, on which a row
-- expires, so that retention can drop partitions; the default partition takes what no other one
-- covers, so that settling an event never fails for want of one.
CREATE TABLE {history} (
    id bigint NOT NULL,
    state text NOT NULL,
    name text COLLATE "C" NOT NULL,
    handler text COLLATE "C",
    origin bigint,
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
    dead_reason text,
    last_error text,
    failures jsonb,
    output json,
    CONSTRAINT state_is_an_end CHECK (state IN ('processed', 'discarded', 'cancelled'))
) PARTITION BY RANGE (expires_at);

CREATE TABLE {history_default} PARTITION OF {history} DEFAULT;

CREATE INDEX {index_history_id} ON {history} (id);
CREATE INDEX {index_history_expiry} ON {history} (expires_at);

-- Events that nobody will try again unless a person asks. Nothing removes them by age.
CREATE TABLE {dead} (
    id bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    handler text COLLATE "C",
    origin bigint,
    version integer NOT NULL,
    payload json NOT NULL,
    headers json,
    dedup_key text COLLATE "C",
    ordering_key text COLLATE "C",
    blocks boolean NOT NULL,
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

CREATE INDEX {index_dead_order} ON {dead} (ordering_key, coalesce(origin, id)) WHERE blocks;
CREATE INDEX {index_dead_parts} ON {dead} (origin) WHERE origin IS NOT NULL;

-- Dedup keys: a table of their own, because a unique index on the hot table would be paid by every
-- claim, and because a row on its way from the hot table to the history would be in neither for a
-- publisher that waits for it.
--
-- state, output and expires_at are set when the event is processed, discarded or cancelled. A key without
-- expires_at is never removed: its event is unsettled or dead.
CREATE TABLE {keys} (
    name text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    event_id bigint NOT NULL DEFAULT pg_catalog.nextval({events_id_seq_literal}::regclass),
    retention interval NOT NULL,
    fingerprint bytea,
    state text,
    output json,
    expires_at timestamptz,
    PRIMARY KEY (name, key),
    CONSTRAINT state_is_an_end CHECK (state IN ('processed', 'discarded', 'cancelled')),
    CONSTRAINT only_a_settled_key_expires CHECK (
        (state IS NULL) = (expires_at IS NULL) AND (state IS NOT NULL OR output IS NULL)
    )
);

CREATE INDEX {index_keys_expiry} ON {keys} (expires_at) WHERE expires_at IS NOT NULL;

-- What is paused: an event, where handler is empty, or one of its handlers. Few rows, read by every
-- claim.
CREATE TABLE {paused} (
    name text COLLATE "C" NOT NULL,
    handler text COLLATE "C" NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (name, handler)
);

-- One row: what makes an event's id unique across databases.
CREATE TABLE {installation} (
    only_row boolean NOT NULL DEFAULT true PRIMARY KEY CHECK (only_row),
    id uuid NOT NULL
);

INSERT INTO {installation} (id) VALUES (gen_random_uuid());

-- Drops one partition of the history whose day is past, or makes the first one that is missing
-- between today and ahead from now, at most 400 days. Answers whether it did either.
--
-- It runs with its owner's rights, so that a role needs no more than EXECUTE to have it done. Nobody
-- but the owner has that until it is granted, and nothing that a caller says gets into a statement.
--
-- Settlements do not wait for it for longer than a fifth of a second:
-- - No lock is waited for for longer than a tenth of a second, and not as long once somebody may be
--   waiting for us.
-- - A new partition is made by itself and then attached. That locks the default partition alone, and
--   no event of a day that has a partition goes there. CREATE .. PARTITION OF would lock them all.
-- - Attaching reads the default partition from end to end, to see that no row of the day is in it.
--   While that has more than 4096 pages, none is attached.
-- - Up to 500 rows of the day that are there are moved. A day with more of them gets no partition:
--   they are removed one by one, as all that is in the default partition.
CREATE FUNCTION {upkeep}(ahead interval) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '100ms'
SET "TimeZone" = 'UTC'
SET "DateStyle" = 'ISO, YMD'
AS {function_quote}
DECLARE
    today CONSTANT date := clock_timestamp()::date;
    last_day CONSTANT date :=
        (clock_timestamp() + least(greatest(ahead, interval '0'), interval '400 days'))::date;
    stem CONSTANT text := {table_literal} || '_history_';
    one_day CONSTANT text := 'FOR VALUES FROM (%L) TO (%L)';
    crowded CONSTANT integer := 500;
    partition regclass;
    new_day date;
    new_name text;
    lower_bound timestamptz;
    upper_bound timestamptz;
BEGIN
    -- By its bounds as well as by its name: what somebody else has attached is theirs.
    SELECT child.oid::regclass INTO partition
    FROM pg_inherits AS inherits
    JOIN pg_class AS child ON child.oid = inherits.inhrelid
    CROSS JOIN LATERAL (SELECT pg_get_expr(child.relpartbound, child.oid) AS text) AS bounds
    CROSS JOIN LATERAL (
        SELECT substring(bounds.text FROM '^FOR VALUES FROM [(]''([0-9-]{10}) ')::date AS date
    ) AS day
    WHERE inherits.inhparent = {history_literal}::regclass
    AND child.relname = stem || to_char(day.date, 'YYYYMMDD')
    AND bounds.text = format(one_day, day.date::timestamptz, (day.date + 1)::timestamptz)
    AND day.date < today
    ORDER BY day.date
    LIMIT 1;
    IF partition IS NOT NULL THEN
        LOCK TABLE ONLY {history} IN ACCESS EXCLUSIVE MODE;
        SET LOCAL lock_timeout = '50ms';
        -- IF EXISTS, should another caller have been faster.
        EXECUTE format('DROP TABLE IF EXISTS %s', partition);
        RETURN true;
    END IF;

    IF pg_relation_size({history_default_literal}::regclass)
        > 4096 * current_setting('block_size')::bigint
    THEN
        RETURN false;
    END IF;
    FOR new_day IN
        SELECT day::date FROM generate_series(today::timestamp, last_day::timestamp, '1 day') AS day
    LOOP
        new_name := stem || to_char(new_day, 'YYYYMMDD');
        lower_bound := new_day::timestamptz;
        upper_bound := (new_day + 1)::timestamptz;
        CONTINUE WHEN to_regclass(format('%I.%I', {schema_literal}, new_name)) IS NOT NULL;
        CONTINUE WHEN (
            SELECT count(*) FROM (
                SELECT FROM ONLY {history_default}
                WHERE expires_at >= lower_bound AND expires_at < upper_bound
                LIMIT crowded + 1
            ) AS those
        ) > crowded;

        -- Keeps other callers out, and neither readers nor settlements.
        LOCK TABLE ONLY {history} IN SHARE UPDATE EXCLUSIVE MODE;
        CONTINUE WHEN to_regclass(format('%I.%I', {schema_literal}, new_name)) IS NOT NULL;
        EXECUTE format(
            'CREATE TABLE %I.%I (LIKE %s INCLUDING ALL)',
            {schema_literal}, new_name, {history_literal}::regclass
        );
        -- From here nothing is added to the default partition.
        LOCK TABLE ONLY {history_default} IN ACCESS EXCLUSIVE MODE;
        EXECUTE format(
            'WITH moved AS (
                DELETE FROM ONLY %s WHERE expires_at >= $1 AND expires_at < $2 RETURNING *
            )
            INSERT INTO %I.%I SELECT * FROM moved',
            {history_default_literal}::regclass, {schema_literal}, new_name
        ) USING lower_bound, upper_bound;
        EXECUTE format(
            'ALTER TABLE %s ATTACH PARTITION %I.%I ' || format(one_day, lower_bound, upper_bound),
            {history_literal}::regclass, {schema_literal}, new_name
        );
        RETURN true;
    END LOOP;
    RETURN false;
END
{function_quote};

REVOKE ALL ON FUNCTION {upkeep}(interval) FROM PUBLIC;

-- The whole story, for somebody with psql. An event whose lease has ended without an outcome is
-- pending again, whoever's token is still in the row.
CREATE VIEW {all} AS
SELECT
    id, replace((SELECT i.id::text FROM {installation} AS i), '-', '') || '-' || id AS event_id,
    name, handler, origin, version, payload, headers, dedup_key, ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END
        AS priority,
    CASE
        WHEN lease_expires_at > clock_timestamp() THEN 'in_progress'
        WHEN lease_token IS NULL AND due_at IS NOT NULL AND attempts > 0 THEN 'failed'
        ELSE 'pending'
    END AS status,
    attempts, max_attempts, lease_token, lease_expires_at, claimed_by, due_at, expires_at, created_at,
    NULL::timestamptz AS settled_at, last_error, NULL::text AS dead_reason, NULL::json AS output,
    failures
FROM {events}
UNION ALL
SELECT
    id, replace((SELECT i.id::text FROM {installation} AS i), '-', '') || '-' || id,
    name, handler, origin, version, payload, headers, dedup_key, ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END,
    state,
    attempts, max_attempts, NULL, NULL, claimed_by, NULL, NULL, created_at,
    settled_at, last_error, dead_reason, output, failures
FROM {history}
UNION ALL
SELECT
    id, replace((SELECT i.id::text FROM {installation} AS i), '-', '') || '-' || id,
    name, handler, origin, version, payload, headers, dedup_key, ordering_key,
    CASE priority WHEN 0 THEN 'low' WHEN 1 THEN 'normal' WHEN 2 THEN 'high' ELSE 'critical' END,
    'dead_letter',
    attempts, max_attempts, NULL, NULL, claimed_by, NULL, NULL, created_at,
    settled_at, last_error, dead_reason, NULL, failures
FROM {dead};

INSERT INTO {versions} (version) VALUES (1);
