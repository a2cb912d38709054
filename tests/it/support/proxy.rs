//! A connection to PostgreSQL that breaks when told to.
//!
//! It listens on a port of its own and passes everything on, until a test asks for a fault. A
//! fault holds for every connection there is and, where it is not over at once, for those to come.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use super::PgDb;
use super::wire::{Answers, Requests};

/// A proxy in front of one database. Its connections end when this value is dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    options: PgConnectOptions,
    shared: Arc<Shared>,
    /// `None` while connections are refused.
    listening: Option<JoinHandle<()>>,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    ToServer,
    ToClient,
}

/// What happens to the bytes that go one way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Flow {
    /// They go on.
    Pass,
    /// They wait, and go on when the flow is [`Pass`](Self::Pass) again: what a broken network
    /// looks like from both ends, for as long as nobody gives up.
    Hold,
    /// They go on this much later, chunk by chunk.
    Delay(Duration),
}

impl Proxy {
    /// Listens in front of `db`.
    pub(crate) async fn to(db: &PgDb) -> Self {
        let server = db.options();
        assert!(
            server.get_socket().is_none() && !server.get_host().starts_with('/'),
            "the proxy speaks TCP, and this DATABASE_URL is a Unix socket"
        );
        let shared = Arc::new(Shared {
            server: (server.get_host().to_owned(), server.get_port()),
            flows: [
                watch::Sender::new(Flow::Pass),
                watch::Sender::new(Flow::Pass),
            ],
            ending: watch::Sender::new(Ending::Close),
            commit: Mutex::new(None),
            commit_lost: Notify::new(),
            budget: Mutex::new(None),
            accepted: AtomicUsize::new(0),
        });
        let (address, listening) =
            listen(Arc::clone(&shared), (Ipv4Addr::LOCALHOST, 0).into()).await;
        Self {
            address,
            // Not encrypted, because the proxy reads along.
            options: server
                .host(&address.ip().to_string())
                .port(address.port())
                .ssl_mode(PgSslMode::Disable),
            shared,
            listening: Some(listening),
        }
    }

    /// How to log in to the database through this proxy.
    pub(crate) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    /// The same as a URL, for another process.
    pub(crate) fn url(&self) -> String {
        self.options.to_url_lossy().to_string()
    }

    /// How many connections it has accepted so far.
    pub(crate) fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// Refuses new connections, as a server does that is not there. Open ones stay.
    pub(crate) async fn refuse(&mut self) {
        if let Some(listening) = self.listening.take() {
            listening.abort();
            // The port is closed when the task has let go of it.
            let _ = listening.await;
        }
    }

    /// Accepts new connections again, on the same port.
    pub(crate) async fn accept(&mut self) {
        if self.listening.is_none() {
            let (_, listening) = listen(Arc::clone(&self.shared), self.address).await;
            self.listening = Some(listening);
        }
    }

    /// Changes what happens to the bytes that go one `way`.
    pub(crate) fn flow(&self, way: Way, flow: Flow) {
        self.shared.flow(way).send_replace(flow);
    }

    /// Keeps everything open and passes nothing, either way.
    pub(crate) fn black_hole(&self) {
        self.flow(Way::ToServer, Flow::Hold);
        self.flow(Way::ToClient, Flow::Hold);
    }

    /// Passes everything on again, what was held included.
    pub(crate) fn pass(&self) {
        self.flow(Way::ToServer, Flow::Pass);
        self.flow(Way::ToClient, Flow::Pass);
    }

    /// Closes every connection.
    pub(crate) fn cut(&self) {
        self.shared.ending.send_replace(Ending::Close);
    }

    /// Resets every connection: both ends get an error instead of an end.
    pub(crate) fn reset(&self) {
        self.shared.ending.send_replace(Ending::Reset);
    }

    /// Passes `bytes` more bytes one `way`, over all connections, and then closes the connection
    /// that they end in. Once.
    pub(crate) fn cut_after(&self, way: Way, bytes: usize) {
        *self.shared.budget.lock().expect(NEVER_POISONED) = Some((way, bytes));
    }

