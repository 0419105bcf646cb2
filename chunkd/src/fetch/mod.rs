//! How misses are read from parents: from the first that lives, from the next when that one is late, hangs, or lies.
//!
//! Reads wait while no parent lives, and go on with the first that is back. They end only with the image's stack.

mod connection;
mod route;

use std::pin::pin;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use connection::Endpoint;
use connection::Lost;
pub use route::Route;

/// A parent from which nothing has come for so long, while another one answers, hangs.
const HUNG: Duration = Duration::from_secs(1);

/// A parent that answers later than this, and many times later than the next one, is slow.
const SLOW: Duration = Duration::from_millis(20);
const MUCH: u32 = 4;

/// One request in so many goes to the next parent, to learn how fast that one is.
const SAMPLE: u64 = 64;

/// Requests that must be answered for each one that is sent twice because it is late.
const ANSWERS_PER_HEDGE: i64 = 50;
const MOST_HEDGES: i64 = 10;

/// How long a parent comes last after it failed a request, hung, or sent what it should not.
const DEAD_REST: Duration = Duration::from_secs(5);
const HUNG_REST: Duration = Duration::from_secs(60);
const LYING_REST: Duration = Duration::from_secs(600);

/// The image's stack is being removed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the image is not served here any more")]
pub struct Closed;

/// Why a parent was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Dead,
    Hung,
    Lying,
}

/// A parent, by its host's name, was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    pub host: String,
    pub fault: Fault,
}

/// A host to read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    pub host: String,
    pub endpoint: Endpoint,
}

/// Data, and the route by which it came.
pub type Answer = (Bytes, Arc<Route>);

/// The parents of one export.
#[derive(Debug)]
pub struct Upstream {
    routes: Mutex<Vec<Arc<Route>>>,
    /// Connections to the parent in use.
    connections: usize,
    changed: Arc<Notify>,
    closed: CancellationToken,
    left: mpsc::UnboundedSender<Left>,
    requests: AtomicU64,
    hedges: AtomicI64,
}

impl Upstream {
    /// Without parents reads wait. `left` hears of each parent that is left.
    #[must_use]
    pub fn new(connections: usize, closed: CancellationToken, left: mpsc::UnboundedSender<Left>) -> Self {
        Self {
            routes: Mutex::default(),
            connections,
            changed: Arc::default(),
            closed,
            left,
            requests: AtomicU64::new(0),
            hedges: AtomicI64::new(ANSWERS_PER_HEDGE),
        }
    }

    /// Reads from these parents, in this order. No connection to another one is left when this returns.
    pub async fn follow(&self, parents: Vec<Parent>) {
        let old = {
            let mut routes = self.routes();
            let known = std::mem::take(&mut *routes);
            *routes = parents
                .into_iter()
                .map(|parent| {
                    known.iter().find(|route| route.parent == parent).cloned().unwrap_or_else(|| {
                        Route::start(parent, self.changed.clone(), self.closed.child_token(), self.left.clone())
                    })
                })
                .collect();
            let kept = |old: &Arc<Route>| routes.iter().any(|route| Arc::ptr_eq(route, old));
            known.into_iter().filter(|old| !kept(old)).collect::<Vec<_>>()
        };
        for route in old {
            route.close().await;
        }
        self.in_order();
        self.changed.notify_waiters();
    }

