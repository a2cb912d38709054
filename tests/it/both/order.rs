//! Events of one ordering key, one after the other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::{
    BehindDead, Changed, Delivery, EventId, EventState, Handler, HandlerError, Outbox, OutboxEvent,
    SettledResult, Store, Uncommitted,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{Database, on_both_databases};
use crate::events::{publish_for_relays, settled};

on_both_databases! {
    events_of_one_key_run_one_after_the_other_on_two_relays
    a_failing_head_is_in_the_way_of_its_own_key_alone
    behind_a_dead_letter_that_is_skipped_the_key_goes_on
    a_second_event_of_a_key_waits_for_the_inline_run_of_the_first
    what_is_published_behind_a_running_event_is_given_back_uncharged
    before_the_commit_only_the_first_of_a_key_is_run
    keys_drain_behind_a_backlog_that_is_not_theirs
}

/// A step of an account. `n` says which.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Booked {
    account: Option<u64>,
    n: u64,
}

impl Booked {
    fn of(account: u64, n: u64) -> Self {
        Self {
            account: Some(account),
            n,
        }
    }
}

impl OutboxEvent for Booked {
    type Output = ();
    const NAME: &'static str = "booked";

    fn ordering_key(&self) -> Option<String> {
        self.account.map(|account| format!("account:{account}"))
    }
}

/// A value of a sensor, of which the last one counts.
#[derive(Deserialize, Serialize)]
struct Measured {
    sensor: u64,
}

impl OutboxEvent for Measured {
    type Output = ();
    const NAME: &'static str = "measured";
    const BEHIND_DEAD: BehindDead = BehindDead::Skip;

    fn ordering_key(&self) -> Option<String> {
        Some(format!("sensor:{}", self.sensor))
    }
}

/// An account, if it is in order, and which step of it.
type Step = (Option<u64>, u64);

/// What ran, in the order in which it ended, and whether two runs of one account overlapped.
#[derive(Clone, Default)]
struct Ledger {
    /// How many runs each account has now.
    running: Arc<Mutex<HashMap<u64, u32>>>,
    done: Arc<Mutex<Vec<Step>>>,
    overlaps: Arc<AtomicU32>,
}

impl Ledger {
    fn of(&self, account: u64) -> Vec<u64> {
        let done = self.done.lock().unwrap();
        let of_account = done.iter().filter(|(of, _)| *of == Some(account));
        of_account.map(|(_, n)| *n).collect()
    }
}

impl Handler<Booked> for Ledger {
    async fn handle(&self, event: Booked, _: &Delivery) -> Result<(), HandlerError> {
        if let Some(account) = event.account {
            let others = {
                let mut running = self.running.lock().unwrap();
                let running = running.entry(account).or_default();
                *running += 1;
                *running - 1
            };
            self.overlaps.fetch_add(others, Ordering::Relaxed);
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            *self.running.lock().unwrap().get_mut(&account).unwrap() -= 1;
        }
        self.done.lock().unwrap().push((event.account, event.n));
        Ok(())
    }
}

async fn events_of_one_key_run_one_after_the_other_on_two_relays<D: Database>(db: &D) {
    let ledger = Ledger::default();
    let mut outboxes = Vec::new();
    let mut relays = Vec::new();
    let mut outcomes = Vec::new();
    for _ in 0..2 {
        let (builder, settled) = settled(db.outbox());
        let outbox = builder.on(ledger.clone()).build().unwrap();
        relays.push(outbox.relay().start().await.unwrap());
        outboxes.push(outbox);
        outcomes.push(settled);
    }
    // Half of them inline, from both processes, in transactions of several accounts.
    for n in 0..20 {
        let mut tx = outboxes[(n % 2) as usize].begin().await.unwrap();
        let steps = [
            Booked::of(1, n),
            Booked::of(2, n),
            Booked { account: None, n },
        ];
        tx.publish_all(&steps).await.unwrap();
        tx.publish(&Booked::of(3, n)).await.unwrap();
        tx.commit().await.unwrap();
        publish_for_relays(&outboxes[0], &Booked::of(4, n)).await;
    }
    let [mut first, mut second] = <[_; 2]>::try_from(outcomes).unwrap();
    for _ in 0..100 {
        let outcome = tokio::select! {
            outcome = first.recv() => outcome.unwrap(),
            outcome = second.recv() => outcome.unwrap(),
        };
        assert_eq!(outcome.result, SettledResult::Processed);
        assert_eq!(outcome.attempt, 1, "giving back costs nothing");
    }
    assert_eq!(ledger.overlaps.load(Ordering::Relaxed), 0);
    let in_order: Vec<u64> = (0..20).collect();
    for account in 1..=4 {
        assert_eq!(ledger.of(account), in_order, "account {account}");
    }
    for relay in relays {
        relay.shutdown(Duration::from_secs(10)).await.unwrap();
    }
}

