//! Hosts in one process, with real sockets and TLS, and a parent that misbehaves.

#![allow(dead_code)] // not all tests use all of it

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use chunkd::listen;
use chunkd::manifest::{CHUNK, NAME, Name, PAGE, digest, to_usize};
use chunkd::nbd::server::{Handshake, Next, Security};
use chunkd::nbd::{Errno, Replies, Request, client, command};
use chunkd::pool::Pool;
use chunkd::registry::{Event, ImageSpec, ParentSpec, Registry, Secret};
use chunkd::send::send;
use chunkd::serve::{Export, Exports};
use chunkd::tickets::{Claim, ticket};
use chunkd::tls::{self, Key};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep;

pub const IMAGE: &str = "image";

/// The serving key of all parents here.
pub fn serving_key() -> Secret {
    Secret(Key([7; 32]))
}

/// An image's content and manifest.
#[derive(Clone)]
pub struct Content {
    pub data: Bytes,
    pub manifest: Bytes,
    pub digest: String,
    pub key: String,
}

impl Content {
    /// `size` bytes that repeat nowhere, with a hole.
    pub fn new(size: u32) -> Self {
        let mut data = vec![0; size as usize];
        blake3::Hasher::new().update(b"content").finalize_xof().fill(&mut data);
        let hole = 3 * to_usize(CHUNK)..5 * to_usize(CHUNK);
        if data.len() > hole.end {
            data[hole].fill(0);
        }
        Self::of(data)
    }

    pub fn of(data: Vec<u8>) -> Self {
        let mut names = Vec::new();
        for chunk in data.chunks(to_usize(CHUNK)) {
            let mut whole = chunk.to_vec();
            whole.resize(to_usize(CHUNK), 0);
            names.extend_from_slice(&Name::of_chunk(&whole).0);
        }
        let list: Vec<u8> = names.chunks(PAGE as usize * NAME).flat_map(|page| Name::of_page(page).0).collect();
        let digest = blake3::Hash::from(digest(data.len() as u64, &list)).to_hex().to_string();
        let mut manifest = list;
        manifest.resize(manifest.len().next_multiple_of(4096), 0);
        manifest.extend_from_slice(&names);
        manifest.resize(manifest.len().next_multiple_of(512), 0);
        let key = format!("b{digest}");
        Self { data: data.into(), manifest: manifest.into(), digest: format!("blake3-64k:{digest}"), key }
    }
}

/// One host: a registry, its pool, and its listeners.
pub struct Host {
    pub name: String,
    pub registry: Arc<Registry>,
    pub address: SocketAddr,
    pub folder: TempDir,
    /// Of the next list of children: that of all tickets here is 1.
    revision: AtomicU64,
    listeners: [JoinHandle<()>; 2],
}

impl Host {
    pub async fn new(name: &str) -> Self {
        let filter = tracing_subscriber::EnvFilter::from_default_env(); // RUST_LOG=debug
        let _ = tracing_subscriber::fmt().with_test_writer().with_env_filter(filter).try_init();
        let folder = tempfile::tempdir().unwrap();
        let registry = registry(folder.path());
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let tls = listen::tls_of(&registry).unwrap();
        let vms = UnixListener::bind(folder.path().join("vms")).unwrap();
        let listeners = [
            tokio::spawn(listen::serve_hosts(socket, tls, registry.clone())),
            tokio::spawn(listen::serve_vms(vms, registry.clone())),
        ];
        Self { name: name.to_owned(), registry, address, folder, revision: AtomicU64::new(1), listeners }
    }

    /// Serves the whole content.
    pub async fn publish(&self, content: &Content) {
        let path = self.folder.path().join("content");
        File::create(&path).unwrap().write_all(&content.data).unwrap();
        std::fs::write(self.folder.path().join("manifests").join(&content.key), &content.manifest).unwrap();
        let mut spec = spec(content, Vec::new());
        spec.mark = Some("1".to_owned());
        self.registry.serve(spec, Some(File::open(path).unwrap())).await.unwrap();
    }

