//! Dead letters through the outbox, the hooks that hear of them, and events that cannot be decoded.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    Changed, DeadLetterFilter, DeadReason, EventId, EventState, HandlerError, Outbox, Published,
    Requeue, SettledResult, StoreErrorKind, UndecodableEvent,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted, settled};

/// Publishes `n` events that end as dead letters.
async fn buried(store: &MemoryStore, n: u64) -> Vec<EventId> {
    let (handler, _runs) = scripted(|_| Step::Return(Err(HandlerError::permanent("gateway down"))));
    let (builder, mut outcomes) = settled(builder(store).on(handler));
    let outbox = builder.build().unwrap();
    let mut ids = Vec::new();
    for n in 0..n {
        ids.push(publish_for_relays(&outbox, &Ticked { n }).await);
    }
    let relay = outbox.relay().start().await.unwrap();
    for _ in 0..n {
        outcomes.recv().await.unwrap();
    }
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
    ids
}

#[tokio::test(start_paused = true)]
async fn p9_a_tool_without_handlers_lists_pages_and_reads_dead_letters() {
    let store = MemoryStore::new();
    let ids = buried(&store, 5).await;
    let tool = builder(&store).build().unwrap();
    let letters = tool.dead_letters();
    let filter = DeadLetterFilter::all();
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = letters.list(&filter, after, 2).await.unwrap();
        assert!(page.letters.len() <= 2);
        seen.extend(page.letters.iter().map(|letter| letter.id));
        match page.next {
            // As a browser hands it back.
            Some(next) => after = Some(next.to_string().parse().unwrap()),
            None => break,
        }
    }
    let mut newest_first = ids.clone();
    newest_first.reverse();
    assert_eq!(seen, newest_first);

    let record = letters.get(ids[0]).await.unwrap().unwrap();
    assert_eq!(record.payload, r#"{"n":0}"#);
    assert_eq!(record.failures.len(), 1);
    assert_eq!(record.failures[0].error, "gateway down");
    assert!(
        letters
            .list(&filter, None, 0)
            .await
            .unwrap()
            .letters
            .is_empty()
    );
}

#[tokio::test(start_paused = true)]
async fn p9_a_requeued_dead_letter_runs_again_with_all_its_attempts() {
    let store = MemoryStore::new();
    let ids = buried(&store, 1).await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let letters = outbox.dead_letters();
    assert_eq!(letters.requeue(ids[0]).await.unwrap(), Changed::Done);
    let run = runs.recv().await.unwrap();
    assert_eq!(run.delivery.event_id(), ids[0]);
    assert_eq!(run.delivery.attempt().get(), 1);
    let outcome = outcomes.recv().await.unwrap();
    assert_eq!(outcome.result, SettledResult::Processed);

    // Whoever comes second is told.
    let processed = Changed::NotDead(EventState::Processed);
    assert_eq!(letters.requeue(ids[0]).await.unwrap(), processed);
    assert_eq!(letters.discard(ids[0]).await.unwrap(), processed);
    let elsewhere = EventId::new(uuid::Uuid::new_v4(), ids[0].row());
    assert_eq!(letters.requeue(elsewhere).await.unwrap(), Changed::NotFound);
}

#[tokio::test(start_paused = true)]
async fn a_running_event_cannot_be_discarded() {
    let store = MemoryStore::new();
    let ids = buried(&store, 1).await;
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(5)));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let letters = outbox.dead_letters();
    assert_eq!(letters.requeue(ids[0]).await.unwrap(), Changed::Done);
    runs.recv().await.unwrap();
    let running = Changed::NotDead(EventState::InProgress);
    assert_eq!(letters.discard(ids[0]).await.unwrap(), running);
    let outcome = outcomes.recv().await.unwrap();
    assert_eq!(outcome.result, SettledResult::Processed);
}

