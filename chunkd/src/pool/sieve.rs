//! Which chunk goes when a new one needs its place: SIEVE (Zhang et al., NSDI 2024).
//!
//! Chunks are in a queue by age. A hand goes from the oldest to the newest, spares each that was read since the hand came
//! by, and takes the first that was not. A read only sets a bit, so reads take no lock; and what is read once, as a whole
//! image may be, goes before what is read again and again.

const NONE: u32 = u32::MAX;

/// The queue of a member's slots, and those without a chunk.
#[derive(Debug)]
pub struct Sieve {
    /// By slot: the next newer and the next older one.
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    hand: u32,
    free: Vec<u32>,
    /// Slots from here on have never been used.
    unused: u32,
    slots: u32,
}

impl Sieve {
    /// A queue for so many slots, all without a chunk.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        Self {
            newer: Vec::new(),
            older: Vec::new(),
            newest: NONE,
            oldest: NONE,
            hand: NONE,
            free: Vec::new(),
            unused: 0,
            slots,
        }
    }

    /// A slot that had a chunk and has none now.
    pub fn take_free(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// A slot that never had a chunk.
    pub fn take_unused(&mut self) -> Option<u32> {
        let slot = self.unused;
        (slot < self.slots).then(|| {
            self.unused += 1;
            self.newer.push(NONE);
            self.older.push(NONE);
            slot
        })
    }

    /// The slot has no chunk, and is not in the queue.
    pub fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Whether no chunk is in the queue.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.oldest == NONE
    }

    /// Whether there is a slot without a chunk.
    #[must_use]
    pub fn has_free(&self) -> bool {
        !self.free.is_empty() || self.unused < self.slots
    }

    /// Puts a slot into the queue as the newest.
    pub fn insert(&mut self, slot: u32) {
        self.older[slot as usize] = self.newest;
        self.newer[slot as usize] = NONE;
        if self.newest == NONE {
            self.oldest = slot;
        } else {
            self.newer[self.newest as usize] = slot;
        }
        self.newest = slot;
    }

    /// Takes a slot out of the queue.
    pub fn remove(&mut self, slot: u32) {
        let (newer, older) = (self.newer[slot as usize], self.older[slot as usize]);
        if self.hand == slot {
            self.hand = newer;
        }
        if newer == NONE {
            self.newest = older;
        } else {
            self.older[newer as usize] = older;
        }
        if older == NONE {
            self.oldest = newer;
        } else {
            self.newer[older as usize] = newer;
        }
    }

    /// Takes the slot out of the queue whose chunk is to go; none if nothing may go.
    ///
    /// `verdict` says of a slot whether its chunk may go now, and forgets that it was read.
    pub fn evict(&mut self, mut verdict: impl FnMut(u32) -> bool) -> Option<u32> {
        // One turn forgets the reads, so after two nothing is left that may go.
        let mut left = 2 * u64::from(self.unused) + 2;
        while left > 0 {
            let slot = if self.hand == NONE { self.oldest } else { self.hand };
            if slot == NONE {
                return None;
            }
            self.hand = self.newer[slot as usize];
            if verdict(slot) {
                self.remove(slot);
                return Some(slot);
            }
            left -= 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn filled(slots: u32) -> Sieve {
        let mut sieve = Sieve::new(slots);
        while let Some(slot) = sieve.take_unused() {
            sieve.insert(slot);
        }
        sieve
    }

    #[test]
    fn the_oldest_goes_first() {
        let mut sieve = filled(3);
        assert_eq!(sieve.evict(|_| true), Some(0));
        sieve.insert(0);
        assert_eq!(sieve.evict(|_| true), Some(1));
    }

    #[test]
    fn what_was_read_is_spared_once() {
        let mut sieve = filled(3);
        let mut read = HashSet::from([0, 1]);
        assert_eq!(sieve.evict(|slot| !read.remove(&slot)), Some(2));
        assert_eq!(sieve.evict(|slot| !read.remove(&slot)), Some(0));
    }

    #[test]
    fn new_chunks_go_before_old_ones_that_were_read() {
        let mut sieve = filled(4);
        let mut read: HashSet<u32> = (0..4).collect();
        for _ in 0..10 {
            let slot = sieve.evict(|slot| !read.remove(&slot)).unwrap();
            sieve.insert(slot);
            read.extend((0..4).filter(|&other| other != slot));
        }
    }

    #[test]
    fn nothing_goes_that_must_stay() {
        let mut sieve = filled(3);
        assert_eq!(sieve.evict(|_| false), None);
        assert_eq!(Sieve::new(0).evict(|_| true), None);
    }

    #[test]
    fn a_removed_slot_is_never_evicted() {
        let mut sieve = filled(5);
        sieve.evict(|_| true);
        sieve.remove(1);
        sieve.remove(4);
        sieve.remove(2);
        assert_eq!(sieve.evict(|_| true), Some(3));
        assert_eq!(sieve.evict(|_| true), None);
        sieve.insert(2);
        assert_eq!(sieve.evict(|_| true), Some(2));
    }
}
