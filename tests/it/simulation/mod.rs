//! A simulation: several processes publish and handle events over one database, and each of them may
//! stop, freeze, be slow or lose its connection before and after every call of the store, and while
//! a handler runs.
//!
//! A seed decides what happens. Time is virtual, so a run of some minutes takes milliseconds. When the
//! misfortunes are over, everything has to come to an end within [`CALM`], and then the history is
//! checked: see [`history`].
//!
//! A seed that fails is printed. To run it again, and others from it:
//!
//! ```text
//! SIMULATION_SEED=4711 scripts/test -p outbox-tests --test it -- simulation
//! ```
//!
//! The seed decides what goes wrong and when, and not in which order the runtime polls what is ready
//! at one moment: a failure that needs such an order may take some runs of its seed to come again.

mod history;
mod poison;
mod unreliable;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use outbox_core::backoff::Backoff;
use outbox_core::event::BehindDead;
use outbox_core::testing::MemoryStore;
use outbox_core::{Delivery, HandlerError, Outbox, OutboxEvent};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use history::{History, Promised};
use unreliable::{Process, Unreliable};

const SEEDS: u64 = 10_000;

/// As many as the smallest machine has cores that this is run on.
const WORKERS: usize = 2;

/// How long a seed may take on a busy machine: far more than the ten milliseconds that it needs.
const SEED_MAX: Duration = Duration::from_secs(60);

/// How long things go wrong, and events are published.
const STORM: Duration = Duration::from_secs(60);

/// How long it may take then until every event has ended: the leases, a sweep, and the retries.
const CALM: Duration = Duration::from_secs(10 * 60);

const LEASE: Duration = Duration::from_secs(10);
const TIMEOUT: Duration = Duration::from_secs(5);
const SWEEP: Duration = Duration::from_secs(30);

macro_rules! event {
    ($name:ident, $text:literal, $key:expr, $ordering:expr, $behind:expr) => {
        #[derive(Clone, Debug, Deserialize, Serialize)]
        struct $name {
            n: u64,
        }

        impl OutboxEvent for $name {
            type Output = u64;
            const NAME: &'static str = $text;
            const BEHIND_DEAD: BehindDead = $behind;

            fn dedup_key(&self) -> Option<String> {
                let key: fn(u64) -> Option<String> = $key;
                key(self.n)
            }

            fn ordering_key(&self) -> Option<String> {
                let key: fn(u64) -> Option<String> = $ordering;
                key(self.n)
            }
        }
    };
}

event!(Plain, "plain", |_| None, |_| None, BehindDead::Block);
event!(
    Keyed,
    "keyed",
    |n| Some((n % 3).to_string()),
    |_| None,
    BehindDead::Block
);
event!(
    Blocking,
    "blocking",
    |_| None,
    |n| Some((n % 2).to_string()),
    BehindDead::Block
);
event!(
    Skipping,
    "skipping",
    |_| None,
    |n| Some(format!("s{}", n % 2)),
    BehindDead::Skip
);
event!(Fanned, "fanned", |_| None, |_| None, BehindDead::Block);

