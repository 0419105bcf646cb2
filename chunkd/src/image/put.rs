//! Chunks that came another way than from a parent: from a file or a pipe of the agent.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::{Image, whole};
use crate::fetch::Closed;
use crate::manifest::{CHUNK, Name, chunk_of, to_usize};
use crate::pool::Entry;

/// What came of chunks that were put. Ranges in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Bytes that are kept now, and were not before.
    pub kept: u64,
    /// What is not what the image's manifest names.
    pub wrong: Vec<Range<u64>>,
    /// The pool had no room for a chunk.
    pub full: bool,
}

impl Image {
    /// Takes ranges of the image, one after the other, from where a file is, or from a pipe.
    ///
    /// Each range has whole chunks. Nothing is kept that the manifest does not name.
    ///
    /// # Errors
    /// Nothing proves what the image holds, a range has no whole chunks, the file cannot be read or ends too early, or
    /// the image is dropped.
    pub fn put(self: &Arc<Self>, ranges: &[Range<u64>], from: &mut impl Read, runtime: &Handle) -> io::Result<Taken> {
        if !self.proven() {
            return Err(io::Error::other("nothing proves what the image holds"));
        }
        if ranges.iter().any(|range| !self.has_whole_chunks(range)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a range has to have whole chunks of the image"));
        }
        let mut taken = Taken::default();
        for chunk in ranges.iter().flat_map(|range| chunk_of(range.start)..chunk_of(range.end - 1) + 1) {
            let begin = u64::from(chunk) * CHUNK;
            let mut data = vec![0; to_usize(CHUNK.min(self.size - begin))];
            from.read_exact(&mut data)?;
            let name = runtime.block_on(self.name(chunk)).map_err(io::Error::other)?;
            if self.content.is_none() && name != Name::ZEROS && self.kept(&name).is_none() {
                self.take(chunk, name, data, &mut taken);
            }
        }
        Ok(taken)
    }

    fn has_whole_chunks(&self, range: &Range<u64>) -> bool {
        let ends = range.end % CHUNK == 0 || range.end == self.size;
        range.start % CHUNK == 0 && range.start < range.end && range.end <= self.size && ends
    }

    fn take(&self, chunk: u32, name: Name, data: Vec<u8>, taken: &mut Taken) {
        let (begin, length) = (u64::from(chunk) * CHUNK, data.len() as u64);
        let data = whole(data.into());
        if Name::of_chunk(&data) != name {
            push(&mut taken.wrong, begin..begin + length);
        } else if let Some(place) = self.pool.keep(&Entry { name, content: name }, &data) {
            self.pool.pin(&self.key, place);
            self.set_word(chunk, place.to_word());
            taken.kept += length;
        } else {
            taken.full = true;
        }
    }

    /// The ranges of the image, in bytes, that are not here and do not hold zeros only.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn lacking(&self) -> Result<Vec<Range<u64>>, Closed> {
        let mut lacking = Vec::new();
        if self.content.is_some() {
            return Ok(lacking);
        }
        for chunk in 0..=chunk_of(self.size - 1) {
            let name = self.name(chunk).await?;
            if name != Name::ZEROS && self.pool.find(&name).is_none() {
                let begin = u64::from(chunk) * CHUNK;
                push(&mut lacking, begin..(begin + CHUNK).min(self.size));
            }
        }
        Ok(lacking)
    }
}

/// Adds a range at the end, to the last one if the two meet.
fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}
