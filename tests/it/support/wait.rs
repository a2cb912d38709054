//! Deadlines, so that a test fails instead of hanging.

use std::future::Future;
use std::panic::Location;
use std::time::Duration;

/// How often [`eventually`] asks.
const POLL: Duration = Duration::from_millis(10);

/// Awaits `future` for at most `limit`.
///
/// # Panics
///
/// If it takes longer, naming the line that waited.
#[track_caller]
pub(crate) fn within<F: Future>(limit: Duration, future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        match tokio::time::timeout(limit, future).await {
            Ok(output) => output,
            Err(_) => panic!("still waiting after {limit:?}, at {caller}"),
        }
    }
}

/// Asks `poll` again and again until it answers true, for at most `limit`.
///
/// The one place where a test polls. It is for what only the database knows, such as whether a
/// session waits for a lock: nothing there can signal the test. A test that can wait for a signal
/// or a line waits for that.
///
/// # Panics
///
/// If it is not true by then, naming the line that waited.
#[track_caller]
pub(crate) fn eventually<F, Fut>(limit: Duration, mut poll: F) -> impl Future<Output = ()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let caller = Location::caller();
    async move {
        let polling = async {
            while !poll().await {
                tokio::time::sleep(POLL).await;
            }
        };
        if tokio::time::timeout(limit, polling).await.is_err() {
            panic!("not so after {limit:?}, at {caller}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn eventually_asks_until_the_answer_is_yes() {
        let mut asked = 0;
        eventually(Duration::from_secs(1), || {
            asked += 1;
            let yes = asked == 3;
            async move { yes }
        })
        .await;
        assert_eq!(asked, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_missed_deadline_names_the_line_that_waited() {
        let waiting = [
            tokio::spawn(within(Duration::from_secs(1), std::future::pending::<()>())),
            tokio::spawn(eventually(Duration::from_secs(1), async || false)),
        ];
        for waiting in waiting {
            let panic = waiting.await.unwrap_err().into_panic();
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(text.contains("wait.rs:"), "{text}");
        }
    }
}
