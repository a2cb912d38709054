//! Layers of tower around each run of a handler.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use outbox_core::middleware::tower::{Dispatch, RunService};
use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    DeadReason, Delivery, EventState, HandlerError, Outbox, SettledResult, Uncommitted,
};
use tokio::sync::mpsc;
use tower::Service;
use tower::buffer::BufferLayer;
use tower::layer::layer_fn;
use tower::layer::util::Stack;
use tower::limit::{ConcurrencyLimitLayer, RateLimitLayer};
use tower::load_shed::LoadShedLayer;
use tower::timeout::TimeoutLayer;

use super::builder;
use super::middleware::{Book, NotTicked, dispatch, ok};
use crate::events::{OrderPaid, Run, Step, Ticked, publish_for_relays, scripted, settled};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a layer of the test does with a call of the service further in.
#[derive(Clone, Copy)]
enum Does {
    /// Waits for it.
    Calls,
    /// Lets it begin, and drops it.
    Drops,
    /// Never begins it.
    Refuses,
    Panics,
}

#[derive(Clone)]
struct Layered<S> {
    does: Does,
    seen: mpsc::UnboundedSender<Delivery>,
    inner: S,
}

impl<S> Service<Dispatch> for Layered<S>
where
    S: Service<Dispatch, Error: Into<BoxError>, Future: Send + 'static>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, dispatch: Dispatch) -> Self::Future {
        let _ = self.seen.send(dispatch.delivery().clone());
        let does = self.does;
        let mut calling = Box::pin(self.inner.call(dispatch));
        Box::pin(async move {
            match does {
                Does::Calls => calling.await.map_err(Into::into),
                Does::Drops => {
                    let is_pending =
                        poll_fn(|cx| Poll::Ready(calling.as_mut().poll(cx).is_pending())).await;
                    assert!(is_pending);
                    drop(calling);
                    // So that whoever runs the handler is polled once more.
                    tokio::task::yield_now().await;
                    Err("dropped".into())
                }
                Does::Refuses => Err("refused".into()),
                Does::Panics => panic!("as asked"),
            }
        })
    }
}

/// An outbox with one layer that does this, and the deliveries that it sees.
fn layered(
    store: &MemoryStore,
    does: Does,
    script: impl Fn(&Run) -> Step + Send + Sync + 'static,
) -> (
    Outbox<MemoryStore>,
    mpsc::UnboundedReceiver<Delivery>,
    mpsc::UnboundedReceiver<Run>,
) {
    let (seen, deliveries) = mpsc::unbounded_channel();
    let layer = layer_fn(move |inner: RunService| Layered {
        does,
        seen: seen.clone(),
        inner,
    });
    let (handler, runs) = scripted(script);
    let outbox = builder(store)
        .on(handler)
        .on_transactional(Book)
        .layer(layer)
        .build()
        .unwrap();
    (outbox, deliveries, runs)
}

