//! One image on this host: reads come from the pool, else from its parents, each chunk once for all who wait for it.

mod bootset;
mod fill;
mod get;
mod put;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_util::sync::CancellationToken;

use bootset::BootSet;
pub use fill::Class;
use fill::Filling;
pub use put::Taken;

use crate::fetch::{Answer, Closed, Fault, Left, Upstream, Urgency};
use crate::kept::names;
use crate::limits::Limits;
use crate::loops::Loops;
use crate::manifest::{CHUNK, Manifest, Name, PAGE, chunk_of, to_usize};
use crate::nbd::{Extent, extent};
use crate::nowait;
use crate::pool::{Entry, Found, Place, Pool};

/// Connections to the parent in use.
const CONNECTIONS: usize = 4;

/// Chunks that are asked of a parent at once.
const JOIN: usize = 4;

/// Bytes that are on their way from parents, or from there to the pool.
const IN_FLIGHT: usize = 16 << 20;

/// The word of a chunk that is known to hold zeros.
const ZEROS: u64 = u64::MAX;

/// Why a read fails.
#[derive(Debug, Error)]
pub enum Failed {
    #[error(transparent)]
    Closed(#[from] Closed),
    /// This host has the whole image, and cannot read it.
    #[error("the image cannot be read: {0}")]
    Content(#[from] io::Error),
}

/// A chunk on its way. `urgency`: whether somebody waits for it.
#[derive(Clone, Debug)]
struct Flight {
    data: watch::Receiver<Option<Bytes>>,
    urgency: Arc<Urgency>,
}

/// A chunk that is to be fetched, and those who wait for it.
struct Wanted {
    chunk: u32,
    name: Name,
    sender: watch::Sender<Option<Bytes>>,
}

/// Where a chunk is.
enum Part {
    Zeros,
    Kept(JoinHandle<Option<Bytes>>),
    Coming(Flight),
}

/// What all images of a host share.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    pub pool: Arc<Pool>,
    pub limits: Arc<Limits>,
    pub loops: Arc<Loops>,
}

#[derive(Debug)]
pub struct Image {
    /// Names the exports, and the chunks of an image without a manifest.
    pub key: String,
    pub size: u64,
    /// All of the image, if this host is an origin of it.
    content: Option<File>,
    /// Without it nothing that parents send is proven.
    manifest: Option<Manifest>,
    pub parents: Upstream,
    pub manifest_parents: Upstream,
    pool: Arc<Pool>,
    limits: Arc<Limits>,
    /// By chunk, in pages: the word of its place, if it was found once.
    places: Box<[OnceLock<Box<[AtomicU64]>>]>,
    flights: Mutex<HashMap<u32, Flight>>,
    in_flight: Semaphore,
    one_page: tokio::sync::Mutex<()>,
    pub closed: CancellationToken,
    /// Bytes read from parents.
    pub fetched: AtomicU64,
    /// Bytes sent to other hosts.
    pub sent: AtomicU64,
    /// Bytes that clients got without waiting for a parent or a disk.
    pub hits: AtomicU64,
    pub boot_set: BootSet,
    filling: Mutex<Filling>,
    held: Mutex<Held>,
    /// All of it was compared with its hashes since this process began: it was filled as a whole.
    compared: AtomicBool,
}

/// What the pool had of the image when it and the manifest were as these numbers say.
#[derive(Debug, Default)]
struct Held {
    changes: u64,
    pages: usize,
    bytes: u64,
    whole: bool,
    counted: Option<Instant>,
}

/// Chunks whose flights end when this is dropped, whatever ends their fetch.
struct Landed<'a> {
    image: &'a Image,
    chunks: Vec<u32>,
}

impl Drop for Landed<'_> {
    fn drop(&mut self) {
        let mut flights = self.image.flights();
        for chunk in &self.chunks {
            flights.remove(chunk);
        }
    }
}

