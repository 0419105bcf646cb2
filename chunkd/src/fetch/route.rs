//! One parent: its connections, how fast it answers, whether it comes last, and when the agent hears of that.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::connection::{Connection, Endpoint, Lost};
use super::urgency::Urgency;
use super::{Fault, HUNG, Left, PATIENT_HUNG, Parent};
use crate::loops::Loops;

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(2);

/// A parent without a connection for so long is lost. One that starts again, or that hears of this child in a moment, is not.
const UNREACHABLE: Duration = Duration::from_secs(1);

/// A parent that fails requests again within this has not just started again.
const AGAIN: Duration = Duration::from_secs(30);

/// How long a parent comes last after it failed a request, hung, or sent what it should not.
const DEAD_REST: Duration = Duration::from_secs(5);
const HUNG_REST: Duration = Duration::from_secs(60);
const LYING_REST: Duration = Duration::from_secs(600);

/// A parent is never late before this: a machine that is busy for a moment is no reason to ask twice.
const LEAST_PATIENCE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub struct Route {
    pub parent: Parent,
    /// How it is reached, with the newest ticket.
    endpoint: Mutex<Endpoint>,
    state: Mutex<State>,
    wanted: watch::Sender<usize>,
    /// Whether it has no connection, and one is wanted.
    away: watch::Sender<bool>,
    changed: Arc<Notify>,
    closed: CancellationToken,
    left: mpsc::UnboundedSender<Left>,
    loops: Arc<Loops>,
}

#[derive(Debug, Default)]
struct State {
    connections: Vec<Arc<Connection>>,
    rests_until: Option<Instant>,
    /// Whether the agent has heard why it rests.
    told: bool,
    unreachable: bool,
    /// When its requests last began to fail.
    failed: Option<Instant>,
    /// The mean time of an answer, and its mean deviation (RFC 6298, section 2).
    mean: Duration,
    deviation: Duration,
    /// The mean time of an answer, divided by the requests that waited then: from one answer to the next.
    pace: Duration,
}

