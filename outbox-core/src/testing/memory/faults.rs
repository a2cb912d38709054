//! What can be made to go wrong, and what was asked.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::{MemoryStore, lock};
use crate::outcome::Outcome;
use crate::store::{Settlement, StoreError, StoreErrorKind};

/// A method of [`Store`](crate::Store).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Operation {
    /// `begin`.
    Begin,
    /// `commit`.
    Commit,
    /// `rollback`. A transaction that is dropped is not counted.
    Rollback,
    /// `insert`.
    Insert,
    /// `check`.
    Check,
    /// `claim`.
    Claim,
    /// `claim_in`.
    ClaimIn,
    /// `claim_rows`.
    ClaimRows,
    /// `verify`.
    Verify,
    /// `renew`.
    Renew,
    /// `split`.
    Split,
    /// `set_paused`.
    SetPaused,
    /// `paused`.
    Paused,
    /// `settle`.
    Settle,
    /// `release`.
    Release,
    /// `sweep`.
    Sweep,
    /// `purge`.
    Purge,
    /// `upkeep`.
    Upkeep,
    /// `find`.
    Find,
    /// `dead_letters`.
    DeadLetters,
    /// `change_dead_letters`.
    ChangeDeadLetters,
    /// `stats`.
    Stats,
    /// `begin_part`.
    BeginPart,
    /// `settle_through`.
    SettleThrough,
    /// `lock_entity`.
    LockEntity,
    /// `lock_ordering_key`.
    LockOrderingKey,
    /// `cancel`.
    Cancel,
    /// `look_up`.
    LookUp,
    /// `blocked_keys`.
    BlockedKeys,
    /// `next_in_order`.
    NextInOrder,
    /// `newest`.
    Newest,
    /// `try_exclusive`.
    TryExclusive,
    /// `ExclusiveLock::keep`.
    KeepExclusive,
    /// `listen`.
    Listen,
    /// `notify`.
    Notify,
}

impl Operation {
    pub(super) fn error(self, kind: StoreErrorKind) -> StoreError {
        StoreError::new(kind, self.doing())
    }

    fn doing(self) -> &'static str {
        match self {
            Self::Begin => "begin a transaction",
            Self::Commit => "commit",
            Self::Rollback => "roll back",
            Self::Insert => "insert events",
            Self::Check => "check the outbox",
            Self::Claim | Self::ClaimIn | Self::ClaimRows => "claim events",
            Self::Verify => "verify leases",
            Self::Renew => "renew leases",
            Self::Settle | Self::SettleThrough => "settle events",
            Self::Split => "split events among their handlers",
            Self::SetPaused => "pause or resume",
            Self::Paused => "list what is paused",
            Self::Release => "release events",
            Self::Sweep => "sweep",
            Self::Purge => "purge",
            Self::Upkeep => "make and drop partitions",
            Self::DeadLetters => "list dead letters",
            Self::ChangeDeadLetters => "change dead letters",
            Self::Stats => "count events",
            Self::BeginPart => "set a savepoint",
            Self::LockEntity => "lock an entity",
            Self::LockOrderingKey => "lock an ordering key",
            Self::Cancel => "cancel an event",
            Self::LookUp => "look up events",
            Self::BlockedKeys => "list blocked keys",
            Self::NextInOrder => "find what is next in order",
            Self::Newest => "find the newest event",
            Self::TryExclusive => "take an exclusive lock",
            Self::KeepExclusive => "keep an exclusive lock",
            Self::Find => "find an event",
            Self::Listen => "listen for wake-ups",
            Self::Notify => "send a wake-up",
        }
    }
}

/// While it lives, the calls of one operation wait before they do anything. Dropping it lets them
/// go on.
#[derive(Debug)]
#[must_use = "dropping it lets the calls go on"]
pub struct Hold {
    gate: Arc<Gate>,
}

impl Hold {
    /// Waits until `n` calls have come to wait since the hold began.
    pub async fn arrived(&self, n: u64) {
        wait_until(&self.gate.arrivals, |arrivals| *arrivals >= n).await;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.gate.open.send_replace(true);
    }
}

#[derive(Debug, Default)]
struct Gate {
    open: watch::Sender<bool>,
    arrivals: watch::Sender<u64>,
}

impl MemoryStore {
    /// Makes the next `times` calls of `operation` fail with an error of `kind`, before they do
    /// anything. Adds to what was asked for earlier.
    pub fn fail_next(&self, operation: Operation, kind: StoreErrorKind, times: usize) {
        let mut plan = self.shared.faults.plan();
        let failures = plan.failures.entry(operation).or_default();
        failures.extend(std::iter::repeat_n(kind, times));
    }

    /// Makes the next `times` calls of `operation` do their work and then fail with an error of
    /// kind [`TimedOut`](StoreErrorKind::TimedOut), as a connection does that is cut before the
    /// answer arrives.
    pub fn lose_answers(&self, operation: Operation, times: usize) {
        let mut plan = self.shared.faults.plan();
        *plan.lost_answers.entry(operation).or_default() += times;
    }

    /// While it is, every call fails with an error of kind
    /// [`Unreachable`](StoreErrorKind::Unreachable). Subscriptions to wake-ups break.
    pub fn unreachable(&self, unreachable: bool) {
        self.shared.faults.plan().unreachable = unreachable;
        if unreachable {
            self.shared.bell.break_subscriptions();
        }
    }

