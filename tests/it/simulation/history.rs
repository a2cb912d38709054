//! What has happened, and what must be true of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use outbox_core::event::EventId;
use outbox_core::store::{EventRecord, EventState};
use outbox_core::{DeadReason, Delivery};
use tokio::time::Instant;

use super::unreliable::Process;

/// What a publisher knows of an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Promised {
    /// Its transaction committed.
    Kept,
    /// Its transaction was rolled back.
    Nothing,
    /// The answer to its commit was lost.
    Unknown,
}

/// Everything that publishers and handlers have seen.
#[derive(Debug, Default)]
pub(crate) struct History {
    next: Mutex<u64>,
    promised: Mutex<BTreeMap<u64, (EventId, Promised)>>,
    runs: Arc<Mutex<Vec<Run>>>,
}

#[derive(Clone, Debug)]
struct Run {
    n: u64,
    event: EventId,
    handler: Option<&'static str>,
    attempt: u32,
    process: Process,
    began: Instant,
    ended: Option<Instant>,
    succeeded: bool,
}

/// A run that has begun. Dropped without an end when its future is: then it has not succeeded.
pub(crate) struct Running {
    runs: Arc<Mutex<Vec<Run>>>,
    index: usize,
}

impl Running {
    pub(crate) fn end(&self, succeeded: bool) {
        self.runs.lock().unwrap()[self.index].succeeded = succeeded;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.runs.lock().unwrap()[self.index].ended = Some(Instant::now());
    }
}

impl Run {
    /// Until when it could have an effect. A process that has stopped has none any more.
    fn over_at(&self) -> Instant {
        let stopped = self.process.stopped_at();
        let ended = self.ended.or(stopped).expect("nothing runs at the end");
        stopped.map_or(ended, |stopped| std::cmp::min(stopped, ended))
    }
}

impl Run {
    /// Whether its process cut it short while it shut down, which costs no attempt.
    fn may_be_given_back(&self) -> bool {
        let leaves_at = self.process.leaves_at();
        !self.succeeded && leaves_at.is_some_and(|at| at <= self.over_at())
    }
}

impl History {
    pub(crate) fn next(&self) -> u64 {
        let mut next = self.next.lock().unwrap();
        *next += 1;
        *next
    }

    pub(crate) fn promise(&self, events: &[(u64, EventId)], promised: Promised) {
        let mut all = self.promised.lock().unwrap();
        for (n, id) in events {
            all.insert(*n, (*id, promised));
        }
    }

    pub(crate) fn begin(
        &self,
        process: &Process,
        n: u64,
        handler: Option<&'static str>,
        delivery: &Delivery,
    ) -> Running {
        let mut runs = self.runs.lock().unwrap();
        runs.push(Run {
            n,
            event: delivery.event_id(),
            handler,
            attempt: delivery.attempt().get(),
            process: process.clone(),
            began: Instant::now(),
            ended: None,
            succeeded: false,
        });
        Running {
            runs: Arc::clone(&self.runs),
            index: runs.len() - 1,
        }
    }

    /// Whether everything has ended that can: a dead letter keeps those behind it waiting.
    pub(crate) fn is_at_rest(&self, records: &[EventRecord]) -> bool {
        let nothing_runs = self
            .runs
            .lock()
            .unwrap()
            .iter()
            .all(|run| run.ended.is_some() || run.process.stopped_at().is_some());
        nothing_runs
            && records
                .iter()
                .all(|record| is_settled(record) || is_behind_a_dead_letter(record, records))
    }

    /// The promises, of everything that happened.
    pub(crate) fn check(&self, records: &[EventRecord]) {
        let runs = self.runs.lock().unwrap().clone();
        self.what_was_committed_is_there_and_nothing_else(records, &runs);
        every_end_has_its_cause(records, &runs);
        no_attempt_is_run_twice(&runs);
        no_two_runs_overlap(&runs);
        a_key_has_one_event(records);
        a_key_is_handled_in_order(records, &runs);
    }

