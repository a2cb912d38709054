//! Locks that a transaction of the caller takes.

use outbox_core::lock::LockId;
use outbox_core::store::StoreError;
use sqlx::PgConnection;

use super::PgStore;
use super::query::Query;
use super::sqlstate::failed;

/// Takes the lock `$2` of the namespace `$1`, and waits for whoever has it.
///
/// - `xact`: it ends with the transaction, also behind a pooler.
/// - The form with two arguments has a key space of its own, in which no single-argument lock of
///   the application can be.
/// - `pg_catalog`, because the caller's `search_path` is not ours.
pub(super) const LOCK_ENTITY: &str = "SELECT pg_catalog.pg_advisory_xact_lock($1, $2)";

pub(super) async fn lock_entity(
    store: &PgStore,
    connection: &mut PgConnection,
    namespace: i32,
    id: LockId,
) -> Result<(), StoreError> {
    let query = Query::new(&store.sql().lock_entity)
        .bind(namespace)
        .bind(id.get());
    let locked = query.fetch(connection, store.keeps_statements()).await;
    locked.map_err(|error| failed("lock an entity", error))?;
    Ok(())
}
