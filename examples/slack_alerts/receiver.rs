//! The other end of the webhook: a server on this machine that can be unwell.
//!
//! It takes each idempotency key once. What it has taken outlives its restarts, as if it were in a
//! database.

use std::future::pending;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{RETRY_AFTER, USER_AGENT};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use reqwest::Url;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::alert::{IDEMPOTENCY_KEY, number};
use crate::show;

/// The server, and what it has seen.
pub(crate) struct Receiver {
    address: SocketAddr,
    seen: Arc<watch::Sender<Seen>>,
    serving: Option<JoinHandle<()>>,
}

/// How the receiver is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Mood {
    #[default]
    Well,
    /// Answers 500, whatever it is sent.
    Failing,
    /// Takes the alert, and never says so.
    Hanging,
    /// Answers 429, and asks to be left alone for so long.
    Busy(Duration),
}

impl Receiver {
    /// Listens on a port that was free.
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let mut receiver = Self {
            address: (Ipv4Addr::LOCALHOST, 0).into(),
            seen: Arc::default(),
            serving: None,
        };
        receiver.listen().await?;
        Ok(receiver)
    }

    /// Listens, on the port it had before.
    pub(crate) async fn listen(&mut self) -> anyhow::Result<()> {
        let listener = TcpListener::bind(self.address)
            .await
            .with_context(|| format!("listen on {}", self.address))?;
        self.address = listener.local_addr()?;
        self.serving = Some(tokio::spawn(serve(listener, Arc::clone(&self.seen))));
        Ok(())
    }

    /// Stops listening, and cuts every connection.
    pub(crate) async fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.abort();
            // The port is free once it has ended, and how it has ended is known.
            let _ = serving.await;
        }
    }

    pub(crate) fn set(&self, mood: Mood) {
        self.seen.send_modify(|seen| seen.mood = mood);
    }

    pub(crate) fn webhook(&self) -> anyhow::Result<Url> {
        Ok(format!("http://{}/services/T0/B0/secret", self.address).parse()?)
    }

    pub(crate) fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.subscribe()
    }
}

/// Everything the receiver has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    mood: Mood,
    posts: Vec<Post>,
    /// The keys of the alerts it has taken.
    pub(crate) accepted: Vec<String>,
    /// How many requests it dropped because it had taken their alerts before.
    pub(crate) repeated: usize,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Post {
    key: String,
    /// Which relay sent it.
    pub(crate) from: String,
    pub(crate) at: Instant,
    pub(crate) end: End,
}

/// What has become of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// Whoever sent it waits for an answer.
    Open,
    /// Whoever sent it is gone, or was cut off, without an answer.
    Cut,
    Answered(StatusCode),
}

impl Seen {
    /// The requests for an alert, in the order in which they came.
    pub(crate) fn posts(&self, key: &str) -> impl Iterator<Item = &Post> {
        self.posts.iter().filter(move |post| post.key == key)
    }

    /// Whether there was a request with such an end for each of these alerts.
    pub(crate) fn each(&self, keys: &[String], end: End) -> bool {
        let mut keys = keys.iter();
        keys.all(|key| self.posts(key).any(|post| post.end == end))
    }

    /// The alerts that a relay waits for an answer about.
    pub(crate) fn open_from(&self, relay: &str) -> Vec<String> {
        let open = self.posts.iter();
        open.filter(|post| post.from == relay && post.end == End::Open)
            .map(|post| post.key.clone())
            .collect()
    }

    /// Decides about a request, and keeps it.
    fn receive(&mut self, key: &str, from: &str, text: &str) -> (usize, End, &'static str) {
        let (end, says) = match self.mood {
            Mood::Failing => (StatusCode::INTERNAL_SERVER_ERROR.into(), "out of order"),
            Mood::Busy(_) => (StatusCode::TOO_MANY_REQUESTS.into(), "rate_limited"),
            // What Slack says to a post without a text, however often it is sent.
            _ if text.is_empty() => (StatusCode::BAD_REQUEST.into(), "no_text"),
            Mood::Hanging => (End::Open, self.take(key)),
            Mood::Well => (StatusCode::OK.into(), self.take(key)),
        };
        self.posts.push(Post {
            key: key.to_owned(),
            from: from.to_owned(),
            at: Instant::now(),
            end,
        });
        (self.posts.len() - 1, end, says)
    }

    /// Takes an alert, unless it was taken before.
    fn take(&mut self, key: &str) -> &'static str {
        if self.accepted.iter().any(|accepted| accepted == key) {
            self.repeated += 1;
            return "dropped, it is here already";
        }
        self.accepted.push(key.to_owned());
        "accepted"
    }
}

impl From<StatusCode> for End {
    fn from(status: StatusCode) -> Self {
        Self::Answered(status)
    }
}

// --- HTTP --------------------------------------------------------------------------------------

/// Serves until it is aborted, and its connections with it.
async fn serve(listener: TcpListener, seen: Arc<watch::Sender<Seen>>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let seen = Arc::clone(&seen);
                let service = service_fn(move |request| answer(Arc::clone(&seen), request));
                let stream = TokioIo::new(stream);
                connections.spawn(http1::Builder::new().serve_connection(stream, service));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// What the webhook is sent.
#[derive(Default, Deserialize)]
struct Body {
    text: String,
}

async fn answer(
    seen: Arc<watch::Sender<Seen>>,
    request: Request<Incoming>,
) -> anyhow::Result<Response<String>> {
    let key = header(request.headers(), IDEMPOTENCY_KEY);
    let from = header(request.headers(), USER_AGENT.as_str());
    let body = request.into_body().collect().await?.to_bytes();
    let Body { text } = serde_json::from_slice(&body).unwrap_or_default();

    let mut received = None;
    seen.send_modify(|seen| received = Some((seen.receive(&key, &from, &text), seen.mood)));
    let ((index, end, says), mood) = received.context("`send_modify` calls what it is given")?;
    let post = format!("{} from {from}", number(&key));
    let End::Answered(status) = end else {
        show("receiver", &format!("{post}: {says}, and no answer"));
        let _open = OpenPost { seen, index, post };
        return pending().await;
    };
    show("receiver", &format!("{post}: {} {says}", status.as_u16()));
    let mut response = Response::new(says.to_owned());
    *response.status_mut() = status;
    if let Mood::Busy(wait) = mood {
        response
            .headers_mut()
            .insert(RETRY_AFTER, wait.as_secs().into());
    }
    Ok(response)
}

fn header(headers: &HeaderMap, name: &str) -> String {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}

/// Notes, when its request is dropped, that the connection was cut.
struct OpenPost {
    seen: Arc<watch::Sender<Seen>>,
    index: usize,
    post: String,
}

impl Drop for OpenPost {
    fn drop(&mut self) {
        show("receiver", &format!("{}: cut off", self.post));
        self.seen
            .send_modify(|seen| seen.posts[self.index].end = End::Cut);
    }
}
