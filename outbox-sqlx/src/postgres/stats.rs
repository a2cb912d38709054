//! Counting what there is, at a cost that does not grow.

use std::collections::BTreeMap;
use std::time::Duration;

use outbox_core::event::Priority;
use outbox_core::stats::{EventCounts, StoreStats};
use outbox_core::store::StoreError;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::claim::LEASE_IS_FREE;
use super::query::Query;
use super::sqlstate::failed;

const DOING: &str = "count events";

/// How many pages of a table are read at most, on average: 32 MiB, some 20 ms.
const PAGES: u32 = 4_000;

/// How many entries of an index are looked at for the oldest due event, per priority.
const HEAD: u32 = 1_000;

/// Counts unsettled events and dead letters by name. Answers, before each name, with how long the
/// longest due event has been due, and with the shares of the two tables that were read.
///
/// - A sample of whole pages, so that what is read does not grow with the table. All of them where
///   there are few: the counts are exact then.
/// - The sizes are those of the files, which do not depend on when the tables were last analysed.
/// - `LEFT JOIN`, so that an empty outbox has an answer too.
const STATS: &str = "
    WITH share AS MATERIALIZED (
        SELECT
            least(100, 100.0 * {pages} / greatest(events, 1))::real AS events,
            least(100, 100.0 * {pages} / greatest(dead, 1))::real AS dead
        FROM (
            SELECT
                pg_relation_size({events_literal}::regclass)
                    / current_setting('block_size')::bigint AS events,
                pg_relation_size({dead_literal}::regclass)
                    / current_setting('block_size')::bigint AS dead
        ) AS pages
    ),
    clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
    counted AS MATERIALIZED (
        SELECT name, kind, count(*) AS rows
        FROM (
            SELECT
                name,
                CASE
                    WHEN lease_expires_at > now THEN 'in_progress'
                    WHEN due_at > now AND attempts > 0 THEN 'retrying'
                    WHEN due_at > now THEN 'waiting'
                    WHEN attempts >= max_attempts THEN 'exhausted'
                    ELSE 'due'
                END AS kind
            FROM {events} TABLESAMPLE SYSTEM ((SELECT events FROM share)), clock
        ) AS unsettled
        GROUP BY name, kind
        UNION ALL
        SELECT name, 'dead', count(*)
        FROM {dead} TABLESAMPLE SYSTEM ((SELECT dead FROM share))
        GROUP BY name
    )
    SELECT
        (
            SELECT (extract(epoch FROM max(clock.now - due.since)) * 1000000)::bigint
            FROM ({heads}) AS due, clock
        ),
        share.events, share.dead, counted.name, counted.kind, counted.rows
    FROM share
    LEFT JOIN counted ON true
";

/// Since when the first rows of one priority have been due.
///
/// - The limit is inside and what is leased is left out outside of it, so that a table full of
///   leases is not walked over.
const HEADS: &str = "
    SELECT since FROM (
        SELECT created_at AS since, attempts, max_attempts, lease_expires_at
        FROM {events}
        WHERE due_at IS NULL AND priority = {level}
        ORDER BY id + 0
        LIMIT {head}
    ) AS ready_{level}
    WHERE attempts < max_attempts AND {lease_is_free}
    UNION ALL
    SELECT since FROM (
        SELECT due_at AS since, attempts, max_attempts, lease_expires_at
        FROM {events}
        WHERE due_at IS NOT NULL AND priority = {level}
        AND due_at <= (SELECT now FROM clock)
        ORDER BY due_at, id
        LIMIT {head}
    ) AS waiting_{level}
    WHERE attempts < max_attempts AND {lease_is_free}";

pub(super) fn template() -> String {
    let heads = Priority::DESCENDING
        .map(|priority| HEADS.replace("{level}", &priority.level().to_string()))
        .join(" UNION ALL ");
    STATS
        .replace("{heads}", &heads)
        .replace("{head}", &HEAD.to_string())
        .replace("{pages}", &PAGES.to_string())
        .replace("{lease_is_free}", LEASE_IS_FREE)
}

pub(super) async fn stats(store: &PgStore) -> Result<StoreStats, StoreError> {
    let rows = store.ask(DOING, Query::new(&store.sql().stats)).await?;
    read(&rows).map_err(|error| failed(DOING, error))
}

fn read(rows: &[PgRow]) -> Result<StoreStats, sqlx::Error> {
    let mut stats = StoreStats {
        exact: true,
        ..StoreStats::default()
    };
    let mut events: BTreeMap<String, EventCounts> = BTreeMap::new();
    for row in rows {
        let oldest: Option<i64> = row.try_get(0)?;
        stats.oldest_due =
            oldest.map(|micros| Duration::from_micros(u64::try_from(micros).unwrap_or(0)));
        let (hot, dead): (f32, f32) = (row.try_get(1)?, row.try_get(2)?);
        stats.exact = hot >= 100.0 && dead >= 100.0;
        let Some(name) = row.try_get::<Option<String>, _>(3)? else {
            continue;
        };
        let kind: String = row.try_get(4)?;
        let share = if kind == "dead" { dead } else { hot };
        let all = extrapolated(row.try_get(5)?, share);
        add(events.entry(name).or_default(), &kind, all);
    }
    stats.events = events;
    Ok(stats)
}

fn add(counts: &mut EventCounts, kind: &str, rows: u64) {
    let count = match kind {
        "in_progress" => &mut counts.in_progress,
        "retrying" => &mut counts.retrying,
        "waiting" => &mut counts.waiting,
        "exhausted" => &mut counts.exhausted,
        "dead" => &mut counts.dead,
        _ => &mut counts.due,
    };
    *count += rows;
}

/// How many rows there are in all, if `rows` were found in `share` percent of the pages.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "an estimate, of a count that no table reaches"
)]
fn extrapolated(rows: i64, share: f32) -> u64 {
    (rows as f64 * 100.0 / f64::from(share)).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_give_the_count_itself() {
        assert_eq!(extrapolated(0, 100.0), 0);
        assert_eq!(extrapolated(123_456, 100.0), 123_456);
        assert_eq!(extrapolated(7, 25.0), 28);
    }
}
