//! What happens, in seven chapters.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use outbox_core::{EventId, EventState, Outbox, Published, SettledEvent, SettledResult};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::broker::Broker;
use crate::orders::{Answers, CacheWarm, OrderPaid, Shop, Stored, TellBroker};
use crate::stream::Stream;

/// Tells it, and fails where it goes another way.
pub(crate) async fn tell<S: Shop>(store: S, broker: &mut Broker) -> anyhow::Result<()> {
    let stream = broker.connect().await?;
    println!("The broker: NATS {}, {}.", stream.version(), broker.about());
    println!("Its stream: {}.", broker.stream());

    let answers = Answers::default();
    let (report, outcomes) = unbounded_channel();
    let outbox = Outbox::builder(store)
        .on(TellBroker {
            stream: stream.clone(),
            answers: answers.clone(),
        })
        .on::<CacheWarm, _>(stream.clone())
        .on_settled(move |event| {
            let _ = report.send(event.clone());
        })
        .build()?;
    let relay = outbox.relay();
    let relay = relay.poll_interval(Duration::from_millis(100));
    let relay = relay.start().await?;

    let mut story = Story {
        outbox,
        outcomes,
        answers,
        stream,
        paid: BTreeMap::new(),
    };
    story.three_orders().await?;
    story.a_rollback().await?;
    story.a_lost_answer(broker).await?;
    story.an_outage(broker).await?;
    story.the_backlog(broker).await?;
    story.a_second_click().await?;
    relay.shutdown(Duration::from_secs(5)).await?;
    story.what_the_stream_has(broker).await
}

const WARM: CacheWarm = CacheWarm { order_id: 6 };

struct Story<S: Shop> {
    outbox: Outbox<S>,
    outcomes: UnboundedReceiver<SettledEvent>,
    answers: Answers,
    stream: Stream,
    /// The event of each order whose payment was committed.
    paid: BTreeMap<i64, EventId>,
}

impl<S: Shop> Story<S> {
    async fn three_orders(&mut self) -> anyhow::Result<()> {
        println!("\n1. Orders 1 to 3 are paid. Each change is committed together with its event.");
        for order_id in 1..=3 {
            let event = self.pay(order_id).await?;
            let committed = Instant::now();
            self.processed([event]).await?;
            let elapsed = committed.elapsed();
            let Stored { sequence } = self.stored(event).await?;
            println!(
                "   Order {order_id} is in the stream, sequence {sequence}, {elapsed:.1?} after the commit."
            );
        }
        Ok(())
    }

    async fn a_rollback(&mut self) -> anyhow::Result<()> {
        println!("\n2. Order 4 is paid, its event published, and then the transaction rolls back.");
        let mut tx = self.outbox.begin().await?;
        S::pay(&mut tx, 4).await?;
        let event = tx.publish(&order_paid(4)).await?.event_id();
        tx.rollback().await?;
        ensure!(self.outbox.find(event).await?.is_none());
        println!("   Neither the change nor the event is there. Nobody is told.");
        Ok(())
    }

    /// The stream has the event, and the sender does not know.
    async fn a_lost_answer(&mut self, broker: &Broker) -> anyhow::Result<()> {
        println!("\n3. Order 5 is paid, and the connection breaks before the stream's answer.");
        let mut reader = broker.reader().await?;
        broker.line().hold_answers();
        let event = self.pay(5).await?;
        let mut entry = reader.next().await?;
        while entry.id != event {
            entry = reader.next().await?;
        }
        println!("   The stream has it, sequence {}.", entry.sequence);
        broker.line().cut();
        self.stream.until_connected(false).await?;
        broker.line().restore();

        loop {
            let outcome = self.outcome().await?;
            let SettledResult::Retry { after, error } = outcome.result else {
                break;
            };
            println!(
                "   Attempt {}: {error}. Again in {after:.0?}.",
                outcome.attempt
            );
        }
        let answer = self.answers.about(event).context("no answer came")?;
        println!(
            "   Attempt {}: sequence {}, duplicate: {}. The stream keeps one of the two.",
            answer.attempt, answer.sequence, answer.duplicate
        );
        ensure!(answer.duplicate && answer.sequence == entry.sequence);
        ensure!(self.stored(event).await?.sequence == entry.sequence);
        Ok(())
    }

    async fn an_outage(&mut self, broker: &mut Broker) -> anyhow::Result<()> {
        println!("\n4. The broker is away: {}.", broker.stop().await?);
        self.stream.until_connected(false).await?;
        let began = Instant::now();
        let mut untried = BTreeSet::new();
        for order_id in 6..=25 {
            untried.insert(self.pay(order_id).await?);
        }
        println!(
            "   Orders 6 to 25 are paid all the same, in {:.1?}.",
            began.elapsed()
        );

        let mut why = String::new();
        while !untried.is_empty() {
            let outcome = self.outcome().await?;
            let SettledResult::Retry { error, .. } = outcome.result else {
                bail!("order.paid was {:?} without a broker", outcome.result);
            };
            untried.remove(&outcome.event_id);
            why = error;
        }
        println!("   Each was tried at once, and is tried again: {why}.");

        let again = self.publish_again(6).await?;
        let first = again.duplicate().context("order 6 has two events")?;
        ensure!(first.state() != EventState::Processed && first.output()?.is_none());
        println!("   Order 6 is paid a second time: no second event, the first one still waits.");

        let Err(error) = self.outbox.dispatch_directly(&WARM).await else {
            bail!("cache.warm reached a broker that is away");
        };
        println!("   Its page is not warmed: {error}. That has no row, and is not tried again.");

        let waiting = self.outbox.store().waiting().await?;
        println!("   {waiting} events wait in the outbox.");
        ensure!(waiting == 20);
        Ok(())
    }

