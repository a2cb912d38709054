//! The runbook, `docs/operations.md`: its statements run, and what it quotes is in the code.
//!
//! A SQL block says in its first line for which database it is. Its statements must work on one that
//! has an event in each state, and find or change something there, unless that line says that no
//! rows are good news.

use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use outbox_core::lease::LeaseToken;
use outbox_core::store::{ClaimRequest, KnownEvent, LowWater};
use outbox_core::{
    Changed, DeadLetterFilter, HandlerError, Outbox, OutboxEvent, PublishOptions, Requeue,
    Snapshot, Store,
};
use outbox_sqlx::PgStore;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Executor};

use crate::both::{Database, LIMIT, Postgres, Sqlite};
use crate::events::{OrderPaid, Unhandled};
use crate::support::within;

const PAGE: &str = include_str!("../../docs/operations.md");

/// The instance that the page takes for one that is gone.
const GONE: &str = "host-7:4242";

struct Statement {
    sql: String,
    /// Whether it must find, or change, at least one row.
    has_rows: bool,
}

/// The statements of the page for `database`, in their order. Where the page means event 42, they
/// mean `id`.
fn statements(database: &str, id: i64) -> Vec<Statement> {
    let mut found = Vec::new();
    for block in PAGE.split("```sql\n").skip(1) {
        let (block, _) = block.split_once("\n```").expect("blocks are closed");
        let (first, rest) = block.split_once('\n').expect("a block has a first line");
        assert!(
            first.starts_with("-- PostgreSQL") || first.starts_with("-- SQLite"),
            "a block of SQL without its database: {first}"
        );
        if !first.starts_with(&format!("-- {database}")) {
            continue;
        }
        let has_rows = !first.contains("no rows if all is well");
        found.extend(rest.split_inclusive(";\n").map(|sql| Statement {
            sql: sql.replace("id = 42", &format!("id = {id}")),
            has_rows,
        }));
    }
    assert!(
        found.len() > 10,
        "{database} has {} statements",
        found.len()
    );
    found
}

/// A step of an account, which is always refused.
#[derive(serde::Deserialize, serde::Serialize)]
struct Booked;

impl OutboxEvent for Booked {
    type Output = ();
    const NAME: &'static str = "booked";

    fn ordering_key(&self) -> Option<String> {
        Some("account:1".to_owned())
    }
}

/// Events in every state there is, and a pause: one that nobody handles, one that waits, failed, processed and
/// discarded ones, one that [`GONE`] holds, a cancelled one, a dead letter that blocks
/// its ordering key, and a dead letter whose number is the answer.
async fn events_in_every_state<S: Store>(outbox: &Outbox<S>) -> i64 {
    let mut tx = outbox.begin().await.unwrap();
    let mut ids = Vec::new();
    for order in 0..4 {
        let published = tx.publish(&OrderPaid { order }).await.unwrap();
        ids.push(published.event_id());
    }
    tx.publish(&Unhandled).await.unwrap();
    tx.publish(&Booked).await.unwrap();
    let cancelled = tx.publish(&Unhandled).await.unwrap().event_id();
    tx.cancel(cancelled).await.unwrap();
    let delay = PublishOptions::new().delay(Duration::from_secs(3600));
    tx.publish_with(&OrderPaid { order: 4 }, &delay)
        .await
        .unwrap();
    tx.commit().await.unwrap().settled().await;
    outbox.pauses().pause(Unhandled::NAME).await.unwrap();
    let discarded = outbox.dead_letters().discard(ids[3]).await.unwrap();
    assert_eq!(discarded, Changed::Done);

    let store = outbox.store();
    let mut tx = store.begin().await.unwrap();
    outbox
        .publish(&mut tx, &OrderPaid { order: 5 })
        .await
        .unwrap();
    store.commit(tx).await.unwrap();
    let request = ClaimRequest {
        limit: 1.try_into().unwrap(),
        reserved: 0,
        lease: Duration::from_secs(300),
        token: LeaseToken::random(),
        instance: GONE,
        events: &[KnownEvent {
            name: "order.paid",
            handler: None,
            newest_version: NonZeroU32::MIN,
        }],
        low_water: LowWater::BEGINNING,
        freed: &[],
    };
    assert_eq!(store.claim(&request).await.unwrap().len(), 1);
    ids[2].row()
}

