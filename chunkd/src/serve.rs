//! Answers one client's requests: from the pool at once, else when the data is there, in any order.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::busypoll::BusyPoll;
use crate::image::{Failed, Image};
use crate::limits::Bucket;
use crate::manifest::{CHUNK, to_usize};
use crate::nbd::server::{Handshake, Next};
use crate::nbd::{Errno, Extent, MOST_READ, Replies, Request, Violation, command, extent};
use crate::send::send;

/// How long a client waits for an export that is not there: the agent may be about to tell of it.
const EXPORT_WITHIN: Duration = Duration::from_secs(5);

/// Bytes that one client may wait for. One that asks for more is not heard until it has got some.
const MOST_AWAITED: u64 = 32 << 20;

/// Bytes that are read from the pool before they are sent.
const PIECE: usize = 256 << 10;

/// Bytes of requests that are read together, at least.
const ROOM: usize = 4 << 10;

/// Reads up to here are sent together.
const SMALL: usize = 64 << 10;

const MOST_EXTENTS: usize = 1024;

/// What a handshake led to.
#[derive(Debug)]
pub enum Agreed {
    StartTls,
    Serve(Export, Replies),
    End,
}

/// Why a connection ends.
#[derive(Debug, Error)]
pub enum Ended {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Nbd(#[from] Violation),
    #[error("TLS: {0}")]
    Tls(#[from] openssl::ssl::Error),
    #[error("the handshake takes too long")]
    Late,
    #[error(transparent)]
    Read(#[from] Failed),
}

/// What a client may find here.
pub trait Exports: Send + Sync {
    fn find(&self, name: &str) -> Option<Export>;
    fn names(&self) -> Vec<String>;
    /// Changes when there is another export.
    fn news(&self) -> watch::Receiver<()>;
}

/// What a name means: an image, or its manifest. What is read first of an image for a VM's disk makes a boot set.
#[derive(Clone, Debug)]
pub enum Export {
    Image(Arc<Image>),
    Disk(Arc<Image>),
    Manifest(Arc<Image>),
}

impl Export {
    fn image(&self) -> &Arc<Image> {
        match self {
            Self::Image(image) | Self::Disk(image) | Self::Manifest(image) => image,
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::Image(image) | Self::Disk(image) => image.size,
            Self::Manifest(image) => image.manifest().map_or(0, |manifest| manifest.layout.length()),
        }
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> bool {
        matches!(self, Self::Image(image) | Self::Disk(image) if image.read_now(offset, into))
    }

    /// Whether a read can end with an error: that of an origin's own disk.
    fn may_fail(&self) -> bool {
        matches!(self, Self::Image(image) | Self::Disk(image) if image.is_origin())
    }

    /// A program of this host reads a range.
    fn note(&self, request: &Request) {
        if let (Self::Disk(image), true) = (self, request.length > 0) {
            image.boot_set.note(Instant::now().into_std(), request.offset, request.length);
        }
    }

    fn hit(&self, length: usize) {
        self.image().hits.fetch_add(length as u64, Ordering::Relaxed);
    }

    async fn extents(&self, offset: u64, length: u32, most: usize) -> Result<Vec<Extent>, Failed> {
        match self {
            Self::Image(image) | Self::Disk(image) => Ok(image.extents(offset, length.into(), most).await?),
            Self::Manifest(_) => Ok(vec![Extent { length, bits: extent::DATA }]),
        }
    }

    async fn read(&self, offset: u64, length: u32, patient: bool) -> Result<Bytes, Failed> {
        match self {
            Self::Image(image) | Self::Disk(image) => image.read(offset, length, patient).await,
            Self::Manifest(image) => image.read_manifest(offset, length).await,
        }
    }
}

/// Greets, or goes on after TLS, until requests may come. Nothing if the client ends it.
///
/// `Handshake::greet` was sent already, and `input` is what came after that. All waits for exports end `EXPORT_WITHIN` after
/// the call.
///
/// # Errors
/// The client hangs up, or does not speak the protocol.
pub async fn negotiate<S>(
    stream: &mut S,
    handshake: &mut Handshake,
    input: &mut BytesMut,
    exports: &dyn Exports,
) -> Result<Agreed, Ended>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let until = Instant::now() + EXPORT_WITHIN;
    let mut output = BytesMut::new();
    let mut looked = None;
    let mut next = Next::More;
    loop {
        next = match next {
            Next::Find(name) => {
                looked = wait_for(exports, &name, until).await;
                handshake.found(looked.as_ref().map(Export::size), &mut output)
            }
            Next::List => {
                Handshake::list(exports.names().iter().map(String::as_str), &mut output);
                Next::More
            }
            Next::More => {
                let next = handshake.next(input, &mut output)?;
                send(stream, &mut output).await?;
                if next == Next::More && stream.read_buf(input).await? == 0 {
                    return Ok(Agreed::End);
                }
                next
            }
            Next::StartTls => return Ok(Agreed::StartTls),
            Next::End => return Ok(Agreed::End),
            Next::Ready(name, replies) => {
                send(stream, &mut output).await?;
                let export = looked.or_else(|| exports.find(&name));
                return Ok(export.map_or(Agreed::End, |export| Agreed::Serve(export, replies)));
            }
        };
    }
}

/// The export of this name, as soon as it is there; none if it is not there in time.
async fn wait_for(exports: &dyn Exports, name: &str, until: Instant) -> Option<Export> {
    let mut news = exports.news();
    loop {
        if let Some(export) = exports.find(name) {
            return Some(export);
        }
        timeout_at(until, news.changed()).await.ok()?.ok()?;
    }
}

/// Answers requests until the client says goodbye, the image is dropped, or `cut`.
///
/// `up`: what all that is sent to another host is paid from; none for a program of this host.
///
/// # Errors
/// Why it ended otherwise.
pub async fn serve<S>(
    stream: S,
    input: BytesMut,
    export: Export,
    replies: Replies,
    cut: &CancellationToken,
    up: Option<&Bucket>,
) -> Result<(), Ended>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let closed = export.image().closed.clone();
    let (answers, answered) = mpsc::unbounded_channel();
    let (output, piece, busy_poll) = (BytesMut::new(), Vec::new(), BusyPoll::default());
    let mut session = Session {
        stream,
        export,
        replies,
        up,
        input,
        output,
        piece,
        answers,
        answered,
        busy_poll,
        awaited: 0,
        unread: 0,
    };
    tokio::select! {
        ended = session.run() => ended,
        () = closed.cancelled() => Ok(()),
        () = cut.cancelled() => Ok(()),
    }
}

/// What came of a request that had to wait.
enum Answer {
    Data(Bytes),
    Extents(Vec<Extent>),
    Done,
}

struct Session<'a, S> {
    stream: S,
    export: Export,
    replies: Replies,
    up: Option<&'a Bucket>,
    input: BytesMut,
    output: BytesMut,
    /// What was read of a large answer; no memory before the first one.
    piece: Vec<u8>,
    answers: mpsc::UnboundedSender<(Request, Result<Answer, Failed>)>,
    answered: mpsc::UnboundedReceiver<(Request, Result<Answer, Failed>)>,
    busy_poll: BusyPoll,
    /// Bytes that the client waits for.
    awaited: u64,
    /// Bytes of a write's data that are still to come, and are ignored.
    unread: u64,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Session<'_, S> {
    async fn run(&mut self) -> Result<(), Ended> {
        loop {
            while self.awaited < MOST_AWAITED {
                let Some(request) = self.next_request()? else { break };
                if request.kind == command::DISCONNECT {
                    return Ok(());
                }
                self.request(request).await?;
            }
            self.flush().await?;
            self.input.reserve(ROOM);
            if self.awaited == 0 && self.comes_at_once().await? {
                continue;
            }
            tokio::select! {
                Some((request, answer)) = self.answered.recv() => self.answer(&request, answer).await?,
                read = self.stream.read_buf(&mut self.input), if self.awaited < MOST_AWAITED => if read? == 0 {
                    return Ok(());
                },
            }
            while let Ok((request, answer)) = self.answered.try_recv() {
                self.answer(&request, answer).await?;
            }
        }
    }

    /// Whether a program of this host has sent something right after its last answer.
    async fn comes_at_once(&mut self) -> io::Result<bool> {
        if self.up.is_some() {
            return Ok(false);
        }
        let read = self.busy_poll.wait(self.stream.read_buf(&mut self.input)).await;
        Ok(read.transpose()?.is_some_and(|read| read > 0))
    }

    fn next_request(&mut self) -> Result<Option<Request>, Violation> {
        let ignored = self.input.len().min(usize::try_from(self.unread).unwrap_or(usize::MAX));
        self.input.advance(ignored);
        self.unread -= ignored as u64;
        if self.unread > 0 { Ok(None) } else { Request::take(&mut self.input) }
    }

    async fn request(&mut self, request: Request) -> Result<(), Ended> {
        let range = request.range(self.export.size());
        match request.kind {
            command::READ if request.length > MOST_READ => self.refuse(&request, Errno::Overflow),
            command::READ if range.is_none() => self.refuse(&request, Errno::Inval),
            command::READ => return self.read(request).await,
            command::CACHE if range.is_some() => self.later(request),
            command::BLOCK_STATUS if range.is_some() && self.replies.allocation => self.later(request),
            command::FLUSH => self.replies.done(&mut self.output, request.cookie),
            command::WRITE if request.length > MOST_READ => return Err(Violation::Nonsense("a write too long").into()),
            command::WRITE => {
                self.unread = request.length.into();
                self.refuse(&request, Errno::Perm);
            }
            command::TRIM | command::WRITE_ZEROES => self.refuse(&request, Errno::Perm),
            _ => self.refuse(&request, Errno::Inval),
        }
        Ok(())
    }

    fn refuse(&mut self, request: &Request, error: Errno) {
        self.replies.error(&mut self.output, request.cookie, error);
    }

    /// Answers a read now if it is here, or if the beginning of a large one is.
    async fn read(&mut self, request: Request) -> Result<(), Ended> {
        if self.up.is_none() {
            self.export.note(&request);
        }
        if request.length as usize > SMALL {
            return self.read_large(request).await;
        }
        let before = self.output.len();
        self.replies.data(&mut self.output, &request);
        let begin = self.output.len();
        self.output.resize(begin + request.length as usize, 0);
        if self.export.read_now(request.offset, &mut self.output[begin..]) {
            self.export.hit(request.length as usize);
            self.pay(before, request.length as usize).await?;
            return Ok(self.flush_if_full().await?);
        }
        self.output.truncate(before);
        self.later(request);
        Ok(())
    }

    async fn read_large(&mut self, request: Request) -> Result<(), Ended> {
        self.busy_poll.rest(); // it takes long in any case
        // An answer that has begun cannot become an error, so what may fail is read as a whole first.
        let piece = if self.export.may_fail() { request.length as usize } else { PIECE };
        self.piece.resize(piece, 0);
        let mut offset = request.offset;
        let end = offset + u64::from(request.length);
        while offset < end {
            let length = to_usize(end - offset).min(piece).min(self.most_paid());
            let begins = offset == request.offset;
            let here = self.export.read_now(offset, &mut self.piece[..length]);
            if begins && !here {
                self.later(request);
                return Ok(());
            }
            if begins {
                self.replies.data(&mut self.output, &request);
            }
            if here {
                self.export.hit(length);
                self.pay(self.output.len(), length).await?;
                self.flush().await?;
                self.stream.write_all(&self.piece[..length]).await?;
                self.stream.flush().await?;
            } else {
                // The answer has begun, so it has to go on.
                let length = u32::try_from(length).unwrap_or(u32::MAX);
                let data = self.export.read(offset, length, request.is_patient()).await?;
                self.put(&data).await?;
            }
            offset += length as u64;
        }
        self.piece.truncate(PIECE);
        self.piece.shrink_to_fit();
        Ok(())
    }

    async fn flush_if_full(&mut self) -> io::Result<()> {
        if self.output.len() > PIECE { self.flush().await } else { Ok(()) }
    }

    async fn put(&mut self, data: &[u8]) -> io::Result<()> {
        for part in data.chunks(self.most_paid()) {
            self.pay(self.output.len(), part.len()).await?;
            self.output.extend_from_slice(part);
        }
        self.flush_if_full().await
    }

    /// The most bytes to pay for at once: a client with a slow answer must see that it comes.
    fn most_paid(&self) -> usize {
        if self.up.is_some_and(Bucket::limited) { SMALL } else { usize::MAX }
    }

    /// Waits until so many bytes may be sent, and counts those for other hosts. What was answered before `begin`, in the output, is sent meanwhile.
    async fn pay(&mut self, begin: usize, bytes: usize) -> io::Result<()> {
        let Some(up) = self.up else { return Ok(()) };
        if !matches!(self.export, Export::Manifest(_)) {
            self.export.image().sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        if !up.limited() {
            return Ok(());
        }
        let answer = self.output.split_off(begin);
        self.flush().await?;
        up.demand(bytes as u64).await;
        self.output = answer;
        Ok(())
    }

    async fn flush(&mut self) -> io::Result<()> {
        send(&mut self.stream, &mut self.output).await
    }

    /// Answers when the data is there.
    fn later(&mut self, request: Request) {
        self.awaited += weight(&request);
        let (export, answers) = (self.export.clone(), self.answers.clone());
        tokio::spawn(async move {
            let answer = match request.kind {
                command::READ => {
                    let read = export.read(request.offset, request.length, request.is_patient());
                    read.await.map(Answer::Data)
                }
                command::CACHE => cache(&export, &request).await.map(|()| Answer::Done),
                _ => {
                    let most = if request.flags & command::REQ_ONE == 0 { MOST_EXTENTS } else { 1 };
                    export.extents(request.offset, request.length, most).await.map(Answer::Extents)
                }
            };
            let _ = answers.send((request, answer)); // the client may be gone
        });
    }

    async fn answer(&mut self, request: &Request, answer: Result<Answer, Failed>) -> io::Result<()> {
        self.awaited -= weight(request);
        match answer {
            Ok(Answer::Data(data)) if self.replies.structured && matches!(self.export, Export::Manifest(_)) => {
                let begin = self.output.len();
                self.replies.sparse(&mut self.output, request, &data); // most names of a sparse image are those of zeros
                self.pay(begin, self.output.len() - begin).await?;
                self.flush_if_full().await?;
            }
            Ok(Answer::Data(data)) => {
                self.replies.data(&mut self.output, request);
                self.put(&data).await?;
            }
            Ok(Answer::Extents(extents)) => self.replies.extents(&mut self.output, request.cookie, &extents),
            Ok(Answer::Done) => self.replies.done(&mut self.output, request.cookie),
            Err(Failed::Closed(_)) => self.refuse(request, Errno::Shutdown),
            Err(Failed::Content(error)) => {
                tracing::error!(%error, "an image of this host cannot be read");
                self.refuse(request, Errno::Io);
            }
        }
        Ok(())
    }
}

/// What a request counts against `MOST_AWAITED`.
fn weight(request: &Request) -> u64 {
    if request.kind == command::READ { request.length.into() } else { CHUNK }
}

async fn cache(export: &Export, request: &Request) -> Result<(), Failed> {
    let end = request.offset + u64::from(request.length);
    let mut offset = request.offset;
    while offset < end {
        let length = (end - offset).min(PIECE as u64);
        export.read(offset, u32::try_from(length).unwrap_or(u32::MAX), false).await?;
        offset += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::io::{DuplexStream, duplex};

    use super::*;
    use crate::image::Shared;
    use crate::nbd::client;
    use crate::nbd::option;
    use crate::nbd::server::Security;

    const SIZE: u64 = 512;

    /// One export, from the moment at which somebody serves it.
    struct Later {
        image: Mutex<Option<Export>>,
        news: watch::Sender<()>,
    }

    impl Later {
        fn new() -> Self {
            Self { image: Mutex::default(), news: watch::Sender::default() }
        }

        fn serve(&self) {
            let (left, _) = mpsc::unbounded_channel();
            let image = Image::new("key".to_owned(), SIZE, None, None, left, Shared::default());
            *self.image.lock().unwrap() = Some(Export::Image(Arc::new(image)));
            self.news.send_replace(());
        }
    }

    impl Exports for Later {
        fn find(&self, _name: &str) -> Option<Export> {
            self.image.lock().unwrap().clone()
        }

        fn names(&self) -> Vec<String> {
            Vec::new()
        }

        fn news(&self) -> watch::Receiver<()> {
            self.news.subscribe()
        }
    }

    async fn server(mut stream: DuplexStream, exports: &dyn Exports) -> Result<Agreed, Ended> {
        let mut greeting = BytesMut::new();
        Handshake::greet(&mut greeting);
        stream.write_all(&greeting).await?;
        negotiate(&mut stream, &mut Handshake::new(Security::Plain), &mut BytesMut::new(), exports).await
    }

    /// The size of the export that a client asks for, or why there is none.
    async fn client(mut stream: DuplexStream) -> Result<u64, Violation> {
        let mut handshake = client::Handshake::new("key", false);
        let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
        loop {
            if let client::Next::Ready(size) = handshake.next(&mut input, &mut output)? {
                return Ok(size);
            }
            stream.write_all(&output).await.unwrap();
            output.clear();
            assert!(stream.read_buf(&mut input).await.unwrap() > 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_comes_before_its_export_gets_it() {
        let (here, there) = duplex(4096);
        let exports = Later::new();
        let later = async {
            tokio::time::sleep(EXPORT_WITHIN / 2).await;
            exports.serve();
        };
        let (served, size, ()) = tokio::join!(server(there, &exports), client(here), later);
        assert!(matches!(served, Ok(Agreed::Serve(..))));
        assert_eq!(Ok(SIZE), size);
    }

    #[tokio::test(start_paused = true)]
    async fn an_export_that_does_not_come_is_refused() {
        let (here, there) = duplex(4096);
        let exports = Later::new();
        let begun = Instant::now();
        let refused = tokio::select! {
            refused = client(here) => refused,
            _ = server(there, &exports) => panic!("the client may ask for another one"),
        };
        assert!(matches!(refused, Err(Violation::Refused(_))));
        assert!(begun.elapsed() >= EXPORT_WITHIN);
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_of_exports_waits_for_none() {
        let (mut here, there) = duplex(4096);
        let begun = Instant::now();
        let mut said = BytesMut::from(&[0, 0, 0, 3][..]);
        for kind in [option::LIST, option::ABORT] {
            said.extend_from_slice(b"IHAVEOPT");
            said.extend_from_slice(&[kind.to_be_bytes(), [0; 4]].concat());
        }
        here.write_all(&said).await.unwrap();
        assert!(matches!(server(there, &Later::new()).await, Ok(Agreed::End)));
        assert_eq!(begun, Instant::now());
    }
}