impl Image {
    /// Call with `content` on an origin, with `manifest` if the image has one.
    #[must_use]
    pub fn new(
        key: String,
        size: u64,
        content: Option<File>,
        manifest: Option<Manifest>,
        left: mpsc::UnboundedSender<Left>,
        shared: Shared,
    ) -> Self {
        let Shared { pool, limits, loops } = shared;
        let closed = CancellationToken::new();
        let pages = chunk_of(size - 1) / PAGE + 1;
        Self {
            key,
            size,
            content,
            manifest,
            parents: Upstream::new(CONNECTIONS, closed.clone(), left.clone(), loops.clone()),
            manifest_parents: Upstream::new(1, closed.clone(), left, loops),
            pool,
            limits,
            places: (0..pages).map(|_| OnceLock::new()).collect(),
            flights: Mutex::default(),
            in_flight: Semaphore::new(IN_FLIGHT),
            one_page: tokio::sync::Mutex::default(),
            closed,
            fetched: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            boot_set: BootSet::default(),
            filling: Mutex::default(),
            held: Mutex::default(),
            compared: AtomicBool::new(false),
        }
    }

    /// Whether this host has all of the image, whatever is in the pool.
    #[must_use]
    pub fn is_origin(&self) -> bool {
        self.content.is_some()
    }

    /// Bytes of the image's chunks in the pool, and whether this host needs no parent to read all of the image, as counted
    /// last.
    #[must_use]
    pub fn held(&self) -> (u64, bool) {
        let held = self.last_held();
        (held.bytes, self.is_origin() || held.whole && self.compared.load(Ordering::Acquire))
    }

    /// When what the pool has was counted last.
    #[must_use]
    pub fn counted(&self) -> Option<Instant> {
        self.last_held().counted
    }

    /// Counts what the pool has. Cheap if nothing has changed since the last time.
    pub fn count(&self) {
        let (changes, pages) = (self.pool.changes(), self.manifest.as_ref().map_or(0, Manifest::known));
        let last = self.last_held();
        if last.counted.is_some() && (last.changes, last.pages) == (changes, pages) {
            return;
        }
        drop(last);
        let names = names(&self.key, self.size, self.manifest.as_ref());
        let known = self.manifest.as_ref().is_none_or(Manifest::is_whole);
        let (bytes, whole) = (self.pool.held(&names), known && self.pool.has_all(&names));
        *self.last_held() = Held { changes, pages, bytes, whole, counted: Some(Instant::now()) };
    }

    fn last_held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what is here, without waiting for anything. False: call `read`.
    pub fn read_now(&self, offset: u64, into: &mut [u8]) -> bool {
        if let Some(file) = &self.content {
            return nowait::read(file, offset, into).is_ok();
        }
        let (mut offset, mut rest) = (offset, into);
        while !rest.is_empty() {
            let begin = offset % CHUNK;
            let length = rest.len().min(to_usize(CHUNK - begin));
            let (part, after) = rest.split_at_mut(length);
            match self.word(chunk_of(offset)) {
                ZEROS => part.fill(0),
                word => match Place::from_word(word).map(|place| self.pool.read(place, begin, part)) {
                    Some(Found::Data) => {}
                    _ => return false,
                },
            }
            offset += length as u64;
            rest = after;
        }
        true
    }

    /// Reads a range, in bytes, of which the image has all, wherever it has to come from. `patient`: nobody waits for it.
    ///
    /// # Errors
    /// The image is dropped, or its origin's own disk fails.
    pub async fn read(self: &Arc<Self>, offset: u64, length: u32, patient: bool) -> Result<Bytes, Failed> {
        if self.content.is_some() {
            let image = self.clone();
            return spawn_blocking(move || image.read_content(offset, length)).await.map_err(io::Error::other)?;
        }
        let mut data = BytesMut::zeroed(length as usize);
        let mut chunks: Vec<u32> = (chunk_of(offset)..=chunk_of(offset + u64::from(length) - 1)).collect();
        while !chunks.is_empty() {
            let mut again = Vec::new();
            for (chunk, part) in chunks.iter().copied().zip(self.find(&chunks, patient).await?) {
                let found = match part {
                    Part::Zeros => continue,
                    Part::Kept(reading) => reading.await.ok().flatten(),
                    Part::Coming(mut flight) => {
                        let arrived = flight.data.wait_for(Option::is_some).await;
                        arrived.map_err(|_| Closed)?.clone()
                    }
                };
                match found {
                    Some(found) => copy(&found, u64::from(chunk) * CHUNK, &mut data, offset),
                    None => again.push(chunk), // it has gone meanwhile, or the disk is bad
                }
            }
            chunks = again;
        }
        Ok(data.freeze())
    }

