//! Which connections are used, and for how long.

use std::time::Duration;

use outbox_core::{HandlerError, Outbox};
use outbox_sqlx::PgStore;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::mpsc;

use crate::events::{Step, Ticked, publish_for_relays, scripted, settled};
use crate::support::{PgDb, eventually, within};

const LIMIT: Duration = Duration::from_secs(60);

/// P10: while a handler runs, nothing of ours is in a transaction or holds a lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p10_no_connection_is_held_while_a_handler_runs() {
    let db = PgDb::new().await;
    let (handler, mut runs) = scripted(|_| Step::Hang);
    let outbox = Outbox::builder(PgStore::new(db.pool()))
        .on(handler)
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    within(LIMIT, runs.recv()).await.unwrap();

    // The check at the start, and the chunks of a pass, are transactions that end.
    let pool = db.pool();
    eventually(LIMIT, || async {
        let in_a_transaction: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
             AND state LIKE 'idle in transaction%'",
        )
        .fetch_one(&pool)
        .await
        .unwrap();
        in_a_transaction == 0
    })
    .await;
    let mut session = db.session().await;
    // The row can be locked by anybody, so nobody has it locked.
    sqlx::query("SELECT id FROM outbox.outbox_events FOR UPDATE NOWAIT")
        .fetch_all(&mut session)
        .await
        .unwrap();
}

/// Publishers and handlers that use up the application's pool neither wait for themselves nor
/// stop the relay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p2_forty_publishers_on_a_pool_of_four_do_not_wait_for_themselves() {
    let db = PgDb::new().await;
    let pool = PgPoolOptions::new()
        .max_connections(4)
        .acquire_timeout(Duration::from_secs(20))
        .connect_lazy_with(db.options());
    let (send, mut handled) = mpsc::unbounded_channel();
    let of_the_handler = pool.clone();
    let outbox = Outbox::builder(PgStore::new(pool))
        .on(move |event: Ticked| {
            let (pool, send) = (of_the_handler.clone(), send.clone());
            async move {
                sqlx::query("SELECT 1").execute(&pool).await?;
                let _ = send.send(event.n);
                Ok::<_, HandlerError>(())
            }
        })
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let mut publishing = Vec::new();
    for n in 0..40 {
        let outbox = outbox.clone();
        publishing.push(tokio::spawn(async move {
            let mut tx = outbox.begin().await.unwrap();
            sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
            tx.publish(&Ticked { n }).await.unwrap();
            tx.commit().await.unwrap();
        }));
    }
    within(LIMIT, async {
        for publishing in publishing {
            publishing.await.unwrap();
        }
        for _ in 0..40 {
            handled.recv().await.unwrap();
        }
    })
    .await;
    assert_eq!(outbox.counters().store_errors, 0);
}

/// A transaction that holds every connection of the application does not keep the relay from
/// working.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_relay_has_connections_of_its_own() {
    let db = PgDb::new().await;
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .connect_lazy_with(db.options());
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(PgStore::new(pool.clone()))
        .on(handler)
        .build()
        .unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let all_of_them = pool.acquire().await.unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    within(LIMIT, runs.recv()).await.unwrap();
    drop(all_of_them);
}

/// P18: an operator locks a row and leaves. Everybody else's outcomes are stored meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p18_an_operators_lock_on_one_row_stops_nobody_else() {
    let db = PgDb::new().await;
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_millis(200)));
    let (builder, mut outcomes) = settled(Outbox::builder(PgStore::new(db.pool())).on(handler));
    let outbox = builder.build().unwrap();
    let mut ids = Vec::new();
    for n in 0..20 {
        ids.push(publish_for_relays(&outbox, &Ticked { n }).await);
    }
    let _relay = outbox.relay().concurrency(20).start().await.unwrap();
    for _ in 0..20 {
        within(LIMIT, runs.recv()).await.unwrap();
    }
    let pool = db.pool();
    let mut operator = pool.begin().await.unwrap();
    sqlx::query("SELECT id FROM outbox.outbox_events WHERE id = $1 FOR UPDATE")
        .bind(ids[7].row())
        .fetch_one(&mut *operator)
        .await
        .unwrap();
    for _ in 0..19 {
        let outcome = within(LIMIT, outcomes.recv()).await.unwrap();
        assert_ne!(outcome.event_id, ids[7]);
    }
    operator.rollback().await.unwrap();
    let last = within(LIMIT, outcomes.recv()).await.unwrap();
    assert_eq!((last.event_id, last.attempt), (ids[7], 1));
}

/// A commit wakes the relays of other processes, off the publisher's path.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_wakes_the_relay_of_another_process() {
    let db = PgDb::new().await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let relaying = Outbox::builder(PgStore::new(db.pool()))
        .on(handler)
        .build()
        .unwrap();
    let _relay = relaying
        .relay()
        .poll_interval(Duration::from_secs(3_600))
        .start()
        .await
        .unwrap();
    let pool = db.pool();
    eventually(LIMIT, || async {
        let listening = "SELECT EXISTS (SELECT FROM pg_stat_activity \
             WHERE datname = current_database() AND query LIKE 'LISTEN %')";
        sqlx::query_scalar(listening)
            .fetch_one(&pool)
            .await
            .unwrap()
    })
    .await;

    let publishing = Outbox::builder(PgStore::new(db.pool())).build().unwrap();
    for n in 0..3 {
        let mut tx = publishing.begin().await.unwrap();
        tx.publish(&Ticked { n }).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(within(LIMIT, runs.recv()).await.unwrap().n, n);
    }
}
