//! One connection to an export of a parent, with many requests in flight.

use std::collections::HashMap;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::urgency::Urgency;
use crate::alive;
use crate::nbd::client::{Handshake, Next, Part};
use crate::nbd::{Request, Violation, chunk, command};
use crate::send::send;
use crate::tls::{self, Key, Stream};

/// A parent that does not even connect or greet is given up after this; then it is tried again.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// To have another thread ask and answer takes as long as so many requests of this one.
const WAKE_UP: usize = 2;

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum Lost {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("TLS: {0}")]
    Tls(#[from] openssl::ssl::Error),
    #[error("{0}")]
    Nbd(#[from] Violation),
    #[error("no answer within {CONNECT_WITHIN:?}")]
    Late,
    #[error("it serves {found} bytes, not {wanted}")]
    Size { found: u64, wanted: u64 },
    #[error("the connection has ended")]
    Ended,
    #[error("it cannot read the range (error {0})")]
    Refused(u32),
}

/// What to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `HOST:PORT`
    pub address: String,
    pub identity: String,
    pub key: Key,
    pub export: String,
    /// Bytes of the export.
    pub size: u64,
}

struct Asked {
    request: Request,
    answer: oneshot::Sender<Result<Bytes, Lost>>,
}

struct Waiting {
    data: BytesMut,
    offset: u64,
    answer: oneshot::Sender<Result<Bytes, Lost>>,
}

type Table = Arc<Mutex<HashMap<u64, Waiting>>>;

/// A connection that is ready for requests. It ends when this is dropped.
pub struct Connection {
    asked: mpsc::UnboundedSender<Asked>,
    waiting: Table,
    ended: CancellationToken,
    heard: Arc<AtomicU64>,
    began: Instant,
    /// The thread of the event loop that has the connection.
    thread: ThreadId,
    next: AtomicU64,
    all: InFlight,
    /// Those of all for which somebody waits.
    urgent: InFlight,
    tasks: TaskTracker,
}

impl Connection {
    /// Connects, and proves who each side is.
    pub async fn open(endpoint: &Endpoint) -> Result<Self, Lost> {
        let (stream, input) = timeout(CONNECT_WITHIN, Self::negotiate(endpoint)).await.map_err(|_| Lost::Late)??;
        let (reader, writer) = split(stream);
        let (asked, questions) = mpsc::unbounded_channel();
        let connection = Self::new(asked);
        connection.tasks.spawn(ask(writer, questions, connection.waiting.clone(), connection.ended.clone()));
        let hear = Hearing {
            reader,
            input,
            waiting: connection.waiting.clone(),
            heard: connection.heard.clone(),
            began: connection.began,
        };
        connection.tasks.spawn(hear.run(connection.ended.clone()));
        connection.tasks.close();
        Ok(connection)
    }

    /// Without tasks: nobody sends what is asked.
    fn new(asked: mpsc::UnboundedSender<Asked>) -> Self {
        Self {
            asked,
            waiting: Table::default(),
            ended: CancellationToken::new(),
            heard: Arc::default(),
            began: Instant::now(),
            thread: thread::current().id(),
            next: AtomicU64::new(1),
            all: InFlight::default(),
            urgent: InFlight::default(),
            tasks: TaskTracker::new(),
        }
    }

    async fn negotiate(endpoint: &Endpoint) -> Result<(Stream, BytesMut), Lost> {
        let mut plain = TcpStream::connect(&endpoint.address).await?;
        alive::watch(&plain)?;
        let mut handshake = Handshake::new(&endpoint.export, true);
        let mut input = BytesMut::new();
        if advance(&mut plain, &mut handshake, &mut input).await?.is_some() || !input.is_empty() {
            return Err(Violation::Nonsense("the server goes on without TLS").into());
        }
        let mut stream = tls::connect(plain, &endpoint.identity, &endpoint.key).await?;
        let mut output = BytesMut::new();
        handshake.encrypted(&mut output);
        send(&mut stream, &mut output).await?;
        match advance(&mut stream, &mut handshake, &mut input).await? {
            Some(size) if size == endpoint.size => Ok((stream, input)),
            Some(found) => Err(Lost::Size { found, wanted: endpoint.size }),
            None => Err(Violation::Nonsense("TLS twice").into()),
        }
    }

