//! The stream on the broker: sending events to it, and reading what it has.

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use async_nats::jetstream::consumer::pull::{Ordered, OrderedConfig};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::{self, stream};
use async_nats::{Client, ConnectOptions, Event, ServerAddr, header};
use futures_util::StreamExt;
use outbox_core::EventId;
use tokio::sync::watch;

use crate::orders::OrderPaid;

/// A connection to the stream. When it is lost it is made again, until it is dropped.
#[derive(Clone)]
pub(crate) struct Stream {
    client: Client,
    jetstream: jetstream::Context,
    name: String,
    connected: watch::Receiver<bool>,
}

impl Stream {
    pub(crate) async fn connect(address: ServerAddr, name: &str) -> anyhow::Result<Self> {
        let (changes, connected) = watch::channel(true);
        let options = options().event_callback(move |event| {
            let now = match event {
                Event::Connected => Some(true),
                Event::Disconnected => Some(false),
                _ => None,
            };
            changes.send_if_modified(|connected| {
                let before = *connected;
                *connected = now.unwrap_or(before);
                *connected != before
            });
            std::future::ready(())
        });
        let client = options.connect(address).await?;
        Ok(Self {
            jetstream: jetstream::new(client.clone()),
            client,
            name: name.to_owned(),
            connected,
        })
    }

    /// The version of the server behind it.
    pub(crate) fn version(&self) -> String {
        self.client.server_info().version
    }

    /// Sends an event, and waits for the stream's answer.
    ///
    /// Of two with the same id the stream keeps the first one, and answers the second with its
    /// sequence. Without a connection this fails at once: the client would keep what it cannot
    /// send and send it later, beside the retry.
    pub(crate) async fn send(&self, id: EventId, payload: Vec<u8>) -> anyhow::Result<PublishAck> {
        let mut connected = self.connected.clone();
        if !*connected.borrow_and_update() {
            bail!("the broker is away");
        }
        let publish = PublishMessage::build()
            .message_id(id.to_string())
            .payload(payload.into());
        let answer = async {
            let sent = self.jetstream.send_publish(subject(&self.name), publish);
            anyhow::Ok(sent.await?.await?)
        };
        tokio::select! {
            answer = answer => answer,
            _ = connected.changed() => Err(anyhow!("the connection broke before the answer")),
        }
    }

    /// Says something beside the stream: who does not listen now never hears it.
    pub(crate) async fn mention(&self, payload: Vec<u8>) -> anyhow::Result<()> {
        if !*self.connected.borrow() {
            bail!("the broker is away");
        }
        let subject = format!("{}.cache.warm", self.name);
        self.client.publish(subject, payload.into()).await?;
        self.client.flush().await?;
        Ok(())
    }

    /// Waits until the connection is there, or until it is not.
    pub(crate) async fn until_connected(&self, wanted: bool) -> anyhow::Result<()> {
        let mut connected = self.connected.clone();
        let reached = connected.wait_for(|connected| *connected == wanted).await;
        reached.context("the client of the broker has ended")?;
        Ok(())
    }
}

/// What somebody else finds in the stream.
pub(crate) struct Reader {
    stream: stream::Stream,
    entries: Ordered,
}

/// An event in the stream.
pub(crate) struct Entry {
    pub(crate) sequence: u64,
    pub(crate) id: EventId,
    pub(crate) paid: OrderPaid,
}

impl Reader {
    /// Reads a stream from its beginning.
    pub(crate) async fn of(stream: stream::Stream) -> anyhow::Result<Self> {
        let consumer = stream.create_consumer(OrderedConfig::default()).await?;
        let entries = consumer.messages().await?;
        Ok(Self { stream, entries })
    }

    /// The next event, as soon as the stream has it.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Entry> {
        let entry = self
            .entries
            .next()
            .await
            .context("the stream has ended")??;
        let headers = entry.headers.as_ref();
        let id = headers.and_then(|headers| headers.get(header::NATS_MESSAGE_ID));
        Ok(Entry {
            sequence: entry
                .info()
                .map_err(|error| anyhow!(error))?
                .stream_sequence,
            id: id.context("an entry without an id")?.as_str().parse()?,
            paid: serde_json::from_slice(&entry.payload)?,
        })
    }

    /// Everything that is in the stream now.
    pub(crate) async fn all(mut self) -> anyhow::Result<Vec<Entry>> {
        let count = self.stream.get_info().await?.state.messages;
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(self.next().await?);
        }
        Ok(all)
    }
}

/// How every connection of this program is made.
pub(crate) fn options() -> ConnectOptions {
    ConnectOptions::new()
        .connection_timeout(Duration::from_secs(2))
        .reconnect_delay_callback(|_| Duration::from_millis(100))
        // A cluster tells its clients of other servers, and they would go past the line.
        .ignore_discovered_servers()
}

/// The one subject whose events are in the stream.
pub(crate) fn subject(name: &str) -> String {
    format!("{name}.order.paid")
}