    /// Reads a range, in bytes. Returns the data, and the route by which it came.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn read(&self, offset: u64, length: u32) -> Result<Answer, Closed> {
        loop {
            let routes = self.ready().await?;
            if let Some(answer) = self.race(&routes, offset, length).await? {
                self.hedges.fetch_min(ANSWERS_PER_HEDGE * MOST_HEDGES - 1, Ordering::Relaxed);
                self.hedges.fetch_add(1, Ordering::Relaxed);
                return Ok(answer);
            }
        }
    }

    /// The hosts that are connected, the one to ask first.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        self.in_order().iter().map(|route| route.parent.host.clone()).collect()
    }

    /// What a parent sent is not what the image holds.
    pub fn blame(&self, route: &Arc<Route>) {
        self.leave(route, Fault::Lying);
    }

    fn leave(&self, route: &Arc<Route>, fault: Fault) {
        let rest = match fault {
            Fault::Dead => DEAD_REST,
            Fault::Hung => HUNG_REST,
            Fault::Lying => LYING_REST,
        };
        if route.rest(rest) {
            tracing::warn!(host = route.parent.host, ?fault, "a parent is left");
            let _ = self.left.send(Left { host: route.parent.host.clone(), fault });
        }
    }

    /// The parents that can be asked now, the one to ask first; waits until there is one.
    async fn ready(&self) -> Result<Vec<Arc<Route>>, Closed> {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable(); // before looking, so that nothing is missed
            let routes = self.in_order();
            if !routes.is_empty() {
                return Ok(routes);
            }
            tokio::select! {
                () = changed => {}
                () = self.closed.cancelled() => return Err(Closed),
            }
        }
    }

    /// The parents that are connected, best first. Connects further ones until there are two.
    fn in_order(&self) -> Vec<Arc<Route>> {
        let mut all = self.routes().clone();
        all.sort_by_key(|route| route.rests_until());
        let mut routes: Vec<Arc<Route>> = Vec::new();
        for route in all {
            route.want([self.connections, 1, 0][routes.len().min(2)]);
            if route.connected() {
                routes.push(route);
            }
        }
        if routes.len() > 1 && routes[1].rests_until().is_none() {
            let (first, second) = (routes[0].latency(), routes[1].latency());
            let slow = first > SLOW && first > second * MUCH;
            let sample = self.requests.fetch_add(1, Ordering::Relaxed) % SAMPLE == SAMPLE - 1;
            if slow != sample {
                routes.swap(0, 1);
            }
        }
        routes
    }

    /// The answer of the first parent, or of the second if the first is late; none if who was asked fails.
    async fn race(&self, routes: &[Arc<Route>], offset: u64, length: u32) -> Result<Option<Answer>, Closed> {
        let first = &routes[0];
        let begun = Instant::now();
        let mut one = pin!(first.read(offset, length));
        let mut patience = first.patience();
        loop {
            tokio::select! {
                answer = &mut one => return Ok(self.settle(first, answer)),
                () = sleep(patience), if routes.len() > 1 => {}
                () = self.closed.cancelled() => return Err(Closed),
            }
            if hangs(first, begun) || self.may_hedge() {
                break;
            }
            patience = HUNG.saturating_sub(begun.elapsed()).max(HUNG / 10);
        }
        let second = &routes[1];
        let mut other = pin!(second.read(offset, length));
        tokio::select! {
            answer = &mut one => Ok(self.settle(first, answer)),
            answer = &mut other => {
                let answer = self.settle(second, answer);
                if answer.is_some() && hangs(first, begun) {
                    self.leave(first, Fault::Hung);
                }
                Ok(answer)
            }
            () = self.closed.cancelled() => Err(Closed),
        }
    }

    /// Leaves a parent that has failed a request.
    fn settle(&self, route: &Arc<Route>, answer: Result<Bytes, Lost>) -> Option<Answer> {
        match answer {
            Ok(data) => Some((data, route.clone())),
            Err(error) => {
                tracing::debug!(host = route.parent.host, %error, "a request fails");
                self.leave(route, Fault::Dead);
                None
            }
        }
    }

    fn may_hedge(&self) -> bool {
        let pay = |left: i64| (left >= ANSWERS_PER_HEDGE).then(|| left - ANSWERS_PER_HEDGE);
        self.hedges.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
    }

    fn routes(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Route>>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether nothing has come from a parent for too long, of which something was asked `since` then.
fn hangs(route: &Route, since: Instant) -> bool {
    route.silent().min(since.elapsed()) >= HUNG
}