    /// Asks for a range, in bytes, and waits for it. The parent hears whether somebody else does.
    pub async fn read(&self, offset: u64, length: u32, urgency: &Urgency) -> Result<Bytes, Lost> {
        let cookie = self.next.fetch_add(1, Ordering::Relaxed);
        let flags = if urgency.is_urgent() { 0 } else { command::PATIENT };
        let request = Request { flags, kind: command::READ, cookie, offset, length };
        let (answer, answered) = oneshot::channel();
        let _waits = Waits::new(&self.all);
        self.asked.send(Asked { request, answer }).map_err(|_| Lost::Ended)?;
        let mut answered = pin!(answered);
        let answer = tokio::select! {
            biased;
            answer = &mut answered => answer,
            () = urgency.urgent() => {
                let _waits = Waits::new(&self.urgent);
                answered.await
            }
        };
        answer.map_err(|_| Lost::Ended)?
    }

    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Resolves when the connection has ended.
    pub async fn end(&self) {
        self.ended.cancelled().await;
    }

    /// Ends the connection soon.
    pub fn cancel(&self) {
        self.ended.cancel();
    }

    /// Ends the connection: nothing is sent or received any more when this returns.
    pub async fn close(&self) {
        self.ended.cancel();
        self.tasks.wait().await;
    }

    /// Requests that wait for an answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.all.lock().0
    }

    /// How long an answer would take, in requests: those that wait, and a wake-up if another thread has the connection.
    #[must_use]
    pub fn cost(&self) -> usize {
        self.in_flight() + if self.thread == thread::current().id() { 0 } else { WAKE_UP }
    }

    /// How long nothing has been heard while a request waited; `urgent`: one for which somebody waits.
    #[must_use]
    pub fn stalled(&self, urgent: bool) -> Duration {
        let (requests, since) = *if urgent { &self.urgent } else { &self.all }.lock();
        let heard = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        if requests == 0 { Duration::ZERO } else { self.began.elapsed().saturating_sub(heard).min(since.elapsed()) }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("ended", &self.ended()).finish_non_exhaustive()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.ended.cancel();
    }
}

/// Requests that wait, and since when there are any.
struct InFlight(Mutex<(usize, Instant)>);

impl Default for InFlight {
    fn default() -> Self {
        Self(Mutex::new((0, Instant::now())))
    }
}

impl InFlight {
    fn lock(&self) -> MutexGuard<'_, (usize, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a request as long as it waits.
struct Waits<'a>(&'a InFlight);

impl<'a> Waits<'a> {
    fn new(in_flight: &'a InFlight) -> Self {
        let mut now = in_flight.lock();
        if now.0 == 0 {
            now.1 = Instant::now();
        }
        now.0 += 1;
        drop(now);
        Self(in_flight)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.lock().0 -= 1;
    }
}

/// One side's handshake: until TLS (none) or until requests may be sent (the size).
async fn advance<S: AsyncReadExt + AsyncWriteExt + Unpin>(
    stream: &mut S,
    handshake: &mut Handshake,
    input: &mut BytesMut,
) -> Result<Option<u64>, Lost> {
    let mut output = BytesMut::new();
    loop {
        let next = handshake.next(input, &mut output)?;
        send(stream, &mut output).await?;
        match next {
            Next::More if stream.read_buf(input).await? == 0 => return Err(Lost::Ended),
            Next::More => {}
            Next::StartTls => return Ok(None),
            Next::Ready(size) => return Ok(Some(size)),
        }
    }
}

/// Sends requests, and notes who waits for the answers.
async fn ask(
    mut writer: WriteHalf<Stream>,
    mut asked: mpsc::UnboundedReceiver<Asked>,
    waiting: Table,
    ended: CancellationToken,
) {
    let mut output = BytesMut::new();
    let mut batch = Vec::new();
    loop {
        let sent = async {
            if asked.recv_many(&mut batch, 64).await == 0 {
                return Err(io::ErrorKind::NotConnected.into());
            }
            for Asked { request, answer } in batch.drain(..) {
                request.put(&mut output);
                let data = BytesMut::zeroed(request.length as usize);
                let entry = Waiting { data, offset: request.offset, answer };
                waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(request.cookie, entry);
            }
            send(&mut writer, &mut output).await
        };
        let sent = tokio::select! { sent = sent => sent, () = ended.cancelled() => break };
        if let Err(error) = sent {
            tracing::debug!(%error, "a connection to a parent ends");
            break;
        }
    }
    ended.cancel();
    waiting.lock().unwrap_or_else(PoisonError::into_inner).clear(); // who waits hears of that
}

struct Hearing {
    reader: ReadHalf<Stream>,
    input: BytesMut,
    waiting: Table,
    heard: Arc<AtomicU64>,
    began: Instant,
}

