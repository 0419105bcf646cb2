//! What traffic with other hosts may take, all images together: bytes a second each way, and connections.
//!
//! Fetches are in two classes. Demand is what somebody waits for. Filling is behind it: it pays only while no demand waits.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Hosts that are connected at once, if nothing else is said. The next ones wait in the kernel.
const MOST_HOSTS: usize = 4096;

/// How far ahead of its rate a bucket may be: timers are not exact.
const BURST: Duration = Duration::from_millis(20);

/// Limits as the agent tells them. Bytes a second that this host sends to other hosts (`up`) and reads from parents (`down`),
/// and hosts that are connected at once. None: no limit, or the usual one.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsSpec {
    pub up: Option<NonZeroU64>,
    pub down: Option<NonZeroU64>,
    pub connections: Option<usize>,
}

/// The limits of this host.
#[derive(Debug, Default)]
pub struct Limits {
    pub up: Bucket,
    pub down: Bucket,
    pub hosts: Room,
    /// Reads of this host that wait for parents.
    pub reads: Count,
}

impl Limits {
    /// Takes effect at once, but for hosts that are connected already.
    pub fn set(&self, spec: &LimitsSpec) {
        self.up.set(spec.up);
        self.down.set(spec.down);
        self.hosts.set(spec.connections.unwrap_or(MOST_HOSTS));
    }

    #[must_use]
    pub fn get(&self) -> LimitsSpec {
        LimitsSpec { up: self.up.rate(), down: self.down.rate(), connections: Some(self.hosts.0.borrow().most) }
    }
}

/// Bytes a second that many share: first come, first served.
#[derive(Debug)]
pub struct Bucket {
    rate: watch::Sender<Option<NonZeroU64>>,
    /// When all that was taken is paid.
    paid: Mutex<Instant>,
    demand: Count,
    line: tokio::sync::Mutex<()>,
    line_behind: tokio::sync::Mutex<()>,
}

impl Default for Bucket {
    /// Without a limit.
    fn default() -> Self {
        Self {
            rate: watch::Sender::default(),
            paid: Mutex::new(Instant::now()),
            demand: Count::default(),
            line: tokio::sync::Mutex::default(),
            line_behind: tokio::sync::Mutex::default(),
        }
    }
}

impl Bucket {
    fn set(&self, rate: Option<NonZeroU64>) {
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = self.rate.send_if_modified(|old| std::mem::replace(old, rate) != rate);
        if changed {
            *paid = Instant::now(); // nobody waits by the old rate
        }
    }

    fn rate(&self) -> Option<NonZeroU64> {
        *self.rate.borrow()
    }

    #[must_use]
    pub fn limited(&self) -> bool {
        self.rate().is_some()
    }

    /// Waits until so many bytes may go.
    pub async fn demand(&self, bytes: u64) {
        if self.limited() {
            let _waits = self.demand.enter();
            let _turn = self.line.lock().await;
            self.pay(bytes).await;
        }
    }

    /// Waits until so many bytes may go, and no demand waits.
    pub async fn behind(&self, bytes: u64) {
        if !self.limited() {
            return;
        }
        let _turn = self.line_behind.lock().await;
        loop {
            self.demand.none().await;
            tokio::select! {
                biased;
                () = self.demand.some() => {}
                () = self.pay(bytes) => return,
            }
        }
    }

    async fn pay(&self, bytes: u64) {
        let mut rate = self.rate.subscribe();
        loop {
            let Some(now) = *rate.borrow_and_update() else { return };
            let Some(until) = self.take(bytes, now) else { return };
            tokio::select! { () = sleep_until(until) => {}, _ = rate.changed() => {} }
        }
    }

    /// Takes so many bytes, or returns until when to wait before that.
    fn take(&self, bytes: u64, rate: NonZeroU64) -> Option<Instant> {
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if *paid > now + BURST {
            return Some(*paid - BURST);
        }
        *paid = now.max(*paid) + Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate);
        None
    }
}

/// How many do something now.
#[derive(Debug, Default)]
pub struct Count(watch::Sender<usize>);