/// Fails for step 1 of account 1, whatever the attempt.
fn failing<D: Database>(
    db: &D,
) -> (
    Outbox<D::Store>,
    mpsc::UnboundedReceiver<outbox_core::SettledEvent>,
) {
    let (builder, outcomes) = settled(db.outbox());
    let outbox = builder
        .max_attempts(3)
        .on(|event: Booked| async move {
            match (event.account, event.n) {
                (Some(1), 1) => Err(HandlerError::retry("no")),
                _ => Ok(()),
            }
        })
        .build()
        .unwrap();
    (outbox, outcomes)
}

/// Key 1: the first event always fails. Key 2: all is well.
///
/// 1. The first of key 1 fails three times and is dead. Key 2 is done long before.
/// 2. Key 1 is blocked, and listed so.
/// 3. A person discards the dead letter, and the rest of key 1 is handled, each with its first
///    attempt.
async fn a_failing_head_is_in_the_way_of_its_own_key_alone<D: Database>(db: &D) {
    let (outbox, mut outcomes) = failing(db);
    let mut ids = Vec::new();
    for (account, n) in [(1, 1), (1, 2), (1, 3), (2, 1)] {
        ids.push(publish_for_relays(&outbox, &Booked::of(account, n)).await);
    }
    let relay = outbox.relay().start().await.unwrap();
    let mut of_account_2 = 0;
    let mut attempts = 0;
    while attempts < 3 {
        let outcome = outcomes.recv().await.unwrap();
        if outcome.event_id == ids[3] {
            of_account_2 += 1;
            continue;
        }
        assert_eq!(outcome.event_id, ids[0], "nothing overtakes it");
        attempts += 1;
        if attempts < 3 {
            let blocked = outbox.blocked_keys().await.unwrap();
            assert_eq!(blocked[0].state, EventState::Failed);
            assert_eq!(blocked[0].waiting, 2);
            db.make_due(ids[0].row()).await;
            outbox.wake();
        }
    }
    if of_account_2 == 0 {
        assert_eq!(outcomes.recv().await.unwrap().event_id, ids[3]);
    }

    let blocked = outbox.blocked_keys().await.unwrap();
    assert_eq!(blocked.len(), 1, "{blocked:?}");
    assert_eq!(blocked[0].ordering_key, "account:1");
    assert_eq!((blocked[0].head, blocked[0].waiting), (ids[0], 2));
    assert_eq!(
        blocked[0].dead_reason.as_deref(),
        Some("attempts_exhausted")
    );
    assert_eq!(blocked[0].last_error, "no");

    let discarded = outbox.dead_letters().discard(ids[0]).await.unwrap();
    assert_eq!(discarded, Changed::Done);
    outbox.wake();
    for id in &ids[1..3] {
        let outcome = outcomes.recv().await.unwrap();
        assert_eq!(outcome.event_id, *id);
        assert_eq!(
            (outcome.attempt, outcome.result),
            (1, SettledResult::Processed)
        );
    }
    assert_eq!(outbox.blocked_keys().await.unwrap(), []);
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
}

async fn behind_a_dead_letter_that_is_skipped_the_key_goes_on<D: Database>(db: &D) {
    let (builder, mut outcomes) = settled(db.outbox());
    let first_fails = AtomicU32::new(1);
    let outbox = builder
        .on(move |_: Measured| {
            let fails = first_fails.swap(0, Ordering::Relaxed) == 1;
            async move {
                match fails {
                    true => Err(HandlerError::permanent("off the scale")),
                    false => Ok(()),
                }
            }
        })
        .build()
        .unwrap();
    let first = publish_for_relays(&outbox, &Measured { sensor: 1 }).await;
    let second = publish_for_relays(&outbox, &Measured { sensor: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    let ends = [
        outcomes.recv().await.unwrap(),
        outcomes.recv().await.unwrap(),
    ];
    assert_eq!([ends[0].event_id, ends[1].event_id], [first, second]);
    assert_eq!(ends[1].result, SettledResult::Processed);
    assert_eq!(outbox.blocked_keys().await.unwrap(), []);
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
}

/// A handler that says when it starts, and goes on when it is told.
struct Gated {
    started: mpsc::UnboundedSender<u64>,
    gate: Arc<tokio::sync::Semaphore>,
}

impl Handler<Booked> for Gated {
    async fn handle(&self, event: Booked, _: &Delivery) -> Result<(), HandlerError> {
        let _ = self.started.send(event.n);
        self.gate.acquire().await.unwrap().forget();
        Ok(())
    }
}

fn gated<D: Database>(
    db: &D,
) -> (
    Outbox<D::Store>,
    mpsc::UnboundedReceiver<u64>,
    Arc<tokio::sync::Semaphore>,
) {
    let (started, starts) = mpsc::unbounded_channel();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let handler = Gated {
        started,
        gate: Arc::clone(&gate),
    };
    let outbox = db.outbox().on(handler).build().unwrap();
    (outbox, starts, gate)
}

/// In this order:
///
/// 1. A transaction publishes two events of one key, both born leased.
/// 2. The first one is started. The second one is found blocked and given back.
/// 3. The first one ends, and the relay takes the second.
async fn a_second_event_of_a_key_waits_for_the_inline_run_of_the_first<D: Database>(db: &D) {
    let (outbox, mut starts, gate) = gated(db);
    let relay = outbox.relay().start().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let steps = [Booked::of(1, 1), Booked::of(1, 2)];
    let published = tx.publish_all(&steps).await.unwrap();
    tx.commit().await.unwrap();

    assert_eq!(starts.recv().await, Some(1));
    let second = published[1].event_id();
    waits_uncharged(&outbox, second).await;
    assert!(starts.is_empty());

    gate.add_permits(2);
    assert_eq!(starts.recv().await, Some(2));
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
    let record = outbox.find(second).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 1));
}

