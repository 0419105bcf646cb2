//! The chunks that this host keeps: one pool for all images, in files, partitions and disks.
//!
//! A chunk is found by its name, whichever image brought it. What is on a disk is not believed before it was compared with
//! its hash once, so a crash needs no journal.

mod index;
mod member;
mod pins;
mod sieve;
#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use index::Index;
use member::Member;
pub use member::{Entry, Found};
use pins::Pins;
pub use pins::Turn;

use crate::manifest::{CHUNK, Name};

/// A disk that takes so long for a chunk hangs.
const HANGS: Duration = Duration::from_secs(5);

/// Members that a pool can get between two starts.
const MOST: usize = 255;

/// Where a chunk is: a member, a slot of it, and the slot's generation. Goes out of date when the slot gets another chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    member: u8,
    generation: u32,
    slot: u32,
}

impl Place {
    /// In one word, never 0.
    #[must_use]
    pub fn to_word(self) -> u64 {
        u64::from(self.member) << 56 | u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // the fields of a word
    pub fn from_word(word: u64) -> Option<Self> {
        let member = (word >> 56) as u8;
        (member != 0).then_some(Self { member, generation: (word >> 32) as u32 & 0xff_ffff, slot: word as u32 })
    }
}

/// The pool. Any thread may use it.
#[derive(Debug)]
pub struct Pool {
    /// The first one has number 1.
    members: Box<[OnceLock<Member>]>,
    used: Mutex<usize>,
    index: Index,
    turn: AtomicUsize,
    changes: Arc<AtomicU64>,
    pub pins: Pins,
    /// The log says that nothing further is kept.
    told_full: AtomicBool,
}

impl Default for Pool {
    /// A pool without members.
    fn default() -> Self {
        Self {
            members: (0..MOST).map(|_| OnceLock::new()).collect(),
            used: Mutex::new(0),
            index: Index::new(),
            turn: AtomicUsize::new(0),
            changes: Arc::default(),
            pins: Pins::default(),
            told_full: AtomicBool::new(false),
        }
    }
}

impl Pool {
    /// Adds a file or a block device, of at most `limit` bytes. One that is a member already is opened anew if it is to be
    /// smaller or larger. `reserve`: bytes to leave free in the file system. `make`: a file that is not there.
    ///
    /// # Errors
    /// It cannot be opened, is too small, or holds something else.
    pub fn add(&self, path: &Path, limit: u64, reserve: u64, make: bool) -> io::Result<()> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, member)) = self.all().find(|(_, member)| member.path == path) {
            member.set_reserve(reserve);
            if member.wanted == limit {
                return Ok(());
            }
            self.retire(member);
        }
        let number = u8::try_from(*used + 1).map_err(io::Error::other)?;
        let place = self.members.get(*used).ok_or_else(|| io::Error::other("too many changes; start again"))?;
        let (member, entries) = Member::open(path, limit, reserve, make, self.changes.clone())?;
        for (slot, entry) in entries {
            let generation = member.generation(slot).unwrap_or_default();
            self.index.insert(&entry.name, Place { member: number, generation, slot });
        }
        *used += 1;
        place.set(member).map_err(|_| io::Error::other("a member with this number is there"))?;
        self.changed();
        Ok(())
    }

    /// Uses a member no more. Returns whether it was one.
    pub fn remove(&self, path: &Path) -> bool {
        let found = self.all().find(|(_, member)| member.path == path);
        found.inspect(|(_, member)| self.retire(member)).is_some()
    }

    /// Returns when nobody uses the member's file any more, or when what still does hangs.
    fn retire(&self, member: &Member) {
        let file = member.retire();
        self.changed();
        let begun = Instant::now();
        while file.as_ref().is_some_and(|file| Arc::strong_count(file) > 1) && begun.elapsed() < HANGS {
            std::thread::sleep(Duration::from_millis(1)); // reads and writes of one chunk
        }
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Another number after each change of what the pool has.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Bytes of the chunks of these names that are here, each counted once.
    #[must_use]
    pub fn held(&self, names: &[Name]) -> u64 {
        let mut places: Vec<u64> = names.iter().filter_map(|name| self.find(name)).map(Place::to_word).collect();
        places.sort_unstable();
        places.dedup();
        places.len() as u64 * CHUNK
    }

    /// Whether the chunks of all these names are here.
    pub fn has_all(&self, names: &[Name]) -> bool {
        names.iter().all(|name| self.find(name).is_some())
    }

    /// Whether nothing further can be kept: all chunks are pinned, or file systems need their reserve.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.all().all(|(_, member)| member.is_full())
    }

    /// Has a chunk stay as long as the image with this key is pinned.
    pub fn pin(&self, key: &str, place: Place) {
        if let Some(member) = self.member(place) {
            self.pins.mark(key, |bit| member.pin(place.slot, place.generation, bit));
        }
    }

    /// Lets chunks go again that no image has pinned in this turn.
    pub fn unpin(&self, turn: &Turn) {
        self.all().for_each(|(_, member)| member.unpin(turn.old));
    }

    /// The members in use.
    fn all(&self) -> impl Iterator<Item = (u8, &Member)> {
        (1..=u8::MAX).zip(self.members.iter().map_while(OnceLock::get)).filter(|(_, member)| !member.retired())
    }

    fn member(&self, place: Place) -> Option<&Member> {
        self.members.get(usize::from(place.member).checked_sub(1)?)?.get()
    }

    /// Where the chunk of a name is.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<Place> {
        let place = self.index.get(name)?;
        if self.member(place).and_then(|member| member.generation(place.slot)) == Some(place.generation) {
            return Some(place);
        }
        self.index.remove(name, place);
        None
    }

    /// Reads a part of a chunk, `offset` bytes from its beginning, without waiting for a disk.
    pub fn read(&self, place: Place, offset: u64, into: &mut [u8]) -> Found {
        self.member(place).map_or(Found::Gone, |member| member.read(place.slot, place.generation, offset, into))
    }

    /// Reads a whole chunk, waiting for the disk, and compares it with its name, or if that is not `proven` with its entry.
    ///
    /// Returns whether the chunk is there and right.
    pub fn check(&self, place: Place, name: &Name, proven: bool, into: &mut [u8]) -> bool {
        self.member(place).is_some_and(|member| member.check(place.slot, place.generation, name, proven, into))
    }

    /// Whether a chunk was compared with its hash, or written, and is in memory as far as is known.
    #[must_use]
    pub fn is_checked(&self, place: Place) -> bool {
        self.member(place).is_some_and(|member| member.is_checked(place.slot))
    }

    /// Keeps a whole chunk, in the members by turns. Returns its place; none if there is no room, or a disk fails.
    pub fn keep(&self, entry: &Entry, data: &[u8]) -> Option<Place> {
        if let Some(place) = self.find(&entry.name) {
            return Some(place);
        }
        let members: Vec<_> = self.all().collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        for step in 0..members.len() {
            let (number, member) = members[(turn + step) % members.len()];
            match member.keep(entry, data) {
                Ok((slot, generation)) => {
                    let place = Place { member: number, generation, slot };
                    if let Some(other) = self.index.insert(&entry.name, place) {
                        self.drop_at(other); // two have brought it at the same time
                    }
                    self.changed();
                    self.told_full.store(false, Ordering::Relaxed);
                    return Some(place);
                }
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    if !self.told_full.swap(true, Ordering::Relaxed) {
                        tracing::warn!(path = %member.path.display(), "no further chunks are kept: nothing may go");
                    }
                }
                Err(error) => tracing::warn!(path = %member.path.display(), %error, "a chunk is not kept"),
            }
        }
        None
    }

    /// Forgets a chunk. Returns the bytes that are free now.
    pub fn forget(&self, name: &Name) -> u64 {
        let Some(place) = self.find(name) else { return 0 };
        self.index.remove(name, place);
        self.drop_at(place)
    }

    fn drop_at(&self, place: Place) -> u64 {
        self.member(place).map_or(0, |member| member.drop_chunk(place.slot, place.generation))
    }

    /// Gives space back to file systems whose reserve is in use. Returns the bytes that are free now.
    pub fn shrink(&self) -> u64 {
        self.all().map(|(_, member)| member.shrink()).sum()
    }

    /// Bytes of chunks, and the most that there may be.
    #[must_use]
    pub fn usage(&self) -> (u64, u64) {
        self.all().fold((0, 0), |(held, limit), (_, member)| (held + member.held(), limit + member.limit()))
    }
}