    /// Makes the calls of `operation` wait until the [`Hold`] is dropped. A later hold of the same
    /// operation replaces an earlier one.
    pub fn hold(&self, operation: Operation) -> Hold {
        let gate = Arc::new(Gate::default());
        let gates = &mut self.shared.faults.plan().gates;
        gates.insert(operation, Arc::clone(&gate));
        Hold { gate }
    }

    /// Makes a settlement that has an output with `text` in it fail for its whole batch, with an
    /// error of kind [`Data`](StoreErrorKind::Data), as a value does that a database refuses.
    pub fn refuse_output_containing(&self, text: impl Into<String>) {
        self.shared.faults.plan().refused_outputs.push(text.into());
    }

    /// As [`refuse_output_containing`](Self::refuse_output_containing), for an error text.
    pub fn refuse_error_containing(&self, text: impl Into<String>) {
        self.shared.faults.plan().refused_errors.push(text.into());
    }

    /// Makes claims and renewals skip `row`, and settlements and releases that name it fail with an
    /// error of kind [`Locked`](StoreErrorKind::Locked), as they do while somebody has locked it.
    pub fn lock_row(&self, row: i64) {
        self.shared.database().locked.insert(row);
    }

    /// Ends what [`lock_row`](Self::lock_row) began.
    pub fn unlock_row(&self, row: i64) {
        self.shared.database().locked.remove(&row);
    }

    /// How many calls of `operation` have come back, with an answer or an error.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        count(&self.shared.faults.calls.borrow(), operation)
    }

    /// Waits until at least `n` calls of `operation` have come back.
    pub async fn wait_for_calls(&self, operation: Operation, n: u64) {
        wait_until(&self.shared.faults.calls, |calls| {
            count(calls, operation) >= n
        })
        .await;
    }
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    plan: Mutex<Plan>,
    calls: watch::Sender<HashMap<Operation, u64>>,
}

#[derive(Debug, Default)]
struct Plan {
    unreachable: bool,
    failures: HashMap<Operation, VecDeque<StoreErrorKind>>,
    lost_answers: HashMap<Operation, usize>,
    gates: HashMap<Operation, Arc<Gate>>,
    refused_outputs: Vec<String>,
    refused_errors: Vec<String>,
}

impl Faults {
    /// Comes before the work of a call. Where it fails, the call has come back.
    pub(super) async fn before(&self, operation: Operation) -> Result<(), StoreError> {
        let gate = self.plan().gates.get(&operation).cloned();
        if let Some(gate) = gate {
            gate.arrivals.send_modify(|arrivals| *arrivals += 1);
            wait_until(&gate.open, |open| *open).await;
        }
        let failure = self.plan().failure(operation);
        match failure {
            None => Ok(()),
            Some(kind) => {
                self.came_back(operation);
                Err(operation.error(kind))
            }
        }
    }

    /// Comes after the work of a call.
    pub(super) fn after(&self, operation: Operation) -> Result<(), StoreError> {
        let lost = self.plan().loses_answer(operation);
        self.came_back(operation);
        if lost {
            return Err(operation.error(StoreErrorKind::TimedOut));
        }
        Ok(())
    }

    pub(super) fn refuses(&self, settlements: &[Settlement]) -> bool {
        let plan = self.plan();
        let has_any =
            |text: &str, refused: &[String]| refused.iter().any(|part| text.contains(part));
        settlements
            .iter()
            .any(|settlement| match &settlement.outcome {
                Outcome::Processed { output } => output
                    .as_deref()
                    .is_some_and(|output| has_any(output, &plan.refused_outputs)),
                Outcome::Retry { error, .. } | Outcome::Dead { error, .. } => {
                    has_any(error.as_str(), &plan.refused_errors)
                }
                Outcome::Expired | Outcome::Discarded { .. } => false,
            })
    }

    /// Waits until `condition` holds. It is looked at now, and after each call that has come back.
    pub(super) async fn after_each_call(&self, condition: impl Fn() -> bool) {
        wait_until(&self.calls, |_| condition()).await;
    }

    fn plan(&self) -> std::sync::MutexGuard<'_, Plan> {
        lock(&self.plan)
    }

    fn came_back(&self, operation: Operation) {
        self.calls
            .send_modify(|calls| *calls.entry(operation).or_default() += 1);
    }
}

impl Plan {
    fn failure(&mut self, operation: Operation) -> Option<StoreErrorKind> {
        if self.unreachable {
            return Some(StoreErrorKind::Unreachable);
        }
        self.failures.get_mut(&operation)?.pop_front()
    }

    fn loses_answer(&mut self, operation: Operation) -> bool {
        match self.lost_answers.get_mut(&operation) {
            Some(left) if *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        }
    }
}

fn count(calls: &HashMap<Operation, u64>, operation: Operation) -> u64 {
    calls.get(&operation).copied().unwrap_or(0)
}

async fn wait_until<T>(sender: &watch::Sender<T>, condition: impl FnMut(&T) -> bool) {
    // The sender is borrowed for as long as this waits, so the channel does not close.
    let _ = sender.subscribe().wait_for(condition).await;
}
