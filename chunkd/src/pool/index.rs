//! From the name of a chunk to its place in the pool.
//!
//! Reads of chunks that an image has read before do not come here (`image.rs` remembers places), and no lock is held for
//! longer than a look into a table.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, PoisonError};

use super::Place;
use crate::manifest::Name;

const SHARDS: usize = 64;

/// Half a name: 24 bytes of memory for each chunk. What is found is checked by the whole name.
type Key = [u8; 16];

#[derive(Debug, Default)]
struct First(u64);

impl Hasher for First {
    fn finish(&self) -> u64 {
        self.0
    }

    /// Names are hashes already.
    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 ^= u64::from_le_bytes(*first);
        }
    }
}

type Table = HashMap<Key, Place, BuildHasherDefault<First>>;

/// The places of all chunks.
#[derive(Debug)]
pub struct Index {
    shards: Vec<Mutex<Table>>,
}

impl Index {
    #[must_use]
    pub fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    pub fn get(&self, name: &Name) -> Option<Place> {
        self.with(name, |table, key| table.get(key).copied())
    }

    /// Returns the place that the name had.
    pub fn insert(&self, name: &Name, place: Place) -> Option<Place> {
        self.with(name, |table, key| table.insert(*key, place))
    }

    /// Forgets a name, unless it has another place by now.
    pub fn remove(&self, name: &Name, place: Place) {
        self.with(name, |table, key| {
            if table.get(key) == Some(&place) {
                table.remove(key);
            }
        });
    }

    fn with<T>(&self, name: &Name, act: impl FnOnce(&mut Table, &Key) -> T) -> T {
        let key: &Key = name.0.first_chunk().expect("a name is longer than a key");
        let shard = usize::from(key[15]) % SHARDS;
        act(&mut self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner), key)
    }
}
