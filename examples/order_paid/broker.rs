//! The broker: a NATS server of this program's own or somebody else's, and the one stream of it
//! that this program made.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use async_nats::ServerAddr;
use async_nats::jetstream;
use uuid::Uuid;

use crate::line::Line;
use crate::server::Server;
use crate::stream::{self, Reader, Stream};

/// For how long the stream knows an id again. A second send that comes later is stored a second
/// time, so it has to be longer than the longest wait between two attempts: with the outbox's own
/// backoff, longer than half an hour.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(2 * 60);

/// A broker with a stream, and the line to it.
pub(crate) struct Broker {
    /// `None` if somebody else runs it.
    server: Option<Server>,
    address: ServerAddr,
    line: Line,
    /// Unlike that of any other run, since the server may be shared.
    name: String,
}

impl Broker {
    /// Finds the server at `NATS_URL` or starts one, and makes the stream.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let given = std::env::var("NATS_URL").ok().filter(|url| !url.is_empty());
        let (server, url) = match given {
            Some(url) => (None, url),
            None => {
                let server = Server::start().await?;
                let url = server.url();
                (Some(server), url)
            }
        };
        let address: ServerAddr = url.parse().context("read NATS_URL")?;
        ensure!(
            address.scheme() == "nats",
            "NATS_URL is not a nats:// URL: this program is built without TLS"
        );
        let line = Line::to((address.host().to_owned(), address.port())).await?;
        let broker = Self {
            server,
            address,
            line,
            name: format!("outbox_example_{}", Uuid::new_v4().simple()),
        };
        broker.make_stream().await?;
        Ok(broker)
    }

    async fn make_stream(&self) -> anyhow::Result<()> {
        let config = jetstream::stream::Config {
            name: self.name.clone(),
            subjects: vec![stream::subject(&self.name)],
            duplicate_window: DUPLICATE_WINDOW,
            ..Default::default()
        };
        let made = self.jetstream().await?.create_stream(config).await;
        made.context("make the stream; does the NATS server have JetStream?")?;
        Ok(())
    }

    /// A connection to the stream through the line, as the shop has it.
    pub(crate) async fn connect(&self) -> anyhow::Result<Stream> {
        let mut url = self.address.clone().into_inner();
        url.set_host(Some(&Ipv4Addr::LOCALHOST.to_string()))?;
        url.set_port(Some(self.line.port()))
            .map_err(|()| anyhow!("a nats:// URL has a port"))?;
        Stream::connect(ServerAddr::from_url(url)?, &self.name).await
    }

    /// Somebody else who reads the stream, on a line of their own.
    pub(crate) async fn reader(&self) -> anyhow::Result<Reader> {
        let stream = self.jetstream().await?.get_stream(&self.name).await?;
        Reader::of(stream).await
    }

    async fn jetstream(&self) -> anyhow::Result<jetstream::Context> {
        let client = stream::options().connect(self.address.clone()).await;
        let client = client.with_context(|| format!("connect to {}", self.place()))?;
        Ok(jetstream::new(client))
    }

    /// Where it is, without the password that may be in its URL.
    fn place(&self) -> String {
        format!("{}:{}", self.address.host(), self.address.port())
    }

    /// Who it is, for people.
    pub(crate) fn about(&self) -> String {
        let place = self.place();
        match &self.server {
            Some(server) => format!("{} at {place}, started here", server.program().display()),
            None => format!("the NATS server at NATS_URL, {place}"),
        }
    }

    pub(crate) fn stream(&self) -> &str {
        &self.name
    }

    /// The line, for the accidents that happen on the way.
    pub(crate) fn line(&self) -> &Line {
        &self.line
    }

    /// Takes the broker away: kills the server or, if it is somebody else's, cuts the line to it.
    /// Returns what it did.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<&'static str> {
        let Some(server) = &mut self.server else {
            self.line.cut();
            return Ok("the line to it is cut, because the server is not ours to stop");
        };
        server.kill().await?;
        Ok("the server is killed")
    }

    /// Brings it back, with all that it had.
    pub(crate) async fn resume(&mut self) -> anyhow::Result<&'static str> {
        let Some(server) = &mut self.server else {
            self.line.restore();
            return Ok("the line is restored");
        };
        server.restart().await?;
        Ok("the server is started again, on the same port and files")
    }

    /// Removes what this program made: the stream, or the server with all of its files.
    pub(crate) async fn remove(self) -> anyhow::Result<()> {
        if let Some(server) = self.server {
            return server.remove().await;
        }
        let jetstream = self.jetstream().await?;
        let deleted = jetstream.delete_stream(&self.name).await;
        deleted.with_context(|| format!("delete the stream {}", self.name))?;
        Ok(())
    }
}
