//! Processes on one PostgreSQL that are killed with `kill -9` at any moment.
//!
//! A run is a row in `runs`, which the handler writes on a connection of its own. What was
//! committed is what is in `orders`: whether the publisher lived to say so or not.

use std::time::{Duration, Instant};

use serde::Deserialize;
use sqlx::PgPool;
use tokio::process::Command;

use crate::support::{Child, PgDb, eventually};

const LIMIT: Duration = Duration::from_secs(90);

async fn database() -> PgDb {
    let db = PgDb::new().await;
    for table in [
        "CREATE TABLE orders (id bigint PRIMARY KEY, paid boolean NOT NULL)",
        "CREATE TABLE runs (number bigint, event text, attempt bigint, instance text)",
    ] {
        sqlx::query(table).execute(&db.pool()).await.unwrap();
    }
    db
}

fn node(db: &PgDb, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_node"));
    command
        .arg(arguments[0])
        .arg(db.url())
        .args(&arguments[1..]);
    Child::spawn(&mut command)
}

#[derive(Deserialize)]
struct Committed {
    committed: i64,
}

async fn count(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

/// The orders that nobody has handled, and the handled ones that do not exist.
const DIFFERENCE: &str = "SELECT count(*) FROM (SELECT id FROM orders) o \
     FULL JOIN (SELECT DISTINCT number FROM runs) r ON o.id = r.number \
     WHERE o.id IS NULL OR r.number IS NULL";

const UNSETTLED: &str = "SELECT count(*) FROM outbox.outbox_events";

/// P1, P4, P6, P7. Two relays and a publisher with inline dispatch; each is killed again and again
/// and a new one started in its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p1_killed_relays_and_publishers_deliver_exactly_the_committed_set() {
    let db = database().await;
    let pool = db.pool();
    let mut relays = [
        node(&db, &["relay", "relay-0"]),
        node(&db, &["relay", "relay-1"]),
    ];
    for relay in &mut relays {
        relay.event::<String>(LIMIT).await;
    }
    let mut next_order = 0;
    let began = Instant::now();
    let mut kills = 0;
    while kills < 12 {
        let mut publisher = node(&db, &["publish", "publisher", &next_order.to_string()]);
        // Killed after a number of commits that is different every time.
        let commits = 20 + (kills * 37) % 90;
        let mut last = next_order;
        for _ in 0..commits {
            last = publisher.event::<Committed>(LIMIT).await.committed;
        }
        let victim = &mut relays[kills % 2];
        victim.kill_9().await;
        publisher.kill_9().await;
        // It may have committed some more before it was killed.
        next_order = last + 1_000;
        *victim = node(
            &db,
            &["relay", if kills % 2 == 0 { "relay-0" } else { "relay-1" }],
        );
        kills += 1;
    }
    eventually(LIMIT, || async { count(&pool, UNSETTLED).await == 0 }).await;

    assert_eq!(
        count(&pool, DIFFERENCE).await,
        0,
        "the delivered set is the committed set"
    );
    let orders = count(&pool, "SELECT count(*) FROM orders").await;
    assert!(orders >= 500, "{orders}");
    let identities = "SELECT count(DISTINCT event) FROM runs";
    assert_eq!(
        count(&pool, identities).await,
        orders,
        "one id per event, over all its runs"
    );
    // A run more than once needs a process that died holding it; each held at most a few.
    let again = "SELECT count(*) FROM runs WHERE attempt > 1";
    let repeated = count(&pool, again).await;
    assert!(repeated <= 12 * 2 * 40, "{repeated} repeated runs");
    let dead = "SELECT count(*) FROM outbox.outbox_events_dead";
    assert_eq!(count(&pool, dead).await, 0);
    println!(
        "{orders} orders, {repeated} runs repeated, {:?}",
        began.elapsed()
    );

    for relay in &mut relays {
        relay.close_stdin();
        assert!(relay.wait(LIMIT).await.success(), "{relay:?}");
    }
}