    fn read_content(&self, offset: u64, length: u32) -> Result<Bytes, Failed> {
        let Some(file) = &self.content else { return Err(Closed.into()) };
        let mut data = BytesMut::zeroed(length as usize);
        file.read_exact_at(&mut data, offset)?;
        Ok(data.freeze())
    }

    /// Where chunks are. Those that are nowhere begin to come.
    async fn find(self: &Arc<Self>, chunks: &[u32], patient: bool) -> Result<Vec<Part>, Closed> {
        let mut named = Vec::with_capacity(chunks.len());
        for &chunk in chunks {
            named.push((chunk, self.name(chunk).await?));
        }
        Ok(self.parts(&named, patient, false))
    }

    /// As `find`. `paid`: the bytes that come are paid.
    fn parts(self: &Arc<Self>, named: &[(u32, Name)], patient: bool, paid: bool) -> Vec<Part> {
        let (mut missing, urgency) = (Vec::new(), Arc::new(Urgency::new(!patient)));
        let mut flights = self.flights();
        let parts = named.iter().map(|&(chunk, name)| {
            if name == Name::ZEROS {
                self.set_word(chunk, ZEROS);
                return Part::Zeros;
            }
            if let Some(flight) = flights.get(&chunk) {
                if !patient {
                    flight.urgency.raise();
                }
                return Part::Coming(flight.clone());
            }
            if let Some(place) = self.kept(&name) {
                self.set_word(chunk, place.to_word());
                return Part::Kept(self.check(place, name));
            }
            let (sender, data) = watch::channel(None);
            let flight = Flight { data, urgency: urgency.clone() };
            flights.insert(chunk, flight.clone());
            missing.push(Wanted { chunk, name, sender });
            Part::Coming(flight)
        });
        let parts = parts.collect();
        drop(flights);
        for run in runs(missing) {
            tokio::spawn(self.clone().fetch(run, urgency.clone(), paid));
        }
        parts
    }

    /// The place of a chunk in the pool. It stays there if this image is pinned.
    fn kept(&self, name: &Name) -> Option<Place> {
        self.pool.find(name).inspect(|&place| self.pool.pin(&self.key, place))
    }

    /// Begins to read a kept chunk as a whole.
    fn check(&self, place: Place, name: Name) -> JoinHandle<Option<Bytes>> {
        let (pool, proven) = (self.pool.clone(), self.proven());
        spawn_blocking(move || {
            let mut data = BytesMut::zeroed(to_usize(CHUNK));
            pool.check(place, &name, proven, &mut data).then(|| data.freeze())
        })
    }

    /// Whether the names of chunks prove what they hold.
    #[must_use]
    pub fn proven(&self) -> bool {
        self.manifest.is_some()
    }

    /// The name of a chunk. Its page is fetched if it is not here.
    async fn name(&self, chunk: u32) -> Result<Name, Closed> {
        let Some(manifest) = &self.manifest else { return Ok(Name::of_place(&self.key, chunk)) };
        loop {
            if let Some(name) = manifest.name(chunk) {
                return Ok(name);
            }
            let _one = self.one_page.lock().await;
            if !manifest.has_page(chunk / PAGE) {
                self.fetch_page(manifest, chunk / PAGE).await?;
            }
        }
    }