#[tokio::test(start_paused = true)]
async fn a_rate_spreads_the_second_life_of_many_over_time() {
    let store = MemoryStore::new();
    buried(&store, 6).await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let begun = Instant::now();
    let rate = Requeue::per_minute(6);
    let requeued = outbox
        .dead_letters()
        .requeue_all(&DeadLetterFilter::all(), rate)
        .await
        .unwrap();
    assert_eq!(requeued, 6);
    for n in 0..6_u64 {
        runs.recv().await.unwrap();
        // Each at its time, and found by a poll up to a second later.
        let at = begun.elapsed().as_secs();
        assert!((n * 10..=n * 10 + 1).contains(&at), "{n} ran after {at} s");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bulk_change_that_is_cut_short_says_what_it_did_and_can_be_repeated() {
    let store = MemoryStore::new();
    buried(&store, 450).await;
    let tool = builder(&store).build().unwrap();
    let letters = tool.dead_letters();
    let hold = store.hold(Operation::ChangeDeadLetters);
    let cut_short = tokio::spawn({
        let letters = letters.clone();
        async move { letters.discard_all(&DeadLetterFilter::all()).await }
    });
    hold.arrived(1).await;
    let second = store.hold(Operation::ChangeDeadLetters);
    drop(hold);
    second.arrived(1).await;
    store.fail_next(Operation::ChangeDeadLetters, StoreErrorKind::Unreachable, 1);
    drop(second);
    let error = cut_short.await.unwrap().unwrap_err();
    assert_eq!(error.changed(), 200);
    assert_eq!(error.error().kind(), StoreErrorKind::Unreachable);
    assert!(
        error
            .to_string()
            .starts_with("cut short after 200 dead letters")
    );

    let rest = letters.discard_all(&DeadLetterFilter::all()).await.unwrap();
    assert_eq!(rest, 250);
    let states = store.records().into_iter().map(|record| record.state);
    assert!(
        states
            .into_iter()
            .all(|state| state == EventState::Discarded)
    );
}

#[tokio::test(start_paused = true)]
async fn p17_only_a_person_removes_dead_letters_and_only_the_old_ones() {
    let store = MemoryStore::new();
    let old = buried(&store, 2).await;
    tokio::time::advance(Duration::from_secs(90 * 24 * 60 * 60)).await;
    let young = buried(&store, 1).await;
    let tool = builder(&store).build().unwrap();
    let month = Duration::from_secs(30 * 24 * 60 * 60);
    assert_eq!(tool.dead_letters().purge(month).await.unwrap(), 2);
    assert_eq!(tool.find(old[0]).await.unwrap(), None);
    let record = tool.find(young[0]).await.unwrap().unwrap();
    assert_eq!(record.state, EventState::DeadLetter);
}

#[tokio::test(start_paused = true)]
async fn a_hook_hears_of_every_event_that_dies_and_of_nothing_else() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|run| match run.n {
        1 => Step::Return(Err(HandlerError::permanent("no such user"))),
        2 if run.delivery.attempt().get() == 1 => Step::Return(Err(HandlerError::retry("down"))),
        _ => Step::Return(Ok(())),
    });
    let (died, mut dead) = mpsc::unbounded_channel();
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder
        .on_dead_letter(move |event| {
            let _ = died.send(event.clone());
            panic!("a hook that panics changes nothing");
        })
        .build()
        .unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    publish_for_relays(&outbox, &Ticked { n: 2 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    for _ in 0..3 {
        outcomes.recv().await.unwrap();
    }
    let event = dead.recv().await.unwrap();
    assert_eq!((event.event_id, event.attempt), (id, 1));
    assert_eq!(event.reason, DeadReason::Permanent);
    assert_eq!(event.error, "no such user");
    assert!(dead.try_recv().is_err());
}

/// What `ticked` was in an earlier release.
#[derive(Deserialize, Serialize)]
struct TickedOnce {
    at: String,
}

impl outbox_core::OutboxEvent for TickedOnce {
    type Output = ();
    const NAME: &'static str = "ticked";

    fn dedup_key(&self) -> Option<String> {
        Some(self.at.clone())
    }
}

fn once() -> TickedOnce {
    TickedOnce {
        at: "noon".to_owned(),
    }
}

#[tokio::test(start_paused = true)]
async fn p12_an_undecodable_event_is_given_away_and_removed_where_that_is_wanted() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let given: Arc<Mutex<Vec<UndecodableEvent>>> = Arc::default();
    let taker = Arc::clone(&given);
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder
        .discard_undecodable(move |event| taker.lock().unwrap().push(event.clone()))
        .build()
        .unwrap();
    let id = publish_for_relays(&outbox, &once()).await;
    let _relay = outbox.relay().start().await.unwrap();
    let outcome = outcomes.recv().await.unwrap();
    assert!(
        matches!(&outcome.result, SettledResult::Discarded { error } if error.contains("missing field `n`")),
        "{outcome:?}"
    );
    assert_eq!(outbox.find(id).await.unwrap(), None);
    assert_eq!(outbox.counters().discarded, 1);
    let given = std::mem::take(&mut *given.lock().unwrap());
    assert_eq!(given.len(), 1);
    assert_eq!(given[0].payload, r#"{"at":"noon"}"#);
    assert_eq!(
        (given[0].event_id, given[0].event_name.as_str()),
        (id, "ticked")
    );
    assert!(
        !format!("{given:?}").contains("noon"),
        "no payload in a log"
    );

    // Its key says so until it is free.
    let mut tx = outbox.begin().await.unwrap();
    match tx.publish(&once()).await.unwrap() {
        Published::Duplicate(duplicate) => assert_eq!(duplicate.state(), EventState::Discarded),
        published => panic!("{published:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn p12_an_undecodable_event_whose_hook_panics_is_a_dead_letter() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder
        .discard_undecodable(|_| panic!("no room"))
        .build()
        .unwrap();
    let id = publish_for_relays(&outbox, &once()).await;
    let _relay = outbox.relay().start().await.unwrap();
    let outcome = outcomes.recv().await.unwrap();
    let reason = DeadReason::Undecodable;
    assert!(
        matches!(outcome.result, SettledResult::DeadLetter { reason: r, .. } if r == reason),
        "{outcome:?}"
    );
    assert!(outbox.dead_letters().get(id).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn statistics_name_what_nobody_here_handles() {
    let store = MemoryStore::new();
    buried(&store, 2).await;
    let outbox: Outbox<MemoryStore> = builder(&store)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .build()
        .unwrap();
    publish_for_relays(&outbox, &OrderPaid { order: 7 }).await;
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    tokio::time::advance(Duration::from_secs(60)).await;
    let stats = outbox.stats().await.unwrap();
    assert!(stats.exact);
    assert_eq!(stats.unhandled, ["ticked"]);
    assert_eq!((stats.total().due, stats.total().dead), (2, 2));
    assert_eq!(stats.events["ticked"].unsettled(), 1);
    assert_eq!(stats.oldest_due, Some(Duration::from_secs(60)));
}
