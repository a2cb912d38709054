//! Locks for the application: exclusive ones on a connection of their own, and those of an entity.

use outbox_core::lock::LockId;
use outbox_core::store::ExclusiveLock;
use tokio::process::Command;

use super::*;
use crate::support::{Child, Proxy};

/// The sessions that have an exclusive lock.
const HOLDERS: &str = "SELECT count(*) FROM pg_locks JOIN pg_database AS db ON db.oid = database
     WHERE datname = current_database() AND locktype = 'advisory' AND objsubid = 2
     AND classid::bigint >> 16 = x'6f76'::bigint";

async fn until_free(pool: &PgPool) {
    eventually(LIMIT, async || number(pool, HOLDERS).await == 0).await;
}

#[tokio::test]
async fn a_lock_is_lost_with_its_session() {
    let (_db, store) = installed().await;
    let mut held = store.try_exclusive("report", "a").await.unwrap().unwrap();
    run(
        store.pool(),
        "SELECT pg_terminate_backend(pid) FROM pg_locks
         WHERE locktype = 'advisory' AND objsubid = 2
         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    .await;
    until_free(store.pool()).await;
    let again = store.try_exclusive("report", "b").await.unwrap();
    assert!(!held.keep().await.unwrap());
    assert!(!held.keep().await.unwrap());
    // Releasing what is lost frees nobody else's.
    held.release().await.unwrap();
    assert!(again.expect("it is free").keep().await.unwrap());
}

#[tokio::test]
async fn a_lock_is_free_when_its_process_was_killed() {
    let (db, store) = installed().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_node"));
    let mut node = Child::spawn(command.args(["lock", &db.url(), "report"]));
    node.event::<String>(LIMIT).await;
    assert!(store.try_exclusive("report", "b").await.unwrap().is_none());
    node.kill_9().await;
    until_free(store.pool()).await;
    assert!(store.try_exclusive("report", "b").await.unwrap().is_some());
}

/// The session has no transaction open, in which vacuum could do nothing, and says who it is.
#[tokio::test]
async fn a_lock_costs_an_idle_session() {
    let (_db, store) = installed().await;
    let mut held = store
        .try_exclusive("report", "pod-7")
        .await
        .unwrap()
        .unwrap();
    assert!(held.keep().await.unwrap());
    let session = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
         AND application_name = 'outbox pod-7' AND state = 'idle' AND backend_xmin IS NULL";
    assert_eq!(number(store.pool(), session).await, 1);
    held.release().await.unwrap();
    let session = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
         AND application_name = 'outbox pod-7'";
    eventually(LIMIT, async || number(store.pool(), session).await == 0).await;
}

/// Whatever keeps the server from answering in time, or the caller from waiting for it: the lock is
/// given up, and no late answer is taken for a new one.
#[tokio::test]
async fn a_call_without_an_answer_gives_the_lock_up() {
    let (db, store) = installed().await;
    let proxy = Proxy::to(&db).await;
    let distant = PgStore::builder(PgPoolOptions::new().connect_lazy_with(proxy.options()))
        .statement_deadline(Duration::from_millis(500))
        .build()
        .unwrap();
    for dropped in [false, true] {
        let mut held = distant.try_exclusive("report", "a").await.unwrap().unwrap();
        proxy.black_hole();
        if dropped {
            tokio::select! {
                biased;
                _ = held.keep() => panic!("nothing answers"),
                () = std::future::ready(()) => {}
            }
        } else {
            assert!(!held.keep().await.unwrap());
        }
        proxy.pass();
        assert!(!held.keep().await.unwrap());
        until_free(store.pool()).await;
    }
}

/// Behind a pooler a session is nobody's: the lock is a transaction's.
#[tokio::test]
async fn behind_a_pooler_a_lock_is_a_transaction() {
    let (db, store) = installed().await;
    run(
        store.pool(),
        "DO $$ BEGIN EXECUTE format(
             'ALTER DATABASE %I SET idle_in_transaction_session_timeout = 100',
             current_database()); END $$",
    )
    .await;
    let pooled = PgStore::builder(db.pool())
        .behind_transaction_pooler()
        .build()
        .unwrap();
    let mut held = pooled.try_exclusive("report", "a").await.unwrap().unwrap();
    assert!(held.keep().await.unwrap());
    let session = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
         AND state = 'idle in transaction' AND backend_xmin IS NULL AND backend_xid IS NULL
         AND clock_timestamp() > state_change + interval '300 ms'";
    eventually(LIMIT, async || number(store.pool(), session).await == 1).await;
    assert!(held.keep().await.unwrap());
    // Both kinds know of each other.
    assert!(store.try_exclusive("report", "b").await.unwrap().is_none());
    held.release().await.unwrap();
    let again = store.try_exclusive("report", "b").await.unwrap();
    let none = pooled.try_exclusive("report", "a").await.unwrap();
    assert!(none.is_none());
    again.expect("it is free").release().await.unwrap();
}

#[tokio::test]
async fn an_entity_is_no_lock_of_one_number() {
    let (db, store) = installed().await;
    let mut other = db.session().await;
    other
        .execute("SELECT pg_advisory_lock((7::bigint << 32) | 5), pg_advisory_lock(5)")
        .await
        .unwrap();
    let mut tx = store.begin().await.unwrap();
    tx.execute("SET LOCAL lock_timeout = '1s'; SET LOCAL search_path = ''")
        .await
        .unwrap();
    store
        .lock_entity(&mut tx, 7, LockId::from(5))
        .await
        .unwrap();

    let mut second = store.begin().await.unwrap();
    second
        .execute("SET LOCAL lock_timeout = '20ms'")
        .await
        .unwrap();
    let locked = store.lock_entity(&mut second, 7, LockId::from(5)).await;
    assert_eq!(locked.unwrap_err().kind(), StoreErrorKind::Locked);
    store.commit(tx).await.unwrap();
}