    /// Closes the connection of the next COMMIT before the server gets to see it. Once.
    pub(crate) fn lose_commit_request(&self) {
        *self.shared.commit.lock().expect(NEVER_POISONED) = Some(Lost::Request);
    }

    /// Swallows the server's answer to the next COMMIT, and closes that connection. Once.
    pub(crate) fn lose_commit_answer(&self) {
        *self.shared.commit.lock().expect(NEVER_POISONED) = Some(Lost::Answer);
    }

    /// Waits until the COMMIT asked for has been lost. When it is the answer, the server has
    /// committed by then.
    pub(crate) async fn commit_lost(&self) {
        self.shared.commit_lost.notified().await;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(listening) = &self.listening {
            listening.abort();
        }
        self.cut();
    }
}

const NEVER_POISONED: &str = "nobody panics while holding it";

struct Shared {
    server: (String, u16),
    flows: [watch::Sender<Flow>; 2],
    ending: watch::Sender<Ending>,
    commit: Mutex<Option<Lost>>,
    commit_lost: Notify,
    budget: Mutex<Option<(Way, usize)>>,
    accepted: AtomicUsize,
}

#[derive(Clone, Copy, PartialEq)]
enum Ending {
    Close,
    Reset,
}

/// Which half of a COMMIT.
#[derive(Clone, Copy, PartialEq)]
enum Lost {
    Request,
    Answer,
}

/// What becomes of a chunk: so many bytes go on, and then the connection is closed or not.
struct Passed {
    bytes: usize,
    close: bool,
}

impl Shared {
    fn flow(&self, way: Way) -> &watch::Sender<Flow> {
        match way {
            Way::ToServer => &self.flows[0],
            Way::ToClient => &self.flows[1],
        }
    }

    /// Takes the fault of the next COMMIT, if it is this one.
    fn take_commit(&self, lost: Lost) -> bool {
        let mut commit = self.commit.lock().expect(NEVER_POISONED);
        let armed = *commit == Some(lost);
        if armed {
            *commit = None;
        }
        armed
    }

    /// Applies [`Proxy::cut_after`].
    fn spend(&self, way: Way, bytes: usize) -> Passed {
        let mut budget = self.budget.lock().expect(NEVER_POISONED);
        match &mut *budget {
            Some((limited, left)) if *limited == way => {
                if bytes < *left {
                    *left -= bytes;
                } else {
                    let bytes = *left;
                    *budget = None;
                    return Passed { bytes, close: true };
                }
            }
            _ => {}
        }
        Passed {
            bytes,
            close: false,
        }
    }
}

async fn listen(shared: Arc<Shared>, address: SocketAddr) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind(address).await.expect("listen on a port");
    let address = listener.local_addr().expect("it is bound");
    let listening = tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            shared.accepted.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(connection(Arc::clone(&shared), client));
        }
    });
    (address, listening)
}

async fn connection(shared: Arc<Shared>, mut client: TcpStream) {
    let mut ending = shared.ending.subscribe();
    let (host, port) = &shared.server;
    let Ok(mut server) = TcpStream::connect((host.as_str(), *port)).await else {
        return;
    };
    // Otherwise small messages wait for each other's acknowledgement.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));

    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    // The cycle whose answer is to be swallowed. 0 is none.
    let swallowed = AtomicU64::new(0);

    let mut requests = Requests::new();
    let forth = pump(&shared, Way::ToServer, from_client, to_server, |chunk| {
        if let Some(commit) = requests.read(chunk) {
            if shared.take_commit(Lost::Request) {
                shared.commit_lost.notify_one();
                return Passed {
                    bytes: commit.offset,
                    close: true,
                };
            }
            if shared.take_commit(Lost::Answer) {
                swallowed.store(commit.cycle, Ordering::Relaxed);
            }
        }
        shared.spend(Way::ToServer, chunk.len())
    });

    let mut answers = Answers::new();
    let back = pump(&shared, Way::ToClient, from_server, to_client, |chunk| {
        let wanted = Some(swallowed.load(Ordering::Relaxed)).filter(|cycle| *cycle > 0);
        let kept = answers.read(chunk, wanted);
        if kept.complete {
            shared.commit_lost.notify_one();
            return Passed {
                bytes: kept.before,
                close: true,
            };
        }
        shared.spend(Way::ToClient, kept.before)
    });

    let ended = tokio::select! {
        // An error of one end is an end to the other.
        _ = forth => Ending::Close,
        _ = back => Ending::Close,
        _ = ending.changed() => *ending.borrow(),
    };
    if ended == Ending::Reset {
        let _ = (client.set_zero_linger(), server.set_zero_linger());
    }
}

