//! What programs of this host read first of an image: the boot set, which other hosts fetch before their programs read.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::manifest::{CHUNK, chunk_of};

/// A boot ends so long after the first read.
const WITHIN: Duration = Duration::from_secs(120);

/// The most chunks of a boot set: 1 GiB.
const MOST: usize = 16_384;

/// Whoever reads fewer chunks than these only looks what the image is. Then the next read begins.
const LEAST: usize = 16;

/// Records reads, each chunk once, until the boot ends.
#[derive(Debug, Default)]
pub struct BootSet {
    ended: AtomicBool,
    reads: Mutex<Reads>,
}

#[derive(Debug, Default)]
struct Reads {
    begun: Option<Instant>,
    seen: HashSet<u32>,
    /// Runs of chunks, in the order in which they were read.
    runs: Vec<Range<u32>>,
}

impl BootSet {
    /// A program reads a range, in bytes, of at least one byte.
    pub fn note(&self, now: Instant, offset: u64, length: u32) {
        if self.ended.load(Ordering::Relaxed) {
            return;
        }
        let mut reads = self.reads();
        if reads.is_over(now) {
            if reads.is_boot(now) {
                self.ended.store(true, Ordering::Relaxed);
                return;
            }
            *reads = Reads::default();
        }
        reads.begun.get_or_insert(now);
        for chunk in chunk_of(offset)..=chunk_of(offset + u64::from(length) - 1) {
            reads.add(chunk);
        }
    }

    /// The ranges, in bytes, once the boot has ended.
    pub fn complete(&self, now: Instant) -> Option<Vec<Range<u64>>> {
        let reads = self.reads();
        let bytes = |run: &Range<u32>| u64::from(run.start) * CHUNK..u64::from(run.end) * CHUNK;
        reads.is_boot(now).then(|| reads.runs.iter().map(bytes).collect())
    }

    #[must_use]
    pub fn is_complete(&self, now: Instant) -> bool {
        self.reads().is_boot(now)
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reads {
    fn is_over(&self, now: Instant) -> bool {
        self.seen.len() >= MOST || self.begun.is_some_and(|begun| now.duration_since(begun) >= WITHIN)
    }

    fn is_boot(&self, now: Instant) -> bool {
        self.seen.len() >= LEAST && self.is_over(now)
    }

    fn add(&mut self, chunk: u32) {
        if self.seen.len() >= MOST || !self.seen.insert(chunk) {
            return;
        }
        match self.runs.last_mut() {
            Some(run) if run.end == chunk => run.end += 1,
            _ => self.runs.push(chunk..chunk + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u32 = 1 << 20;

    #[test]
    fn what_is_read_within_the_time_is_complete_after_it() {
        let (set, begin) = (BootSet::default(), Instant::now());
        set.note(begin, 5 * CHUNK + 7, 1);
        set.note(begin + WITHIN / 2, 4 * CHUNK, MIB);
        set.note(begin + WITHIN / 2, 0, 1);
        assert_eq!(None, set.complete(begin + WITHIN / 2));
        set.note(begin + WITHIN, 100 * CHUNK, MIB);
        let ranges = vec![5 * CHUNK..6 * CHUNK, 4 * CHUNK..5 * CHUNK, 6 * CHUNK..20 * CHUNK, 0..CHUNK];
        assert_eq!(Some(ranges), set.complete(begin + WITHIN));
    }

    #[test]
    fn a_look_at_the_image_is_no_boot() {
        let (set, begin) = (BootSet::default(), Instant::now());
        set.note(begin, 0, 512);
        assert_eq!(None, set.complete(begin + WITHIN));
        set.note(begin + 2 * WITHIN, CHUNK, MIB);
        assert_eq!(None, set.complete(begin + 2 * WITHIN));
        assert_eq!(Some(vec![CHUNK..17 * CHUNK; 1]), set.complete(begin + 3 * WITHIN));
    }

    #[test]
    fn a_boot_set_has_an_end() {
        let (set, begin) = (BootSet::default(), Instant::now());
        for part in 0..2000 {
            set.note(begin, part * u64::from(MIB), MIB);
        }
        assert_eq!(Some(vec![0..1 << 30; 1]), set.complete(begin));
    }
}
