//! The line from this program to the broker: it passes bytes on until the story cuts it.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A port of this program, from where everything goes to the broker. Closed when it is dropped.
pub(crate) struct Line {
    address: SocketAddr,
    flow: watch::Sender<Flow>,
    listening: JoinHandle<()>,
}

/// What gets through.
#[derive(Clone, Copy, PartialEq)]
enum Flow {
    Everything,
    /// What is said to the broker, and none of its answers.
    NoAnswers,
    Nothing,
}

impl Line {
    pub(crate) async fn to(broker: (String, u16)) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let flow = watch::Sender::new(Flow::Everything);
        let changes = flow.clone();
        let listening = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, broker.clone(), changes.subscribe()));
            }
        });
        Ok(Self {
            address,
            flow,
            listening,
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Keeps the broker's answers back, while everything still reaches it.
    pub(crate) fn hold_answers(&self) {
        self.flow.send_replace(Flow::NoAnswers);
    }

    /// Ends every connection, and those to come at once. Answers that were held are lost.
    ///
    /// Whoever restores it first waits until the other end has noticed: a connection sees the line
    /// as it is, not all that it was.
    pub(crate) fn cut(&self) {
        self.flow.send_replace(Flow::Nothing);
    }

    pub(crate) fn restore(&self) {
        self.flow.send_replace(Flow::Everything);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

/// Passes one connection on, until one of its ends closes or the line is cut.
async fn pass(client: TcpStream, broker: (String, u16), mut flow: watch::Receiver<Flow>) {
    let passing = connection(client, broker, flow.clone());
    tokio::select! {
        // To this program, an error of the broker's end is an end like any other.
        _ = passing => {}
        _ = flow.wait_for(|flow| *flow == Flow::Nothing) => {}
    }
}

async fn connection(
    client: TcpStream,
    broker: (String, u16),
    mut flow: watch::Receiver<Flow>,
) -> io::Result<()> {
    let broker = TcpStream::connect(broker).await?;
    client.set_nodelay(true)?;
    broker.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_broker, mut to_broker) = broker.into_split();
    let answers = async {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let read = from_broker.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            // Never an error: the line outlives its connections, or takes them along.
            let _ = flow.wait_for(|flow| *flow == Flow::Everything).await;
            to_client.write_all(&buffer[..read]).await?;
        }
    };
    tokio::select! {
        ended = copy(&mut from_client, &mut to_broker) => ended.map(drop),
        ended = answers => ended,
    }
}