impl Route {
    /// Begins to connect when connections are wanted.
    pub fn start(
        parent: Parent,
        changed: Arc<Notify>,
        closed: CancellationToken,
        left: mpsc::UnboundedSender<Left>,
        loops: Arc<Loops>,
    ) -> Arc<Self> {
        let route = Arc::new(Self::new(parent, changed, closed, left, loops));
        let kept = route.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = keep_connected(&kept) => {}
                () = report(&kept) => {}
                () = kept.closed.cancelled() => {}
            }
        });
        route
    }

    fn new(
        parent: Parent,
        changed: Arc<Notify>,
        closed: CancellationToken,
        left: mpsc::UnboundedSender<Left>,
        loops: Arc<Loops>,
    ) -> Self {
        let (wanted, away) = (watch::Sender::new(0), watch::Sender::new(false));
        let endpoint = Mutex::new(parent.endpoint.clone());
        Self { parent, endpoint, state: Mutex::default(), wanted, away, changed, closed, left, loops }
    }

    /// Connects with a newer ticket from now on. Connections that live go on.
    pub fn renew(&self, endpoint: Endpoint) {
        *self.endpoint.lock().unwrap_or_else(PoisonError::into_inner) = endpoint;
    }

    fn endpoint(&self) -> Endpoint {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many connections there are to be.
    pub fn want(&self, connections: usize) {
        self.wanted.send_replace(connections);
    }

    /// Ends all connections, and waits for that.
    pub async fn close(&self) {
        self.closed.cancel();
        let connections = std::mem::take(&mut self.state().connections);
        for connection in connections {
            connection.close().await;
        }
    }

    #[must_use]
    pub fn connected(&self) -> bool {
        self.state().connections.iter().any(|connection| !connection.ended())
    }

    /// Comes last for a while, and gets new connections. The agent hears why, once.
    pub fn leave(&self, fault: Fault) {
        let rest = match fault {
            Fault::Dead => DEAD_REST,
            Fault::Hung => HUNG_REST,
            Fault::Lying => LYING_REST,
        };
        let mut state = self.state();
        let known = state.rests() && state.told;
        state.rests_until = state.rests_until.max(Some(Instant::now() + rest));
        state.told = true;
        state.connections.drain(..).for_each(|connection| connection.cancel());
        drop(state);
        if !known {
            self.tell(fault);
        }
    }

    /// A request failed. The parent comes last for a while. It may be starting again, so the agent hears of that only if the
    /// parent refuses, or fails again soon.
    pub fn fail(&self, error: &Lost) {
        let mut state = self.state();
        let refuses = matches!(error, Lost::Refused(_));
        if !refuses && state.rests() {
            return; // requests fail together
        }
        let now = Instant::now();
        let again = state.failed.replace(now).is_some_and(|before| now - before < AGAIN);
        if refuses || again {
            drop(state);
            return self.leave(Fault::Dead);
        }
        (state.rests_until, state.told) = (Some(now + DEAD_REST), false);
    }

    fn tell(&self, fault: Fault) {
        tracing::warn!(host = self.parent.host, ?fault, "a parent is left");
        let _ = self.left.send(Left { host: self.parent.host.clone(), fault });
    }

    /// Whether the agent has heard that it cannot be read from now.
    #[must_use]
    pub fn lost(&self) -> bool {
        let state = self.state();
        state.unreachable || state.rests() && state.told
    }

    /// Until when it comes last; none if it does not.
    #[must_use]
    pub fn rests_until(&self) -> Option<Instant> {
        self.state().rests_until.filter(|&until| until > Instant::now())
    }

    /// The mean time of its answers.
    #[must_use]
    pub fn latency(&self) -> Duration {
        self.state().mean
    }

    /// The mean time from one answer to the next while requests wait. So requests that wait for each other make no parent
    /// slow.
    #[must_use]
    pub fn pace(&self) -> Duration {
        self.state().pace
    }

    /// How long to wait for an answer before it is late: hardly any of its answers takes longer.
    #[must_use]
    pub fn patience(&self) -> Duration {
        let state = self.state();
        (state.mean + 4 * state.deviation).max(LEAST_PATIENCE)
    }

    /// Whether requests wait, and nothing has come for too long; `patient`: for those for which nobody waits.
    #[must_use]
    pub fn hangs(&self, patient: bool) -> bool {
        let state = self.state();
        let stalled = |urgent, time| state.connections.iter().any(|connection| connection.stalled(urgent) >= time);
        stalled(false, PATIENT_HUNG) || !patient && stalled(true, HUNG)
    }

    /// Reads a range, in bytes, by the connection with the least to do.
    ///
    /// What nobody waits for comes by the first one. Connections share the link: what several bring at once is whole later
    /// than what comes one after the other, and this host's children wait for that.
    ///
    /// # Errors
    /// The connection ends, or the parent refuses.
    pub async fn read(&self, offset: u64, length: u32, urgency: &Urgency) -> Result<Bytes, Lost> {
        let (begun, patient) = (Instant::now(), !urgency.is_urgent());
        let (least, waiting) = {
            let state = self.state();
            let live = || state.connections.iter().filter(|connection| !connection.ended());
            let least = live().min_by_key(|connection| if patient { 0 } else { connection.cost() });
            (least.cloned().ok_or(Lost::Ended)?, live().map(|connection| connection.in_flight()).sum::<usize>() + 1)
        };
        let data = least.read(offset, length, urgency).await?;
        self.note(begun.elapsed(), u32::try_from(waiting).unwrap_or(u32::MAX));
        Ok(data)
    }

    /// The connections that live. Of those beyond `most` the idle ones end.
    fn live(&self, most: usize) -> Vec<Arc<Connection>> {
        let mut state = self.state();
        let mut kept = 0;
        state.connections.retain(|connection| {
            let stays = !connection.ended() && (kept < most || connection.in_flight() > 0);
            kept += usize::from(stays);
            stays
        });
        state.connections.clone()
    }

    fn note(&self, took: Duration, waiting: u32) {
        let mut state = self.state();
        if state.mean.is_zero() {
            (state.mean, state.deviation, state.pace) = (took, took / 2, took / waiting);
        } else {
            state.pace = (state.pace * 7 + took / waiting) / 8;
            state.deviation = (state.deviation * 3 + state.mean.abs_diff(took)) / 4;
            state.mean = (state.mean * 7 + took) / 8;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn rests(&self) -> bool {
        self.rests_until.is_some_and(|until| until > Instant::now())
    }
}

/// A connection on the next event loop.
async fn open(route: &Route) -> Result<Connection, Lost> {
    let endpoint = route.endpoint();
    let opening = route.loops.next().spawn(async move { Connection::open(&endpoint).await });
    AbortOnDropHandle::new(opening).await.unwrap_or(Err(Lost::Ended))
}

/// Has as many connections as are wanted, without an end.
async fn keep_connected(route: &Route) {
    let mut wanted = route.wanted.subscribe();
    let mut retry = FIRST_RETRY;
    loop {
        let number = *wanted.borrow_and_update();
        let live = route.live(number);
        route.away.send_replace(live.is_empty() && number > 0);
        if live.len() >= number {
            tokio::select! { () = any_ends(&live) => {}, _ = wanted.changed() => {} }
            continue;
        }
        match open(route).await {
            Ok(connection) => {
                retry = FIRST_RETRY;
                route.state().connections.push(Arc::new(connection));
                route.changed.notify_waiters();
            }
            Err(error) => {
                tracing::debug!(host = route.parent.host, %error, "a parent cannot be reached");
                sleep(retry).await;
                retry = (retry * 2).min(LAST_RETRY);
            }
        }
    }
}

/// Tells the agent each time that the parent is away for too long, without an end.
async fn report(route: &Route) {
    let mut away = route.away.subscribe();
    loop {
        let _ = away.wait_for(|&away| away).await;
        if timeout(UNREACHABLE, away.wait_for(|&away| !away)).await.is_ok() {
            continue;
        }
        route.state().unreachable = true;
        route.tell(Fault::Dead);
        let _ = away.wait_for(|&away| !away).await;
        route.state().unreachable = false;
    }
}

/// Resolves when one of the connections has ended; never if there is none.
async fn any_ends(connections: &[Arc<Connection>]) {
    let mut ends: Vec<_> = connections.iter().map(|connection| Box::pin(connection.end())).collect();
    std::future::poll_fn(|context| {
        let ended = ends.iter_mut().any(|end| end.as_mut().poll(context).is_ready());
        if ended { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::Endpoint;
    use crate::tls::Key;

    /// A route that never connects, and what the agent hears of it.
    fn route() -> (Route, mpsc::UnboundedReceiver<Left>) {
        let (left, heard) = mpsc::unbounded_channel();
        let endpoint = Endpoint {
            address: String::new(),
            identity: String::new(),
            key: Key([0; 32]),
            export: String::new(),
            size: 512,
        };
        let parent = Parent { host: "parent".to_owned(), far: false, endpoint };
        (Route::new(parent, Arc::default(), CancellationToken::new(), left, Arc::default()), heard)
    }

    fn faults(heard: &mut mpsc::UnboundedReceiver<Left>) -> Vec<Fault> {
        std::iter::from_fn(|| heard.try_recv().ok()).map(|left| left.fault).collect()
    }

    /// Is away for so long, and then there again for so long.
    async fn away(route: &Route, away: Duration, there: Duration) {
        let act = async {
            route.away.send_replace(true);
            sleep(away).await;
            route.away.send_replace(false);
            sleep(there).await;
        };
        tokio::select! { biased; () = report(route) => {}, () = act => {} }
    }

    #[tokio::test(start_paused = true)]
    async fn a_parent_is_lost_when_it_is_away_for_a_second() {
        let (route, mut heard) = route();
        away(&route, UNREACHABLE * 9 / 10, UNREACHABLE).await;
        assert!(faults(&mut heard).is_empty());
        away(&route, UNREACHABLE * 100, Duration::ZERO).await;
        assert!(route.lost());
        assert_eq!([Fault::Dead], faults(&mut heard)[..]);
        away(&route, UNREACHABLE / 2, UNREACHABLE).await;
        assert!(faults(&mut heard).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_parent_that_starts_again_comes_last_and_is_not_reported() {
        let (route, mut heard) = route();
        (0..10).for_each(|_| route.fail(&Lost::Ended));
        assert!(route.rests_until().is_some() && !route.lost());
        sleep(DEAD_REST).await;
        assert!(route.rests_until().is_none() && faults(&mut heard).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_parent_that_fails_again_soon_is_reported() {
        let (route, mut heard) = route();
        route.fail(&Lost::Ended);
        sleep(DEAD_REST).await;
        route.fail(&Lost::Ended);
        assert!(route.lost());
        assert_eq!([Fault::Dead], faults(&mut heard)[..]);
        sleep(AGAIN).await;
        route.fail(&Lost::Ended);
        assert!(faults(&mut heard).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_parent_that_refuses_hangs_or_lies_is_reported_at_once() {
        let (route, mut heard) = route();
        route.fail(&Lost::Ended);
        route.fail(&Lost::Refused(5));
        route.fail(&Lost::Refused(5));
        assert!(route.lost());
        assert_eq!([Fault::Dead], faults(&mut heard)[..]);
        for (fault, rest) in [(Fault::Hung, HUNG_REST), (Fault::Lying, LYING_REST)] {
            sleep(LYING_REST).await;
            route.fail(&Lost::Ended);
            route.leave(fault);
            route.leave(fault);
            assert_eq!([fault], faults(&mut heard)[..]);
            assert_eq!(Some(Instant::now() + rest), route.rests_until());
        }
        assert_eq!([60, 600], [HUNG_REST, LYING_REST].map(|rest| rest.as_secs())); // docs/chunkstore.md
    }
}
