//! Partitions of the history: made ahead, dropped when their day is past.

use std::time::Duration;

use outbox_core::store::{Pass, StoreError, Upkeep};
use sqlx::Row;

use super::PgStore;
use super::pass::Chunk;
use super::query::{Query, interval};
use super::sqlstate::failed;

const DOING: &str = "make or drop a partition";

/// One step of upkeep, for days up to `$1` from now. The schema's own function does it, with the
/// rights of whoever migrated: `migrations/0001.sql` says how.
pub(super) const UPKEEP: &str = "SELECT {upkeep}($1)";

/// As many steps as the days ahead of a new installation need, whose partitions nobody can be
/// using yet.
pub(super) const UPKEEP_AT_FIRST: &str = "
    SELECT pg_catalog.count(*)
    FROM pg_catalog.generate_series(0, 9)
    WHERE {upkeep}(interval '9 days')
";

pub(super) async fn upkeep(
    store: &PgStore,
    pass: Pass,
    ahead: Duration,
) -> Result<Option<Upkeep>, StoreError> {
    let Some(mut chunk) = Chunk::begin(store, pass, DOING).await? else {
        return Ok(None);
    };
    let step = Query::new(&store.sql().upkeep).bind(interval(ahead));
    let rows = chunk.ask(step).await?;
    chunk.commit().await?;
    let changed = match rows.first() {
        Some(row) => row.try_get(0).map_err(|error| failed(DOING, error))?,
        None => false,
    };
    Ok(Some(if changed {
        Upkeep::Changed
    } else {
        Upkeep::Done
    }))
}