impl Hearing {
    async fn run(mut self, ended: CancellationToken) {
        let result = tokio::select! { result = self.hear() => result, () = ended.cancelled() => Ok(()) };
        if let Err(error) = result {
            tracing::debug!(%error, "a connection to a parent ends");
        }
        ended.cancel();
        self.table().clear();
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn hear(&mut self) -> Result<(), Lost> {
        loop {
            let part = loop {
                if let Some(part) = Part::take(&mut self.input)? {
                    break part;
                }
                self.more().await?;
            };
            self.part(part).await?;
        }
    }

    async fn more(&mut self) -> Result<(), Lost> {
        self.input.reserve(256 << 10);
        if self.reader.read_buf(&mut self.input).await? == 0 {
            return Err(Lost::Ended);
        }
        self.note();
        Ok(())
    }

    /// Something has come.
    fn note(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard.store(now, Ordering::Relaxed);
    }

    async fn part(&mut self, part: Part) -> Result<(), Lost> {
        let nobody = Violation::Nonsense("an answer that nothing was asked for");
        // Taken out of the table while its data comes: who waits hears of a connection that ends by the dropped sender.
        let Some(mut waiting) = self.table().remove(&part.cookie) else { return Err(nobody.into()) };
        let mut refused = None;
        match part.kind {
            chunk::NONE if part.length == 0 => {}
            chunk::OFFSET_DATA if part.length > 8 => {
                let place = self.place(part.length - 8, &waiting).await?;
                self.fill(&mut waiting.data[place]).await?;
            }
            chunk::OFFSET_HOLE if part.length == 12 => {
                while self.input.len() < 12 {
                    self.more().await?;
                }
                let length = u32::from_be_bytes(*self.input[8..].first_chunk().expect("there are 12 bytes"));
                self.place(length, &waiting).await?;
                self.input.advance(4);
            }
            kind if kind & chunk::ERROR != 0 && (6..1 << 16).contains(&part.length) => {
                let mut said = vec![0; part.length as usize];
                self.fill(&mut said).await?;
                refused = said.first_chunk().map(|&number| u32::from_be_bytes(number));
            }
            _ => return Err(Violation::Nonsense("an answer of an unknown kind").into()),
        }
        if let Some(number) = refused {
            let _ = waiting.answer.send(Err(Lost::Refused(number)));
        } else if part.last {
            let _ = waiting.answer.send(Ok(waiting.data.freeze()));
        } else {
            self.table().insert(part.cookie, waiting);
        }
        Ok(())
    }

    /// Takes the offset of a part, and says which bytes of the answer it is.
    async fn place(&mut self, length: u32, waiting: &Waiting) -> Result<std::ops::Range<usize>, Lost> {
        while self.input.len() < 8 {
            self.more().await?;
        }
        let begin = self.input.get_u64().checked_sub(waiting.offset).and_then(|begin| usize::try_from(begin).ok());
        let place = begin.and_then(|begin| Some(begin..begin.checked_add(length as usize)?));
        place
            .filter(|place| place.end <= waiting.data.len())
            .ok_or(Lost::Nbd(Violation::Nonsense("an answer beyond what was asked for")))
    }

    async fn fill(&mut self, into: &mut [u8]) -> Result<(), Lost> {
        let begun = into.len().min(self.input.len());
        into[..begun].copy_from_slice(&self.input[..begun]);
        self.input.advance(begun);
        let mut rest = &mut into[begun..];
        while !rest.is_empty() {
            if self.reader.read_buf(&mut rest).await? == 0 {
                return Err(Lost::Ended);
            }
            self.note();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_stalls_as_long_as_a_request_waits_and_not_while_it_rests() {
        let (asked, _questions) = mpsc::unbounded_channel();
        let connection = Connection::new(asked);
        let second = Duration::from_secs(1);
        sleep(10 * second).await;
        let stalled = || [true, false].map(|urgent| connection.stalled(urgent));
        assert_eq!([Duration::ZERO; 2], stalled());
        let urgency = Urgency::new(false);
        let read = connection.read(0, 512, &urgency);
        tokio::pin!(read);
        assert!(timeout(2 * second, &mut read).await.is_err());
        assert_eq!([Duration::ZERO, 2 * second], stalled());
        urgency.raise();
        assert!(timeout(second, &mut read).await.is_err());
        assert_eq!([second, 3 * second], stalled());
        connection.heard.store(11_000, Ordering::Relaxed); // a part of an answer, two seconds ago
        assert_eq!([second, 2 * second], stalled());
    }

    #[test]
    fn a_connection_of_this_thread_is_preferred_unless_it_has_more_to_do() {
        let (asked, _questions) = mpsc::unbounded_channel();
        let (mine, mut other) = (Connection::new(asked.clone()), Connection::new(asked));
        other.thread = thread::spawn(|| thread::current().id()).join().unwrap();
        assert!(mine.cost() < other.cost());
        let _waits: Vec<_> = (0..=WAKE_UP).map(|_| Waits::new(&mine.all)).collect();
        assert!(mine.cost() > other.cost());
    }
}
