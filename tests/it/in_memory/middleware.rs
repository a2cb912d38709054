//! What runs around each run of a handler.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::middleware::{Middleware, Next, Returned, RunError};
use outbox_core::testing::{MemoryConnection, MemoryStore, Operation};
use outbox_core::{
    DeadReason, Delivery, EventState, HandlerError, Outbox, SettledResult, TransactionalHandler,
    Uncommitted,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use super::builder;
use crate::events::{OrderPaid, Run, Step, Ticked, publish_for_relays, scripted, settled};

type Log = Arc<Mutex<Vec<String>>>;

/// Notes when it is entered and left.
struct Noted(&'static str, Log);

impl Noted {
    fn note(&self, what: &str) {
        self.1.lock().unwrap().push(format!("{what} {}", self.0));
    }
}

impl Middleware for Noted {
    async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        self.note("into");
        let result = next.run().await;
        self.note("out of");
        result
    }
}

/// Does what it is told instead of calling the handler.
struct Instead<F>(F);

impl<F> Middleware for Instead<F>
where
    F: Fn(&Delivery) -> Result<Returned, RunError> + Send + Sync + 'static,
{
    async fn around(&self, delivery: &Delivery, _: Next<'_>) -> Result<Returned, RunError> {
        (self.0)(delivery)
    }
}

pub(super) async fn dispatch(outbox: &Outbox<MemoryStore>, n: u64) -> outbox_core::EventId {
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;
    id
}

pub(super) fn ok(_: &Run) -> Step {
    Step::Return(Ok(()))
}

pub(super) struct Book;

impl TransactionalHandler<MemoryConnection, OrderPaid> for Book {
    async fn handle(
        &self,
        _: OrderPaid,
        _: &mut MemoryConnection,
        _: &Delivery,
    ) -> Result<String, HandlerError> {
        Ok("booked".to_owned())
    }
}

#[tokio::test(start_paused = true)]
async fn it_is_around_every_kind_of_run_and_the_first_is_the_outermost() {
    let store = MemoryStore::new();
    let log = Log::default();
    let (handler, _runs) = scripted(ok);
    let outbox = builder(&store)
        .middleware(Noted("a", Arc::clone(&log)))
        .on(handler)
        .on_transactional(Book)
        .middleware(Noted("b", Arc::clone(&log)))
        .build()
        .unwrap();
    let took = || std::mem::take(&mut *log.lock().unwrap());
    let around = ["into a", "into b", "out of b", "out of a"];

    dispatch(&outbox, 1).await;
    assert_eq!(took(), around, "inline");
    outbox.dispatch_directly(&Ticked { n: 2 }).await.unwrap();
    assert_eq!(took(), around, "directly");
    let mut tx = outbox.begin().await.unwrap();
    let done = tx.dispatch_uncommitted(&Ticked { n: 3 }).await.unwrap();
    assert!(matches!(done, Uncommitted::Processed(_)));
    tx.commit().await.unwrap();
    assert_eq!(took(), around, "before the commit");
    let event = OrderPaid { order: 1 };
    assert_eq!(outbox.dispatch_directly(&event).await.unwrap(), "booked");
    assert_eq!(took(), around, "directly, in a transaction");
    let id = publish_for_relays(&outbox, &event).await;
    outbox.dispatch([id]).unwrap().settled().await;
    assert_eq!(took(), around, "in a transaction");
    publish_for_relays(&outbox, &Ticked { n: 4 }).await;
    let relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Settle, 2).await;
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert_eq!(took(), around, "by relay");
    let done = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(done.output.as_deref(), Some("\"booked\""));
}