    /// Reads from these, in this order, by the content's digest.
    pub async fn attach(&self, content: &Content, parents: &[ParentSpec]) {
        self.registry.serve(spec(content, parents.to_vec()), None).await.unwrap();
    }

    /// Names the children, as Volt does by a newer list each time.
    pub fn admit(&self, names: &[&str]) {
        let revision = self.revision.fetch_add(1, Ordering::SeqCst);
        let names = names.iter().map(|&name| name.to_owned()).collect();
        self.registry.admit(IMAGE, serving_key(), revision, names, true);
    }

    /// How a child of this name reaches this host.
    pub fn as_parent_of(&self, child: &str) -> ParentSpec {
        parent(&self.name, self.address, child)
    }

    pub async fn read(&self, offset: u64, length: u32) -> Bytes {
        let Some(Export::Image(image)) = self.registry.find(IMAGE) else { panic!("{} has no image", self.name) };
        image.read(offset, length, false).await.unwrap()
    }

    pub fn fetched(&self) -> u64 {
        self.registry.status(None)[0].fetched
    }

    /// As kill -9 does: all connections end. Its pool and folder stay.
    pub fn die(&self) {
        self.listeners.iter().for_each(JoinHandle::abort);
        self.registry.drop_image(IMAGE);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.die();
    }
}

pub fn registry(folder: &Path) -> Arc<Registry> {
    let manifests = folder.join("manifests");
    std::fs::create_dir_all(&manifests).unwrap();
    let pool = Pool::default();
    pool.add(&folder.join("pool"), 256 << 20, 0, true).unwrap();
    Arc::new(Registry::new(manifests, Arc::new(pool), Arc::default()))
}

pub fn spec(content: &Content, parents: Vec<ParentSpec>) -> ImageSpec {
    ImageSpec {
        name: IMAGE.to_owned(),
        key: content.key.clone(),
        size: content.data.len() as u64,
        digest: content.digest.clone(),
        mark: None,
        parents,
    }
}

pub fn parent(host: &str, address: SocketAddr, child: &str) -> ParentSpec {
    ParentSpec {
        host: host.to_owned(),
        address: address.to_string(),
        identity: format!("{IMAGE}/{child}/1"),
        secret: Secret(ticket(&serving_key().0, child, 1).unwrap()),
        far: false,
    }
}

/// A client of an export, after the handshake.
pub struct Client<S> {
    stream: S,
    input: BytesMut,
}

impl Client<UnixStream> {
    /// A program of the host.
    pub async fn vm(host: &Host, export: &str) -> std::io::Result<Self> {
        let stream = UnixStream::connect(host.folder.path().join("vms")).await?;
        let mut client = Self { stream, input: BytesMut::new() };
        client.advance(&mut client::Handshake::new(export, false), BytesMut::new()).await?;
        Ok(client)
    }
}

impl Client<tls::Stream> {
    pub async fn child(host: &Host, child: &str, export: &str) -> std::io::Result<Self> {
        let parent = host.as_parent_of(child);
        let mut handshake = client::Handshake::new(export, true);
        let mut plain = Client { stream: TcpStream::connect(host.address).await?, input: BytesMut::new() };
        plain.advance(&mut handshake, BytesMut::new()).await?;
        let tls = tls::connect(plain.stream, &parent.identity, &parent.secret.0).await;
        let mut client = Self { stream: tls.map_err(std::io::Error::other)?, input: plain.input };
        let mut output = BytesMut::new();
        handshake.encrypted(&mut output);
        client.advance(&mut handshake, output).await?;
        Ok(client)
    }
}

impl<S: AsyncReadExt + AsyncWriteExt + Unpin> Client<S> {
    /// The handshake until TLS, or to its end.
    async fn advance(&mut self, handshake: &mut client::Handshake, mut output: BytesMut) -> std::io::Result<()> {
        loop {
            let next = handshake.next(&mut self.input, &mut output).map_err(std::io::Error::other)?;
            send(&mut self.stream, &mut output).await?;
            if next != client::Next::More {
                return Ok(());
            }
            self.receive().await?;
        }
    }