/// Passes bytes one way until either end closes or `inspect` says so.
fn pump<'a>(
    shared: &'a Shared,
    way: Way,
    mut from: impl AsyncRead + Unpin + 'a,
    mut to: impl AsyncWrite + Unpin + 'a,
    mut inspect: impl FnMut(&[u8]) -> Passed + 'a,
) -> impl Future<Output = io::Result<()>> + 'a {
    let mut flow = shared.flow(way).subscribe();
    async move {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let read = tokio::select! {
                // First, so that nothing is read any more once bytes are to be held.
                biased;
                () = until(&mut flow, |flow| flow == Flow::Hold) => {
                    until(&mut flow, |flow| flow != Flow::Hold).await;
                    continue;
                }
                read = from.read(&mut buffer) => read?,
            };
            if read == 0 {
                return Ok(());
            }
            let delay = *flow.borrow();
            if let Flow::Delay(delay) = delay {
                tokio::time::sleep(delay).await;
            }
            let passed = inspect(&buffer[..read]);
            to.write_all(&buffer[..passed.bytes]).await?;
            if passed.close {
                return Ok(());
            }
        }
    }
}

async fn until(flow: &mut watch::Receiver<Flow>, reached: impl Fn(Flow) -> bool) {
    // Never an error: the connection keeps its proxy's half alive.
    let _ = flow.wait_for(|flow| reached(*flow)).await;
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use sqlx::{Connection, PgConnection};

    use super::*;
    use crate::support::{Proxy, eventually, within};

    const LIMIT: Duration = Duration::from_secs(10);
    const SILENCE: Duration = Duration::from_millis(100);

    async fn ping(session: &mut PgConnection) -> sqlx::Result<i32> {
        within(LIMIT, sqlx::query_scalar("SELECT 1").fetch_one(session)).await
    }

    /// Whether `future` is still not done after a moment.
    async fn hangs<F: Future>(future: F) -> bool {
        tokio::time::timeout(SILENCE, future).await.is_err()
    }

    async fn table(db: &PgDb) {
        sqlx::query("CREATE TABLE t (n int)")
            .execute(&db.pool())
            .await
            .unwrap();
    }

    async fn rows(db: &PgDb) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM t")
            .fetch_one(&db.pool())
            .await
            .unwrap()
    }

    /// Inserts a row through the proxy, and returns how its commit ended.
    async fn insert(proxy: &Proxy) -> sqlx::Result<()> {
        let mut session = proxy.options().connect().await.unwrap();
        let mut tx = session.begin().await.unwrap();
        sqlx::query("INSERT INTO t VALUES (1)")
            .execute(&mut *tx)
            .await
            .unwrap();
        within(LIMIT, tx.commit()).await
    }

    #[tokio::test]
    async fn what_is_passed_on_arrives_unchanged() {
        let db = PgDb::empty().await;
        let proxy = Proxy::to(&db).await;
        let mut session = PgConnection::connect(&proxy.url()).await.unwrap();
        let long = "ü".repeat(100_000);
        let echo: String = sqlx::query_scalar("SELECT $1::text")
            .bind(&long)
            .fetch_one(&mut session)
            .await
            .unwrap();
        assert_eq!(echo, long);
        assert_eq!(proxy.accepted(), 1);
    }

    #[tokio::test]
    async fn refused_connections_leave_open_ones_alone() {
        let db = PgDb::empty().await;
        let mut proxy = Proxy::to(&db).await;
        let mut session = proxy.options().connect().await.unwrap();
        proxy.refuse().await;
        let refused = proxy.options().connect().await.unwrap_err();
        let sqlx::Error::Io(refused) = refused else {
            panic!("{refused}");
        };
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        ping(&mut session).await.unwrap();
        proxy.accept().await;
        ping(&mut proxy.options().connect().await.unwrap())
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_cut_ends_open_connections_only() {
        let db = PgDb::empty().await;
        let proxy = Proxy::to(&db).await;
        let mut session = proxy.options().connect().await.unwrap();
        proxy.cut();
        ping(&mut session).await.unwrap_err();
        ping(&mut proxy.options().connect().await.unwrap())
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_reset_is_an_error_and_not_an_end() {
        let db = PgDb::empty().await;
        let proxy = Proxy::to(&db).await;
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        // A request for TLS, which the server answers with a byte and then waits for more: so the
        // proxy is known to have both ends, and neither ends by itself.
        stream
            .write_all(b"\0\0\0\x08\x04\xd2\x16\x2f")
            .await
            .unwrap();
        within(LIMIT, stream.read_u8()).await.unwrap();
        proxy.reset();
        let mut rest = Vec::new();
        let error = within(LIMIT, stream.read_to_end(&mut rest)).await;
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test]
    async fn a_cut_after_some_bytes_lets_exactly_those_through() {
        let db = PgDb::empty().await;
        let proxy = Proxy::to(&db).await;
        let mut session = proxy.options().connect().await.unwrap();
        proxy.cut_after(Way::ToClient, 3);
        ping(&mut session).await.unwrap_err();
        proxy.cut_after(Way::ToServer, 1_000_000);
        ping(&mut proxy.options().connect().await.unwrap())
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_black_hole_keeps_what_it_holds() {
        let db = PgDb::empty().await;
        let proxy = Proxy::to(&db).await;
        let mut session = proxy.options().connect().await.unwrap();
        proxy.black_hole();
        let answer = tokio::spawn(async move { ping(&mut session).await });
        assert!(hangs(proxy.options().connect()).await);
        assert!(!answer.is_finished());
        proxy.pass();
        within(LIMIT, answer).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_statement_takes_effect_while_its_answer_is_held() {
        let db = PgDb::empty().await;
        table(&db).await;
        let proxy = Proxy::to(&db).await;
        let mut session = proxy.options().connect().await.unwrap();
        proxy.flow(Way::ToClient, Flow::Hold);
        let inserting = tokio::spawn(async move {
            sqlx::raw_sql("INSERT INTO t VALUES (1)")
                .execute(&mut session)
                .await
        });
        eventually(LIMIT, async || rows(&db).await == 1).await;
        assert!(!inserting.is_finished());
        proxy.pass();
        within(LIMIT, inserting).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_delay_makes_every_answer_late() {
        let db = PgDb::empty().await;
        let proxy = Proxy::to(&db).await;
        let mut session = proxy.options().connect().await.unwrap();
        proxy.flow(Way::ToClient, Flow::Delay(SILENCE));
        let asked = Instant::now();
        ping(&mut session).await.unwrap();
        assert!(asked.elapsed() >= SILENCE);
    }

    #[tokio::test]
    async fn a_commit_whose_answer_is_lost_has_committed() {
        let db = PgDb::empty().await;
        table(&db).await;
        let proxy = Proxy::to(&db).await;
        proxy.lose_commit_answer();
        insert(&proxy).await.unwrap_err();
        within(LIMIT, proxy.commit_lost()).await;
        assert_eq!(rows(&db).await, 1);
        // Once only.
        insert(&proxy).await.unwrap();
        assert_eq!(rows(&db).await, 2);
    }

    #[tokio::test]
    async fn a_commit_whose_request_is_lost_has_not_committed() {
        let db = PgDb::empty().await;
        table(&db).await;
        let proxy = Proxy::to(&db).await;
        proxy.lose_commit_request();
        insert(&proxy).await.unwrap_err();
        within(LIMIT, proxy.commit_lost()).await;
        assert_eq!(rows(&db).await, 0);
    }
}
