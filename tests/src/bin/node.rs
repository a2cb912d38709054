//! A process of the tests: publishes, relays, or both, until its standard input ends.
//!
//! ```text
//! node relay <url> <instance>            relays, and writes a row into `runs` for every run
//! node poison <url> <instance>           relays, and aborts in the middle of order 0
//! node publish <url> <instance> <from>   publishes order after order, inline dispatch on, and
//!                                        writes `{"committed": n}` after each commit
//! node lock <url> <name>                 takes an exclusive lock, writes `"had"`, and keeps it
//! ```
//!
//! It is meant to be killed at any moment. It ends by itself when its standard input does, so it
//! goes away with a test that was killed.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a program of the tests: lines are its answers, and a panic is its failure"
)]

use std::time::Duration;

use outbox_core::store::Store;
use outbox_core::{Delivery, Handler, HandlerError, Outbox, OutboxEvent};
use outbox_sqlx::PgStore;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::io::AsyncReadExt;

#[derive(Deserialize, Serialize)]
struct OrderPlaced {
    order: i64,
}

impl OutboxEvent for OrderPlaced {
    type Output = ();
    const NAME: &'static str = "order.placed";
    const MAX_ATTEMPTS: Option<std::num::NonZeroU32> = std::num::NonZeroU32::new(1_000);

    fn dedup_key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

/// Records each run where a test can count them: on a connection of its own, outside of whatever
/// the outbox does.
struct Recording {
    pool: PgPool,
    instance: String,
    /// Whether to abort the process in the middle of order 0, with others beside it.
    aborts: bool,
}

impl Handler<OrderPlaced> for Recording {
    async fn handle(&self, event: OrderPlaced, delivery: &Delivery) -> Result<(), HandlerError> {
        sqlx::query("INSERT INTO runs VALUES ($1, $2, $3, $4)")
            .bind(event.order)
            .bind(delivery.event_id().to_string())
            .bind(i64::from(delivery.attempt().get()))
            .bind(&self.instance)
            .execute(&self.pool)
            .await?;
        if self.aborts {
            tokio::time::sleep(BESIDE).await;
            if event.order == 0 {
                std::process::abort();
            }
            tokio::time::sleep(BESIDE).await;
        }
        Ok(())
    }
}

/// Long enough for all that were claimed together to begin.
const BESIDE: Duration = Duration::from_millis(200);

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize| arguments.get(at).expect("see the module's doc").as_str();
    let instance = argument(2).to_owned();
    let connect = || {
        PgPoolOptions::new()
            .max_connections(4)
            .connect_lazy(argument(1))
            .unwrap()
    };
    let recording = Recording {
        pool: connect(),
        instance: instance.clone(),
        aborts: argument(0) == "poison",
    };
    let outbox = Outbox::builder(PgStore::new(connect()))
        .instance(instance)
        // Short, so that what a killed process held is due again while the test waits.
        .lease(Duration::from_secs(2))
        .inline_lease(Duration::from_secs(1))
        .handler_timeout(Duration::from_secs(2))
        .on(recording)
        .build()
        .unwrap();
    match argument(0) {
        "relay" => {
            let relay = outbox.relay().start().await.unwrap();
            println!("\"relaying\"");
            end_of_input().await;
            relay.shutdown(Duration::from_secs(10)).await.unwrap();
        }
        "poison" => {
            let relay = outbox.relay().sweep_interval(Duration::from_secs(1));
            let relay = relay.start().await.unwrap();
            end_of_input().await;
            relay.shutdown(Duration::from_secs(10)).await.unwrap();
        }
        "publish" => {
            let from: i64 = argument(3).parse().unwrap();
            tokio::select! {
                () = publish(&outbox, from) => {}
                () = end_of_input() => {}
            }
        }
        "lock" => {
            let store = PgStore::new(connect());
            let lock = store.try_exclusive(argument(2), "node").await.unwrap();
            let _held = lock.expect("nobody else has it");
            println!("\"had\"");
            end_of_input().await;
        }
        mode => panic!("no mode `{mode}`"),
    }
}

async fn publish(outbox: &Outbox<PgStore>, from: i64) {
    for order in from.. {
        let mut tx = outbox.begin().await.unwrap();
        sqlx::query("INSERT INTO orders VALUES ($1, false)")
            .bind(order)
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.publish(&OrderPlaced { order }).await.unwrap();
        tx.commit().await.unwrap();
        println!("{{\"committed\":{order}}}");
    }
}

async fn end_of_input() {
    let mut ignored = Vec::new();
    let _ = tokio::io::stdin().read_to_end(&mut ignored).await;
}