#[test]
fn whatever_stops_freezes_or_gets_lost_every_committed_event_comes_to_its_one_end() {
    let first: Option<u64> = std::env::var("SIMULATION_SEED")
        .ok()
        .map(|seed| seed.parse().expect("SIMULATION_SEED is a number"));
    let seeds = first.unwrap_or(0)..first.unwrap_or(0) + SEEDS;
    let next = Arc::new(AtomicU64::new(seeds.start));
    let (report, reports) = std::sync::mpsc::channel();
    for worker in 0..WORKERS {
        let (next, seeds, report) = (Arc::clone(&next), seeds.clone(), report.clone());
        std::thread::spawn(move || {
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if !seeds.contains(&seed) {
                    return;
                }
                let _ = report.send((worker, seed, None));
                let end = catch_unwind(AssertUnwindSafe(|| simulate(seed)));
                let _ = report.send((worker, seed, Some(end)));
            }
        });
    }
    drop(report);
    let mut at_work = [None; WORKERS];
    loop {
        match reports.recv_timeout(SEED_MAX) {
            Ok((worker, seed, None)) => at_work[worker] = Some(seed),
            Ok((worker, _, Some(Ok(())))) => at_work[worker] = None,
            Ok((_, seed, Some(Err(panic)))) => {
                eprintln!("SIMULATION_SEED={seed}");
                resume_unwind(panic);
            }
            Err(RecvTimeoutError::Timeout) => {
                panic!("SIMULATION_SEED={at_work:?}: time does not move any more")
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn simulate(seed: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        // Without I/O: thousands of these would run out of file descriptors.
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = Arc::new(World::new(seed));
        let processes = world.random().usize(2..=3);
        let lives: Vec<_> = (0..processes)
            .map(|number| tokio::spawn(live(Arc::clone(&world), number)))
            .collect();
        tokio::time::sleep(STORM).await;
        world.calm_down();
        let ends_by = Instant::now() + CALM;
        while !world.history.is_at_rest(&world.database.records()) {
            assert!(
                Instant::now() < ends_by,
                "not at rest: {:#?}",
                world.database.records()
            );
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        world.history.check(&world.database.records());
        for life in lives {
            life.abort();
        }
        // Their handlers have the world.
        let over = std::mem::take(&mut *world.over.lock().unwrap());
        drop(over);
    });
}

struct World {
    database: MemoryStore,
    history: History,
    random: std::sync::Mutex<fastrand::Rng>,
    current: std::sync::Mutex<Vec<Process>>,
    is_calm: std::sync::atomic::AtomicBool,
    /// Outboxes whose processes have stopped.
    over: std::sync::Mutex<Vec<Outbox<Unreliable>>>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self {
            database: MemoryStore::new(),
            history: History::default(),
            random: std::sync::Mutex::new(fastrand::Rng::with_seed(seed)),
            current: std::sync::Mutex::default(),
            is_calm: false.into(),
            over: std::sync::Mutex::default(),
        }
    }

    fn random(&self) -> std::sync::MutexGuard<'_, fastrand::Rng> {
        self.random.lock().unwrap()
    }

    fn start_process(&self) -> Process {
        let process = Process::new(self.random().u64(..));
        if self.is_calm.load(Ordering::Relaxed) {
            process.calm_down();
        }
        self.current.lock().unwrap().push(process.clone());
        process
    }

    fn calm_down(&self) {
        self.is_calm.store(true, Ordering::Relaxed);
        for process in &*self.current.lock().unwrap() {
            process.calm_down();
        }
    }
}

/// One place where processes run, one after the other.
async fn live(world: Arc<World>, number: usize) {
    for generation in 0.. {
        let process = world.start_process();
        let instance = format!("{number}-{generation}");
        let outbox = outbox(&world, &process, &instance);
        let stopped = process.stopped().clone();
        tokio::select! {
            () = stopped.cancelled() => {}
            () = run(&world, &process, &outbox) => {}
        }
        // Its loops stay where they are, and do nothing: dropping the outbox would close it.
        world.over.lock().unwrap().push(outbox);
        let down_for = Duration::from_millis(world.random().u64(0..8_000));
        tokio::time::sleep(down_for).await;
    }
}

