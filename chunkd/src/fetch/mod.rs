//! How misses are read from parents: from the first that lives, from the next when that one is late, hangs, or lies.
//!
//! Reads wait while no parent lives, and go on with the first that is back. They end only with the image's stack.

mod connection;
mod route;

use std::pin::pin;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use connection::Endpoint;
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
        self.connected();
        self.changed.notify_waiters();
    }

    /// Reads a range, in bytes. Returns the data, and the route by which it came.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn read(&self, offset: u64, length: u32) -> Result<Answer, Closed> {
        loop {
            let route = self.first().await?;
            if let Some(answer) = self.ask(route, offset, length).await? {
                self.hedges.fetch_min(ANSWERS_PER_HEDGE * MOST_HEDGES - 1, Ordering::Relaxed);
                self.hedges.fetch_add(1, Ordering::Relaxed);
                return Ok(answer);
            }
        }
    }

    /// The hosts that are connected, the one to ask first.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        self.connected().iter().map(|route| route.parent.host.clone()).collect()
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

    /// The parent to ask; waits until one is connected.
    async fn first(&self) -> Result<Arc<Route>, Closed> {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable(); // before looking, so that nothing is missed
            if let Some(route) = self.choose() {
                return Ok(route);
            }
            tokio::select! {
                () = changed => {}
                () = self.closed.cancelled() => return Err(Closed),
            }
        }
    }

    /// The first parent, or the second if the first is slow. One request in `SAMPLE` goes to the other of the two.
    fn choose(&self) -> Option<Arc<Route>> {
        let mut routes = self.connected().into_iter();
        let (first, second) = (routes.next()?, routes.next());
        let Some(second) = second.filter(|second| second.rests_until().is_none()) else { return Some(first) };
        let slow = first.latency() > SLOW && first.latency() > second.latency() * MUCH;
        let sample = self.requests.fetch_add(1, Ordering::Relaxed) % SAMPLE == SAMPLE - 1;
        Some(if slow == sample { first } else { second })
    }

    /// The parents that are connected, best first. Connects further ones until there are two.
    fn connected(&self) -> Vec<Arc<Route>> {
        let mut all = self.routes().clone();
        all.sort_by_cached_key(|route| (route.rests_until(), route.hangs()));
        let (mut routes, mut answering) = (Vec::new(), 0);
        for route in all {
            route.want([self.connections, 1, 0][answering.min(2)]);
            if route.connected() {
                answering += usize::from(!route.hangs());
                routes.push(route);
            }
        }
        routes
    }

    /// The answer of a parent, or of others if those who were asked are late; none if all who were asked fail.
    async fn ask(&self, first: Arc<Route>, offset: u64, length: u32) -> Result<Option<Answer>, Closed> {
        let read = |route: Arc<Route>| async move { (route.read(offset, length).await, route) };
        let mut patience = first.patience();
        let mut asked = vec![first.clone()];
        let mut answers = FuturesUnordered::from_iter([read(first)]);
        loop {
            tokio::select! {
                Some((answer, route)) = answers.next() => match answer {
                    Ok(data) => {
                        self.leave_hung(&asked, &route);
                        return Ok(Some((data, route)));
                    }
                    Err(error) => {
                        tracing::debug!(host = route.parent.host, %error, "a request fails");
                        self.leave(&route, Fault::Dead);
                        if answers.is_empty() {
                            return Ok(None);
                        }
                    }
                },
                () = sleep(patience) => {}
                () = self.closed.cancelled() => return Err(Closed),
            }
            let fresh = |route: &Arc<Route>| !asked.iter().any(|known| Arc::ptr_eq(known, route));
            if let Some(next) = self.connected().into_iter().find(fresh) {
                if asked.iter().all(|route| route.hangs()) || self.may_hedge() {
                    asked.push(next.clone());
                    answers.push(read(next));
                }
            }
            patience = HUNG / 10;
        }
    }

    /// Leaves those of the asked parents that hang, since another one has answered.
    fn leave_hung(&self, asked: &[Arc<Route>], answered: &Arc<Route>) {
        for route in asked.iter().filter(|route| !Arc::ptr_eq(route, answered) && route.hangs()) {
            self.leave(route, Fault::Hung);
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
