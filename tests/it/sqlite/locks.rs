//! The write lock of the file, locks of entities, and exclusive locks.

use outbox_core::lock::LockId;
use outbox_core::store::ExclusiveLock;
use outbox_sqlx::sqlite::SqliteExclusive;

use super::*;

#[tokio::test]
async fn a_deferred_transaction_that_read_too_early_is_told_to_run_again() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let mut deferred = db.pool().begin().await.unwrap();
    sqlx::query("SELECT count(*) FROM outbox_events")
        .fetch_one(&mut *deferred)
        .await
        .unwrap();
    publish_one(&store, event()).await;

    let error = store.insert(&mut deferred, &[event()]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Conflict);
    assert!(error.is_transient());
}

#[tokio::test]
async fn the_write_lock_is_waited_for_until_the_deadline() {
    let db = SqliteDb::new().await;
    installed(&db).await;
    let impatient = SqliteStore::builder(db.pool())
        .statement_deadline(Duration::from_millis(50))
        .build()
        .unwrap();
    let writer = impatient.begin().await.unwrap();

    let error = impatient.claim(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert!(error.is_transient());

    impatient.rollback(writer).await.unwrap();
    let patient = SqliteStore::new(db.pool());
    publish_one(&patient, event()).await;
    assert_eq!(claim(&patient, 1).await.len(), 1);
}

#[tokio::test]
async fn a_lock_that_is_not_had_in_time_is_transient() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let options = db.pool().connect_options().as_ref().clone();
    let hasty = SqlitePool::connect_with(options.busy_timeout(Duration::ZERO))
        .await
        .unwrap();
    let writer = store.begin().await.unwrap();

    let error = SqliteStore::new(hasty).begin().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert!(error.is_transient());
    store.rollback(writer).await.unwrap();
}

// Locks of entities

/// The same file with connections of their own, as another process has it.
async fn elsewhere(db: &SqliteDb, busy_timeout: Duration) -> SqliteStore {
    let options = db.options().busy_timeout(busy_timeout);
    SqliteStore::new(SqlitePool::connect_with(options).await.unwrap())
}

#[tokio::test]
async fn locking_an_entity_makes_a_deferred_transaction_a_writing_one() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let impatient = elsewhere(&db, Duration::ZERO).await;
    let patient = elsewhere(&db, Duration::from_secs(5)).await;

    let mut deferred = db.pool().begin().await.unwrap();
    impatient
        .rollback(impatient.begin().await.unwrap())
        .await
        .expect("a deferred transaction has no lock yet");
    store
        .lock_entity(&mut deferred, 7, LockId::from("order 7"))
        .await
        .unwrap();

    let error = impatient.begin().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut, "{error}");
    let waiting = tokio::spawn(async move { publish_one(&patient, event()).await });
    let read = count(&db.pool(), "SELECT count(*) FROM outbox_events").await;
    assert_eq!(read, 0);
    assert!(!waiting.is_finished());
    deferred.commit().await.unwrap();
    let row = waiting.await.unwrap();
    assert_eq!(record(&store, row).await.state, EventState::Pending);
}

#[tokio::test]
async fn an_entity_that_is_locked_elsewhere_is_waited_for_as_long_as_the_busy_timeout() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let impatient = elsewhere(&db, Duration::ZERO).await;
    let mut first = store.begin().await.unwrap();
    store
        .lock_entity(&mut first, 7, LockId::from(1))
        .await
        .unwrap();

    let mut deferred = impatient.pool().begin().await.unwrap();
    // Another entity, but the same lock.
    let error = impatient
        .lock_entity(&mut deferred, 8, LockId::from(2))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut, "{error}");
    store.commit(first).await.unwrap();
    impatient
        .lock_entity(&mut deferred, 8, LockId::from(2))
        .await
        .unwrap();
    deferred.commit().await.unwrap();
}

// Exclusive locks

async fn take(store: &SqliteStore, instance: &str) -> Option<SqliteExclusive> {
    store.try_exclusive("report", instance).await.unwrap()
}

/// Moves the end of the lock, as time does.
async fn end_lease(db: &SqliteDb) {
    let ended = execute(&db.pool(), "UPDATE outbox_events_locks SET expires_at = 1").await;
    assert_eq!(ended, 1);
}

async fn holders(db: &SqliteDb) -> Vec<(String, String)> {
    sqlx::query_as("SELECT name, instance FROM outbox_events_locks ORDER BY name")
        .fetch_all(&db.pool())
        .await
        .unwrap()
}

/// The order of events:
///
/// 1. A takes the lock, and is frozen.
/// 2. Its lease ends. B, in another process, takes the lock.
/// 3. A wakes up, asks whether it still has the lock, and releases it.
#[tokio::test]
async fn a_stale_holder_knows_it_and_frees_nothing() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let other = elsewhere(&db, Duration::from_secs(5)).await;

    let mut a = take(&store, "a").await.unwrap();
    assert!(take(&other, "b").await.is_none());
    end_lease(&db).await;
    let mut b = take(&other, "b").await.unwrap();

    assert!(!a.keep().await.unwrap());
    a.release().await.unwrap();
    assert!(b.keep().await.unwrap());
    assert!(take(&store, "a").await.is_none());
    assert_eq!(holders(&db).await, [("report".to_owned(), "b".to_owned())]);
    b.release().await.unwrap();
    assert_eq!(holders(&db).await, []);
}

#[tokio::test]
async fn of_many_processes_one_takes_over_a_lock_that_ended() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    drop(take(&store, "dead").await.unwrap());
    end_lease(&db).await;
    let mut takers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = elsewhere(&db, Duration::from_secs(5)).await;
        takers.spawn(async move { take(&store, "taker").await });
    }
    let taken = takers.join_all().await.into_iter().flatten().count();
    assert_eq!(taken, 1);
}

#[tokio::test]
async fn a_lock_that_ended_is_kept_if_nobody_had_it_meanwhile() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let mut held = take(&store, "a").await.unwrap();
    end_lease(&db).await;
    assert!(held.keep().await.unwrap());
    assert!(take(&store, "b").await.is_none());
}

#[tokio::test]
async fn a_busy_database_does_not_say_that_a_lock_is_lost() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let impatient = elsewhere(&db, Duration::ZERO).await;
    let mut held = take(&impatient, "a").await.unwrap();
    let writer = store.begin().await.unwrap();
    let error = held.keep().await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    let error = impatient.try_exclusive("other", "a").await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    store.rollback(writer).await.unwrap();
    assert!(held.keep().await.unwrap());
}

/// The clock was set back by days: nobody would get the lock until it is there again.
#[tokio::test]
async fn a_lock_from_the_future_lasts_no_longer_than_any() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    drop(take(&store, "a").await.unwrap());
    let moved = "UPDATE outbox_events_locks SET expires_at = expires_at + 90000000000";
    execute(&db.pool(), moved).await;
    assert!(take(&store, "b").await.is_none());
    let moved = "UPDATE outbox_events_locks SET expires_at = expires_at - 30000000";
    execute(&db.pool(), moved).await;
    assert!(take(&store, "b").await.is_some());
}
