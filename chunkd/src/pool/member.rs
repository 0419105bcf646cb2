//! One file, partition or disk of the pool.
//!
//! It begins with a header of 64 KiB. Groups follow: 64 KiB of entries, then as many chunks. The entry of a slot has the name of
//! its chunk, and the hash of what was written. It is written after the chunk, and nothing is ever flushed: after a power
//! cut an entry may be older or newer than its chunk, which the hash shows when the chunk is first read.
//!
//! The word of each slot in memory says whether it has a chunk. Whoever reads a slot looks at the word before and after: a
//! slot gets another generation before another chunk is written to it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwapOption;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::pins::PINNED;
use super::sieve::Sieve;
use crate::manifest::{CHUNK, NAME, Name, to_usize};
use crate::nowait;

const MAGIC: &[u8; 16] = b"virtman chunks 1";
const GROUP: u32 = 1024;
const ENTRY: usize = 2 * NAME;
const GROUP_BYTES: u64 = CHUNK + GROUP as u64 * CHUNK;
const _: () = assert!(GROUP as u64 * ENTRY as u64 <= CHUNK, "the entries of a group lie before its chunks");

const USED: u32 = 1;
/// What memory has of the slot was compared with its hash, or was never anywhere else. A disk may lose what it was given.
const CHECKED: u32 = 2;
/// Somebody has read it since the hand of the sieve came by.
const READ: u32 = 4;
// PINNED: 8 and 16. Such a slot is not in the sieve.
const GENERATION: u32 = 1 << 8;

/// What came of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Data,
    /// The whole chunk has to be read and compared first.
    Unchecked,
    /// The disk has to be waited for.
    Cold,
    /// The slot does not have the chunk, or it cannot be read.
    Gone,
}

/// The entry of a slot: the name of its chunk, and the BLAKE3 hash of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: Name,
    pub content: Name,
}

#[derive(Debug)]
pub struct Member {
    pub path: PathBuf,
    /// None once it is used no more, so that its space is free again.
    file: ArcSwapOption<File>,
    /// The most bytes that it was to have.
    pub wanted: u64,
    slots: u32,
    /// The length of the file; none for a block device.
    length: Option<u64>,
    words: Box<[AtomicU32]>,
    sieve: Mutex<Sieve>,
    /// Bytes to leave free in its file system.
    reserve: AtomicU64,
    held: AtomicU64,
    /// See `Pool::changes`.
    changes: Arc<AtomicU64>,
}

