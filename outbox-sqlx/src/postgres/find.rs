//! Finding one event, wherever it is.

use outbox_core::store::{EventRecord, StoreError};

use super::PgStore;
use super::query::Query;
use super::row::{RECORD_COLUMNS, record};
use super::sqlstate::failed;

const DOING: &str = "find an event";

/// Reads the row `$1` from the view.
///
/// - One statement over every table, because a row can move between two.
const FIND: &str = "SELECT {record_columns} FROM {all} WHERE id = $1";

pub(super) fn find_template() -> String {
    FIND.replace("{record_columns}", RECORD_COLUMNS)
}

pub(super) async fn find(store: &PgStore, row: i64) -> Result<Option<EventRecord>, StoreError> {
    let installation = store.installation().await?;
    let query = Query::new(&store.sql().find).bind(row);
    let rows = store.ask(DOING, query).await?;
    rows.first()
        .map(|row| record(row, installation))
        .transpose()
        .map_err(|error| failed(DOING, error))
}
