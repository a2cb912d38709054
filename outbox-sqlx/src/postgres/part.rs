//! Parts of a caller's transaction: savepoints.

use outbox_core::store::{Part, StoreError, StoreErrorKind};
use sqlx::{Connection, Executor, PgConnection};

use super::sqlstate::failed;
use crate::part::{NeverDropped, Savepoint};

const DOING: &str = "set a savepoint";

/// Sets a savepoint. Dropping the future half way leaves one that nobody goes back to, which changes
/// nothing.
pub(super) async fn begin<'c>(
    connection: &'c mut PgConnection,
) -> Result<Box<dyn Part<PgConnection> + 'c>, StoreError> {
    if !connection.is_in_transaction() {
        // sqlx would begin one, and to keep the part would be to commit everything.
        let why = "the connection is in no transaction that sqlx has begun";
        return Err(StoreError::new(StoreErrorKind::Other, DOING).with_source(why));
    }
    // When a SAVEPOINT fails, sqlx rolls the whole transaction back and forgets that there was one:
    // what the caller sends next would be kept, one statement at a time. In a transaction that an
    // error has aborted it always fails, so such a one is found out first.
    let usable = (&mut *connection).execute("SELECT").await;
    usable.map_err(|error| failed(DOING, error))?;
    // Forgotten where it would be dropped, all that is left of it is a savepoint on the server.
    let savepoint = NeverDropped::new(connection.begin(), std::mem::forget).await;
    Ok(Box::new(Savepoint {
        transaction: savepoint.map_err(|error| failed(DOING, error))?,
        failed,
    }))
}
