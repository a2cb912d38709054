//! Wake-ups from other processes.
//!
//! Only hints: whatever goes wrong here costs latency, never an event.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::wait;
use crate::outcome::ErrorText;
use crate::relay::RelayParts;
use crate::relay::claim::stoppable;
use crate::store::{Store, StoreError, Wakeups};

/// Runs until the relay stops, or at once if the store has no wake-ups.
pub(crate) async fn run<S: Store>(parts: Arc<RelayParts<S>>) {
    let mut pause = wait::Pause::new(Duration::from_millis(100), Duration::from_secs(10));
    loop {
        // Not dropped half way: a subscription is a connection of its own.
        let error = match parts.shared.store.listen().await {
            Ok(None) => return,
            Ok(Some(mut wakeups)) => {
                pause.reset();
                // What came while nobody listened.
                parts.shared.wake.local();
                match stoppable(&parts, forward(&parts, &mut wakeups)).await {
                    Some(error) => error,
                    None => return,
                }
            }
            Err(error) => error,
        };
        parts.shared.counters.store_errors.one();
        let delay = pause.next();
        tracing::warn!(
            error = %ErrorText::from(&error),
            retry_in = ?delay,
            "wake-ups are interrupted; the relay polls meanwhile"
        );
        if stoppable(&parts, tokio::time::sleep(delay)).await.is_none() {
            return;
        }
    }
}

async fn forward<S: Store>(parts: &RelayParts<S>, wakeups: &mut S::Wakeups) -> StoreError {
    loop {
        match wakeups.next().await {
            Ok(()) => parts.shared.wake.local(),
            Err(error) => return error,
        }
    }
}