async fn waits_uncharged<S: Store>(outbox: &Outbox<S>, event: EventId) {
    crate::support::eventually(super::LIMIT, async || {
        let record = outbox.find(event).await.unwrap().unwrap();
        (record.state, record.attempts) == (EventState::Pending, 0)
    })
    .await;
}

async fn what_is_published_behind_a_running_event_is_given_back_uncharged<D: Database>(db: &D) {
    let (outbox, mut starts, gate) = gated(db);
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Booked::of(1, 1)).await.unwrap();
    let first = tx.commit().await.unwrap();
    assert_eq!(starts.recv().await, Some(1));

    let mut tx = outbox.begin().await.unwrap();
    let second = tx.publish(&Booked::of(1, 2)).await.unwrap().event_id();
    let other = tx.publish(&Booked::of(2, 7)).await.unwrap().event_id();
    let dispatching = tx.commit().await.unwrap();
    assert_eq!(
        starts.recv().await,
        Some(7),
        "another key is in nobody's way"
    );
    waits_uncharged(&outbox, second).await;
    // Asked for by number it is refused as well.
    outbox.dispatch([second]).unwrap().settled().await;
    waits_uncharged(&outbox, second).await;

    gate.add_permits(3);
    first.settled().await;
    dispatching.settled().await;
    outbox.dispatch([second]).unwrap().settled().await;
    for id in [second, other] {
        let record = outbox.find(id).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempts), (EventState::Processed, 1));
    }
}

async fn before_the_commit_only_the_first_of_a_key_is_run<D: Database>(db: &D) {
    let ledger = Ledger::default();
    let outbox = db.outbox().on(ledger.clone()).build().unwrap();
    let waiting = publish_for_relays(&outbox, &Booked::of(1, 1)).await;

    let mut tx = outbox.begin().await.unwrap();
    let behind = tx.dispatch_uncommitted(&Booked::of(1, 2)).await.unwrap();
    let Uncommitted::Left(behind) = behind else {
        panic!("{behind:?}");
    };
    for n in [1, 2] {
        let first = tx.dispatch_uncommitted(&Booked::of(2, n)).await.unwrap();
        assert!(matches!(first, Uncommitted::Processed(_)), "{first:?}");
    }
    tx.commit().await.unwrap();

    assert_eq!((ledger.of(1), ledger.of(2)), (vec![], vec![1, 2]));
    for id in [waiting, behind] {
        let record = outbox.find(id).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
    }
    outbox.dispatch([waiting]).unwrap().settled().await;
    outbox.dispatch([behind]).unwrap().settled().await;
    assert_eq!(ledger.of(1), [1, 2]);
}

/// The followers of a key are far below the low-water mark by the time their turn comes; each of
/// them is found when the one before it is settled, and not at the relay's next look from the
/// beginning, of which there is one a second.
async fn keys_drain_behind_a_backlog_that_is_not_theirs<D: Database>(db: &D) {
    let ledger = Ledger::default();
    let (builder, mut outcomes) = settled(db.outbox());
    let outbox = builder.on(ledger.clone()).build().unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let steps: Vec<_> = (0..60).map(|n| Booked::of(1, n)).collect();
    outbox.publish_all(&mut tx, &steps).await.unwrap();
    let others: Vec<_> = (0..500).map(|n| Booked { account: None, n }).collect();
    outbox.publish_all(&mut tx, &others).await.unwrap();
    outbox.store().commit(tx).await.unwrap();

    let relay = outbox.relay().start().await.unwrap();
    let began = std::time::Instant::now();
    for _ in 0..560 {
        let outcome = outcomes.recv().await.unwrap();
        assert_eq!(outcome.result, SettledResult::Processed);
    }
    let took = began.elapsed();
    assert!(
        took < Duration::from_secs(30),
        "a look from the beginning each: {took:?}"
    );
    assert_eq!(ledger.of(1), (0..60).collect::<Vec<_>>());
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
}