    async fn receive(&mut self) -> std::io::Result<()> {
        let read = self.stream.read_buf(&mut self.input).await?;
        if read == 0 { Err(std::io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    pub async fn read(&mut self, offset: u64, length: u32) -> Bytes {
        self.ask(&[(offset, length)]).await;
        self.answer().await.1
    }

    /// Asks for ranges at once.
    pub async fn ask(&mut self, ranges: &[(u64, u32)]) {
        let mut output = BytesMut::new();
        for &(offset, length) in ranges {
            Request { flags: 0, kind: command::READ, cookie: offset, offset, length }.put(&mut output);
        }
        send(&mut self.stream, &mut output).await.unwrap();
    }

    /// The next answer: where its range begins, and the data.
    pub async fn answer(&mut self) -> (u64, Bytes) {
        let part = loop {
            if let Some(part) = client::Part::take(&mut self.input).unwrap() {
                break part;
            }
            self.receive().await.unwrap();
        };
        while self.input.len() < part.length as usize {
            self.receive().await.unwrap();
        }
        (part.cookie, self.input.split_to(part.length as usize).split_off(8).freeze())
    }
}

/// What a parent does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    WrongBytes,
    WrongManifest,
    AnotherSize,
    AnswersBeyond,
    CutsInHalf,
    StallsAfterHeader,
    Late(Duration),
    ClosesAtRandom,
    /// Requests for the image's first bytes get no answer, and the others a late one.
    StallsAtBegin,
    Refuses,
    NoTls,
    AnotherKey,
    Silent,
}

/// A parent of real sockets and TLS that does one thing wrong, as long as `wrong` says so.
pub struct BadParent {
    pub address: SocketAddr,
    pub wrong: Arc<AtomicBool>,
    pub asked: Arc<AtomicU64>,
    /// Requests that had no answer yet at the same time, at most.
    pub busiest: Arc<AtomicU64>,
    /// Requests of which it was said that nobody waits for them.
    pub patient: Arc<AtomicU64>,
    listener: JoinHandle<()>,
}

impl BadParent {
    pub async fn new(content: &Content, fault: Fault) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let bad = Bad {
            content: content.clone(),
            fault,
            wrong: Arc::new(true.into()),
            asked: Arc::default(),
            busy: Arc::default(),
            busiest: Arc::default(),
            patient: Arc::default(),
        };
        let Bad { wrong, asked, busiest, patient, .. } = bad.clone();
        let listener = tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                let bad = bad.clone();
                tokio::spawn(async move {
                    let _ = bad.serve(stream).await;
                });
            }
        });
        Self { address, wrong, asked, busiest, patient, listener }
    }

    pub fn as_parent_of(&self, child: &str) -> ParentSpec {
        parent("bad", self.address, child)
    }
}

impl Drop for BadParent {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

#[derive(Clone)]
struct Bad {
    content: Content,
    fault: Fault,
    wrong: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    busy: Arc<AtomicU64>,
    busiest: Arc<AtomicU64>,
    patient: Arc<AtomicU64>,
}

impl Bad {
    fn does(&self, fault: Fault) -> bool {
        self.fault == fault && self.wrong.load(Ordering::SeqCst)
    }

