//! Filling: ranges of an image are kept here before anybody reads them.
//!
//! It stays behind demand. An image has several requests on their way, but only one while any read of this host waits for a
//! parent. In the idle class it hardly takes anything from who reads. What is kept already is not read from the disk, unless
//! that was not done since this process began.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep, sleep_until};

use super::{Image, JOIN, Part, ZEROS};
use crate::fetch::Closed;
use crate::manifest::{CHUNK, Name, chunk_of};

/// Requests on their way while nobody waits for a parent.
const AT_ONCE: usize = 8;

/// Bytes of a request.
const PIECE: u64 = JOIN as u64 * CHUNK;

/// For so long after a read has waited for a parent more such reads are expected, as while a VM boots.
const LATELY: Duration = Duration::from_secs(5);

/// The idle class rests so many times as long as each request took, as long as reads are expected.
const REST: u32 = 9;
const LONGEST_REST: Duration = Duration::from_secs(1);

/// Whom filling must not slow down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// What is filled is read soon, as what a boot reads: only reads that wait at this moment come before it.
    Soon,
    /// Nobody waits for it. While reads wait for parents from time to time, it has a tenth of the link.
    Idle,
}

/// What is being filled, and how far that is.
#[derive(Debug, Default)]
pub(super) struct Filling {
    task: Option<JoinHandle<()>>,
    progress: Arc<Progress>,
}

/// Bytes.
#[derive(Debug, Default)]
struct Progress {
    done: AtomicU64,
    of: u64,
}