#[tokio::test(start_paused = true)]
async fn a_layer_is_around_every_kind_of_run() {
    let store = MemoryStore::new();
    let (outbox, mut seen, _runs) = layered(&store, Does::Calls, ok);
    let mut saw = || seen.try_recv().map(|delivery| delivery.event_name());

    dispatch(&outbox, 1).await;
    assert_eq!(saw(), Ok("ticked"), "inline");
    outbox.dispatch_directly(&Ticked { n: 2 }).await.unwrap();
    assert_eq!(saw(), Ok("ticked"), "directly");
    let mut tx = outbox.begin().await.unwrap();
    let done = tx.dispatch_uncommitted(&Ticked { n: 3 }).await.unwrap();
    assert!(matches!(done, Uncommitted::Processed(_)));
    tx.commit().await.unwrap();
    assert_eq!(saw(), Ok("ticked"), "before the commit");
    let event = OrderPaid { order: 1 };
    assert_eq!(outbox.dispatch_directly(&event).await.unwrap(), "booked");
    assert_eq!(saw(), Ok("order.paid"), "directly, in a transaction");
    let id = publish_for_relays(&outbox, &event).await;
    outbox.dispatch([id]).unwrap().settled().await;
    assert_eq!(saw(), Ok("order.paid"), "in a transaction");
    publish_for_relays(&outbox, &Ticked { n: 4 }).await;
    let relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Settle, 2).await;
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert_eq!(saw(), Ok("ticked"), "by relay");
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_no_layer_calls_or_waits_for_is_not_run() {
    for (does, error) in [
        (Does::Refuses, "refused"),
        (Does::Drops, "dropped"),
        (Does::Panics, "the handler panicked: as asked"),
    ] {
        let store = MemoryStore::new();
        let (outbox, _seen, runs) = layered(&store, does, ok);
        // Often enough for what is left to chance to show.
        for n in 0..20 {
            let id = dispatch(&outbox, n).await;
            let kept = outbox.find(id).await.unwrap().unwrap();
            assert_eq!(kept.state, EventState::Failed);
            assert_eq!(kept.last_error.as_deref(), Some(error));
        }
        assert!(runs.is_empty(), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn p11_a_handler_that_panics_behind_a_layer_is_a_failed_attempt() {
    let store = MemoryStore::new();
    let (outbox, _seen, _runs) = layered(&store, Does::Calls, |_| Step::Panic);
    let id = dispatch(&outbox, 1).await;
    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Failed);
    let error = "the handler panicked: as asked";
    assert_eq!(kept.last_error.as_deref(), Some(error));
}

/// Its error is a box by then, as in most layers.
#[tokio::test(start_paused = true)]
async fn p12_what_is_permanent_or_undecodable_stays_so_through_layers() {
    let store = MemoryStore::new();
    let (outbox, _seen, _runs) = layered(&store, Does::Calls, |_| {
        Step::Return(Err(HandlerError::permanent("no such user")))
    });
    let refused = dispatch(&outbox, 1).await;
    let other = builder(&store).build().unwrap();
    let unreadable = publish_for_relays(&other, &NotTicked("x")).await;
    outbox.dispatch([unreadable]).unwrap().settled().await;
    let mut reasons = Vec::new();
    for id in [refused, unreadable] {
        reasons.push(outbox.find(id).await.unwrap().unwrap().dead_reason);
    }
    let expected = [DeadReason::Permanent, DeadReason::Undecodable].map(Some);
    assert_eq!(reasons, expected);
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_handler_runs_while_a_service_is_not_ready() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(ok);
    let outbox = builder(&store)
        .on(handler)
        .layer(ConcurrencyLimitLayer::new(0))
        .build()
        .unwrap();
    let id = dispatch(&outbox, 1).await;
    let kept = outbox.find(id).await.unwrap().unwrap();
    let error = "the handler overran its timeout of 30s";
    assert_eq!(kept.last_error.as_deref(), Some(error));
    assert!(runs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_a_layer_sheds_is_a_retry_and_starts_no_handler() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(ok);
    let full = ConcurrencyLimitLayer::new(0);
    let outbox = builder(&store)
        .on(handler)
        .layer(Stack::new(full, LoadShedLayer::new()))
        .build()
        .unwrap();
    let id = dispatch(&outbox, 1).await;
    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Failed);
    assert_eq!(kept.last_error.as_deref(), Some("service overloaded"));
    assert!(runs.is_empty());
}

/// Its service cannot be cloned, and one that can be is around it.
#[tokio::test(start_paused = true)]
async fn a_rate_limit_of_tower_takes_a_buffer() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(ok);
    let rate = RateLimitLayer::new(2, Duration::from_secs(1));
    let outbox = builder(&store)
        .on(handler)
        .layer(Stack::new(rate, BufferLayer::new(16)))
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let events = [1, 2, 3, 4, 5].map(|n| Ticked { n });
    tx.publish_all(&events).await.unwrap();
    let began = tokio::time::Instant::now();
    tx.commit().await.unwrap().settled().await;
    assert!(began.elapsed() >= Duration::from_secs(2));
    assert_eq!(outbox.counters().processed, 5);
}

#[tokio::test(start_paused = true)]
async fn a_concurrency_limit_of_tower_holds_for_all_runs_together() {
    let store = MemoryStore::new();
    let running = Arc::new(Mutex::new((0, 0)));
    let count = Arc::clone(&running);
    let outbox = builder(&store)
        .on(move |_: Ticked| {
            let count = Arc::clone(&count);
            async move {
                {
                    let mut count = count.lock().unwrap();
                    count.0 += 1;
                    count.1 = std::cmp::max(count.0, count.1);
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
                count.lock().unwrap().0 -= 1;
                Ok::<_, HandlerError>(())
            }
        })
        .layer(ConcurrencyLimitLayer::new(2))
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let events = [1, 2, 3, 4, 5].map(|n| Ticked { n });
    tx.publish_all(&events).await.unwrap();
    let began = tokio::time::Instant::now();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(running.lock().unwrap().1, 2);
    assert!(began.elapsed() >= Duration::from_secs(3));
    assert_eq!(outbox.counters().processed, 5);
}

/// Says when it is dropped.
struct Dropped(mpsc::UnboundedSender<()>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[tokio::test(start_paused = true)]
async fn a_timeout_of_tower_drops_the_handler_and_is_a_retry() {
    let store = MemoryStore::new();
    let (dropped, mut is_dropped) = mpsc::unbounded_channel();
    let outbox = builder(&store)
        .on(move |_: Ticked| {
            let guard = Dropped(dropped.clone());
            async move {
                let _guard = guard;
                std::future::pending::<Result<(), HandlerError>>().await
            }
        })
        .layer(TimeoutLayer::new(Duration::from_secs(2)))
        .build()
        .unwrap();
    let began = tokio::time::Instant::now();
    let id = dispatch(&outbox, 1).await;
    assert!(began.elapsed() < Duration::from_secs(3));
    is_dropped.recv().await.unwrap();
    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Failed);
    assert_eq!(kept.last_error.as_deref(), Some("request timed out"));
}

#[tokio::test(start_paused = true)]
async fn a_handlers_error_comes_through_layers_as_it_was() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| {
        Step::Return(Err(HandlerError::retry_after(
            Duration::from_secs(7),
            "429",
        )))
    });
    let (builder, mut outcomes) = settled(builder(&store));
    let outbox = builder
        .on(handler)
        .layer(TimeoutLayer::new(Duration::from_secs(2)))
        .layer(ConcurrencyLimitLayer::new(1))
        .build()
        .unwrap();
    dispatch(&outbox, 1).await;
    let expected = SettledResult::Retry {
        after: Duration::from_secs(7),
        error: "429".to_owned(),
    };
    assert_eq!(outcomes.recv().await.unwrap().result, expected);
}