    async fn the_backlog(&mut self, broker: &mut Broker) -> anyhow::Result<()> {
        println!("\n5. The broker is back: {}.", broker.resume().await?);
        self.stream.until_connected(true).await?;
        let connected = Instant::now();
        let backlog: Vec<_> = self.paid.range(6..).map(|(_, event)| *event).collect();
        self.processed(backlog).await?;
        let waiting = self.outbox.store().waiting().await?;
        println!(
            "   {waiting} events wait in the outbox, {:.1?} after it was reached.",
            connected.elapsed()
        );
        ensure!(waiting == 0);
        Ok(())
    }

    async fn a_second_click(&mut self) -> anyhow::Result<()> {
        println!("\n6. Order 6 is paid a third time, now that its event is in the stream.");
        let again = self.publish_again(6).await?;
        let first = again.duplicate().context("order 6 has two events")?;
        let told = first.output()?.context("the sequence was not kept")?;
        println!(
            "   The answer is the first event's: sequence {}.",
            told.sequence
        );
        ensure!(first.event_id() == self.paid[&6]);
        ensure!(told == self.stored(first.event_id()).await?);

        self.outbox.dispatch_directly(&WARM).await?;
        println!("   Its page is warmed, too. The broker passes that on and does not keep it.");
        Ok(())
    }

    /// Compares what was committed, what the outbox says, and what somebody else reads.
    async fn what_the_stream_has(&self, broker: &Broker) -> anyhow::Result<()> {
        println!("\n7. Somebody else reads the stream from its beginning.");
        let entries = broker.reader().await?.all().await?;
        let orders = self.outbox.store().paid().await?;
        ensure!(orders.iter().eq(self.paid.keys()), "paid: {orders:?}");
        let read: BTreeMap<_, _> = entries
            .iter()
            .map(|entry| (entry.paid.order_id, entry.id))
            .collect();
        println!(
            "   {} entries for {} paid orders: each once, and none of order 4.",
            entries.len(),
            orders.len()
        );
        ensure!(read == self.paid, "in the stream: {read:?}");
        ensure!(entries.len() == orders.len(), "the stream has duplicates");
        for entry in &entries {
            ensure!(self.stored(entry.id).await?.sequence == entry.sequence);
        }
        println!("   Every row of the outbox has the sequence of its entry.");
        let answers = self.answers.all();
        let duplicates = answers.iter().filter(|answer| answer.duplicate).count();
        println!(
            "   The stream gave {} answers, {duplicates} of them with duplicate: true.",
            answers.len()
        );
        Ok(())
    }

    // --- What the chapters are made of ---------------------------------------------------------

    /// Pays an order, and publishes that in the same transaction.
    async fn pay(&mut self, order_id: i64) -> anyhow::Result<EventId> {
        let mut tx = self.outbox.begin().await?;
        S::pay(&mut tx, order_id).await?;
        let published = tx.publish(&order_paid(order_id)).await?;
        tx.commit().await?;
        self.paid.insert(order_id, published.event_id());
        Ok(published.event_id())
    }

    /// Publishes what was published before, as a shop does whose customer clicks twice.
    async fn publish_again(&self, order_id: i64) -> anyhow::Result<Published<OrderPaid>> {
        let mut tx = self.outbox.begin().await?;
        let published = tx.publish(&order_paid(order_id)).await?;
        tx.commit().await?;
        Ok(published)
    }

    /// The next outcome that was recorded.
    async fn outcome(&mut self) -> anyhow::Result<SettledEvent> {
        let outcome = self.outcomes.recv().await;
        let outcome = outcome.context("the outbox has ended")?;
        if let SettledResult::DeadLetter { reason, error } = &outcome.result {
            bail!("{} is a dead letter ({reason}): {error}", outcome.event_id);
        }
        Ok(outcome)
    }

    /// Waits until all of these are processed.
    async fn processed(&mut self, events: impl IntoIterator<Item = EventId>) -> anyhow::Result<()> {
        let mut events: BTreeSet<_> = events.into_iter().collect();
        while !events.is_empty() {
            let outcome = self.outcome().await?;
            if outcome.result == SettledResult::Processed {
                events.remove(&outcome.event_id);
            }
        }
        Ok(())
    }

    /// What the outbox has kept of the stream's answer.
    async fn stored(&self, event: EventId) -> anyhow::Result<Stored> {
        let record = self.outbox.find(event).await?;
        let output = record.and_then(|record| record.output);
        let output = output.with_context(|| format!("no output is kept with {event}"))?;
        Ok(serde_json::from_str(&output)?)
    }
}

fn order_paid(order_id: i64) -> OrderPaid {
    OrderPaid {
        order_id,
        cents: 4_200,
    }
}