impl Progress {
    fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Image {
    /// Has ranges, in bytes, kept here, in this order. Replaces what was asked for before; nothing to fill ends that.
    ///
    /// Ranges beyond the end of the image are cut off. An origin has all already. `rate`: bytes a second at most.
    pub fn fill(self: &Arc<Self>, ranges: Vec<Range<u64>>, class: Class, rate: Option<NonZeroU64>) {
        let ranges: Vec<_> = ranges.into_iter().map(|range| range.start..range.end.min(self.size)).collect();
        let of = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        let done = if self.content.is_some() { of } else { 0 };
        let progress = Arc::new(Progress { done: done.into(), of });
        let task = (done < of)
            .then(|| tokio::spawn(self.clone().fill_unless_closed(ranges, class, Pace::new(rate), progress.clone())));
        let old = std::mem::replace(&mut *self.filling(), Filling { task, progress });
        if let Some(task) = old.task {
            task.abort();
        }
    }

    /// Bytes that were filled, the bytes that are to be filled, and whether that goes on.
    #[must_use]
    pub fn filled(&self) -> (u64, u64, bool) {
        let filling = self.filling();
        let goes_on = filling.task.as_ref().is_some_and(|task| !task.is_finished());
        (filling.progress.done.load(Ordering::Relaxed), filling.progress.of, goes_on)
    }

    fn filling(&self) -> MutexGuard<'_, Filling> {
        self.filling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn fill_unless_closed(
        self: Arc<Self>,
        ranges: Vec<Range<u64>>,
        class: Class,
        pace: Pace,
        progress: Arc<Progress>,
    ) {
        let filled = self.closed.run_until_cancelled(self.fill_all(ranges, class, pace, &progress)).await;
        if !matches!(filled, Some(Ok(()))) {
            tracing::info!(image = self.key, "the image is not filled: it is dropped");
        }
    }

    async fn fill_all(
        self: &Arc<Self>,
        ranges: Vec<Range<u64>>,
        class: Class,
        mut pace: Pace,
        progress: &Progress,
    ) -> Result<(), Closed> {
        let mut coming = FuturesUnordered::new();
        let mut lately = Lately::new(self.limits.reads.changes());
        for piece in ranges.into_iter().flat_map(pieces) {
            let length = piece.end - piece.start;
            let missing = self.missing(&piece).await?;
            if missing.is_empty() {
                progress.add(length);
                yield_now().await; // others want this thread, and nothing here waits
                continue;
            }
            if self.pool.is_full() {
                tracing::warn!(image = self.key, "filling ends: the pool has no room");
                return Ok(());
            }
            while coming.len() >= if self.limits.reads.any() { 1 } else { AT_ONCE } {
                tokio::select! {
                    Some(length) = coming.next() => progress.add(length?),
                    () = self.limits.reads.none(), if coming.len() < AT_ONCE => {}
                }
            }
            let rests = class == Class::Idle && lately.waited();
            pace.wait(missing.len() as u64 * CHUNK).await;
            self.limits.down.behind(missing.len() as u64 * CHUNK).await;
            let begun = Instant::now();
            coming.push(arrived(self.parts(&missing, true, true), length));
            if rests {
                while let Some(length) = coming.next().await {
                    progress.add(length?);
                }
                sleep((begun.elapsed() * REST).min(LONGEST_REST)).await;
            }
        }
        while let Some(length) = coming.next().await {
            progress.add(length?);
        }
        if progress.of == self.size {
            self.compared.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether the pool has a chunk. What was there before this process is compared first: a power cut may have torn it.
    async fn is_kept_right(&self, name: Name) -> bool {
        match self.kept(&name) {
            Some(place) if !self.pool.is_checked(place) => matches!(self.check(place, name).await, Ok(Some(_))),
            place => place.is_some(),
        }
    }

    /// The chunks that a range touches and that are not here.
    async fn missing(&self, range: &Range<u64>) -> Result<Vec<(u32, Name)>, Closed> {
        let mut missing = Vec::new();
        for chunk in chunk_of(range.start)..=chunk_of(range.end - 1) {
            if self.word(chunk) == ZEROS {
                continue;
            }
            let name = self.name(chunk).await?;
            if name != Name::ZEROS && !self.is_kept_right(name).await {
                missing.push((chunk, name));
            }
        }
        Ok(missing)
    }
}

/// Returns `length` when all parts are in the pool.
async fn arrived(parts: Vec<Part>, length: u64) -> Result<u64, Closed> {
    for part in parts {
        if let Part::Coming(mut flight) = part {
            while flight.data.changed().await.is_ok() {} // until the chunk is kept
            flight.data.borrow().as_ref().ok_or(Closed)?;
        }
    }
    Ok(length)
}

/// Whether reads have waited for parents lately.
struct Lately {
    /// How many wait.
    reads: watch::Receiver<usize>,
    waited: Option<Instant>,
}

impl Lately {
    fn new(mut reads: watch::Receiver<usize>) -> Self {
        let waited = (*reads.borrow_and_update() > 0).then(Instant::now);
        Self { reads, waited }
    }

    fn waited(&mut self) -> bool {
        let changed = self.reads.has_changed().unwrap_or(false);
        if *self.reads.borrow_and_update() > 0 || changed {
            self.waited = Some(Instant::now());
        }
        self.waited.is_some_and(|at| at.elapsed() < LATELY)
    }
}

/// How fast one filling may go.
struct Pace {
    rate: Option<NonZeroU64>,
    /// When the next request may begin.
    next: Instant,
}

impl Pace {
    fn new(rate: Option<NonZeroU64>) -> Self {
        Self { rate, next: Instant::now() }
    }

    /// Waits until so many bytes may be asked for.
    async fn wait(&mut self, bytes: u64) {
        let Some(rate) = self.rate else { return };
        sleep_until(self.next).await;
        let takes = Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate.get());
        self.next = self.next.max(Instant::now()) + takes;
    }
}

/// Parts of a range, each for one request.
pub(super) fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut begin = range.start;
    std::iter::from_fn(move || {
        let end = ((begin / PIECE + 1) * PIECE).min(range.end);
        (begin < end).then(|| std::mem::replace(&mut begin, end)..end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_read_that_waits_is_remembered_for_a_while_also_one_that_has_ended() {
        let (count, reads) = watch::channel(0);
        let mut lately = Lately::new(reads);
        assert!(!lately.waited());
        (0..2).for_each(|waiting| _ = count.send_replace(1 - waiting));
        assert!(lately.waited());
        sleep(LATELY).await;
        assert!(!lately.waited());
        count.send_replace(1);
        for _ in 0..2 {
            assert!(lately.waited());
            sleep(LATELY).await; // it waits still
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pace_is_kept_and_what_was_not_used_is_lost() {
        let begun = Instant::now();
        let mut pace = Pace::new(NonZeroU64::new(1000));
        for seconds in [0, 2, 4] {
            pace.wait(2000).await;
            assert_eq!(Duration::from_secs(seconds), begun.elapsed());
        }
        sleep(Duration::from_secs(10)).await;
        for seconds in [14, 16] {
            pace.wait(2000).await;
            assert_eq!(Duration::from_secs(seconds), begun.elapsed());
        }
        Pace::new(None).wait(u64::MAX).await;
        assert_eq!(Duration::from_secs(16), begun.elapsed());
    }

    #[test]
    fn pieces_make_up_the_range() {
        let cut = |start, end| pieces(Range { start, end }).collect::<Vec<_>>();
        assert_eq!(vec![5..PIECE, PIECE..2 * PIECE, 2 * PIECE..2 * PIECE + 1], cut(5, 2 * PIECE + 1));
        assert_eq!(vec![5..9; 1], cut(5, 9));
        assert!(cut(9, 5).is_empty());
    }
}