    async fn serve(&self, mut plain: TcpStream) -> std::io::Result<()> {
        plain.set_nodelay(true)?;
        if self.does(Fault::Silent) {
            sleep(Duration::from_secs(3600)).await;
        }
        let mut handshake = Handshake::new(if self.does(Fault::NoTls) { Security::Plain } else { Security::Required });
        let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
        Handshake::greet(&mut output);
        send(&mut plain, &mut output).await?;
        loop {
            let next = handshake.next(&mut input, &mut output).map_err(std::io::Error::other)?;
            send(&mut plain, &mut output).await?;
            match next {
                Next::StartTls => break,
                Next::More if plain.read_buf(&mut input).await? > 0 => {}
                _ => return Ok(()),
            }
        }
        let key = if self.does(Fault::AnotherKey) { Key([8; 32]) } else { serving_key().0 };
        let tls = tls::server(move |identity| ticket(&key, Claim::parse(identity)?.child, 1))?;
        let (mut stream, _) = tls::accept(&tls, plain).await.map_err(std::io::Error::other)?;
        handshake.encrypted();
        let (mut data, mut manifest) = (Bytes::new(), false);
        loop {
            let next = handshake.next(&mut input, &mut output).map_err(std::io::Error::other)?;
            let (next, asked) = match next {
                Next::Find(name) => {
                    manifest = name.ends_with("/manifest");
                    data = if manifest { self.content.manifest.clone() } else { self.content.data.clone() };
                    let more = if self.does(Fault::AnotherSize) { 512 } else { 0 };
                    (handshake.found(Some(data.len() as u64 + more), &mut output), true)
                }
                next => (next, false),
            };
            send(&mut stream, &mut output).await?;
            match next {
                Next::Ready(_, replies) => {
                    let (reader, writer) = split(stream);
                    let (arrived, requests) = mpsc::unbounded_channel();
                    return tokio::select! {
                        ended = self.hear(reader, input, arrived) => ended,
                        ended = self.answer(writer, requests, data, manifest, replies) => ended,
                    };
                }
                Next::More if asked || stream.read_buf(&mut input).await? > 0 => {}
                _ => return Ok(()),
            }
        }
    }

    /// Takes requests until the child ends that.
    async fn hear<S: AsyncReadExt + Unpin>(
        &self,
        mut stream: S,
        mut input: BytesMut,
        arrived: mpsc::UnboundedSender<Request>,
    ) -> std::io::Result<()> {
        loop {
            while let Some(request) = Request::take(&mut input).map_err(std::io::Error::other)? {
                if request.kind == command::DISCONNECT {
                    return Ok(());
                }
                self.busiest.fetch_max(self.busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                self.patient.fetch_add(request.is_patient().into(), Ordering::SeqCst);
                let _ = arrived.send(request);
            }
            if stream.read_buf(&mut input).await? == 0 {
                return Ok(());
            }
        }
    }

    async fn answer<S>(
        &self,
        mut stream: S,
        mut requests: mpsc::UnboundedReceiver<Request>,
        data: Bytes,
        manifest: bool,
        replies: Replies,
    ) -> std::io::Result<()>
    where
        S: AsyncWriteExt + Unpin,
    {
        while let Some(request) = requests.recv().await {
            let count = self.asked.fetch_add(1, Ordering::SeqCst);
            let mut answer = BytesMut::new();
            let begin = to_usize(request.offset);
            let mut part = data[begin..begin + request.length as usize].to_vec();
            match self.fault {
                _ if !self.wrong.load(Ordering::SeqCst) => {}
                Fault::WrongBytes if !manifest => part[request.length as usize / 2] ^= 1,
                Fault::WrongManifest if manifest => part[request.length as usize / 2] ^= 1,
                Fault::Late(time) => sleep(time).await,
                Fault::StallsAtBegin if !manifest && request.offset == 0 => continue,
                Fault::StallsAtBegin => sleep(Duration::from_millis(5)).await,
                Fault::ClosesAtRandom if count % 3 == 2 => return Ok(()),
                _ => {}
            }
            if self.does(Fault::Refuses) {
                replies.error(&mut answer, request.cookie, Errno::Io);
            } else {
                let beyond = if self.does(Fault::AnswersBeyond) { 4096 } else { 0 };
                replies.data(&mut answer, &Request { offset: request.offset + beyond, ..request });
                if !self.does(Fault::StallsAfterHeader) {
                    answer.put_slice(&part);
                }
            }
            if self.does(Fault::CutsInHalf) {
                answer.truncate(answer.len() / 2);
                send(&mut stream, &mut answer).await?;
                return Ok(());
            }
            self.busy.fetch_sub(1, Ordering::SeqCst);
            send(&mut stream, &mut answer).await?;
            if self.does(Fault::StallsAfterHeader) {
                sleep(Duration::from_secs(3600)).await;
            }
        }
        Ok(())
    }
}

/// Waits for the next parent that is left: its host, and why.
pub async fn lost(events: &mut tokio::sync::broadcast::Receiver<Event>) -> (String, &'static str) {
    let Event::ParentLost { host, why, .. } = events.recv().await.unwrap();
    (host, why)
}
