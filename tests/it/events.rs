//! The events that tests publish.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::{
    Delivery, Handler, HandlerError, Outbox, OutboxBuilder, OutboxEvent, SettledEvent, Store,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// An order was paid. Its dedup key is its number.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct OrderPaid {
    pub(crate) order: u64,
}

impl OutboxEvent for OrderPaid {
    type Output = String;
    const NAME: &'static str = "order.paid";

    fn dedup_key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

/// Something ticked. It has no key.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Ticked {
    pub(crate) n: u64,
}

impl OutboxEvent for Ticked {
    type Output = ();
    const NAME: &'static str = "ticked";
}

/// An event that nobody in the tests handles.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Unhandled;

impl OutboxEvent for Unhandled {
    type Output = ();
    const NAME: &'static str = "unhandled";
}

/// What a handler of [`scripted`] was called with.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) n: u64,
    pub(crate) delivery: Delivery,
}

type Script = Arc<dyn Fn(&Run) -> Step + Send + Sync>;

/// What the handler does next.
pub(crate) enum Step {
    Return(Result<(), HandlerError>),
    /// Waits for this long, then succeeds.
    Take(Duration),
    /// Waits until it is cancelled, and longer.
    Hang,
    Panic,
}

/// Handles [`Ticked`] as a script says, and reports each run.
pub(crate) struct Scripted {
    script: Script,
    runs: mpsc::UnboundedSender<Run>,
}

/// A handler that does what `script` says for each run, and the runs it was started for.
pub(crate) fn scripted(
    script: impl Fn(&Run) -> Step + Send + Sync + 'static,
) -> (Scripted, mpsc::UnboundedReceiver<Run>) {
    let (runs, seen) = mpsc::unbounded_channel();
    (
        Scripted {
            script: Arc::new(script),
            runs,
        },
        seen,
    )
}

impl Handler<Ticked> for Scripted {
    async fn handle(&self, event: Ticked, delivery: &Delivery) -> Result<(), HandlerError> {
        let run = Run {
            n: event.n,
            delivery: delivery.clone(),
        };
        let step = (self.script)(&run);
        let _ = self.runs.send(run);
        match step {
            Step::Return(result) => result,
            Step::Take(time) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Step::Hang => std::future::pending().await,
            Step::Panic => panic!("as asked"),
        }
    }
}

/// Every outcome the outbox stores.
pub(crate) fn settled<S: Store>(
    builder: OutboxBuilder<S>,
) -> (OutboxBuilder<S>, mpsc::UnboundedReceiver<SettledEvent>) {
    let (send, outcomes) = mpsc::unbounded_channel();
    let builder = builder.on_settled(move |event| {
        let _ = send.send(event.clone());
    });
    (builder, outcomes)
}

/// Publishes in a transaction of its own, with no inline dispatch, and commits.
pub(crate) async fn publish_for_relays<S: Store, E: OutboxEvent>(
    outbox: &Outbox<S>,
    event: &E,
) -> outbox_core::EventId {
    let mut tx = outbox.store().begin().await.unwrap();
    let id = outbox.publish(&mut tx, event).await.unwrap().event_id();
    outbox.store().commit(tx).await.unwrap();
    id
}
