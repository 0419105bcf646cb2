//! How misses are read from parents: from the first that lives, from the next when that one is late, hangs, or lies.
//!
//! Reads wait while no parent lives, and go on with the first that is back. They end only with the image's stack.

mod connection;
mod route;
mod urgency;

use std::pin::pin;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde::Serialize;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::loops::Loops;
pub use connection::Endpoint;
pub use route::Route;
pub use urgency::Urgency;

/// A parent from which nothing has come for so long, while another one answers, hangs.
const HUNG: Duration = Duration::from_secs(1);

/// For requests that nobody waits for: while an image comes to all hosts of a long chain, the last ones hear nothing until the
/// first bytes have passed all others.
const PATIENT_HUNG: Duration = Duration::from_secs(10);

/// A parent that answers later than this, and many times less often than the next one, is slow.
const SLOW: Duration = Duration::from_millis(20);
const MUCH: u32 = 4;

/// For requests that nobody waits for it is much more, and is first shown: all hosts of a tree get an image at the pace of
/// the slowest link above them, and their first parent's other readers would lose what one of them gains elsewhere.
const PATIENT_MUCH: u32 = 8;

/// While the first parent is slow, one request in so many goes to the other one, to learn how fast that one is.
const SAMPLE: u64 = 64;
const PATIENT_SAMPLE: u64 = 512;

/// Requests that must be answered for each one that is sent twice because it is late.
const ANSWERS_PER_HEDGE: i64 = 50;
const MOST_HEDGES: i64 = 10;

/// What all parents have failed is asked for again after a pause, which doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

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
    /// It is in another place. What this place needs is to come from there once: see `may_help`.
    pub far: bool,
    pub endpoint: Endpoint,
}

/// How a parent is used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// It is asked first.
    Active,
    /// It is connected, or it is not needed now.
    Standby,
    /// It cannot be reached, or it comes last because it failed, hung or lied, and the agent was told.
    Lost,
}

impl Parent {
    /// Whether both are the same host with the same image. One of them may have a newer ticket.
    fn is(&self, other: &Self) -> bool {
        let place = |parent: &Self| {
            let Endpoint { address, export, size, .. } = &parent.endpoint;
            (parent.host.clone(), parent.far, address.clone(), export.clone(), *size)
        };
        place(self) == place(other)
    }
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
    loops: Arc<Loops>,
    requests: AtomicU64,
    hedges: AtomicI64,
}

