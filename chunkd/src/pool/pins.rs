//! What may not go: the chunks of pinned images.
//!
//! A slot has two bits for pins, which take turns. When a pin ends, the chunks of the images that are still pinned get the
//! other bit, and then the old bit goes everywhere. So what images share is never without a bit, and nobody counts.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const BITS: [u32; 2] = [8, 16];

/// Of a slot's word: somebody has pinned its chunk.
pub const PINNED: u32 = BITS[0] | BITS[1];

/// The pinned images.
#[derive(Debug, Default)]
pub struct Pins {
    now: RwLock<Now>,
    one_turn: Mutex<()>,
}

#[derive(Debug, Default)]
struct Now {
    turn: usize,
    /// By the image's key: when the pin ends, in seconds since 1970.
    ends: HashMap<String, u64>,
}

/// A pin has ended: what is to be pinned anew, and the bit that is to go afterwards.
pub struct Turn<'a> {
    pub keys: Vec<String>,
    pub old: u32,
    _one: MutexGuard<'a, ()>,
}

impl Pins {
    /// Pins an image, or tells a pin's other end. Returns whether the pin is new.
    pub fn set(&self, key: &str, end: u64) -> bool {
        self.write().ends.insert(key.to_owned(), end).is_none()
    }

    /// When the pin of an image ends; 0 if the image is not pinned.
    #[must_use]
    pub fn end(&self, key: &str) -> u64 {
        self.read().ends.get(key).copied().unwrap_or(0)
    }

    /// Calls `mark` with the bit of this turn, if the image is pinned. No turn begins meanwhile.
    pub fn mark(&self, key: &str, mark: impl FnOnce(u32)) {
        let now = self.read();
        if now.ends.contains_key(key) {
            mark(BITS[now.turn]);
        }
    }

    /// Forgets the pins that have ended at a time. None if there are none.
    pub fn turn(&self, time: u64) -> Option<Turn<'_>> {
        let one = self.one_turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.read().ends.values().all(|&end| end > time) {
            return None;
        }
        let mut now = self.write();
        now.ends.retain(|_, end| *end > time);
        let old = BITS[now.turn];
        now.turn = 1 - now.turn;
        Some(Turn { keys: now.ends.keys().cloned().collect(), old, _one: one })
    }

    fn read(&self) -> RwLockReadGuard<'_, Now> {
        self.now.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Now> {
        self.now.write().unwrap_or_else(PoisonError::into_inner)
    }
}