/// The publisher dies right after its COMMIT returned, with nobody else to dispatch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_publisher_died_after_the_commit_is_taken_over() {
    let db = database().await;
    let pool = db.pool();
    for round in 0..5_i64 {
        let from = (round * 1_000).to_string();
        let mut publisher = node(&db, &["publish", "publisher", &from]);
        publisher.event::<Committed>(LIMIT).await;
        publisher.kill_9().await;
    }
    let mut relay = node(&db, &["relay", "relay"]);
    eventually(LIMIT, || async { count(&pool, UNSETTLED).await == 0 }).await;
    assert_eq!(count(&pool, DIFFERENCE).await, 0);
    relay.close_stdin();
    assert!(relay.wait(LIMIT).await.success());
}

/// A process that is frozen for longer than its lease wakes up and finds that it has lost it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_relay_loses_its_leases_and_changes_nothing_when_it_wakes_up() {
    let db = database().await;
    let pool = db.pool();
    let mut frozen = node(&db, &["relay", "frozen"]);
    frozen.event::<String>(LIMIT).await;
    // Its handlers wait for this lock, and so are in the middle of a run when it is frozen.
    let mut lock = pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE runs IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *lock)
        .await
        .unwrap();
    let mut publisher = node(&db, &["publish", "publisher", "0"]);
    for _ in 0..10 {
        publisher.event::<Committed>(LIMIT).await;
    }
    publisher.kill_9().await;
    eventually(LIMIT, || async {
        let held = "SELECT count(*) FROM outbox.outbox_events WHERE claimed_by = 'frozen'";
        count(&pool, held).await > 0
    })
    .await;
    frozen.freeze();
    lock.rollback().await.unwrap();

    let mut other = node(&db, &["relay", "other"]);
    eventually(LIMIT, || async { count(&pool, UNSETTLED).await == 0 }).await;
    let settled = count(&pool, "SELECT count(*) FROM outbox.outbox_events_history").await;
    frozen.thaw();
    frozen.close_stdin();
    assert!(frozen.wait(LIMIT).await.success(), "{frozen:?}");

    assert_eq!(count(&pool, DIFFERENCE).await, 0);
    let by_frozen = "SELECT count(*) FROM outbox.outbox_events_history WHERE claimed_by = 'frozen'";
    assert_eq!(count(&pool, by_frozen).await, 0);
    let after = count(&pool, "SELECT count(*) FROM outbox.outbox_events_history").await;
    assert_eq!(after, settled);
    other.close_stdin();
    assert!(other.wait(LIMIT).await.success());
}

/// F19, F21: one of twenty-one events aborts its process, and a supervisor starts that again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_aborts_its_process_is_the_only_one_that_dies() {
    let db = database().await;
    let pool = db.pool();
    let insert = "INSERT INTO outbox.outbox_events
             (name, version, payload, priority, max_attempts, retention)
         SELECT 'order.placed', 1, json_build_object('order', n), 1, 3, interval '1 day'
         FROM generate_series(0, 20) AS n";
    sqlx::query(insert).execute(&pool).await.unwrap();
    let mut aborted = 0;
    loop {
        let mut relay = node(&db, &["poison", &format!("life-{aborted}")]);
        tokio::select! {
            status = relay.wait(LIMIT) => {
                assert!(!status.success(), "{relay:?}");
                aborted += 1;
                assert!(aborted <= 3, "an attempt has aborted two processes");
            }
            () = eventually(LIMIT, || async { count(&pool, UNSETTLED).await == 0 }) => {
                relay.close_stdin();
                assert!(relay.wait(LIMIT).await.success(), "{relay:?}");
                break;
            }
        }
    }
    assert_eq!(aborted, 3);
    let done = "SELECT count(*) FROM outbox.outbox_events_history WHERE state = 'processed'";
    assert_eq!(count(&pool, done).await, 20);
    let dead = "SELECT count(*) FROM outbox.outbox_events_dead
         WHERE payload ->> 'order' = '0' AND dead_reason = 'lease_expired' AND attempts = 3";
    assert_eq!(count(&pool, dead).await, 1);
    let beside = "SELECT count(*) FROM runs WHERE number > 0 AND attempt = 2";
    assert!(count(&pool, beside).await > 0, "nothing ran beside it");
}