impl Member {
    /// Opens a member of `limit` bytes. A block device is a member only if it says so.
    ///
    /// `make`: a file that is not there. `changes` counts the chunks that go. Returns the entries of its chunks as well.
    ///
    /// # Errors
    /// It cannot be opened, or belongs to somebody else.
    pub fn open(
        path: &Path,
        limit: u64,
        reserve: u64,
        make: bool,
        changes: Arc<AtomicU64>,
    ) -> io::Result<(Self, Vec<(u32, Entry)>)> {
        let file = OpenOptions::new().read(true).write(true).create(make).truncate(false).open(path)?;
        let kind = file.metadata()?.file_type();
        let size = if kind.is_block_device() { rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))? } else { limit };
        let slots = slots_in(size.min(limit))?;
        // Two processes would write over each other's chunks. The lock ends with the process (flock(2)).
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| io::Error::new(io::ErrorKind::ResourceBusy, "another process uses it"))?;
        // What the kernel reads ahead comes to memory without being compared.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
        let known = claim(&file, kind.is_block_device())?;
        let length = (!kind.is_block_device()).then(|| at(slots - 1) + CHUNK);
        if let Some(length) = length {
            file.set_len(length)?;
        }
        let member = Self {
            path: path.to_owned(),
            file: ArcSwapOption::from_pointee(file),
            wanted: limit,
            slots,
            length,
            words: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            sieve: Mutex::new(Sieve::new(slots)),
            reserve: reserve.into(),
            held: AtomicU64::new(0),
            changes,
        };
        let entries = if known { member.load()? } else { Vec::new() };
        Ok((member, entries))
    }

    fn load(&self) -> io::Result<Vec<(u32, Entry)>> {
        let mut entries = Vec::new();
        let mut sieve = self.sieve();
        let mut block = vec![0; to_usize(CHUNK)];
        for group in 0..self.slots.div_ceil(GROUP) {
            self.file()?.read_exact_at(&mut block, CHUNK + u64::from(group) * GROUP_BYTES)?;
            let slots = group * GROUP..((group + 1) * GROUP).min(self.slots);
            for (slot, bytes) in slots.zip(block.chunks_exact(ENTRY)) {
                // Slots are used in their order, so one without a name may have chunks after it.
                let taken = sieve.take_unused();
                debug_assert_eq!(taken, Some(slot));
                match Entry::parse(bytes) {
                    Some(entry) => {
                        sieve.insert(slot);
                        self.words[slot as usize].store(GENERATION | USED, Ordering::Release);
                        self.held.fetch_add(CHUNK, Ordering::Relaxed);
                        entries.push((slot, entry));
                    }
                    None => sieve.give_back(slot),
                }
            }
        }
        Ok(entries)
    }

    /// # Errors
    /// It is used no more.
    fn file(&self) -> io::Result<Arc<File>> {
        self.file.load_full().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Bytes of chunks.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// The most bytes of chunks.
    #[must_use]
    pub fn limit(&self) -> u64 {
        u64::from(self.slots) * CHUNK
    }

    /// The generation of a slot's chunk; none if it has none.
    #[must_use]
    pub fn generation(&self, slot: u32) -> Option<u32> {
        let word = self.words.get(slot as usize)?.load(Ordering::Acquire);
        if self.retired() {
            return None;
        }
        (word & USED != 0).then_some(word / GENERATION)
    }

    #[must_use]
    pub fn is_checked(&self, slot: u32) -> bool {
        self.words.get(slot as usize).is_some_and(|word| word.load(Ordering::Acquire) & CHECKED != 0)
    }

    /// Reads a part of a chunk, `offset` bytes from its beginning, without waiting for a disk.
    pub fn read(&self, slot: u32, generation: u32, offset: u64, into: &mut [u8]) -> Found {
        let (Some(word), Some(file)) = (self.words.get(slot as usize), self.file.load_full()) else {
            return Found::Gone;
        };
        let before = word.load(Ordering::Acquire);
        if before & USED == 0 || before / GENERATION != generation {
            return Found::Gone;
        }
        if before & CHECKED == 0 {
            return Found::Unchecked;
        }
        match nowait::read(&file, at(slot) + offset, into) {
            Ok(()) => {}
            Err(Errno::AGAIN) => {
                word.fetch_and(!CHECKED, Ordering::SeqCst);
                return Found::Cold;
            }
            Err(error) => {
                tracing::warn!(path = %self.path.display(), slot, %error, "a chunk cannot be read");
                return Found::Gone;
            }
        }
        if word.load(Ordering::SeqCst) / GENERATION != generation {
            return Found::Gone;
        }
        if before & READ == 0 {
            word.fetch_or(READ, Ordering::Relaxed);
        }
        Found::Data
    }

    /// Reads a whole chunk, waiting for the disk, and compares it with its name, or if that is not `proven` with its entry.
    ///
    /// Returns whether the slot has this chunk; else the slot is free.
    pub fn check(&self, slot: u32, generation: u32, name: &Name, proven: bool, into: &mut [u8]) -> bool {
        if self.generation(slot) != Some(generation) {
            return false;
        }
        let right = self.file().and_then(|file| file.read_exact_at(into, at(slot))).is_ok() && {
            let content = Name(blake3::hash(into).into());
            if proven { *name == content } else { self.entry(slot) == Some(Entry { name: *name, content }) }
        };
        if !right {
            tracing::warn!(path = %self.path.display(), slot, "a chunk is damaged; it is fetched anew");
            self.drop_chunk(slot, generation);
            return false;
        }
        let word = &self.words[slot as usize];
        let same = |now: u32| (now / GENERATION == generation).then_some(now | CHECKED | READ);
        word.fetch_update(Ordering::SeqCst, Ordering::Acquire, same).is_ok()
    }

    fn entry(&self, slot: u32) -> Option<Entry> {
        let mut bytes = [0; ENTRY];
        self.file().ok()?.read_exact_at(&mut bytes, entry_at(slot)).ok()?;
        Entry::parse(&bytes)
    }

    /// Lets a slot have no chunk, if it still has the chunk of this generation. Returns the bytes that are free now.
    pub fn drop_chunk(&self, slot: u32, generation: u32) -> u64 {
        let mut sieve = self.sieve();
        if self.generation(slot) != Some(generation) {
            return 0;
        }
        if self.words[slot as usize].load(Ordering::Acquire) & PINNED == 0 {
            sieve.remove(slot);
        }
        self.clear(slot);
        sieve.give_back(slot);
        if let Err(error) = self.punch(slot) {
            tracing::warn!(path = %self.path.display(), slot, %error, "a chunk is not removed from the disk");
        }
        CHUNK
    }

    /// Has a chunk stay, if the slot still has the chunk of this generation. `bit`: of `PINNED`.
    pub fn pin(&self, slot: u32, generation: u32, bit: u32) {
        let Some(word) = self.words.get(slot as usize) else { return };
        if word.load(Ordering::Acquire) & bit != 0 {
            return;
        }
        let mut sieve = self.sieve(); // nothing gets another generation meanwhile
        if self.generation(slot) == Some(generation) && word.fetch_or(bit, Ordering::SeqCst) & PINNED == 0 {
            sieve.remove(slot);
        }
    }

    /// Takes a bit of `PINNED` from all slots.
    pub fn unpin(&self, bit: u32) {
        for (slot, word) in (0..).zip(&self.words) {
            if word.load(Ordering::Acquire) & bit != 0 {
                let mut sieve = self.sieve();
                if word.fetch_and(!bit, Ordering::SeqCst) & PINNED == bit {
                    sieve.insert(slot);
                }
            }
        }
    }

    /// Whether nothing further can be kept.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let sieve = self.sieve();
        sieve.is_empty() && !(sieve.has_free() && self.has_room())
    }

    /// Gives space back to the file system until the reserve is free again. Returns the bytes that are free now.
    pub fn shrink(&self) -> u64 {
        let mut freed = 0;
        while !self.has_room() {
            let mut sieve = self.sieve();
            let Some(slot) = sieve.evict(|slot| self.may_go(slot)) else { break };
            self.clear(slot);
            let punched = self.punch(slot);
            sieve.give_back(slot);
            if let Err(error) = punched {
                tracing::warn!(path = %self.path.display(), %error, "the pool cannot give space back");
                break;
            }
            freed += CHUNK;
        }
        freed
    }

    /// Forgets the entry, and gives the space of the chunk back to the file system.
    fn punch(&self, slot: u32) -> io::Result<()> {
        let file = self.file()?;
        file.write_all_at(&[0; ENTRY], entry_at(slot))?;
        if self.length.is_some() {
            let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, at(slot), CHUNK)?;
        }
        Ok(())
    }

    /// Nothing is read from it or kept in it from now on. What is under way has the file that is returned open still.
    pub fn retire(&self) -> Option<Arc<File>> {
        let file = self.file.swap(None)?;
        if let Err(error) = rustix::fs::flock(&file, FlockOperation::Unlock) {
            tracing::warn!(path = %self.path.display(), %error, "a member stays locked for a while");
        }
        Some(file)
    }

    #[must_use]
    pub fn retired(&self) -> bool {
        self.file.load().is_none()
    }

    /// Has other bytes stay free in its file system.
    pub fn set_reserve(&self, reserve: u64) {
        self.reserve.store(reserve, Ordering::Relaxed);
    }

    /// The next generation of the slot, without a chunk.
    fn clear(&self, slot: u32) {
        let next = (self.words[slot as usize].load(Ordering::Acquire) / GENERATION + 1).wrapping_mul(GENERATION);
        self.words[slot as usize].store(next, Ordering::SeqCst);
        self.held.fetch_sub(CHUNK, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Writes a chunk to a slot: a free one, else one that was never used, else that of a chunk which may go.
    ///
    /// Returns its place: slot and generation.
    ///
    /// # Errors
    /// Nothing may go, or the chunk cannot be written.
    pub fn keep(&self, entry: &Entry, data: &[u8]) -> io::Result<(u32, u32)> {
        let slot = self.take().ok_or(io::ErrorKind::StorageFull)?;
        let written = self.file().and_then(|file| {
            file.write_all_at(data, at(slot))?;
            file.write_all_at(&entry.bytes(), entry_at(slot))?;
            self.whole(&file)
        });
        let mut sieve = self.sieve();
        if let Err(error) = written {
            sieve.give_back(slot);
            return Err(error);
        }
        let word = self.words[slot as usize].load(Ordering::Acquire) & !(GENERATION - 1);
        self.words[slot as usize].store(word | USED | CHECKED, Ordering::SeqCst);
        self.held.fetch_add(CHUNK, Ordering::Relaxed);
        sieve.insert(slot);
        Ok((slot, word / GENERATION))
    }

    fn take(&self) -> Option<u32> {
        let mut sieve = self.sieve();
        // A free slot may have given its space back.
        if self.has_room() {
            if let Some(slot) = sieve.take_free().or_else(|| sieve.take_unused()) {
                return Some(slot);
            }
        }
        let slot = sieve.evict(|slot| self.may_go(slot))?;
        self.clear(slot);
        Some(slot)
    }

    fn may_go(&self, slot: u32) -> bool {
        let before = self.words[slot as usize].fetch_and(!READ, Ordering::Relaxed);
        before & READ == 0
    }

    /// Whether the file may take more of its file system.
    fn has_room(&self) -> bool {
        let wanted = self.reserve.load(Ordering::Relaxed) + 2 * CHUNK;
        let room = |file| rustix::fs::fstatvfs(file).is_ok_and(|stat| stat.f_bavail * stat.f_frsize > wanted);
        self.length.is_none() || self.file.load().as_ref().is_some_and(room)
    }

    /// Whether the file has its length still. If somebody has cut it off, a write made zeros of what was there.
    fn whole(&self, file: &File) -> io::Result<()> {
        let Some(length) = self.length else { return Ok(()) };
        if file.metadata()?.len() == length {
            return Ok(());
        }
        tracing::warn!(path = %self.path.display(), "somebody has cut the file off: all chunks are checked again");
        self.words.iter().for_each(|word| {
            word.fetch_and(!CHECKED, Ordering::SeqCst);
        });
        file.set_len(length)?;
        Err(io::ErrorKind::Interrupted.into())
    }

    fn sieve(&self) -> MutexGuard<'_, Sieve> {
        self.sieve.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (name, content) = (bytes.first_chunk()?, bytes.last_chunk()?);
        (Name(*name) != Name::ZEROS).then_some(Self { name: Name(*name), content: Name(*content) })
    }

    fn bytes(&self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..NAME].copy_from_slice(&self.name.0);
        bytes[NAME..].copy_from_slice(&self.content.0);
        bytes
    }
}

