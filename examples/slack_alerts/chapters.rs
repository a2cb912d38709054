//! The chapters. Each waits for what it tells, and checks it.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use hyper::StatusCode;
use reqwest::Url;

use crate::alert::{AlertRaised, number};
use crate::receiver::{End, Mood, Receiver};
use crate::relay::Outcome;
use crate::relays::Relays;
use crate::rows::{AlertRow, Alerts};
use crate::story::{Deadline, Story};

/// All of them, with a receiver that goes through everything a receiver goes through.
pub(crate) async fn all<S: Alerts>(
    store: S,
    relays: &mut Relays,
    deadline: Deadline,
) -> anyhow::Result<()> {
    let mut receiver = Receiver::start().await?;
    let mut story = Story::begin(store, &receiver.webhook()?, relays, deadline).await?;
    nothing_is_wrong(&mut story).await?;
    let poison = the_receiver_fails(&mut story, &receiver).await?;
    the_receiver_hangs(&mut story, &receiver).await?;
    the_receiver_is_busy(&mut story, &receiver).await?;
    the_receiver_restarts(&mut story, &mut receiver).await?;
    a_relay_is_killed(&mut story, &receiver).await?;

    let ended = story.ends().await?;
    ended.show_dead()?;
    let [dead] = &ended.dead[..] else {
        bail!("{} dead letters instead of one", ended.dead.len());
    };
    ensure!(dead.event_id == poison, "the wrong alert is dead");
    ensure!(dead.dead_reason.as_deref() == Some("permanent"));
    ended.compare(&receiver)
}

/// The first alone, with a receiver that is not ours to break.
pub(crate) async fn first<S: Alerts>(
    store: S,
    webhook: &Url,
    relays: &mut Relays,
    deadline: Deadline,
) -> anyhow::Result<()> {
    let mut story = Story::begin(store, webhook, relays, deadline).await?;
    nothing_is_wrong(&mut story).await?;
    let ended = story.ends().await?;
    ended.show_dead()?;
    ensure!(
        ended.dead.is_empty(),
        "{} of the alerts did not get through",
        ended.dead.len()
    );
    println!("{} alerts accepted.", ended.processed.len());
    Ok(())
}

async fn nothing_is_wrong<S: Alerts>(story: &mut Story<'_, S>) -> anyhow::Result<()> {
    println!("\n1. Three alerts, and one of them is raised again.");
    let disk = alert("disk-db1", "db-1: the disk is full");
    let alerts = [
        disk.clone(),
        alert("cert-shop", "shop.example: the certificate ends tomorrow"),
        alert("lag-eu", "The replica in Europe is 4 minutes late"),
    ];
    let keys = story.publish(&alerts).await?;
    story.settled(&keys).await?;

    let mut tx = story.outbox.begin().await?;
    let again = tx.publish(&disk).await?;
    tx.commit().await?;
    let duplicate = again.duplicate().context("two alerts about one incident")?;
    ensure!(duplicate.event_id().to_string() == keys[0]);
    let (first, state) = (number(&keys[0]), duplicate.state());
    println!("disk-db1 again: a duplicate of {first}, which is {state}. Nothing is published.");
    Ok(())
}

/// Returns the alert that cannot be delivered.
async fn the_receiver_fails<S: Alerts>(
    story: &mut Story<'_, S>,
    receiver: &Receiver,
) -> anyhow::Result<String> {
    println!("\n2. The receiver answers 500. And one of these alerts has no text.");
    receiver.set(Mood::Failing);
    let alerts = [
        alert("cpu-api", "api: no CPU is idle"),
        alert("blank", ""),
        alert("oom-api", "api: out of memory"),
    ];
    let keys = story.publish(&alerts).await?;
    let failed = End::Answered(StatusCode::INTERNAL_SERVER_ERROR);
    story
        .until("a 500 for each", receiver.seen(), |seen| {
            seen.each(&keys, failed)
        })
        .await?;
    receiver.set(Mood::Well);
    println!("The receiver is well again.");
    story.settled(&keys).await?;
    Ok(keys[1].clone())
}

async fn the_receiver_hangs<S: Alerts>(
    story: &mut Story<'_, S>,
    receiver: &Receiver,
) -> anyhow::Result<()> {
    println!("\n3. The receiver takes an alert and does not say so. The handler has a second.");
    receiver.set(Mood::Hanging);
    let keys = story
        .publish(&[alert("mail-slow", "1,200 mails wait")])
        .await?;
    story
        .until("the time-out", receiver.seen(), |seen| {
            seen.each(&keys, End::Cut)
        })
        .await?;
    receiver.set(Mood::Well);
    println!("The receiver is well again.");
    story.settled(&keys).await?;
    story.unanswered.extend(keys);
    Ok(())
}