async fn run(world: &Arc<World>, process: &Process, outbox: &Outbox<Unreliable>) {
    let relay = loop {
        let relay = outbox.relay().sweep_interval(SWEEP).concurrency(4);
        match relay.start().await {
            Ok(relay) => break relay,
            // As a supervisor does that starts it again.
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    };
    while !world.is_calm.load(Ordering::Relaxed) {
        let pause = Duration::from_millis(world.random().u64(0..6_000));
        tokio::time::sleep(pause).await;
        publish(world, outbox).await;
        if world.random().u32(0..100) < 5 {
            // A deployment: it ends by itself, in time or not.
            let grace = Duration::from_millis(world.random().u64(0..4_000));
            process.leave();
            let _ = relay.shutdown(grace).await;
            let _ = outbox.shutdown(grace).await;
            process.stop();
            return;
        }
    }
    std::future::pending::<()>().await;
}

fn outbox(world: &Arc<World>, process: &Process, instance: &str) -> Outbox<Unreliable> {
    let handler = |name: Option<&'static str>| Handling {
        world: Arc::clone(world),
        process: process.clone(),
        name,
    };
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(8), 0.2).unwrap();
    Outbox::builder(Unreliable::new(&world.database, process))
        .on_current_runtime()
        .instance(instance)
        .lease(LEASE)
        .handler_timeout(TIMEOUT)
        .inline_lease(LEASE)
        .backoff(backoff)
        .max_attempts(6)
        .on::<Plain, _>(handler(None))
        .on::<Keyed, _>(handler(None))
        .on::<Blocking, _>(handler(None))
        .on::<Skipping, _>(handler(None))
        .on_named::<Fanned, _>("email", handler(Some("email")))
        .on_named::<Fanned, _>("ledger", handler(Some("ledger")))
        .build()
        .unwrap()
}

/// A transaction with one event or two, committed or not.
async fn publish(world: &Arc<World>, outbox: &Outbox<Unreliable>) {
    let Ok(mut tx) = outbox.begin().await else {
        return;
    };
    let mut events = Vec::new();
    let count = world.random().usize(1..=2);
    for _ in 0..count {
        let (kind, n) = (world.random().u32(0..5), world.history.next());
        let published = match kind {
            0 => tx.publish(&Plain { n }).await.map(|p| p.event_id()),
            1 => tx.publish(&Keyed { n }).await.map(|p| p.event_id()),
            2 => tx.publish(&Blocking { n }).await.map(|p| p.event_id()),
            3 => tx.publish(&Skipping { n }).await.map(|p| p.event_id()),
            _ => tx.publish(&Fanned { n }).await.map(|p| p.event_id()),
        };
        let Ok(id) = published else {
            return;
        };
        events.push((n, id));
    }
    if world.random().u32(0..100) < 15 {
        world.history.promise(&events, Promised::Nothing);
        if world.random().bool() {
            let _ = tx.rollback().await;
        }
        return;
    }
    // Should the process stop while it commits, nobody knows.
    world.history.promise(&events, Promised::Unknown);
    if tx.commit().await.is_ok() {
        world.history.promise(&events, Promised::Kept);
    }
}

struct Handling {
    world: Arc<World>,
    process: Process,
    name: Option<&'static str>,
}

impl Handling {
    async fn run(&self, n: u64, delivery: &Delivery) -> Result<u64, HandlerError> {
        let run = self
            .world
            .history
            .begin(&self.process, n, self.name, delivery);
        if !self.process.step().await {
            std::future::pending::<()>().await;
        }
        let takes = Duration::from_millis(self.world.random().u64(0..1_000));
        tokio::time::sleep(takes).await;
        let does = if self.world.is_calm.load(Ordering::Relaxed) {
            100
        } else {
            self.world.random().u32(0..100)
        };
        let result = match does {
            0..15 => Err(HandlerError::retry("not now")),
            15..18 => Err(HandlerError::permanent("never")),
            // A panic without its message and backtrace, of which there would be thousands.
            18..21 => resume_unwind(Box::new("as the seed has it")),
            21..25 => {
                // Longer than it may.
                tokio::time::sleep(2 * TIMEOUT).await;
                Ok(n)
            }
            25..27 => {
                self.process.stop();
                std::future::pending().await
            }
            _ => Ok(n),
        };
        if !self.process.step().await {
            std::future::pending::<()>().await;
        }
        run.end(result.is_ok());
        result
    }
}

macro_rules! handles {
    ($($event:ident),+) => {
        $(
            impl outbox_core::Handler<$event> for Handling {
                async fn handle(
                    &self,
                    event: $event,
                    delivery: &Delivery,
                ) -> Result<u64, HandlerError> {
                    self.run(event.n, delivery).await
                }
            }
        )+
    };
}

handles!(Plain, Keyed, Blocking, Skipping, Fanned);
