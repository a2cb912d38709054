//! Pausing events and handlers.

use outbox_core::store::{Pause, PauseRef, StoreError};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::query::Query;
use super::row::time;
use super::sqlstate::failed;

const DOING: &str = "pause or resume";

/// Pauses the handler `$2` of the event `$1`, or all of it where that is empty.
///
/// - The first pause stays, with its time.
pub(super) const PAUSE: &str = "
    INSERT INTO {paused} (name, handler) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING name
";

pub(super) const RESUME: &str = "
    DELETE FROM {paused} WHERE name = $1 AND handler = $2 RETURNING name
";

pub(super) const PAUSED: &str = "
    SELECT name, nullif(handler, ''), (extract(epoch FROM since) * 1000000)::bigint
    FROM {paused}
    ORDER BY name, handler
";

pub(super) async fn set_paused(
    store: &PgStore,
    pause: &PauseRef,
    paused: bool,
) -> Result<bool, StoreError> {
    let sql = store.sql();
    let query = Query::new(if paused { &sql.pause } else { &sql.resume })
        .bind(&pause.name)
        .bind(pause.handler.as_deref().unwrap_or_default());
    Ok(!store.ask(DOING, query).await?.is_empty())
}

pub(super) async fn paused(store: &PgStore) -> Result<Vec<Pause>, StoreError> {
    let rows = store.ask(DOING, Query::new(&store.sql().paused)).await?;
    rows.iter()
        .map(pause)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))
}

fn pause(row: &PgRow) -> Result<Pause, sqlx::Error> {
    Ok(Pause {
        of: PauseRef {
            name: row.try_get(0)?,
            handler: row.try_get(1)?,
        },
        since: time(row.try_get(2)?),
    })
}