impl Upstream {
    /// Without parents reads wait. `left` hears of each parent that is left.
    #[must_use]
    pub fn new(
        connections: usize,
        closed: CancellationToken,
        left: mpsc::UnboundedSender<Left>,
        loops: Arc<Loops>,
    ) -> Self {
        Self {
            routes: Mutex::default(),
            connections,
            changed: Arc::default(),
            closed,
            left,
            loops,
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
                    if let Some(route) = known.iter().find(|route| route.parent.is(&parent)) {
                        route.renew(parent.endpoint);
                        return route.clone();
                    }
                    Route::start(
                        parent,
                        self.changed.clone(),
                        self.closed.child_token(),
                        self.left.clone(),
                        self.loops.clone(),
                    )
                })
                .collect();
            let kept = |old: &Arc<Route>| routes.iter().any(|route| Arc::ptr_eq(route, old));
            known.into_iter().filter(|old| !kept(old)).collect::<Vec<_>>()
        };
        for route in old {
            route.close().await;
        }
        self.connected(false);
        self.changed.notify_waiters();
    }

    /// Reads a range, in bytes. Returns the data, and the route by which it came.
    ///
    /// As long as nobody waits for it, it is not asked for twice because it is late, and many such requests on their way
    /// make no parent slow.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn read(&self, offset: u64, length: u32, urgency: &Urgency) -> Result<Answer, Closed> {
        let mut tries = 0;
        loop {
            self.pause(tries).await?;
            let route = self.first(!urgency.is_urgent()).await?;
            if let Some(answer) = self.ask(route, offset, length, urgency).await? {
                self.hedges.fetch_min(ANSWERS_PER_HEDGE * MOST_HEDGES - 1, Ordering::Relaxed);
                self.hedges.fetch_add(1, Ordering::Relaxed);
                return Ok(answer);
            }
            tries += 1;
        }
    }

    /// Waits before something is asked again that has failed so many times, the longer the more often; not if there is a
    /// parent that has not failed.
    ///
    /// # Errors
    /// The image is dropped.
    pub async fn pause(&self, tries: u32) -> Result<(), Closed> {
        if tries == 0 {
            return Ok(());
        }
        let end = Instant::now() + (FIRST_PAUSE * 2u32.saturating_pow(tries - 1)).min(LONGEST_PAUSE);
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.routes().iter().any(|route| route.rests_until().is_none()) {
                return Ok(());
            }
            tokio::select! {
                () = sleep_until(end) => return Ok(()),
                () = changed => {}
                () = self.closed.cancelled() => return Err(Closed),
            }
        }
    }

    /// The parents in the order of `follow`, and how each is used.
    #[must_use]
    pub fn uses(&self) -> Vec<(Parent, Use)> {
        let active = self.best(false).map(|(best, _)| best);
        let state = |route: &Arc<Route>| match &active {
            _ if route.lost() => Use::Lost,
            Some(active) if Arc::ptr_eq(active, route) => Use::Active,
            _ => Use::Standby,
        };
        self.routes().iter().map(|route| (route.parent.clone(), state(route))).collect()
    }

    /// The parent to ask; waits until one is connected.
    async fn first(&self, patient: bool) -> Result<Arc<Route>, Closed> {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable(); // before looking, so that nothing is missed
            if let Some(route) = self.choose(patient) {
                return Ok(route);
            }
            tokio::select! {
                () = changed => {}
                () = self.closed.cancelled() => return Err(Closed),
            }
        }
    }

    /// The best parent. One request in so many goes to the next one.
    fn choose(&self, patient: bool) -> Option<Arc<Route>> {
        let (best, next) = self.best(patient)?;
        let Some(next) = next else { return Some(best) };
        let every = if patient { PATIENT_SAMPLE } else { SAMPLE };
        let sample = self.requests.fetch_add(1, Ordering::Relaxed) % every == every - 1;
        Some(if sample { next } else { best })
    }

    /// The first parent, or the second if the first is much slower than that; and the other of the two, if it is worth
    /// to know how fast that one is: while the first is slow, and the second does not rest.
    fn best(&self, patient: bool) -> Option<(Arc<Route>, Option<Arc<Route>>)> {
        let mut routes = self.connected(patient).into_iter();
        let first = routes.next()?;
        let (time, much) = if patient { (first.pace(), PATIENT_MUCH) } else { (first.latency(), MUCH) };
        let helps = |second: &Arc<Route>| may_help(second, &first) && second.rests_until().is_none();
        let second = routes.next().filter(|second| time > SLOW && helps(second));
        let better = |second: &Arc<Route>| {
            let pace = second.pace();
            first.pace() > pace * much && !(patient && pace.is_zero())
        };
        Some(match second {
            Some(second) if better(&second) => (second, Some(first)),
            second => (first, second),
        })
    }

    /// The parents that are connected, best first. Connects further ones until there are two, and those that rest: so they
    /// are known to live, or the agent hears that they do not.
    fn connected(&self, patient: bool) -> Vec<Arc<Route>> {
        let mut all = self.routes().clone();
        all.sort_by_cached_key(|route| (route.rests_until(), route.hangs(patient)));
        let (mut routes, mut answering) = (Vec::new(), 0);
        for route in all {
            let rests = usize::from(route.rests_until().is_some());
            route.want([self.connections, 1, 0][answering.min(2)].max(rests));
            if route.connected() {
                answering += usize::from(!route.hangs(patient));
                routes.push(route);
            }
        }
        routes
    }

    /// The answer of a parent, or of others if those who were asked are late; none if all who were asked fail.
    async fn ask(
        &self,
        first: Arc<Route>,
        offset: u64,
        length: u32,
        urgency: &Urgency,
    ) -> Result<Option<Answer>, Closed> {
        let read = |route: Arc<Route>| async move { (route.read(offset, length, urgency).await, route) };
        let (mut patience, mut patient) = (first.patience(), !urgency.is_urgent());
        let mut asked = vec![first.clone()];
        let mut answers = FuturesUnordered::from_iter([read(first)]);
        loop {
            tokio::select! {
                Some((answer, route)) = answers.next() => match answer {
                    Ok(data) => {
                        leave_hung(&asked, &route, patient);
                        return Ok(Some((data, route)));
                    }
                    Err(error) => {
                        tracing::debug!(host = route.parent.host, %error, "a request fails");
                        route.fail(&error);
                        if answers.is_empty() {
                            return Ok(None);
                        }
                    }
                },
                () = sleep(patience) => {}
                () = urgency.urgent(), if patient => {
                    patient = false;
                    continue;
                }
                () = self.closed.cancelled() => return Err(Closed),
            }
            let fresh = |route: &Arc<Route>| !asked.iter().any(|known| Arc::ptr_eq(known, route));
            if let Some(next) = self.connected(patient).into_iter().find(fresh) {
                let hedge = || !patient && asked.iter().all(|route| may_help(&next, route)) && self.may_hedge();
                if asked.iter().all(|route| route.hangs(patient)) || hedge() {
                    asked.push(next.clone());
                    answers.push(read(next));
                }
            }
            patience = HUNG / 10;
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

/// Whether one parent is asked because another one is slow or late. What is in another place is only asked when nobody in
/// this place answers: the link between the places is to carry each range once.
fn may_help(one: &Route, other: &Route) -> bool {
    !one.parent.far || other.parent.far
}

/// Leaves those of the asked parents that hang, since another one has answered.
fn leave_hung(asked: &[Arc<Route>], answered: &Arc<Route>, patient: bool) {
    for route in asked.iter().filter(|route| !Arc::ptr_eq(route, answered) && route.hangs(patient)) {
        route.leave(Fault::Hung);
    }
}