    /// P1.
    fn what_was_committed_is_there_and_nothing_else(&self, records: &[EventRecord], runs: &[Run]) {
        let there: BTreeSet<EventId> = records.iter().map(|record| record.id).collect();
        for (n, (id, promised)) in &*self.promised.lock().unwrap() {
            match promised {
                Promised::Kept => assert!(there.contains(id), "{n} was committed and is lost"),
                // Its number may be that of a duplicate's, which is there.
                Promised::Nothing => {
                    let ran = runs.iter().find(|run| run.n == *n);
                    assert!(ran.is_none(), "{n} was rolled back and is run: {ran:?}");
                }
                Promised::Unknown => {}
            }
        }
        for run in runs {
            assert!(there.contains(&run.event), "run without a row: {run:?}");
        }
    }
}

fn is_settled(record: &EventRecord) -> bool {
    !matches!(
        record.state,
        EventState::Pending | EventState::InProgress | EventState::Failed
    )
}

fn place(record: &EventRecord) -> EventId {
    record.origin.unwrap_or(record.id)
}

fn is_behind_a_dead_letter(record: &EventRecord, records: &[EventRecord]) -> bool {
    record.name == "blocking"
        && records.iter().any(|other| {
            other.name == record.name
                && other.ordering_key == record.ordering_key
                && other.state == EventState::DeadLetter
                && place(other) < place(record)
        })
}

/// P6, P9: what is processed was run with success, and what is dead has a reason that fits.
fn every_end_has_its_cause(records: &[EventRecord], runs: &[Run]) {
    for record in records {
        let of_record: Vec<_> = runs.iter().filter(|run| run.event == record.id).collect();
        let charged = of_record.iter().filter(|run| !run.may_be_given_back());
        assert!(
            charged.count() <= record.attempts as usize,
            "{record:#?}\n{of_record:#?}"
        );
        assert!(record.attempts <= record.max_attempts.get(), "{record:#?}");
        match record.state {
            EventState::Processed => {
                assert!(
                    of_record.iter().any(|run| run.succeeded),
                    "{record:#?}\n{of_record:#?}"
                );
            }
            EventState::DeadLetter => match record.dead_reason {
                Some(DeadReason::Permanent) => assert!(!of_record.is_empty(), "{record:#?}"),
                _ => assert_eq!(record.attempts, record.max_attempts.get(), "{record:#?}"),
            },
            EventState::Pending | EventState::InProgress | EventState::Failed => {
                assert!(is_behind_a_dead_letter(record, records), "{record:#?}");
                assert!(of_record.is_empty(), "{record:#?}");
            }
            other => panic!("nothing of the simulation ends as {other}: {record:#?}"),
        }
    }
}

/// P6, P14: an attempt is charged before it runs, and runs once, unless a process that shut down has
/// given it back.
fn no_attempt_is_run_twice(runs: &[Run]) {
    let mut seen: HashMap<_, &Run> = HashMap::new();
    for run in runs {
        let earlier = seen.insert((run.event, run.handler, run.attempt), run);
        assert!(
            earlier.is_none_or(Run::may_be_given_back),
            "{earlier:#?}\n{run:#?}"
        );
    }
}

/// P4: a run is over, or given up, before the next of its event begins.
fn no_two_runs_overlap(runs: &[Run]) {
    for (index, one) in runs.iter().enumerate() {
        for other in &runs[index + 1..] {
            if (one.event, one.handler) == (other.event, other.handler) {
                assert!(one.over_at() <= other.began, "{one:#?}\n{other:#?}");
            }
        }
    }
}

/// P3.
fn a_key_has_one_event(records: &[EventRecord]) {
    let mut keys = BTreeSet::new();
    for key in records
        .iter()
        .filter_map(|record| record.dedup_key.as_ref())
    {
        assert!(keys.insert(key), "two events of the key {key}");
    }
}

/// Invariant 15: in the order of their numbers, and one after the other.
fn a_key_is_handled_in_order(records: &[EventRecord], runs: &[Run]) {
    let key_of: HashMap<EventId, &str> = records
        .iter()
        .filter_map(|record| Some((record.id, record.ordering_key.as_deref()?)))
        .collect();
    let ordered: Vec<_> = runs
        .iter()
        .filter_map(|run| Some((key_of.get(&run.event)?, run)))
        .collect();
    for (key, one) in &ordered {
        for (other_key, other) in &ordered {
            if key == other_key && one.event < other.event {
                assert!(one.over_at() <= other.began, "{one:#?}\n{other:#?}");
            }
        }
    }
}