impl Count {
    /// Counts one more until the guard is dropped.
    #[must_use]
    pub fn enter(&self) -> Counted<'_> {
        self.0.send_modify(|count| *count += 1);
        Counted(self)
    }

    #[must_use]
    pub fn any(&self) -> bool {
        *self.0.borrow() > 0
    }

    /// Tells how many there are, and that there were others meanwhile.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<usize> {
        self.0.subscribe()
    }

    pub async fn none(&self) {
        let _ = self.0.subscribe().wait_for(|&count| count == 0).await;
    }

    pub async fn some(&self) {
        let _ = self.0.subscribe().wait_for(|&count| count > 0).await;
    }
}

/// One that is counted.
pub struct Counted<'a>(&'a Count);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// Places for connections.
#[derive(Debug)]
pub struct Room(watch::Sender<Places>);

#[derive(Debug)]
struct Places {
    taken: usize,
    most: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self(watch::Sender::new(Places { taken: 0, most: MOST_HOSTS }))
    }
}

impl Room {
    fn set(&self, most: usize) {
        self.0.send_modify(|places| places.most = most);
    }

    #[must_use]
    pub fn is_full(&self) -> bool {
        let places = self.0.borrow();
        places.taken >= places.most
    }

    /// Resolves when there is a place.
    pub async fn free(&self) {
        let _ = self.0.subscribe().wait_for(|places| places.taken < places.most).await;
    }

    /// Resolves when there is no place.
    pub async fn full(&self) {
        let _ = self.0.subscribe().wait_for(|places| places.taken >= places.most).await;
    }
}

/// The place of one host. It is free again when this is dropped.
pub struct Place(Arc<Limits>);

impl Place {
    #[must_use]
    pub fn take(limits: Arc<Limits>) -> Self {
        limits.hosts.0.send_modify(|places| places.taken += 1);
        Self(limits)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.hosts.0.send_modify(|places| places.taken -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use tokio::time::{sleep, timeout};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn bucket(rate: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(NonZeroU64::new(rate));
        bucket
    }

    async fn took(act: impl Future) -> Duration {
        let begun = Instant::now();
        act.await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_share_a_bucket_get_its_rate_together() {
        let bucket = bucket(1_000_000);
        let took = took(join_all((0..100).map(|_| bucket.demand(100_000)))).await;
        assert!(took > SECOND * 98 / 10 && took < SECOND * 10, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_nobody_waits() {
        let (free, none) = (Bucket::default(), Bucket::default());
        free.set(NonZeroU64::new(1));
        free.set(None);
        for bucket in [free, none] {
            assert_eq!(
                Duration::ZERO,
                took(async { (bucket.demand(1 << 40).await, bucket.behind(1 << 40).await) }).await
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_rate_counts_at_once_and_the_same_again_changes_nothing() {
        let bucket = bucket(1);
        bucket.demand(1_000_000).await;
        let change = async {
            sleep(SECOND).await;
            bucket.set(NonZeroU64::new(1)); // who waits waits on
            sleep(SECOND).await;
            bucket.set(NonZeroU64::new(1_000_000));
        };
        let took = took(async { tokio::join!(bucket.demand(1_000_000), change) }).await;
        assert_eq!(2 * SECOND, took);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_behind_pays_after_all_demand() {
        let bucket = bucket(1000);
        bucket.demand(1000).await;
        let order = AtomicUsize::new(0);
        let demand = async {
            sleep(SECOND / 10).await; // after the one behind
            join_all((0..5).map(|_| bucket.demand(1000))).await;
            order.fetch_add(1, Ordering::SeqCst)
        };
        let behind = async {
            bucket.behind(1000).await;
            order.fetch_add(1, Ordering::SeqCst)
        };
        assert_eq!((0, 1), tokio::join!(demand, behind));
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_costs_nothing() {
        let bucket = bucket(1000);
        bucket.demand(1000).await;
        assert!(timeout(SECOND / 10, bucket.demand(1_000_000)).await.is_err());
        assert!(took(bucket.behind(1000)).await < SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_free_when_a_host_ends_or_when_there_are_more() {
        let limits = Arc::new(Limits::default());
        limits.set(&LimitsSpec { connections: Some(1), ..LimitsSpec::default() });
        let one = Place::take(limits.clone());
        assert!(limits.hosts.is_full() && timeout(SECOND, limits.hosts.free()).await.is_err());
        drop(one);
        limits.hosts.free().await;
        let _two = [Place::take(limits.clone()), Place::take(limits.clone())];
        limits.hosts.full().await;
        limits.set(&LimitsSpec::default());
        limits.hosts.free().await;
        assert_eq!(Some(MOST_HOSTS), limits.get().connections);
    }
}