    /// Has the pages of the manifest here that a range of the manifest is in. Nothing to do without a manifest, and on an
    /// origin, which has all of it.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn need_pages(&self, offset: u64, length: u64) -> Result<(), Closed> {
        let Some(manifest) = self.manifest.as_ref().filter(|_| self.content.is_none()) else { return Ok(()) };
        let _one = self.one_page.lock().await;
        if !manifest.has_list() {
            self.fetch_list(manifest).await?;
        }
        for page in manifest.pages_of(offset, length) {
            if !manifest.has_page(page) {
                self.fetch_page(manifest, page).await?;
            }
        }
        Ok(())
    }

    async fn fetch_list(&self, manifest: &Manifest) -> Result<(), Closed> {
        let mut tries = 0;
        loop {
            self.manifest_parents.pause(tries).await?;
            tries += 1;
            let (list, route) = self.ask_manifest(0, manifest.layout.list()).await?;
            match manifest.put_list(&list, true) {
                Ok(()) => return Ok(()),
                Err(wrong) => {
                    tracing::warn!(%wrong, "from a parent");
                    route.leave(Fault::Lying);
                }
            }
        }
    }

    async fn fetch_page(&self, manifest: &Manifest, page: u32) -> Result<(), Closed> {
        if !manifest.has_list() {
            self.fetch_list(manifest).await?;
        }
        let (offset, length) = manifest.layout.page(page);
        if manifest.put_page(page, &vec![0; to_usize(length)]).is_ok() {
            return Ok(()); // the names of zeros need not travel
        }
        let mut tries = 0;
        loop {
            self.manifest_parents.pause(tries).await?;
            tries += 1;
            let (data, route) = self.ask_manifest(offset, length).await?;
            match manifest.put_page(page, &data) {
                Ok(()) => return Ok(()),
                Err(wrong) => {
                    tracing::warn!(%wrong, "from a parent");
                    route.leave(Fault::Lying);
                }
            }
        }
    }

    /// Reads a range of the manifest from parents.
    async fn ask_manifest(&self, offset: u64, length: u64) -> Result<Answer, Closed> {
        let urgency = Urgency::new(true);
        self.pay(length, &urgency).await?;
        self.manifest_parents.read(offset, u32::try_from(length).unwrap_or(u32::MAX), &urgency).await
    }

    /// Waits until this host may read so many bytes from parents.
    async fn pay(&self, length: u64, urgency: &Urgency) -> Result<(), Closed> {
        let down = &self.limits.down;
        let paid = async {
            tokio::select! {
                biased;
                () = urgency.urgent() => down.demand(length).await,
                () = down.behind(length) => {}
            }
        };
        self.closed.run_until_cancelled(paid).await.ok_or(Closed)
    }

    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }

    /// Reads a range of the manifest as its export shows it, in bytes.
    ///
    /// # Errors
    /// The image is dropped, or the manifest of an origin is damaged.
    pub async fn read_manifest(&self, offset: u64, length: u32) -> Result<Bytes, Failed> {
        let manifest = self.manifest.as_ref().ok_or(Closed)?;
        loop {
            self.need_pages(offset, length.into()).await?;
            match manifest.read(offset, length.into()) {
                Some(data) => return Ok(data.into()),
                None if self.content.is_none() => {} // a page was damaged meanwhile
                None => return Err(io::Error::other("its manifest is damaged").into()),
            }
        }
    }

    /// Which parts of a range, in bytes, hold data and which hold nothing but zeros, from its beginning: `most` parts.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn extents(&self, offset: u64, length: u64, most: usize) -> Result<Vec<Extent>, Closed> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < offset + length {
            let end = ((at / CHUNK + 1) * CHUNK).min(offset + length);
            let zeros = self.proven() && self.name(chunk_of(at)).await? == Name::ZEROS;
            let bits = if zeros { extent::HOLE | extent::ZERO } else { extent::DATA };
            let part = u32::try_from(end - at).unwrap_or(u32::MAX);
            let full = extents.len() == most;
            match extents.last_mut() {
                Some(last) if last.bits == bits => last.length += part,
                _ if full => break,
                _ => extents.push(Extent { length: part, bits }),
            }
            at = end;
        }
        Ok(extents)
    }

    /// Brings chunks that follow each other, and hands them to those who wait. Those hear of the end as well.
    async fn fetch(self: Arc<Self>, run: Vec<Wanted>, urgency: Arc<Urgency>, paid: bool) {
        let _landed = Landed { image: &self, chunks: run.iter().map(|wanted| wanted.chunk).collect() };
        let mut fetched = pin!(self.fetch_run(run, &urgency, paid));
        let ended = tokio::select! {
            biased;
            () = urgency.urgent() => {
                let _waits = self.limits.reads.enter();
                fetched.await
            }
            ended = &mut fetched => ended,
        };
        if let Err(error) = ended {
            tracing::debug!(image = self.key, %error, "chunks are not fetched");
        }
    }

    async fn fetch_run(self: &Arc<Self>, run: Vec<Wanted>, urgency: &Urgency, mut paid: bool) -> Result<(), Closed> {
        let permits = u32::try_from(run.len() * to_usize(CHUNK)).unwrap_or(u32::MAX);
        let _room = self.in_flight.acquire_many(permits).await.map_err(|_| Closed)?;
        let mut runs = VecDeque::from([(0, run)]);
        while let Some((tries, run)) = runs.pop_front() {
            self.parents.pause(tries).await?;
            let offset = u64::from(run[0].chunk) * CHUNK;
            let length = (run.len() as u64 * CHUNK).min(self.size - offset);
            if !std::mem::take(&mut paid) {
                self.pay(length, urgency).await?;
            }
            let (data, route) = self.parents.read(offset, u32::try_from(length).unwrap_or(u32::MAX), urgency).await?;
            self.fetched.fetch_add(length, Ordering::Relaxed);
            let (right, wrong) = self.prove(run, data);
            self.keep(right).await;
            if !wrong.is_empty() {
                route.leave(Fault::Lying);
                runs.extend(wrong.into_iter().map(|wanted| (tries + 1, vec![wanted])));
            }
        }
        Ok(())
    }

    /// Compares chunks with their names, and hands on those that are right.
    fn prove(&self, run: Vec<Wanted>, data: Bytes) -> (Vec<(Wanted, Bytes)>, Vec<Wanted>) {
        let (mut right, mut wrong) = (Vec::new(), Vec::new());
        let mut rest = data;
        for wanted in run {
            let chunk = whole(rest.split_to(rest.len().min(to_usize(CHUNK))));
            if self.proven() && Name::of_chunk(&chunk) != wanted.name {
                wrong.push(wanted);
            } else {
                wanted.sender.send_replace(Some(chunk.clone()));
                right.push((wanted, chunk));
            }
        }
        (right, wrong)
    }

    /// Puts chunks into the pool, and remembers where they are.
    async fn keep(self: &Arc<Self>, chunks: Vec<(Wanted, Bytes)>) {
        let image = self.clone();
        let kept = spawn_blocking(move || {
            for (wanted, data) in &chunks {
                // Zeros of an image without a manifest are kept as well: no name says after a start that they are zeros.
                let content = if image.proven() { wanted.name } else { Name(blake3::hash(data).into()) };
                if content == Name::ZEROS {
                    image.set_word(wanted.chunk, ZEROS);
                } else if let Some(place) = image.pool.keep(&Entry { name: wanted.name, content }, data) {
                    image.pool.pin(&image.key, place);
                    image.set_word(wanted.chunk, place.to_word());
                }
            }
        });
        if let Err(error) = kept.await {
            tracing::error!(image = self.key, %error, "chunks are not kept");
        }
    }

    fn word(&self, chunk: u32) -> u64 {
        let page = self.places.get((chunk / PAGE) as usize).and_then(OnceLock::get);
        page.map_or(0, |page| page[(chunk % PAGE) as usize].load(Ordering::Acquire))
    }

    fn set_word(&self, chunk: u32, word: u64) {
        let page = self.places[(chunk / PAGE) as usize].get_or_init(|| (0..PAGE).map(|_| AtomicU64::new(0)).collect());
        page[(chunk % PAGE) as usize].store(word, Ordering::Release);
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<u32, Flight>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Chunks that follow each other, at most JOIN together.
fn runs(missing: Vec<Wanted>) -> Vec<Vec<Wanted>> {
    let mut runs: Vec<Vec<Wanted>> = Vec::new();
    for wanted in missing {
        match runs.last_mut() {
            Some(run) if run.len() < JOIN && run.last().is_some_and(|last| last.chunk + 1 == wanted.chunk) => {
                run.push(wanted);
            }
            _ => runs.push(vec![wanted]),
        }
    }
    runs
}

/// The last chunk of an image, filled up with zeros.
fn whole(chunk: Bytes) -> Bytes {
    if chunk.len() as u64 == CHUNK {
        return chunk;
    }
    let mut filled = BytesMut::from(chunk);
    filled.resize(to_usize(CHUNK), 0);
    filled.freeze()
}

/// Copies what a chunk, which begins at `at`, has of the range that begins at `offset`.
fn copy(chunk: &[u8], at: u64, data: &mut [u8], offset: u64) {
    let end = offset + data.len() as u64;
    let (from, to) = (at.max(offset), (at + CHUNK).min(end));
    let length = to_usize(to - from);
    data[to_usize(from - offset)..][..length].copy_from_slice(&chunk[to_usize(from - at)..][..length]);
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::manifest::digest;

    const CHUNKS: u32 = 3;

    fn chunk(number: u32) -> Vec<u8> {
        number.to_le_bytes().repeat(to_usize(CHUNK) / 4)
    }

    /// A pool, and an image of `CHUNKS` chunks whose list of pages is known, and its page.
    fn scene(folder: &std::path::Path) -> (Arc<Pool>, Image, Vec<u8>) {
        let shared = Shared::default();
        let pool = shared.pool.clone();
        pool.add(&folder.join("pool"), 4 << 20, 0, true).unwrap();
        let page: Vec<u8> = (1..=CHUNKS).flat_map(|number| Name::of_chunk(&chunk(number)).0).collect();
        let (list, size) = (Name::of_page(&page).0, u64::from(CHUNKS) * CHUNK);
        let manifest = Manifest::open(&folder.join("manifest"), digest(size, &list), size).unwrap();
        manifest.put_list(&list, false).unwrap();
        let (left, _) = mpsc::unbounded_channel();
        (pool, Image::new("key".to_owned(), size, None, Some(manifest), left, shared), page)
    }

    fn keep(pool: &Pool, number: u32) {
        let name = Name::of_chunk(&chunk(number));
        pool.keep(&Entry { name, content: name }, &chunk(number)).unwrap();
    }

    fn counted(image: &Image) -> (u64, bool) {
        image.count();
        image.held()
    }

    #[test]
    fn held_follows_the_pool_and_the_names_that_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let (pool, image, page) = scene(folder.path());
        keep(&pool, 1); // as another image does
        assert_eq!([(0, false); 2], [counted(&image), counted(&image)]);
        image.manifest().unwrap().put_page(0, &page).unwrap();
        assert_eq!((CHUNK, false), counted(&image));
        keep(&pool, 2);
        keep(&pool, 7); // of another image
        assert_eq!([(2 * CHUNK, false); 2], [counted(&image), counted(&image)]);
        keep(&pool, 3);
        assert_eq!((3 * CHUNK, false), counted(&image)); // nobody has compared it
        image.compared.store(true, Ordering::Release);
        assert_eq!((3 * CHUNK, true), counted(&image));
        pool.forget(&Name::of_chunk(&chunk(3)));
        pool.forget(&Name::of_chunk(&chunk(1)));
        assert_eq!(((3 * CHUNK, true), (CHUNK, false)), (image.held(), counted(&image)));
    }

    #[test]
    fn only_what_the_manifest_names_is_taken_and_only_what_is_not_here() {
        let folder = tempfile::tempdir().unwrap();
        let (pool, image, page) = scene(folder.path());
        image.manifest().unwrap().put_page(0, &page).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let image = Arc::new(image);
        let put = |ranges: &[Range<u64>], data: Vec<u8>| image.put(ranges, &mut data.as_slice(), runtime.handle());
        let lacking = || runtime.block_on(image.lacking()).unwrap();
        keep(&pool, 1);
        assert_eq!([CHUNK..3 * CHUNK; 1], *lacking());
        let (all, end) = ([0..3 * CHUNK; 1], [2 * CHUNK..3 * CHUNK; 1]);
        let taken = put(&all, [chunk(1), chunk(2), chunk(9)].concat()).unwrap();
        assert_eq!(Taken { kept: CHUNK, wrong: end.to_vec(), full: false }, taken);
        assert_eq!(end, *lacking());
        assert_eq!(CHUNK, put(&end, chunk(3)).unwrap().kept);
        assert_eq!(Taken::default(), put(&end, chunk(3)).unwrap());
        assert!(lacking().is_empty());
        let mut read = vec![0; to_usize(CHUNK)];
        assert!(image.read_now(2 * CHUNK, &mut read) && read == chunk(3));
        for (ranges, data) in
            [(all, chunk(1)), ([1..CHUNK; 1], chunk(1)), ([CHUNK..4 * CHUNK; 1], [0; 1].repeat(1 << 20))]
        {
            assert!(put(&ranges, data).is_err());
        }
    }
}