#[tokio::test(start_paused = true)]
async fn it_can_refuse_a_run_and_say_what_follows() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(ok);
    let (builder, mut outcomes) = settled(builder(&store));
    let outbox = builder
        .on(handler)
        .middleware(Instead(|delivery: &Delivery| {
            match delivery.headers().get("tenant").map(String::as_str) {
                None => Err(HandlerError::permanent("no tenant").into()),
                Some("busy") => {
                    Err(HandlerError::retry_after(Duration::from_secs(7), "busy").into())
                }
                Some(_) => Ok(Returned::nothing()),
            }
        }))
        .build()
        .unwrap();
    for tenant in [None, Some("busy"), Some("closed")] {
        let options = outbox_core::PublishOptions::new();
        let options = match tenant {
            Some(tenant) => options.header("tenant", tenant),
            None => options,
        };
        let mut tx = outbox.begin().await.unwrap();
        tx.publish_with(&Ticked { n: 1 }, &options).await.unwrap();
        tx.commit().await.unwrap().settled().await;
    }
    let mut results = Vec::new();
    for _ in 0..3 {
        results.push(outcomes.recv().await.unwrap().result);
    }
    let expected = [
        SettledResult::DeadLetter {
            reason: DeadReason::Permanent,
            error: "no tenant".to_owned(),
        },
        SettledResult::Retry {
            after: Duration::from_secs(7),
            error: "busy".to_owned(),
        },
        SettledResult::Processed,
    ];
    assert_eq!(results, expected);
    assert!(runs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn nothing_in_place_of_an_output_is_an_error_to_who_expects_one() {
    let store = MemoryStore::new();
    let outbox = builder(&store)
        .on_transactional(Book)
        .middleware(Instead(|_: &Delivery| Ok(Returned::nothing())))
        .build()
        .unwrap();
    let event = OrderPaid { order: 1 };
    let direct = outbox.dispatch_directly(&event).await;
    assert_eq!(
        direct.unwrap_err().to_string(),
        "the direct dispatch of `order.paid` failed: the handler's output cannot be read back: \
         invalid type: null, expected a string at line 1 column 4"
    );
    let id = publish_for_relays(&outbox, &event).await;
    outbox.dispatch([id]).unwrap().settled().await;
    let done = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((done.state, done.output), (EventState::Processed, None));
}

/// Never comes back, or panics.
struct Broken(bool);

impl Middleware for Broken {
    async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        assert!(self.0, "as asked");
        next.run().await?;
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn p11_its_panic_and_its_hanging_are_failed_attempts() {
    for (hangs, error) in [
        (false, "the handler panicked: as asked"),
        (true, "the handler overran its timeout of 30s"),
    ] {
        let store = MemoryStore::new();
        let (handler, _runs) = scripted(ok);
        let outbox = builder(&store)
            .on(handler)
            .middleware(Broken(hangs))
            .build()
            .unwrap();
        let id = dispatch(&outbox, 1).await;
        let kept = outbox.find(id).await.unwrap().unwrap();
        assert_eq!(kept.state, EventState::Failed);
        assert_eq!(kept.last_error.as_deref(), Some(error));
    }
}

/// Waits, and says whose run it is.
struct Waiting(mpsc::UnboundedSender<Delivery>);

impl Middleware for Waiting {
    async fn around(&self, delivery: &Delivery, _: Next<'_>) -> Result<Returned, RunError> {
        let _ = self.0.send(delivery.clone());
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn p14_one_that_waits_is_interrupted_as_a_handler_is() {
    let store = MemoryStore::new();
    let (waiting, mut waits) = mpsc::unbounded_channel();
    let (handler, runs) = scripted(ok);
    let outbox = builder(&store)
        .on(handler)
        .middleware(Waiting(waiting))
        .build()
        .unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    let delivery = waits.recv().await.unwrap();
    relay.shutdown(Duration::from_secs(5)).await.unwrap();
    assert!(delivery.cancelled().is_cancelled());
    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((kept.state, kept.attempts), (EventState::Pending, 0));
    assert!(runs.is_empty());
}

/// Looks at what came of the run, and passes it on.
struct Looking(Log);

impl Middleware for Looking {
    async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        let result = next.run().await;
        self.0.lock().unwrap().push(match &result {
            Ok(returned) => returned.as_json().to_owned(),
            Err(error) if error.is_undecodable() => "undecodable".to_owned(),
            Err(error) => format!("{error}, by a handler: {}", error.handler_error().is_some()),
        });
        result
    }
}

/// What a payload cannot be read as stays a dead letter through every middleware.
#[tokio::test(start_paused = true)]
async fn p12_it_sees_what_came_of_a_run_and_passes_it_on_unchanged() {
    let store = MemoryStore::new();
    let log = Log::default();
    let (handler, _runs) = scripted(|run| match run.n {
        1 => Step::Return(Ok(())),
        _ => Step::Return(Err(HandlerError::permanent("no such user"))),
    });
    let outbox = builder(&store)
        .on(handler)
        .middleware(Looking(Arc::clone(&log)))
        .build()
        .unwrap();
    dispatch(&outbox, 1).await;
    let refused = dispatch(&outbox, 2).await;
    let other = builder(&store).build().unwrap();
    let id = publish_for_relays(&other, &NotTicked("x")).await;
    outbox.dispatch([id]).unwrap().settled().await;
    let expected = ["null", "no such user, by a handler: true", "undecodable"];
    assert_eq!(*log.lock().unwrap(), expected);
    let mut reasons = Vec::new();
    for id in [refused, id] {
        reasons.push(outbox.find(id).await.unwrap().unwrap().dead_reason);
    }
    let expected = [DeadReason::Permanent, DeadReason::Undecodable].map(Some);
    assert_eq!(reasons, expected);
}

/// Published under the name of another event.
#[derive(serde::Serialize)]
pub(super) struct NotTicked(pub(super) &'static str);

impl<'de> serde::Deserialize<'de> for NotTicked {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Ok(Self(""))
    }
}

impl outbox_core::OutboxEvent for NotTicked {
    type Output = ();
    const NAME: &'static str = "ticked";
}

/// As the page of `outbox_core::middleware` has it.
struct Timing(mpsc::UnboundedSender<(&'static str, Duration)>);

impl Middleware for Timing {
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        let began = Instant::now();
        let result = next.run().await;
        let _ = self.0.send((delivery.event_name(), began.elapsed()));
        result
    }
}

#[tokio::test(start_paused = true)]
async fn a_middleware_measures_what_a_handler_took() {
    let store = MemoryStore::new();
    let (times, mut measured) = mpsc::unbounded_channel();
    let (handler, _runs) = scripted(|_| Step::Take(Duration::from_secs(3)));
    let outbox = builder(&store)
        .on(handler)
        .middleware(Timing(times))
        .build()
        .unwrap();
    dispatch(&outbox, 1).await;
    let (event, took) = measured.recv().await.unwrap();
    assert_eq!((event, took.as_secs()), ("ticked", 3));
}

/// As the page of `outbox_core::middleware` has it.
struct TenPerSecond {
    ticks: tokio::sync::Mutex<Interval>,
}

impl Middleware for TenPerSecond {
    async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        self.ticks.lock().await.tick().await;
        next.run().await
    }
}

/// Nothing ran for an hour: that is no allowance to run 36,000 at once.
#[tokio::test(start_paused = true)]
async fn a_rate_limit_holds_after_a_pause() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(ok);
    let mut ticks = interval(Duration::from_millis(100));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let outbox = builder(&store)
        .on(handler)
        .middleware(TenPerSecond {
            ticks: ticks.into(),
        })
        .build()
        .unwrap();
    dispatch(&outbox, 0).await;
    tokio::time::advance(Duration::from_secs(3_600)).await;
    let mut tx = outbox.begin().await.unwrap();
    let events: Vec<_> = (1..=25).map(|n| Ticked { n }).collect();
    tx.publish_all(&events).await.unwrap();
    let began = Instant::now();
    tx.commit().await.unwrap().settled().await;
    assert!(began.elapsed() >= Duration::from_millis(2_400));
    assert_eq!(outbox.counters().processed, 26);
}

/// Asks something else first, which is away.
struct Asking;

impl Middleware for Asking {
    async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        let tenant = Err(std::io::Error::other("the directory is away"));
        tenant?;
        next.run().await
    }
}

#[tokio::test(start_paused = true)]
async fn any_error_in_a_middleware_is_a_retry() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(ok);
    let outbox = builder(&store)
        .on(handler)
        .middleware(Asking)
        .build()
        .unwrap();
    let id = dispatch(&outbox, 1).await;
    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Failed);
    assert_eq!(kept.last_error.as_deref(), Some("the directory is away"));
    assert!(runs.is_empty());
}
