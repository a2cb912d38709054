//! Faults of the network, the server and the pool, after which everything is still handled once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use outbox_core::{HandlerError, Outbox};
use outbox_sqlx::PgStore;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};

use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted};
use crate::support::{PgDb, Proxy, eventually, within};

const LIMIT: Duration = Duration::from_secs(60);

fn store(options: PgConnectOptions, deadline: Duration) -> PgStore {
    let pool = PgPoolOptions::new().max_connections(5);
    PgStore::builder(pool.connect_lazy_with(options))
        .statement_deadline(deadline)
        .build()
        .unwrap()
}

async fn execute(session: &mut PgConnection, sql: String) {
    sqlx::query(AssertSqlSafe(sql))
        .execute(session)
        .await
        .unwrap();
}

async fn until_nothing_is_unsettled(pool: &PgPool) {
    eventually(LIMIT, || async {
        let unsettled = "SELECT count(*) FROM outbox.outbox_events";
        let unsettled: i64 = sqlx::query_scalar(unsettled).fetch_one(pool).await.unwrap();
        unsettled == 0
    })
    .await;
}

/// How many events there are of each status.
async fn summary(pool: &PgPool) -> Vec<(String, i64)> {
    let summary = "SELECT status, count(*) FROM outbox.outbox_events_all GROUP BY 1 ORDER BY 1";
    sqlx::query_as(summary).fetch_all(pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_commits_whose_answers_are_lost_are_each_handled_once_and_charged_once() {
    let db = PgDb::new().await;
    let proxy = Proxy::to(&db).await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(store(proxy.options(), LIMIT))
        .on(handler)
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    for n in 0..5 {
        let mut tx = outbox.begin().await.unwrap();
        tx.publish(&Ticked { n }).await.unwrap();
        proxy.lose_commit_answer();
        tx.commit().await.unwrap_err();
    }

    let mut handled = Vec::new();
    for _ in 0..5 {
        let run = within(LIMIT, runs.recv()).await.unwrap();
        assert_eq!(run.delivery.attempt().get(), 1);
        handled.push(run.n);
    }
    handled.sort_unstable();
    assert_eq!(handled, [0, 1, 2, 3, 4]);
    until_nothing_is_unsettled(&db.pool()).await;
    assert!(runs.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_every_session_is_ended_twenty_times_and_every_committed_event_is_processed() {
    let db = PgDb::new().await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(store(db.options(), Duration::from_secs(2)))
        .lease(Duration::from_secs(2))
        .handler_timeout(Duration::from_secs(2))
        .on(handler)
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let mut admin = db.admin().await;
    let mut committed = 0;
    for n in 0..20 {
        let publish = async {
            let mut tx = outbox.begin().await.ok()?;
            tx.publish(&Ticked { n }).await.ok()?;
            tx.commit().await.ok()
        };
        committed += usize::from(publish.await.is_some());
        let end = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'",
            db.name()
        );
        execute(&mut admin, end).await;
    }

    let pool = PgPoolOptions::new().connect_lazy_with(db.options());
    until_nothing_is_unsettled(&pool).await;
    let all = summary(&pool).await;
    assert!(
        all.iter().all(|(status, _)| status == "processed"),
        "{all:?}"
    );
    let mut handled = BTreeSet::new();
    while let Ok(run) = runs.try_recv() {
        handled.insert(run.n);
    }
    assert!(handled.len() >= committed, "{handled:?}");

    publish_for_relays(&outbox, &Ticked { n: 99 }).await;
    assert_eq!(within(LIMIT, runs.recv()).await.unwrap().n, 99);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_network_that_swallows_everything_in_the_middle_costs_no_event() {
    let db = PgDb::new().await;
    let proxy = Proxy::to(&db).await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let here = Outbox::builder(store(proxy.options(), Duration::from_millis(300)))
        .lease(Duration::from_secs(1))
        .handler_timeout(Duration::from_secs(1))
        .on(handler)
        .build()
        .unwrap();
    let _relay = here.relay().start().await.unwrap();
    let direct = Outbox::builder(store(db.options(), LIMIT)).build().unwrap();
    for round in 0..4 {
        let errors = here.counters().store_errors;
        for n in 0..20 {
            let event = Ticked { n: round * 20 + n };
            publish_for_relays(&direct, &event).await;
        }
        proxy.black_hole();
        eventually(LIMIT, || async { here.counters().store_errors > errors }).await;
        if round % 2 == 0 {
            proxy.cut();
        }
        proxy.pass();
    }

    until_nothing_is_unsettled(&db.pool()).await;
    assert_eq!(summary(&db.pool()).await, [("processed".to_owned(), 80)]);
    let mut handled = BTreeMap::new();
    while let Ok(run) = runs.try_recv() {
        *handled.entry(run.n).or_insert(0) += 1;
    }
    assert_eq!(handled.len(), 80);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_an_event_published_while_the_listener_reconnects_is_not_left_to_a_long_poll() {
    let db = PgDb::new().await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(store(db.options(), LIMIT))
        .on(handler)
        .build()
        .unwrap();
    let _relay = outbox
        .relay()
        .poll_interval(Duration::from_secs(600))
        .start()
        .await
        .unwrap();
    let elsewhere = Outbox::builder(store(db.options(), LIMIT)).build().unwrap();
    let mut admin = db.admin().await;
    for n in 0..10 {
        let end = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = '{}' AND query ILIKE 'LISTEN%'",
            db.name()
        );
        execute(&mut admin, end).await;
        let mut tx = elsewhere.begin().await.unwrap();
        tx.publish(&Ticked { n }).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(within(LIMIT, runs.recv()).await.unwrap().n, n);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_a_transaction_that_the_server_ended_while_idle_is_not_handled() {
    let db = PgDb::new().await;
    let limit = format!(
        r#"ALTER DATABASE "{}" SET idle_in_transaction_session_timeout = '50ms'"#,
        db.name()
    );
    execute(&mut db.admin().await, limit).await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(store(db.options(), LIMIT))
        .on(handler)
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    eventually(LIMIT, || async {
        let alive = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)";
        let alive = sqlx::query_scalar::<_, bool>(alive).bind(pid);
        !alive.fetch_one(&db.pool()).await.unwrap()
    })
    .await;
    tx.commit().await.unwrap_err();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 2 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(within(LIMIT, runs.recv()).await.unwrap().n, 2);
    assert!(runs.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p2_three_relays_and_four_publishers_get_along_where_serializable_is_the_default() {
    let db = PgDb::new().await;
    let stricter = format!(
        r#"ALTER DATABASE "{}" SET default_transaction_isolation = 'serializable'"#,
        db.name()
    );
    execute(&mut db.admin().await, stricter).await;
    let mut relays = Vec::new();
    for _ in 0..3 {
        let handler =
            |event: OrderPaid| async move { Ok::<_, HandlerError>(event.order.to_string()) };
        let outbox = Outbox::builder(store(db.options(), LIMIT))
            .on(handler)
            .build()
            .unwrap();
        let relay = outbox.relay().start().await.unwrap();
        relays.push((outbox, relay));
    }
    let mut publishers = Vec::new();
    for publisher in 0..4 {
        let outbox = relays[publisher % 3].0.clone();
        let pool = db.pool();
        publishers.push(tokio::spawn(async move {
            let first = (publisher as u64 % 2) * 1_000;
            for order in first..first + 50 {
                // Two publish each order: the caller's transaction is run again until it commits.
                loop {
                    let mut tx = pool.begin().await.unwrap();
                    match outbox.publish(&mut tx, &OrderPaid { order }).await {
                        Ok(_) => match tx.commit().await {
                            Ok(()) => break,
                            Err(error) => {
                                let code = error.as_database_error().and_then(|e| e.code());
                                assert_eq!(code.as_deref(), Some("40001"));
                            }
                        },
                        Err(error) => assert!(error.is_transient(), "{error:?}"),
                    }
                }
            }
        }));
    }
    for publisher in publishers {
        within(LIMIT, publisher).await.unwrap();
    }

    until_nothing_is_unsettled(&db.pool()).await;
    assert_eq!(summary(&db.pool()).await, [("processed".to_owned(), 100)]);
    let processed = relays.iter().map(|(outbox, _)| outbox.counters().processed);
    assert_eq!(processed.sum::<u64>(), 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p2_forty_publishers_and_their_handlers_share_four_connections_without_waiting_in_a_ring() {
    let db = PgDb::new().await;
    let pool = PgPoolOptions::new()
        .max_connections(4)
        .connect_lazy_with(db.options());
    let handlers = pool.clone();
    let outbox = Outbox::builder(PgStore::new(pool))
        .on(move |event: OrderPaid| {
            let pool = handlers.clone();
            async move {
                sqlx::query("SELECT 1").execute(&pool).await?;
                Ok::<_, HandlerError>(event.order.to_string())
            }
        })
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let publishers: Vec<_> = (0..40)
        .map(|publisher| {
            let outbox = outbox.clone();
            tokio::spawn(async move {
                for i in 0..10 {
                    let order = (publisher / 2) * 100 + i;
                    let mut tx = outbox.begin().await.unwrap();
                    tx.publish(&OrderPaid { order }).await.unwrap();
                    tx.commit().await.unwrap();
                }
            })
        })
        .collect();
    for publisher in publishers {
        within(LIMIT, publisher).await.unwrap();
    }
    until_nothing_is_unsettled(&db.pool()).await;
    assert_eq!(summary(&db.pool()).await, [("processed".to_owned(), 200)]);
}
