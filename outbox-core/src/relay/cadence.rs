//! When the passes of the three cadences run. What they do is in [`pass`](super::pass).

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::Instant;

use crate::cadence::{Cadence, PassReport};
use crate::outcome::ErrorText;
use crate::relay::claim::stoppable;
use crate::relay::{RelayParts, pass};
use crate::store::{Store, StoreError};

/// The latest first pass of each cadence. A process that is deployed every hour has its daily pass
/// all the same.
const FIRST_WITHIN: [Duration; 3] = [
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(120),
];

/// Somebody waits for a pass that begins now.
pub(crate) type Asked = oneshot::Sender<Result<PassReport, StoreError>>;

/// Runs until the relay stops.
pub(crate) async fn run<S: Store>(
    parts: Arc<RelayParts<S>>,
    cadence: Cadence,
    asked: Arc<Mutex<mpsc::Receiver<Asked>>>,
) {
    // Uncontended: there is one loop per cadence, and after a panic its successor.
    let mut asked = asked.lock().await;
    let every = parts.rhythm(cadence).every;
    // A random offset, so that the pods of one deployment do not begin in step.
    let within = std::cmp::min(every, FIRST_WITHIN[cadence as usize]);
    let mut next = Instant::now() + within.mul_f64(fastrand::f64());
    loop {
        let begin = async {
            tokio::select! {
                () = tokio::time::sleep_until(next) => None,
                Some(asked) = asked.recv() => Some(asked),
            }
        };
        let Some(asker) = stoppable(&parts, begin).await else {
            return;
        };
        next = Instant::now() + every;
        let result = pass::run(&parts, cadence).await;
        if let Err(error) = &result {
            parts.shared.counters.store_errors.one();
            tracing::warn!(
                %cadence,
                error = %ErrorText::from(error),
                "a pass was cut short; the next one goes on"
            );
        }
        if let Some(asker) = asker {
            // Whoever asked may have given up waiting.
            let _ = asker.send(result);
        }
    }
}