async fn database<D: Database>() -> (D, Outbox<D::Store>, i64) {
    let db = D::new().await;
    let outbox = db
        .outbox()
        .on(|paid: OrderPaid| async move {
            match paid.order {
                0 => Ok("R-0".to_owned()),
                1 => Err(HandlerError::retry("the gateway is away")),
                _ => Err(HandlerError::permanent("the card was closed")),
            }
        })
        .on(|_: Booked| async { Err::<(), _>(HandlerError::permanent("the ledger is closed")) })
        .build()
        .unwrap();
    let dead = events_in_every_state(&outbox).await;
    let states: Vec<String> = db.summary().await.into_iter().map(|(s, _)| s).collect();
    assert_eq!(
        states,
        [
            "cancelled",
            "dead_letter",
            "discarded",
            "failed",
            "in_progress",
            "pending",
            "processed"
        ]
    );
    (db, outbox, dead)
}

/// Runs each statement in a transaction of its own and undoes it, so that all meet the same events.
macro_rules! run_all {
    ($pool:expr, $begin:expr, $statements:expr) => {
        for Statement { sql, has_rows } in $statements {
            let mut tx = $pool.begin_with($begin).await.unwrap();
            let ran = sqlx::raw_sql(AssertSqlSafe(sql.clone()));
            let is_query = sql.contains("SELECT") && !sql.contains("GRANT");
            let (rows, what) = if is_query {
                let rows = tx.fetch_all(ran).await;
                (rows.map(|rows| rows.len() as u64), "found")
            } else {
                let done = tx.execute(ran).await;
                (done.map(|done| done.rows_affected()), "changed")
            };
            let rows = rows.unwrap_or_else(|error| panic!("{error}, in\n{sql}"));
            let is_grant = sql.contains("GRANT");
            assert!(
                rows > 0 || !has_rows || is_grant,
                "nothing was {what} by\n{sql}"
            );
            tx.rollback().await.unwrap();
        }
    };
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_statement_of_the_runbook_works_on_postgresql() {
    let test = async {
        let (db, _outbox, dead) = database::<Postgres>().await;
        // For the grants; undone with everything else.
        let begin =
            "BEGIN; DO $$ BEGIN CREATE ROLE relay; EXCEPTION WHEN duplicate_object THEN END $$;
            DO $$ BEGIN CREATE ROLE operator; EXCEPTION WHEN duplicate_object THEN END $$;
            DO $$ BEGIN CREATE ROLE reader; EXCEPTION WHEN duplicate_object THEN END $$";
        run_all!(db.0.pool(), begin, statements("PostgreSQL", dead));
    };
    within(LIMIT, test).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_statement_of_the_runbook_works_on_sqlite() {
    let test = async {
        let (db, _outbox, dead) = database::<Sqlite>().await;
        run_all!(db.0.pool(), "BEGIN IMMEDIATE", statements("SQLite", dead));
    };
    within(LIMIT, test).await;
}

/// The two writes by hand that the page allows do what it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_ended_by_hand_and_a_retry_brought_forward_are_due_at_once() {
    let test = async {
        let (db, outbox, _) = database::<Postgres>().await;
        let before = outbox.stats().await.unwrap().total();
        assert_eq!((before.due, before.retrying, before.in_progress), (1, 1, 1));
        for Statement { sql, .. } in statements("PostgreSQL", 42) {
            if sql.starts_with("UPDATE outbox.outbox_events ") {
                db.0.pool().execute(AssertSqlSafe(sql)).await.unwrap();
            }
        }
        let after = outbox.stats().await.unwrap().total();
        assert_eq!((after.due, after.retrying, after.in_progress), (3, 0, 0));
    };
    within(LIMIT, test).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rights_in_the_runbook_are_enough_for_an_operator_and_a_reader() {
    let test = async {
        let (db, _outbox, _) = database::<Postgres>().await;
        let unique = LeaseToken::random().as_uuid().simple().to_string();
        let named = |role: &str| format!("{role}_{unique}");
        let [relay, operator, reader] = ["relay", "operator", "reader"].map(named);
        let roles = format!("{relay}, {operator}, {reader}");
        let pool = db.0.pool();
        for role in [&relay, &operator, &reader] {
            pool.execute(AssertSqlSafe(format!("CREATE ROLE {role} LOGIN")))
                .await
                .unwrap();
        }
        for Statement { sql, .. } in statements("PostgreSQL", 42) {
            if sql.contains("GRANT") {
                let sql = ["relay", "operator", "reader"]
                    .iter()
                    .fold(sql, |sql, role| {
                        sql.replace(&format!("TO {role}"), &format!("TO {role}_{unique}"))
                            .replace(&format!(", {role};"), &format!(", {role}_{unique};"))
                    });
                pool.execute(AssertSqlSafe(sql)).await.unwrap();
            }
        }
        let as_role = |role: &str| {
            let options = db.0.options().username(role);
            let pool = PgPoolOptions::new().connect_lazy_with(options);
            Outbox::builder(PgStore::new(pool)).build().unwrap()
        };
        assert_eq!(as_role(&reader).stats().await.unwrap().total().dead, 2);

        let tool = as_role(&operator);
        let letters = tool.dead_letters();
        let all = DeadLetterFilter::all();
        let id = letters.list(&all, None, 1).await.unwrap().letters[0].id;
        assert!(letters.get(id).await.unwrap().is_some());
        let requeued = letters.requeue_all(&all, Requeue::at_once()).await;
        assert_eq!(requeued.unwrap(), 2);
        assert_eq!(letters.discard_all(&all).await.unwrap(), 0);
        assert_eq!(letters.purge(Duration::ZERO).await.unwrap(), 0);

        assert!(tool.pauses().resume(Unhandled::NAME).await.unwrap());
        assert!(tool.pauses().pause(Unhandled::NAME).await.unwrap());

        let gone = format!("DROP OWNED BY {roles}; DROP ROLE {roles}");
        pool.execute(AssertSqlSafe(gone)).await.unwrap();
    };
    within(LIMIT, test).await;
}

/// All sources of core, with the texts that go over several lines in one.
fn core() -> String {
    let mut text = String::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../outbox-core/src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                text.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    let lines = text.split("\\\n").map(str::trim_start);
    lines.collect()
}

#[test]
fn every_error_that_the_log_can_show_is_in_the_runbook() {
    let core = core();
    let errors: Vec<&str> = core
        .split("tracing::error!(")
        .skip(1)
        .filter_map(|rest| rest.split_once(");")?.0.rsplit('"').nth(1))
        .collect();
    assert!(errors.len() > 10, "{errors:?}");
    for error in errors {
        assert!(PAGE.contains(&format!("| `{error}` |")), "{error}");
    }
}

#[test]
fn every_log_line_that_the_runbook_quotes_is_in_the_code() {
    let core = core();
    let words: Vec<&str> = PAGE.split_whitespace().collect();
    let page = words.join(" ");
    // What stands between backticks and is several words long, without code in it.
    let quoted = page.split('`').skip(1).step_by(2).filter(|text| {
        text.split(' ').count() > 3 && !text.contains(['=', '(', '[', '\'', '<', ':', '|'])
    });
    for text in quoted {
        let known = text.split("..").all(|part| core.contains(part.trim()));
        assert!(known, "nothing in the code says `{text}`");
    }
}

#[test]
fn every_counter_is_in_the_runbook() {
    let counters = format!("{:?}", Snapshot::default());
    let (_, fields) = counters.split_once('{').unwrap();
    for field in fields.trim_end_matches([' ', '}']).split(',') {
        let (name, _) = field.trim().split_once(':').unwrap();
        assert!(PAGE.contains(&format!("`{name}`")), "{name}");
    }
}
