//! Layers of `tower` around each run of a handler: a timeout, a concurrency limit, load shedding.
//!
//! Registered with [`OutboxBuilder::layer`](crate::OutboxBuilder::layer). A run happens once, so a
//! [`Dispatch`] cannot be cloned, and layers that repeat a request have nothing to repeat: retries are
//! the outbox's.
//!
//! # What becomes of errors
//!
//! What a layer answers by itself, for a timeout or for want of room, is a retry after the backoff, and
//! has cost an attempt even if no handler was started. An error that came from further in goes on as
//! it is: what is permanent stays so. One that a layer wraps into an error of its own is the layer's.
//!
//! # A service that is not ready is waited for
//!
//! The event is held meanwhile: it takes one of the relay's places, and the timeout of its handler
//! runs. So does it where a layer keeps a call for later.
//!
//! # Each run has a clone of the service
//!
//! What holds for all runs together has to be shared by the clones, as the places of a
//! `ConcurrencyLimitLayer` are. A service that cannot be cloned, like that of a `RateLimitLayer`,
//! needs a `BufferLayer` around it, which has to be made inside of a Tokio runtime.
//!
//! ```
//! use std::time::Duration;
//!
//! use outbox_core::testing::MemoryStore;
//! use outbox_core::{HandlerError, Outbox, OutboxEvent};
//! use serde::{Deserialize, Serialize};
//! use tower::limit::ConcurrencyLimitLayer;
//! use tower::timeout::TimeoutLayer;
//!
//! #[derive(Serialize, Deserialize, OutboxEvent)]
//! struct OrderPaid;
//!
//! let outbox = Outbox::builder(MemoryStore::new())
//!     .on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) })
//!     .layer(ConcurrencyLimitLayer::new(4))
//!     .layer(TimeoutLayer::new(Duration::from_secs(5)))
//!     .build()?;
//! # Ok::<_, outbox_core::BuildError>(())
//! ```

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::sync::oneshot;
use tower_service::Service;

use super::{BoxError, Boxed, Middleware, Next, Returned, RunError};
use crate::handler::{Delivery, HandlerError};

type Result<T> = std::result::Result<T, RunError>;

/// One run, as layers see it.
pub struct Dispatch {
    delivery: Delivery,
    start: oneshot::Sender<oneshot::Sender<Result<Returned>>>,
}

impl Dispatch {
    /// Which event and which attempt it is.
    #[must_use]
    pub fn delivery(&self) -> &Delivery {
        &self.delivery
    }
}

impl fmt::Debug for Dispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatch")
            .field("delivery", &self.delivery)
            .finish_non_exhaustive()
    }
}

/// The service at the bottom of all layers: the handler, and what is registered further in.
///
/// A run borrows what it works with, a transaction for instance, and a service has to own what it
/// works with. So this one only says when the run is to start, and waits for what comes of it; the
/// run itself is where it was. Dropping the future of a call drops the handler's.
#[derive(Clone, Copy, Debug)]
pub struct RunService(());

impl Service<Dispatch> for RunService {
    type Response = Returned;
    type Error = RunError;
    type Future = Pin<Box<dyn Future<Output = Result<Returned>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, dispatch: Dispatch) -> Self::Future {
        Box::pin(async move {
            let gone = || RunError::from(HandlerError::retry("the run was interrupted"));
            let (send, result) = oneshot::channel();
            dispatch.start.send(send).map_err(|_| gone())?;
            result.await.map_err(|_| gone())?
        })
    }
}

/// A middleware that is a service.
pub(crate) struct Layered<S> {
    // Behind a lock only to be cloned from: a service need not be `Sync`.
    service: Mutex<S>,
}

impl<S> Layered<S> {
    pub(crate) fn new(layer: &impl tower_layer::Layer<RunService, Service = S>) -> Self {
        Self {
            service: Mutex::new(layer.layer(RunService(()))),
        }
    }
}

impl<S: Clone> Layered<S> {
    fn service(&self) -> S {
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
        service.clone()
    }
}

impl<S> Middleware for Layered<S>
where
    S: Service<Dispatch, Response = Returned> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
{
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned> {
        let mut service = self.service();
        let (start, started) = oneshot::channel();
        let dispatch = Dispatch {
            delivery: delivery.clone(),
            start,
        };
        let calling = async move {
            poll_fn(|cx| service.poll_ready(cx))
                .await
                .map_err(run_error)?;
            service.call(dispatch).await.map_err(run_error)
        };
        tokio::select! {
            // What the layers answer counts, even if the handler ended in the same moment.
            biased;
            result = calling => result,
            never = run_when_started(started, next) => match never {},
        }
    }
}

/// Runs the rest once the layers have called their inner service, unless they drop that call.
async fn run_when_started(
    started: oneshot::Receiver<oneshot::Sender<Result<Returned>>>,
    next: Next<'_>,
) -> Infallible {
    if let Ok(mut answer) = started.await {
        let result = tokio::select! {
            // A call that is dropped before its run was polled starts no handler.
            biased;
            () = answer.closed() => None,
            result = next.run() => Some(result),
        };
        if let Some(result) = result {
            // Whoever asked may have been dropped in this moment.
            let _ = answer.send(result);
        }
    }
    std::future::pending().await
}

/// What came from further in goes on as it is; what a layer made itself is a retry.
fn run_error(error: impl Into<BoxError>) -> RunError {
    match error.into().downcast() {
        Ok(boxed) => {
            let Boxed(error) = *boxed;
            error
        }
        Err(error) => HandlerError::retry(error).into(),
    }
}