/// How many slots fit into so many bytes.
fn slots_in(size: u64) -> io::Result<u32> {
    let room = size.saturating_sub(CHUNK);
    let slots = room / GROUP_BYTES * u64::from(GROUP) + (room % GROUP_BYTES).saturating_sub(CHUNK) / CHUNK;
    match u32::try_from(slots) {
        Ok(slots) if slots > 0 => Ok(slots),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{size} bytes are no size for a pool"))),
    }
}

/// Where a slot's chunk begins.
fn at(slot: u32) -> u64 {
    CHUNK + u64::from(slot / GROUP) * GROUP_BYTES + CHUNK + u64::from(slot % GROUP) * CHUNK
}

fn entry_at(slot: u32) -> u64 {
    CHUNK + u64::from(slot / GROUP) * GROUP_BYTES + u64::from(slot % GROUP) * ENTRY as u64
}

/// Marks a new file, and says whether it was marked already.
fn claim(file: &File, device: bool) -> io::Result<bool> {
    let mut magic = [0; MAGIC.len()];
    match file.read_exact_at(&mut magic, 0) {
        Ok(()) if magic == *MAGIC => Ok(true),
        Ok(()) if device || magic != [0; MAGIC.len()] => {
            Err(io::Error::new(io::ErrorKind::AlreadyExists, "it holds something else"))
        }
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error),
        _ => file.write_all_at(MAGIC, 0).map(|()| false),
    }
}