async fn the_receiver_is_busy<S: Alerts>(
    story: &mut Story<'_, S>,
    receiver: &Receiver,
) -> anyhow::Result<()> {
    println!("\n4. The receiver answers 429: leave me alone for a second.");
    let wait = Duration::from_secs(1);
    receiver.set(Mood::Busy(wait));
    let alerts = [
        alert("login-de", "Logins fail in Germany"),
        alert("login-fr", "Logins fail in France"),
    ];
    let keys = story.publish(&alerts).await?;
    let busy = End::Answered(StatusCode::TOO_MANY_REQUESTS);
    story
        .until("a 429 for each", receiver.seen(), |seen| {
            seen.each(&keys, busy)
        })
        .await?;
    receiver.set(Mood::Well);
    println!("The receiver has time again, but has not said so.");
    story.settled(&keys).await?;
    for key in &keys {
        let seen = receiver.seen();
        let seen = seen.borrow();
        let posts: Vec<_> = seen.posts(key).collect();
        for pair in posts.windows(2).filter(|pair| pair[0].end == busy) {
            let waited = pair[1].at - pair[0].at;
            println!("{} came again after {waited:.2?}.", number(key));
            ensure!(waited + CLOCKS >= wait, "it was asked to wait for {wait:?}");
        }
    }
    Ok(())
}

/// How far the database's clock, which counts the wait, and this process's may drift apart.
const CLOCKS: Duration = Duration::from_millis(10);

async fn the_receiver_restarts<S: Alerts>(
    story: &mut Story<'_, S>,
    receiver: &mut Receiver,
) -> anyhow::Result<()> {
    println!("\n5. The receiver goes down before it has answered, and comes back.");
    receiver.set(Mood::Hanging);
    let alerts = [
        alert("pay-card", "Cards are declined"),
        alert("pay-bank", "The bank is late"),
    ];
    let keys = story.publish(&alerts).await?;
    story
        .until("a request for each", receiver.seen(), |seen| {
            seen.each(&keys, End::Open)
        })
        .await?;
    receiver.stop().await;
    println!("The receiver is down.");
    let failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed { .. });
    // The first when the connection was cut, the second because nobody was there.
    story
        .reported("two failures of each", &keys, 2, failed)
        .await?;
    receiver.set(Mood::Well);
    receiver.listen().await?;
    println!("The receiver is back.");
    story.settled(&keys).await?;
    story.unanswered.extend(keys);
    Ok(())
}

async fn a_relay_is_killed<S: Alerts>(
    story: &mut Story<'_, S>,
    receiver: &Receiver,
) -> anyhow::Result<()> {
    println!("\n6. The receiver hangs again, and relay a is killed while it waits.");
    receiver.set(Mood::Hanging);
    // More than one relay takes at once.
    let keys = story.publish(&[1, 2, 3, 4, 5, 6].map(rack_alert)).await?;
    story
        .until("relay a to wait for two answers", receiver.seen(), |seen| {
            seen.open_from("relay a").len() >= 2
        })
        .await?;
    let held = receiver.seen().borrow().open_from("relay a");
    let killing = story.relays.kill("relay a");
    let status = story.deadline.within("relay a to die", killing).await??;
    println!("Relay a is dead: {status}.");
    let rows = story.outbox.store().rows().await?;
    let claimed = rows.iter().filter(|row| row.is_claimed_by("relay a"));
    let claimed = claimed.count();
    ensure!(claimed > 0, "relay a has died without a claim");
    println!("The database has {claimed} claims of it, until their leases end.");
    receiver.set(Mood::Well);
    println!("The receiver is well again.");
    story.settled(&keys).await?;
    show_takeover(&held, &story.outbox.store().rows().await?)?;
    story.unanswered.extend(held);
    Ok(())
}

fn show_takeover(held: &[String], rows: &[AlertRow]) -> anyhow::Result<()> {
    for row in rows.iter().filter(|row| held.contains(&row.event_id)) {
        let by = row.claimed_by.as_deref().unwrap_or("nobody");
        println!(
            "{} was taken over by {by}. Its attempts, counted when they began: {}.",
            number(&row.event_id),
            row.attempts
        );
        ensure!(by == "relay b" && row.attempts >= 2);
    }
    Ok(())
}

fn rack_alert(rack: u32) -> AlertRaised {
    alert(&format!("heat-{rack}"), &format!("Rack {rack} is too hot"))
}

fn alert(incident: &str, text: &str) -> AlertRaised {
    AlertRaised {
        incident: incident.to_owned(),
        text: text.to_owned(),
    }
}
